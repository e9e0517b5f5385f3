"""The command line: rates and schedulers in a table, and a plan of what the machine can bear.

python -m omniserve.simulate --model llama-2-70b --device 4xA100-80GB --hosts 5xXeon-6342 --ls-rate 1,2,3
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from omniserve.core.arguments import ArgumentParser
from omniserve.core.config import EngineConfig, PrefillConfig
from omniserve.core.options import named_value
from omniserve.core.request import SLO, ClassSpec, ServiceClass
from omniserve.latency import Profile
from omniserve.routing.routers import ROUTERS
from omniserve.sched import SCHEDULERS
from omniserve.sched.policy import known_options
from omniserve.simulate.analytic import analytic_machine, engine_config_for
from omniserve.simulate.calibration import Calibration, read_samples
from omniserve.simulate.hardware import find_devices, find_hosts
from omniserve.simulate.load import TraceRequest, read_trace
from omniserve.simulate.machine import Machine, machine_of_profile
from omniserve.simulate.machines_needed import Offer, Plan, find_plan, plan_table
from omniserve.simulate.models import find_model
from omniserve.simulate.report import Row, plot, require_matplotlib, table, write_record
from omniserve.simulate.results import Result
from omniserve.simulate.run import SimulationConfig, simulate
from omniserve.simulate.scenario import Scenario, highest_rate, parse_arrivals, parse_lengths

_GB = 1e9
_PLAN_HOST = "Xeon-6342"
_PLAN_MINUTES = 10.0
_JUDGED_BY = 20
"""Requests that a rate must bring, for its attainment to mean something."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = ArgumentParser(
        prog="python -m omniserve.simulate",
        description="What a load would see: the engine's own scheduler and KV manager on a virtual clock. Times come "
        "from data sheets (--device) or from a measured profile (--profile).",
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument("--model", required=True, help="a known model (llama-2-70b), or a folder with a config.json")
    machine.add_argument("--device", metavar="[N x]NAME", help="such as 4xA100-80GB")
    machine.add_argument(
        "--hosts", metavar="[N x]NAME", help="CPU hosts for best-effort attention, such as 5xXeon-6342"
    )
    machine.add_argument(
        "--pipeline-parallel-size",
        type=_whole(1),
        default=1,
        metavar="M",
        help="stages, each of the devices of --device",
    )
    machine.add_argument(
        "--prefill-engines",
        type=_whole(0),
        default=0,
        metavar="N",
        help="more machines with the same devices and a host, which compute prompts",
    )
    machine.add_argument(
        "--engines",
        type=_whole(1),
        default=1,
        metavar="N",
        help="engines alike, on such a machine each, which share the load and the prefill engines (default: 1)",
    )
    machine.add_argument(
        "--router",
        choices=list(ROUTERS),
        default="fewest-requests",
        help="how requests are divided among --engines (default: %(default)s)",
    )
    machine.add_argument("--profile", type=Path, metavar="FILE", help="a profile of python -m omniserve.profile")
    machine.add_argument(
        "--calibrate-from",
        type=Path,
        nargs="+",
        metavar="FILE",
        default=[],
        help="traces of a server's steps (--trace-steps): how fast and how steady this machine is; any load will do",
    )
    machine.add_argument("--noise", type=_not_negative, default=0.0, help="of step times: sigma of their logarithm")
    machine.add_argument(
        "--drafts-right",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="decode speculatively, with drafts that are right so often (default: 0, without drafts)",
    )
    load = parser.add_argument_group("load")
    load.add_argument("--ls-rate", type=_rates, metavar="R,R", help="latency-sensitive requests a second")
    load.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="LS requests: CSV with arrival_s,input_tokens,output_tokens, or a .jsonl of Mooncake's form; with "
        "hash_ids in it, prompts begin alike, and there is a prefix cache",
    )
    load.add_argument("--hash-tokens", type=int, default=512, help="tokens of one of the hash_ids (default: 512)")
    load.add_argument("--ls-lengths", metavar="L", help="IN:OUT, lognormal:IN:OUT[:SIGMA] or CSV (default: 512:128)")
    load.add_argument("--arrivals", default="poisson", metavar="A", help="poisson, gamma:CV or square:RATIO:PERIOD_S")
    load.add_argument("--be", default="64", metavar="B", help="N (so many always unfinished; default: 64), rate:R, CSV")
    load.add_argument("--be-lengths", metavar="L", help="as --ls-lengths (default: 1024:256)")
    load.add_argument(
        "--be-deadline", type=_positive, metavar="S", help="seconds that a best-effort request may take (default: any)"
    )
    load.add_argument("--minutes", type=_positive, default=10.0, help="simulated (default: 10)")
    load.add_argument(
        "--warm-up", type=_share_below_one, default=0.2, metavar="SHARE", help="of the time, left out (default: 0.2)"
    )
    load.add_argument("--seed", type=int, default=0)
    engine = parser.add_argument_group("engine")
    engine.add_argument("--scheduler", default="omniserve", metavar="NAME,NAME", help="default: omniserve")
    engine.add_argument(
        "--prefill-placement", default="in-time", metavar="NAME", help="which prompts go to prefill engines"
    )
    engine.add_argument("--slo", type=_slo, default=SLO(ttft_s=1.0, tpot_s=0.1), metavar="TTFT_S:TPOT_S")
    engine.add_argument("--piggyback-slots", type=int, default=32, metavar="P")
    engine.add_argument("--step-tokens", type=int, default=512, help="token budget of a step (default: 512)")
    engine.add_argument("--max-requests", type=int, default=256, help="requests with KV on the device (default: 256)")
    engine.add_argument("--host-requests", type=int, default=256, help="requests on the host tier (default: 256)")
    engine.add_argument("--device-kv-gb", type=_positive, help="KV pool of all devices (default: what they have left)")
    engine.add_argument("--host-kv-gb", type=_not_negative, help="KV pool of all hosts (default: most of their memory)")
    engine.add_argument(
        "--scheduler-option",
        action="append",
        type=named_value,
        default=[],
        metavar="NAME=VALUE",
        help="an option of policies, such as slack=step, for those that have it; repeat it",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--no-plan", action="store_true", help="the table only")
    output.add_argument(
        "--price",
        type=_offer,
        action="append",
        default=[],
        metavar="KIND=PER_HOUR",
        help="how many machines of this kind, named as for --device, the load needs, and what a million tokens costs "
        "then; repeat it for other kinds (with --profile: one, of any name)",
    )
    output.add_argument(
        "--target", type=_share_above_zero, default=0.95, help="share of LS requests in their SLO (default: 0.95)"
    )
    output.add_argument("--record", type=Path, metavar="FILE", help="JSON with all figures and request times")
    output.add_argument("--plot", type=Path, metavar="FILE", help="attainment and throughput over the rate")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status: 2 if what was asked for cannot be simulated."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    try:
        if args.plot is not None:
            require_matplotlib()
    except RuntimeError as error:
        return _refuse(parser, error)
    try:
        _Program(args).run()
    except (OSError, ValueError) as error:
        return _refuse(parser, error)
    return 0


def _refuse(parser: argparse.ArgumentParser, error: Exception) -> int:
    print(f"{parser.prog}: error: {error}", file=sys.stderr)
    return 2


class _Program:
    """The simulations that a command line asks for."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._calibration: Calibration | None = None
        self._check_price()
        self._machine = self._make_machine(more_hosts=0)
        if args.calibrate_from:
            samples = [sample for path in args.calibrate_from for sample in read_samples(path)]
            self._calibration = Calibration.fitted(self._machine.device, samples)
        self._scenario = _scenario(args)
        self._schedulers = args.scheduler.split(",")
        for name in self._schedulers:
            SCHEDULERS.get(name)
            self._config(name, self._machine)
        trace_rate = self._scenario.trace_rate
        self._rates: list[float] = args.ls_rate or [trace_rate if trace_rate is not None else 1.0]
        self._bar = tqdm(
            total=0.0,
            unit="s",
            disable=None,
            leave=False,
            file=sys.stderr,
            bar_format="{percentage:3.0f}% |{bar:30}| {elapsed} {desc}",
        )

    def _check_price(self) -> None:
        args = self._args
        if not args.price:
            return
        kinds = [offer.kind for offer in args.price]
        if args.device is not None or args.engines > 1:
            raise ValueError(
                "--price names the kinds of machines, and their number is searched: leave out --device and --engines"
            )
        if args.profile is not None and len(kinds) > 1:
            raise ValueError("--profile is of one machine: give one --price")
        if len(set(kinds)) < len(kinds):
            raise ValueError(f"--price names a kind twice: {', '.join(kinds)}")
        if args.be_deadline is not None and args.minutes * 60 * (1 - args.warm_up) <= args.be_deadline:
            raise ValueError(
                f"no deadline of {args.be_deadline:g} s would be over before the end of the time that counts: raise "
                "--minutes"
            )

    def run(self) -> None:
        """Print what was asked for: the machines that are needed, or a table and what the machine can bear."""
        if self._args.price:
            self._run_prices()
        else:
            self._run_table()

    def _run_prices(self) -> None:
        """Print how many machines of each kind are needed, and what they cost."""
        args, minutes = self._args, self._args.minutes
        if len(self._rates) > 1 or len(self._schedulers) > 1:
            raise ValueError("--price takes one rate and one scheduler")
        (rate,), (name,) = self._rates, self._schedulers
        plans: list[tuple[Offer, Plan | None]] = []
        for offer in args.price:
            machine = self._make_machine(more_hosts=0, device=offer.kind)

            def simulated(number: int, best_effort: bool, machine: Machine = machine) -> Result:
                self._bar.total += minutes * 60
                return self._simulate(name, rate, minutes, best_effort=best_effort, machine=machine, engines=number)

            found = find_plan(offer, simulated, args.target, has_best_effort=self._scenario.has_best_effort)
            plans.append((offer, found))
        self._bar.close()
        deadline = f", BE within {args.be_deadline:g} s" if args.be_deadline is not None else ""
        print(
            f"{args.model}, {rate:.3g} LS requests/s, {minutes:g} simulated minutes; {args.target:.0%} within TTFT "
            f"{args.slo.ttft_s} s, TPOT {args.slo.tpot_s} s{deadline}; --router {args.router}"
        )
        print(plan_table(plans))
        if args.record is not None:
            rows = [
                Row(scheduler=name, rate=rate, result=plan.result, variant=f"{plan.machines} x {offer.kind}")
                for offer, plan in plans
                if plan is not None
            ]
            write_record(args.record, config=vars(args), seed=args.seed, rows=rows)

    def _run_table(self) -> None:
        args = self._args
        minutes, rows = args.minutes, []
        self._bar.total = minutes * 60 * len(self._schedulers) * len(self._rates)
        for name in self._schedulers:
            for rate in self._rates:
                rows.append(Row(scheduler=name, rate=rate, result=self._simulate(name, rate, minutes)))
        self._bar.close()
        engines = f"{args.engines} x " if args.engines > 1 else ""
        print(
            f"{args.model} on {engines}{self._machine.name}, {minutes:g} simulated minutes; TTFT {args.slo.ttft_s} s, "
            f"TPOT {args.slo.tpot_s} s"
        )
        if self._calibration is not None:
            print(f"calibrated: {self._calibration}")
        print(table(rows))
        if too_long := max(row.result.num_too_long for row in rows):
            print(f"left out: {too_long} requests longer than the model's context or the KV pool")
        plans: list[Row] = []
        if not args.no_plan:
            for name in self._schedulers:
                plans += self._plan(name)
        if args.record is not None:
            write_record(args.record, config=vars(args), seed=args.seed, rows=[*rows, *plans])
        if args.plot is not None:
            plot(args.plot, rows, title=f"{args.model} on {self._machine.name}")

    def _plan(self, name: str) -> list[Row]:
        """Print what the machine can bear, and what more of something would bring."""
        args = self._args
        minutes = min(_PLAN_MINUTES, args.minutes)
        found: dict[float, Result] = {}
        with tqdm(
            desc=f"planning with {name}", disable=None, leave=False, file=sys.stderr, bar_format="{desc} {n} runs"
        ) as bar:

            def meets(rate: float, *, best_effort: bool = True) -> bool:
                bar.update()
                result = self._simulate(name, rate, minutes, best_effort=best_effort)
                if best_effort:
                    found[rate] = result
                return result.classes[ServiceClass.LS].attainment >= args.target

            start, least = min(self._rates), _JUDGED_BY / (minutes * 60 * (1 - args.warm_up))
            best = highest_rate(meets, start, least=least)
            alone = best
            if self._scenario.has_best_effort:
                alone = highest_rate(lambda rate: meets(rate, best_effort=False), max(best, start), least=least)
        print(f"\nplan for {name} ({minutes:g} minutes each, {args.target:.0%} of LS requests in their SLO):")
        print(
            f"  highest LS rate: {best:.3g} requests/s"
            + (f"; {alone:.3g} without best-effort work" if self._scenario.has_best_effort else "")
        )
        if best == 0.0:
            print("  the objectives cannot be met at any rate: relax the SLO, or take faster devices")
            return []
        rows = [Row(scheduler=name, rate=best, result=found[best], variant="highest rate")]
        if not self._scenario.has_best_effort:
            return rows
        base = found[best].classes[ServiceClass.BE].output_tokens_per_s
        print(
            f"  best-effort output with it: {base:.0f} tokens/s, {found[best].host_share:.0%} of them by host attention"
        )
        slots, larger = args.piggyback_slots, self._make_machine(more_hosts=1)
        variants = []
        if len(larger.hosts) > len(self._machine.hosts):
            variants.append(("one more CPU host", larger, slots))
        if self._machine.hosts:
            variants.append((f"P = {2 * slots} instead of {slots}", self._machine, 2 * slots))
        for variant, machine, seats in variants:
            result = self._simulate(name, best, minutes, machine=machine, slots=seats)
            be = result.classes[ServiceClass.BE].output_tokens_per_s
            change = f"{be / base - 1:+.0%}" if base else f"{be:.0f} tokens/s"
            print(f"  {variant}: {be:.0f} tokens/s ({change}), LS {result.classes[ServiceClass.LS].attainment:.1%}")
            rows.append(Row(scheduler=name, rate=best, result=result, variant=variant))
        return rows

    def _simulate(
        self,
        name: str,
        rate: float,
        minutes: float,
        *,
        best_effort: bool = True,
        machine: Machine | None = None,
        slots: int | None = None,
        engines: int | None = None,
    ) -> Result:
        machine = machine or self._machine
        config = SimulationConfig(
            machine=machine if self._calibration is None else self._calibration.apply(machine),
            engine=self._config(name, machine, slots),
            load=self._scenario.load(rate, minutes * 60, self._args.seed, best_effort=best_effort),
            num_engines=engines or self._args.engines,
            router=self._args.router,
            seed=self._args.seed,
            noise=self._args.noise,
            drafts_right=self._args.drafts_right,
        )
        self._bar.set_description_str(f"{name}, {rate:.3g}/s", refresh=False)
        shown_s = self._bar.n

        def show(now_s: float) -> None:
            self._bar.update(shown_s + min(now_s, minutes * 60) - self._bar.n)

        result = simulate(config, progress=show)
        show(minutes * 60)
        return result

    def _make_machine(self, *, more_hosts: int, device: str | None = None) -> Machine:
        """Return the machine of a device (None: of --device, or the first of --price), or of the profile."""
        args = self._args
        named = device or args.device or (args.price[0].kind if args.price else None)
        model = find_model(args.model)
        if args.profile is not None:
            if args.device is not None or args.hosts is not None or args.prefill_engines:
                raise ValueError(
                    "--profile says what the machine is: give it without --device, --hosts and --prefill-engines"
                )
            machine = machine_of_profile(Profile.read(args.profile), model.spec, num_stages=args.pipeline_parallel_size)
            return dataclasses.replace(machine, hosts=machine.hosts + machine.hosts[:1] * more_hosts)
        if named is None:
            raise ValueError("give --device (such as 4xA100-80GB), --price KIND=PER_HOUR or --profile FILE")
        count, found = find_devices(named)
        num_hosts, host = find_hosts(args.hosts) if args.hosts is not None else (0, find_hosts(_PLAN_HOST)[1])
        return analytic_machine(
            model,
            found,
            count,
            hosts=(host,) * (num_hosts + more_hosts),
            num_stages=args.pipeline_parallel_size,
            num_prefill_engines=args.prefill_engines,
        )

    def _config(self, name: str, machine: Machine, slots: int | None = None) -> EngineConfig:
        args = self._args
        pools: dict[str, int] = {}
        if args.device_kv_gb is not None:
            pools["device_kv_bytes"] = int(args.device_kv_gb * _GB)
        if args.host_kv_gb is not None:
            pools["host_kv_bytes"] = int(args.host_kv_gb * _GB)
        elif machine.host_kv_bytes is None:
            pools["host_kv_bytes"] = EngineConfig.host_kv_bytes if machine.hosts else 0
        return engine_config_for(
            machine,
            scheduler=name,
            max_piggyback_seats=slots or args.piggyback_slots,
            max_num_batched_tokens=args.step_tokens,
            max_num_seqs=args.max_requests,
            max_host_requests=args.host_requests,
            prefill=PrefillConfig(prefill_placement=args.prefill_placement),
            scheduler_options=known_options(name, dict(args.scheduler_option)),
            classes=(
                ClassSpec(name=ServiceClass.LS, kind=ServiceClass.LS, slo=args.slo, speculation=args.drafts_right > 0),
                ClassSpec(name=ServiceClass.BE, kind=ServiceClass.BE, speculation=args.drafts_right > 0),
            ),
            **pools,
        )


def _scenario(args: argparse.Namespace) -> Scenario:
    if args.trace is not None and args.ls_lengths is not None:
        raise ValueError("--trace has its own lengths: give it without --ls-lengths")
    backlog, be_rate = 0, 0.0
    be_trace: tuple[TraceRequest, ...] = ()
    if args.be.isdigit():
        backlog = int(args.be)
    elif args.be.startswith("rate:"):
        be_rate = _rates(args.be.removeprefix("rate:"))[0]
    else:
        if not Path(args.be).is_file():
            raise ValueError(f"--be must be a number, rate:R or a CSV file, got {args.be!r}")
        be_trace = tuple(read_trace(args.be))
    return Scenario(
        arrivals=parse_arrivals(args.arrivals),
        ls_lengths=None if args.trace is not None else parse_lengths(args.ls_lengths or "512:128"),
        ls_trace=tuple(read_trace(args.trace)) if args.trace is not None else (),
        backlog=backlog,
        be_rate=be_rate,
        be_lengths=parse_lengths(args.be_lengths or "1024:256") if backlog or be_rate else None,
        be_trace=be_trace,
        be_deadline_s=args.be_deadline,
        hash_tokens=args.hash_tokens,
        warm_up=args.warm_up,
    )


def _offer(text: str) -> Offer:
    kind, _, price = text.partition("=")
    if not kind:
        raise argparse.ArgumentTypeError(f"must be KIND=PER_HOUR, such as A100-80GB=1.9; got {text!r}")
    return Offer(kind=kind, per_hour=_positive(price))


def _whole(low: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers from ``low`` on."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"must be a whole number >= {low}, got {text!r}")
        return int(text)

    return read


def _rates(text: str) -> list[float]:
    return [_positive(part) for part in text.split(",")]


def _slo(text: str) -> SLO:
    ttft, _, tpot = text.partition(":")
    return SLO(ttft_s=_positive(ttft), tpot_s=_positive(tpot))


def _number(said: str, accepts: Callable[[float], bool]) -> Callable[[str], float]:
    """Return an argparse type for finite numbers that ``accepts`` takes; ``said`` names them in errors."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
        if not (math.isfinite(value) and accepts(value)):
            raise argparse.ArgumentTypeError(f"must be a {said}, got {text!r}")
        return value

    return read


_not_negative = _number("number >= 0", lambda value: value >= 0)
_positive = _number("number > 0", lambda value: value > 0)
_share_above_zero = _number("share in (0, 1]", lambda value: 0 < value <= 1)
_share = _number("share in [0, 1]", lambda value: 0 <= value <= 1)
_share_below_one = _number("share in [0, 1)", lambda value: 0 <= value < 1)

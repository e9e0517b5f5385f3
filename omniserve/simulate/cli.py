"""The command line: rates and schedulers in a table, and a plan of what the machine can bear.

python -m omniserve.simulate --model llama-2-70b --device 4xA100-80GB --hosts 5xXeon-6342 --ls-rate 1,2,3
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from omniserve.core.config import EngineConfig, PrefillConfig
from omniserve.core.request import ClassSpec, ServiceClass
from omniserve.latency import Profile
from omniserve.sched import SCHEDULERS
from omniserve.sched.policy import known_options
from omniserve.simulate.analytic import analytic_machine, engine_config_for
from omniserve.simulate.arguments import build_parser, rates
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
        be_rate = rates(args.be.removeprefix("rate:"))[0]
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

"""The host tier as a stock of best-effort decodes: filled while LS load is light, used while it is heavy."""

from __future__ import annotations

import argparse
import functools
import random
from typing import Any

from benchmarks.common.cases import Trials
from benchmarks.common.engine_run import EngineRun
from benchmarks.common.models import builtin_model
from benchmarks.common.timing import OtherLoad
from benchmarks.features import FEATURES
from omniserve import SLO, ClassSpec, Engine, EngineConfig
from omniserve.core.stats import SchedulerStats
from omniserve.latency import Profile
from omniserve.profiling import find_or_make_profile
from omniserve.sched.policy import known_options
from omniserve.simulate import Load
from omniserve.simulate.load import lognormal_lengths, poisson, requests

_CONTEXT = 2048
"""Positions of the built-in model."""


@FEATURES.case(
    policies=(["sarathi", "omniserve", "omniserve-paper"], "the first is what the others are compared with"),
    light_s=(10.0, "of light LS load, before as much of heavy load"), ls_light=(0.5, "LS requests a second"),
    ls_heavy=([3.0, 5.0], "LS requests a second, a table each"), ls_prompt=(700, "tokens, the median"), ls_output=64,
    ttft=1.0, tpot=0.05,
    be=(96, "BE requests that are unfinished"), be_prompt=128, be_output=512, device_kv_mib=4, host_kv_mib=512,
    seats=(64, "most piggyback rows of a layer"), repeats=3, seed=0, profile_s=60.0, uncounted=1,
    tiny={"policies": ["sarathi", "omniserve"], "light_s": 0.5, "ls_heavy": [6.0], "repeats": 1, "profile_s": 1.0},
)  # fmt: skip
def warm_stock(args: argparse.Namespace) -> Trials:
    """BE output while LS load is heavy, after a time of light load in which BE decodes could gather on the host tier.

    The built-in model on this machine's cores, which device tier and host tier share. First LS requests are few, then
    their KV takes the device memory. BE requests are always more than the device holds. Figures are of both windows:
    BE output tokens a second, LS requests that met their objectives (by when they came), the host tier's share of the
    BE output, and the requests with KV on it. Paper: omniserve 2.3, Fig. 10.
    """
    model = builtin_model()
    profile = find_or_make_profile(model, config_of(args.policies[-1], args), time_limit_s=args.profile_s)
    for rate in args.ls_heavy:
        served = functools.partial(measure, model, profile, rate=rate, args=args)
        yield f"{rate:g} LS/s", {policy: functools.partial(served, policy) for policy in args.policies}


def load_of(args: argparse.Namespace, rate: float) -> Load:
    """Return LS requests at a light and a heavier rate, one window after the other, and a pile of BE requests."""
    rng = random.Random(args.seed)
    ls_lengths = lognormal_lengths(args.ls_prompt, args.ls_output, sigma=0.3, max_input=1024, max_output=256)
    be_lengths = lognormal_lengths(args.be_prompt, args.be_output, sigma=0.3, max_input=512, max_output=1024)
    light = poisson(args.ls_light, args.light_s, rng)
    heavy = [args.light_s + at_s for at_s in poisson(rate, args.light_s, rng)]
    return Load(
        latency_sensitive=requests([*light, *heavy], ls_lengths, rng),
        best_effort=requests([0.0] * int(100 * args.light_s), be_lengths, rng),
        backlog=args.be, duration_s=2 * args.light_s,
    )  # fmt: skip


def config_of(policy: str, args: argparse.Namespace) -> EngineConfig:
    """Return the settings of a policy's engine."""
    slo = SLO(ttft_s=args.ttft, tpot_s=args.tpot)
    return EngineConfig(
        scheduler=policy, device_kv_bytes=args.device_kv_mib << 20, host_kv_bytes=args.host_kv_mib << 20,
        block_size=16, max_piggyback_seats=args.seats, max_host_requests=args.be, max_model_len=_CONTEXT,
        classes=(ClassSpec(name="LS", kind="LS", slo=slo), ClassSpec(name="BE", kind="BE")),
        scheduler_options=known_options(policy, {"admission": False}),
    )  # fmt: skip


class Windows(EngineRun):
    """Notes the engine's counters as the light load ends."""

    def __init__(self, engine: Engine, load: Load, args: argparse.Namespace) -> None:
        super().__init__(engine, load, args.seed)
        self._light_s = args.light_s
        self.between: SchedulerStats | None = None

    def add_due(self, now_s: float) -> None:
        super().add_due(now_s)
        if self.between is None and now_s >= self._light_s:
            self.between = self.engine.stats().scheduler


def measure(model: Any, profile: Profile, policy: str, *, rate: float, args: argparse.Namespace) -> dict[str, Any]:
    """Serve both windows, the second at ``rate`` LS requests a second, and return the figures of each."""
    config, load, others = config_of(policy, args), load_of(args, rate), OtherLoad()
    with Engine(model, config, profile=profile) as engine:
        run = Windows(engine, load, args)
        run.run()
    assert run.between is not None
    counters = run.before.scheduler, run.between, run.after.scheduler
    slo, ls = config.class_named("LS").slo, [result for result in run.results.values() if result.service_class == "LS"]
    figures: dict[str, Any] = {}
    for number, window in enumerate(("light", "heavy")):
        begin, end = counters[number], counters[number + 1]
        came = [result for result in ls if (result.arrival_s >= args.light_s) == (window == "heavy")]
        output = end.output_tokens.get("BE", 0) - begin.output_tokens.get("BE", 0)
        figures |= {
            f"be_tokens_per_s_{window}": output / args.light_s,
            f"attained_{window}": sum(r.meets_ttft(slo) and r.meets_tpot(slo) for r in came) / max(1, len(came)),
            f"host_share_{window}": (end.host_output_tokens - begin.host_output_tokens) / max(1, output),
            f"stock_{window}": end.host_requests,
            f"preemptions_{window}": end.preemptions - begin.preemptions,
        }
    figures["be_tokens_per_s"] = (figures["be_tokens_per_s_light"] + figures["be_tokens_per_s_heavy"]) / 2
    return figures | {"ls_requests": len(ls), "others_busy_cores": others.cores()}

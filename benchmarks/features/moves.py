"""KV that moves between the tiers: under a load that comes and goes, and as checkpoints."""

from __future__ import annotations

import argparse
import functools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common.cases import Trials
from benchmarks.common.engine_run import EngineRun, request
from benchmarks.common.models import SMOLLM_135M, builtin_model, random_llama
from benchmarks.features import FEATURES
from omniserve import SLO, Engine, EngineConfig, RequestOutput
from omniserve.core.plan import StepPlan
from omniserve.core.work import KVMove, MoveDirection
from omniserve.host.cores import available_cores
from omniserve.profiling import find_or_make_profile
from omniserve.simulate import Load
from omniserve.simulate.load import TraceRequest


@FEATURES.case(
    periods=8, period=5.0, be=12, ls=(6, "LS requests at a time while the wave is up"), device_kv_mib=8, tpot=0.03,
    seed=0, profile_s=60.0, tiny={"periods": 2, "period": 1.0, "profile_s": 1.0}, uncounted=0,
)  # fmt: skip
def square_wave(args: argparse.Namespace) -> Trials:
    """KV movement under an LS load that comes and goes: how often each BE request's KV moves, and what is copied.

    The built-in model; device memory for about half of the BE requests; a square wave of LS requests. Without and with
    checkpoints. A period begins with the LS load. A move is counted in the period that it began in.
    Paper: omniserve 3.2.4.
    """
    model = builtin_model()
    arms = {}
    for arm, checkpoint in (("without checkpoints", False), ("with checkpoints", True)):
        config = EngineConfig(
            device_kv_bytes=args.device_kv_mib << 20, host_kv_bytes=256 << 20, block_size=16,
            scheduler_options={"checkpoint_kv": checkpoint, "admission": False},
        )  # fmt: skip
        arms[arm] = functools.partial(measure_wave, model, config, args)
    yield "wave", arms


class Wave(EngineRun):
    """Keeps some LS requests unfinished in the first half of each period."""

    def __init__(self, engine: Engine, load: Load, args: argparse.Namespace) -> None:
        super().__init__(engine, load, args.seed, SLO(ttft_s=5.0, tpot_s=args.tpot))
        self._period, self._at_a_time = args.period, args.ls

    def add_due(self, now_s: float) -> None:
        super().add_due(now_s)
        if now_s % self._period < self._period / 2 and self.unfinished["LS"] < self._at_a_time:
            self.add(self.request("LS", TraceRequest(now_s, self.engine.max_model_len // 4, 48)), now_s)


def measure_wave(model: Any, config: EngineConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Drive an engine with the wave and return what moved."""
    moves: Counter[tuple[str, int]] = Counter()
    blocks_out: list[int] = []
    profile = find_or_make_profile(model, config, time_limit_s=args.profile_s)
    with Engine(model, config, profile=profile) as engine:
        limit = engine.max_model_len
        pile = [TraceRequest(0.0, limit // 4, limit - limit // 4 - 1)] * 100_000  # it never ends
        run = Wave(engine, Load(best_effort=pile, backlog=args.be, duration_s=args.periods * args.period), args)

        def watch(plan: StepPlan, host_works: bool, seconds: float) -> None:
            for move in plan.side_work(KVMove):
                if not move.is_checkpoint:
                    moves[move.request_id, int(run.now_s // args.period)] += 1
                    if move.direction is MoveDirection.TO_HOST:
                        blocks_out.append(len(move.src_block_ids))

        engine.on_step = watch
        run.run(drain_s=0.0)
    return {
        "moves": sum(moves.values()), "most_moves_a_request_and_period": max(moves.values(), default=0),
        "blocks_a_move_out": statistics.mean(blocks_out) if blocks_out else None,
        "be_tokens_per_s": run.grown("output_tokens", "BE") / run.seconds,
    }  # fmt: skip


_WARM_UP_STEPS = 3


@FEATURES.case(
    be=(16, "BE requests"), prompt=512, output=128, block_size=16, ls=(8, "LS requests a wave"), ls_output=32, waves=4,
    device_kv_mib=160, host_kv_mib=1024, repeats=3, uncounted=0,
    tiny={"be": 2, "prompt": 64, "output": 8, "ls": 2, "ls_output": 2, "waves": 2, "device_kv_mib": 16, "repeats": 1},
)  # fmt: skip
def checkpointing(args: argparse.Namespace) -> Trials:
    """What checkpoints of BE requests cost while memory is plentiful, and what they save when it is not.

    SmolLM-135M's shape, random weights; the KV managers ``paged`` and ``incremental``. ``cost``: BE requests are
    prefilled and decode, and nothing needs their memory. ``savings``: waves of LS requests take the memory of BE
    requests under ``sarathi``; tokens that were computed again, and seconds until all is done. About four minutes on
    two quiet cores. Paper: conserve 4.4 and 6.5.
    """
    if not 2 <= args.waves <= args.be * args.output:  # what would be the last one comes as BE work is done
        raise ValueError(f"--waves must be in [2, {args.be * args.output}]: waves part the BE tokens, got {args.waves}")
    model = random_llama(**SMOLLM_135M)
    parts: dict[str, Callable[..., dict[str, Any]]] = {"cost": measure_cost, "savings": measure_savings}
    for name, measure in parts.items():
        measure_cost(model, "paged", argparse.Namespace(**vars(args) | {"be": 1, "output": 4}))  # compilation
        yield name, {kv: functools.partial(measure, model, kv, args) for kv in ("paged", "incremental")}


class Watch:
    """Notes how long steps take, and counts the tokens that they compute again."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.computed_again = 0
        self._computed: Counter[str] = Counter()

    def __call__(self, plan: StepPlan, host_works: bool, seconds: float) -> None:
        is_prefill = any(len(chunk.token_ids) > 1 for chunk in plan.chunks)
        self.seconds["prefill" if is_prefill else "decode"] += seconds
        for chunk in plan.chunks:
            end, before = chunk.start + len(chunk.token_ids), self._computed[chunk.request_id]
            self.computed_again += max(0, min(end, before) - chunk.start)
            self._computed[chunk.request_id] = max(end, before)


def open_engine(model: Any, kv: str, device_kv_bytes: int, args: argparse.Namespace) -> Engine:
    """Return an engine that has compiled its steps."""
    torch.set_num_threads(available_cores())  # an engine before this one may have left fewer
    config = EngineConfig(
        scheduler="sarathi", kv=kv, device_kv_bytes=device_kv_bytes, block_size=args.block_size,
        host_kv_bytes=args.host_kv_mib << 20 if kv != "paged" else 0,
    )  # fmt: skip
    engine = Engine(model, config)
    engine.generate([request("be-warm", 64, _WARM_UP_STEPS)])
    return engine


def measure_cost(model: Any, kv: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run BE requests to their end with memory for all; the first steps are left out."""
    watch = Watch()
    with open_engine(model, kv, 1 << 30, args) as engine:
        engine.on_step = watch
        engine.generate([request(f"be{i}", args.prompt, args.output) for i in range(args.be)])
        copy_s = engine.host_tier.stats().busy_seconds if engine.host_tier is not None else 0.0
    return {"prefill_s": watch.seconds["prefill"], "decode_s": watch.seconds["decode"], "copy_s": copy_s}


class Waves(EngineRun):
    """Adds a wave of LS requests whenever BE work has brought so many tokens more, until it is done."""

    def __init__(self, engine: Engine, args: argparse.Namespace) -> None:
        super().__init__(
            engine, Load(best_effort=[TraceRequest(0.0, args.prompt, args.output)] * args.be, backlog=args.be)
        )
        self._args, self._be_tokens, self._num_ls = args, 0, 0

    def add_due(self, now_s: float) -> None:
        super().add_due(now_s)
        args = self._args
        num_waves = self._be_tokens // (args.be * args.output // args.waves)
        while self.unfinished["BE"] and self._num_ls < args.ls * num_waves:
            self.add(self.request("LS", TraceRequest(now_s, args.prompt, args.ls_output)), now_s)
            self._num_ls += 1

    def note(self, output: RequestOutput) -> None:
        super().note(output)
        self._be_tokens += len(output.new_token_ids) * (output.service_class == "BE")


def measure_savings(model: Any, kv: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run BE requests and waves of LS requests to their end."""
    watch = Watch()
    with open_engine(model, kv, args.device_kv_mib << 20, args) as engine:
        engine.on_step = watch
        run = Waves(engine, args)
        run.run()
    return {
        "recomputed_tokens": watch.computed_again,
        "seconds": run.seconds,
        "preemptions": run.after.scheduler.preemptions,
    }

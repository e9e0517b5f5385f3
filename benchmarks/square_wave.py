"""KV movement under an LS load that comes and goes: how often each BE request's KV moves, and how much is copied.

    python -m benchmarks.square_wave --record benchmarks/results/square_wave.json

The built-in model; device memory for about half of the BE requests; a square wave of LS requests with a period of 5 s.
Without and with checkpoints, in one process. A period begins with the LS load. A move is counted in the period that it
began in. Paper: omniserve 3.2.4.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter, defaultdict
from typing import Any

from benchmarks.common.engine_run import EngineRun
from benchmarks.common.models import builtin_model
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser
from omniserve import SLO, Engine, EngineConfig
from omniserve.core.plan import StepPlan
from omniserve.core.work import KVMove, MoveDirection
from omniserve.profiling import find_or_make_profile
from omniserve.simulate import Load
from omniserve.simulate.load import TraceRequest


class Wave(EngineRun):
    """Keeps some LS requests unfinished in the first half of each period."""

    def __init__(self, engine: Engine, load: Load, args: argparse.Namespace) -> None:
        super().__init__(engine, load, args.seed, SLO(ttft_s=5.0, tpot_s=args.tpot))
        self._period, self._at_a_time = args.period, args.ls

    def add_due(self, now_s: float) -> None:
        super().add_due(now_s)
        if now_s % self._period < self._period / 2 and self.unfinished["LS"] < self._at_a_time:
            self.add(self.request("LS", TraceRequest(now_s, self.engine.max_model_len // 4, 48)), now_s)


def measure(model: Any, config: EngineConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Drive an engine with the wave and return what moved."""
    moves: Counter[tuple[str, int]] = Counter()
    blocks: defaultdict[str, list[int]] = defaultdict(list)
    with Engine(model, config, profile=find_or_make_profile(model, config)) as engine:
        limit = engine.max_model_len
        pile = [TraceRequest(0.0, limit // 4, limit - limit // 4 - 1)] * 100_000  # it never ends
        run = Wave(engine, Load(best_effort=pile, backlog=args.be, duration_s=args.periods * args.period), args)

        def watch(plan: StepPlan, host_works: bool, seconds: float) -> None:
            for move in plan.side_work(KVMove):
                if move.is_checkpoint:
                    blocks["checkpoint"].append(len(move.src_block_ids))
                    continue
                moves[move.request_id, int(run.now_s // args.period)] += 1
                blocks["out" if move.direction is MoveDirection.TO_HOST else "in"].append(len(move.src_block_ids))

        engine.on_step = watch
        run.run(drain_s=0.0)
    tpots = [r.tpot_s for r in run.results.values() if r.service_class == "LS" and r.tpot_s is not None]
    return {
        "moves": sum(moves.values()), "most_moves_a_request_and_period": max(moves.values(), default=0),
        "requests_that_moved": len({name for name, _ in moves}),
        **{name: run.grown(name) for name in ("swaps_out", "swaps_in", "preemptions")},
        "blocks_a_move_out": statistics.mean(blocks["out"]) if blocks["out"] else None,
        "checkpointed_blocks": sum(blocks["checkpoint"]), "ls_requests": len(tpots),
        "tpot_attained": statistics.fmean(tpot_s <= args.tpot for tpot_s in tpots) if tpots else None,
        "be_tokens_per_s": run.grown("output_tokens", "BE") / run.seconds,
    }  # fmt: skip


def main() -> None:
    parser = argument_parser(
        __doc__, "square_wave", periods=8, period=5.0, be=12, ls=(6, "LS requests at a time while the wave is up"),
        device_kv_mib=8, tpot=0.03, seed=0,
    )  # fmt: skip
    args = parser.parse_args()
    model = builtin_model()
    results: dict[str, Any] = {}
    for checkpoint in (False, True):
        config = EngineConfig(
            device_kv_bytes=args.device_kv_mib << 20, host_kv_bytes=256 << 20, block_size=16,
            scheduler_options={"checkpoint_kv": checkpoint, "admission": False},
        )  # fmt: skip
        name = "with checkpoints" if checkpoint else "without checkpoints"
        results[name] = measure(model, config, args)
        print(name, results[name], flush=True)
    write_record(args.record, name="square_wave", config=vars(args), seed=args.seed, results=results)


if __name__ == "__main__":
    main()

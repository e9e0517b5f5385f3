"""KV movement under an LS load that comes and goes: how often each BE request's KV moves, and how much is copied.

    python -m benchmarks.square_wave --record benchmarks/results/square_wave.json

The built-in model; device memory for about half of the BE requests; a square wave of LS requests with a period of 5 s.
Without and with checkpoints, in one process. A period begins with the LS load. A move is counted in the period that it
began in. Paper: omniserve 3.2.4.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import Counter, defaultdict
from typing import Any

from benchmarks.common.arguments import argument_parser
from benchmarks.common.models import builtin_model
from benchmarks.common.record import write_record
from omniserve import SLO, Engine, EngineConfig, Request, SamplingParams
from omniserve.core.plan import MoveDirection, StepPlan
from omniserve.profiling import find_or_make_profile


def measure(model: Any, config: EngineConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Drive an engine with the wave and return what moved."""
    rng = random.Random(args.seed)
    profile = find_or_make_profile(model, config)
    moves: Counter[tuple[str, int]] = Counter()
    blocks: defaultdict[str, list[int]] = defaultdict(list)
    gaps: list[float] = []
    met = total = be_tokens = 0
    with Engine(model, config, profile=profile) as engine:
        began_s = time.monotonic()

        def watch(plan: StepPlan, host_works: bool, seconds: float) -> None:
            period = int((time.monotonic() - began_s) // args.period)
            for move in plan.moves:
                if move.is_checkpoint:
                    blocks["checkpoint"].append(len(move.src_block_ids))
                    continue
                moves[move.request_id, period] += 1
                blocks["out" if move.direction is MoveDirection.TO_HOST else "in"].append(len(move.src_block_ids))

        def add(name: str, prompt: int, output: int, service_class: str, slo: SLO | None) -> None:
            ids = [rng.randrange(1, engine.spec.vocab_size) for _ in range(prompt)]
            sampling = SamplingParams(max_tokens=output, ignore_eos=True)
            engine.add(
                Request(prompt_token_ids=ids, sampling=sampling, service_class=service_class, slo=slo, request_id=name)
            )

        engine.on_step = watch
        limit = engine.max_model_len
        for i in range(args.be):
            add(f"be{i}", limit // 4, limit - limit // 4 - 1, "BE", None)
        ls: set[str] = set()
        number = 0
        while (now_s := time.monotonic() - began_s) < args.periods * args.period:
            if now_s % args.period < args.period / 2 and len(ls) < args.ls:
                number += 1
                ls.add(f"ls{number}")
                add(f"ls{number}", limit // 4, 48, "LS", SLO(ttft_s=5.0, tpot_s=args.tpot))
            for output in engine.step():
                if output.service_class == "BE":
                    be_tokens += len(output.new_token_ids)
                    if output.finished:  # the pile never ends
                        add(f"{output.request_id}+", limit // 4, limit - limit // 4 - 1, "BE", None)
                elif output.finished and output.times is not None and output.times.finished_s is not None:
                    ls.discard(output.request_id)
                    assert output.times.first_token_s is not None
                    tpot_s = (output.times.finished_s - output.times.first_token_s) / (output.num_output_tokens - 1)
                    gaps.append(tpot_s)
                    met += tpot_s <= args.tpot
                    total += 1
            if engine.last_plan_was_empty:
                engine.wait(0.01)
        stats = engine.stats()
    return {
        "moves": sum(moves.values()),
        "most_moves_a_request_and_period": max(moves.values(), default=0),
        "requests_that_moved": len({name for name, _ in moves}),
        "swaps_out": stats.swaps_out,
        "swaps_in": stats.swaps_in,
        "preemptions": stats.preemptions,
        "blocks_a_move_out": statistics.mean(blocks["out"]) if blocks["out"] else None,
        "checkpointed_blocks": sum(blocks["checkpoint"]),
        "ls_requests": total,
        "tpot_attained": met / total if total else None,
        "be_tokens_per_s": be_tokens / (args.periods * args.period),
    }


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
            device_kv_bytes=args.device_kv_mib << 20,
            host_kv_bytes=256 << 20, block_size=16,
            scheduler_options={"checkpoint_kv": checkpoint, "admission": False},
        )  # fmt: skip
        name = "with checkpoints" if checkpoint else "without checkpoints"
        results[name] = measure(model, config, args)
        print(name, results[name], flush=True)
    write_record(args.record, name="square_wave", config=vars(args), seed=args.seed, results=results)


if __name__ == "__main__":
    main()

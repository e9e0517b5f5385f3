"""Measures what checkpoints of BE requests cost while memory is plentiful, and what they save when it is not.

    python -m benchmarks.checkpointing --record benchmarks/results/checkpointing.json

SmolLM-135M's shape, random weights. Cost: BE requests are prefilled and decode, and nothing needs their memory; seconds
of prefill and decode steps with ``incremental`` and with ``paged``. Savings: waves of LS requests take the memory of BE
requests under ``sarathi``; tokens that were computed again, and seconds until all is done. The managers take turns in
each repeat. About four minutes on two quiet cores. Paper: conserve 4.4 and 6.5.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter, defaultdict
from typing import Any

import torch

from benchmarks.common.engine_run import EngineRun, request
from benchmarks.common.models import SMOLLM_135M, random_llama
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser
from omniserve import Engine, EngineConfig, RequestOutput
from omniserve.core.plan import StepPlan
from omniserve.core.work import KVMove, MoveDirection
from omniserve.host.cores import available_cores
from omniserve.simulate import Load
from omniserve.simulate.load import TraceRequest

MANAGERS = ("paged", "incremental")
WARM_UP_STEPS = 3
FIGURES = {
    "cost": ("prefill_step_s", "decode_step_s", "prefill_s", "decode_s", "cpu_s"),
    "savings": ("recomputed_tokens", "copied_blocks", "restored_blocks", "seconds", "preemptions", "ls_ttft_p50_s"),
}
"""Figures that are printed of each part."""


class Watch:
    """Counts what steps compute and copy, and how long they take."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.tokens: Counter[str] = Counter()
        self.blocks: Counter[str] = Counter()
        self.shared_steps = 0
        """Steps in which the host tier had some of the device tier's cores."""
        self._computed: Counter[str] = Counter()

    def __call__(self, plan: StepPlan, host_works: bool, seconds: float) -> None:
        self.shared_steps += host_works
        is_prefill = any(len(chunk.token_ids) > 1 for chunk in plan.chunks)
        self.seconds["prefill" if is_prefill else "decode"].append(seconds)
        for chunk in plan.chunks:
            end, before = chunk.start + len(chunk.token_ids), self._computed[chunk.request_id]
            self.tokens["computed"] += end - chunk.start
            self.tokens["computed again"] += max(0, min(end, before) - chunk.start)
            self._computed[chunk.request_id] = max(end, before)
        for move in plan.side_work(KVMove):
            kind = "restored" if move.direction is MoveDirection.TO_DEVICE else "checkpointed"
            self.blocks[kind] += len(move.src_block_ids)


def open_engine(model: Any, kv: str, device_kv_bytes: int, args: argparse.Namespace) -> Engine:
    torch.set_num_threads(available_cores())  # an engine before this one may have left fewer
    host_kv_bytes = args.host_kv_mib << 20 if kv != "paged" else 0
    config = EngineConfig(
        scheduler="sarathi", kv=kv, device_kv_bytes=device_kv_bytes, host_kv_bytes=host_kv_bytes,
        block_size=args.block_size,
    )  # fmt: skip
    return Engine(model, config)


def measure_cost(model: Any, kv: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run BE requests to their end with memory for all; the first steps are left out."""
    watch = Watch()
    with open_engine(model, kv, 1 << 30, args) as engine:
        engine.generate([request("be-warm", 64, WARM_UP_STEPS)])
        engine.on_step = watch
        began_s = time.process_time()
        engine.generate([request(f"be{i}", args.prompt, args.output) for i in range(args.be)])
        cpu_s = time.process_time() - began_s
        copy_s = engine.host_tier.stats().busy_seconds if engine.host_tier is not None else 0.0
    prefills_s, decodes_s = watch.seconds["prefill"], watch.seconds["decode"]
    return {
        "prefill_s": sum(prefills_s), "decode_s": sum(decodes_s), "prefill_step_s": statistics.median(prefills_s),
        "decode_step_s": statistics.median(decodes_s), "cpu_s": cpu_s, "copy_s": copy_s,
        "shared_steps": watch.shared_steps, "blocks": dict(watch.blocks),
    }  # fmt: skip


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
        engine.generate([request("be-warm", 64, WARM_UP_STEPS)])
        engine.on_step = watch
        run = Waves(engine, args)
        run.run()
    ttfts = [r.ttft_s for r in run.results.values() if r.service_class == "LS" and r.ttft_s is not None]
    return {
        "seconds": run.seconds, "tokens": dict(watch.tokens), "recomputed_tokens": watch.tokens["computed again"],
        "copied_blocks": watch.blocks["checkpointed"], "restored_blocks": watch.blocks["restored"],
        "resumed_tokens": run.after.scheduler.resumed_tokens, "preemptions": run.after.scheduler.preemptions,
        "blocks": dict(watch.blocks), "ls_requests": len(ttfts), "ls_ttft_p50_s": statistics.median(ttfts),
    }  # fmt: skip


def compared(runs: dict[str, list[dict[str, Any]]], names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Return, by figure, each manager's median over the repeats, and that of the ratio of the two."""
    result = {}
    for name in names:
        result[name] = {kv: statistics.median(run[name] for run in runs[kv]) for kv in runs}
        pairs = zip(runs["incremental"], runs["paged"], strict=True)
        if ratios := [ours[name] / theirs[name] for ours, theirs in pairs if theirs[name]]:
            result[name]["incremental / paged"] = statistics.median(ratios)
    return result


def main() -> None:
    parser = argument_parser(
        __doc__, "checkpointing", be=(16, "BE requests"), prompt=512, output=128, block_size=16,
        ls=(8, "LS requests a wave"), ls_output=32, waves=4, device_kv_mib=160, host_kv_mib=1024, repeats=3,
    )  # fmt: skip
    args = parser.parse_args()
    if not 2 <= args.waves <= args.be * args.output:  # what would be the last one comes as BE work is done
        parser.error(f"--waves must be in [2, {args.be * args.output}]: waves part the BE tokens, got {args.waves}")
    model = random_llama(**SMOLLM_135M)
    results: dict[str, Any] = {}
    for name, measure in (("cost", measure_cost), ("savings", measure_savings)):
        runs: dict[str, list[dict[str, Any]]] = {kv: [] for kv in MANAGERS}
        measure_cost(model, "paged", argparse.Namespace(**vars(args) | {"be": 1, "output": 4}))  # compilation
        for repeat in range(args.repeats):
            for kv in MANAGERS if repeat % 2 == 0 else reversed(MANAGERS):
                runs[kv].append(measure(model, kv, args))
                print(name, kv, runs[kv][-1], flush=True)
        results[name] = {"runs": runs, "medians": compared(runs, FIGURES[name])}
    for name in results:
        for figure, values in results[name]["medians"].items():
            print(f"{name:<8} {figure:<18} " + "  ".join(f"{key} {value:.4g}" for key, value in values.items()))
    write_record(args.record, name="checkpointing", config=vars(args) | {"model": SMOLLM_135M}, seed=0, results=results)


if __name__ == "__main__":
    main()

"""Simulates `apex` with host rows in the first sub-batch and without: output tokens a second.

    python -m benchmarks.hybrid_batch --record benchmarks/results/hybrid_batch.json

A pile of requests on APEX's machines (section 5): llama-2-7b on a T4 and llama-3.1-8b on an A10, both orders of prompts
and decodes. `with more memory`: without such rows, but with device memory for a step's prompts beside the KV pool, a
rough estimate of what it would bring to send a prompt's KV to the host layer by layer. Paper: apex 3.2, figure 2.
"""

from __future__ import annotations

import random
from typing import Any

from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser, table
from omniserve.simulate import Load, SimulationConfig, simulate
from omniserve.simulate.analytic import analytic_machine, engine_config_for
from omniserve.simulate.hardware import find_devices, find_hosts
from omniserve.simulate.load import fixed_lengths, requests
from omniserve.simulate.models import find_model
from omniserve.simulate.runner import StepRecord

MACHINES = {
    "llama-2-7b on a T4": ("llama-2-7b", "T4", "Xeon-6130-dual", 48, ((300, 50), (300, 400))),
    "llama-3.1-8b on an A10": ("llama-3.1-8b", "A10", "Xeon-6342-dual", 160, ((1000, 100), (1000, 800))),
}
"""Model, device, host, how many requests are unfinished at a time, and their lengths."""


BUDGET = 1024
VARIANTS = {"without": (False, 0), "with": (True, 0), "with more memory": (False, BUDGET)}
"""Name -> host rows in the first sub-batch, and tokens of KV that the device holds beside its pool."""


def run(
    name: str, lengths: tuple[int, int], order: str, args: Any, *, is_hybrid: bool, more_tokens: int
) -> dict[str, float]:
    """Return output tokens a second, and how many steps and rows were pipelined."""
    model, device, host, backlog, _ = MACHINES[name]
    machine = analytic_machine(find_model(model), find_devices(device)[1], hosts=(find_hosts(host)[1],))
    pile = requests([0.0] * 500, fixed_lengths(*lengths), random.Random(args.seed))
    load = Load(best_effort=pile, backlog=backlog, duration_s=args.seconds, warm_up_s=args.warm_up * args.seconds)
    engine = engine_config_for(
        machine, scheduler="apex", max_num_batched_tokens=BUDGET,
        device_kv_bytes=(machine.device_kv_bytes or 0) + more_tokens * machine.spec.kv_block_bytes(1),
        scheduler_options={"hybrid_first_batch": is_hybrid, "be_order": order},
    )  # fmt: skip
    counts = {"steps": 0, "pipelined_steps": 0, "pipelined_rows": 0, "hybrid_rows": 0}

    def count(step: StepRecord) -> None:
        counts["steps"] += 1
        counts["pipelined_steps"] += bool(step.plan.pipelined)
        counts["pipelined_rows"] += len(step.plan.pipelined)
        counts["hybrid_rows"] += len(step.plan.hybrid)

    result = simulate(SimulationConfig(machine=machine, engine=engine, load=load, seed=args.seed), on_step=count)
    return {"output_tokens_per_s": result.classes["BE"].output_tokens_per_s, "host_share": result.host_share} | counts


def main() -> None:
    parser = argument_parser(__doc__, "hybrid_batch", seconds=300.0, warm_up=0.5, seed=0)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    lines = [["machine", "in:out", "order", *VARIANTS, "pipelined steps", "hybrid rows of pipelined"]]
    for name, (*_, all_lengths) in MACHINES.items():
        for lengths in all_lengths:
            for order in ("decode", "prefill"):
                found = {
                    variant: run(name, lengths, order, args, is_hybrid=is_hybrid, more_tokens=more_tokens)
                    for variant, (is_hybrid, more_tokens) in VARIANTS.items()
                }
                text, hybrid = f"{lengths[0]}:{lengths[1]}", found["with"]
                results[f"{name}, {text}, {order}"] = found
                share = hybrid["hybrid_rows"] / max(1, hybrid["pipelined_rows"])
                lines.append([
                    name, text, order, *(f"{figures['output_tokens_per_s']:.1f}" for figures in found.values()),
                    f"{hybrid['pipelined_steps'] / hybrid['steps']:.0%}", f"{share:.0%}",
                ])  # fmt: skip
                print(*lines[-1], sep=" | ", flush=True)
    print(table(lines, numbers=True))
    config = {key: value for key, value in vars(args).items() if key != "record"}
    write_record(args.record, name="hybrid_batch", config=config, seed=args.seed, results=results)


if __name__ == "__main__":
    main()

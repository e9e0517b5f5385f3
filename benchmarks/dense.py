"""The dense part of a step (no attention) for each way of running the halves, on a SmolLM-135M-shaped model.

    python -m benchmarks.dense --record benchmarks/results/dense.json

Variants take turns; medians. CPU time (all threads) is given beside wall time: on a machine that does something else as
well it is the steadier of the two. Weights are random; only shapes matter here.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common.arguments import argument_parser
from benchmarks.common.models import SMOLLM_135M, random_llama
from benchmarks.common.record import write_record
from benchmarks.common.tables import table_of
from benchmarks.common.timing import in_turn
from omniserve.layers.patching import PatchedModel, patch

VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {"compile": False, "prepack": False},
    "compiled": {"compile": True, "prepack": False},
    "prepacked": {"compile": False, "prepack": True},
    "both": {"compile": True, "prepack": True},
}
MAX_LOGIT_ROWS = 8  # a chunked prefill needs the logits of few of its rows


def step(model: PatchedModel, num_tokens: int) -> None:
    """One step without attention: the queries stand in for its result."""
    ids = torch.arange(num_tokens)
    hidden = model.embed(ids, ids)
    cos, sin = model.rotary(ids) or (None, None)
    for layer in range(model.num_layers):
        q, _, _ = model.pre_attention(layer, hidden, cos, sin)
        hidden = model.post_attention(layer, q.flatten(1).contiguous(), hidden)
    model.logits(hidden[-MAX_LOGIT_ROWS:])


def wall_and_cpu_ms(function: Callable[[], object]) -> tuple[float, float]:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    function()
    return 1e3 * (time.perf_counter() - wall_s), 1e3 * (time.process_time() - cpu_s)


@torch.inference_mode()
def main() -> None:
    parser = argument_parser(__doc__, "dense", tokens=[1, 8, 64, 128, 512], repeats=9)
    args = parser.parse_args()
    models: dict[str, Any] = {name: patch(random_llama(**SMOLLM_135M), **options) for name, options in VARIANTS.items()}
    samples: dict[str, dict[str, list[tuple[float, float]]]] = {}
    lines = []
    for num_tokens in args.tokens:
        calls = {
            name: functools.partial(wall_and_cpu_ms, functools.partial(step, model.omniserve, num_tokens))
            for name, model in models.items()
        }
        runs = samples[str(num_tokens)] = in_turn(calls, args.repeats, warm_up=2)
        medians = {name: tuple(map(statistics.median, zip(*pairs, strict=True))) for name, pairs in runs.items()}
        cells = {name: f"{wall:.1f} / {cpu:.1f}" for name, (wall, cpu) in medians.items()}
        lines.append({"tokens; ms, wall / CPU": f"{num_tokens}"} | cells)
    print(table_of(lines))
    write_record(args.record, name="dense", config=vars(args) | {"model": SMOLLM_135M}, seed=0, results=samples)


if __name__ == "__main__":
    main()

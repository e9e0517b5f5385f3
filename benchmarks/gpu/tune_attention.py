"""Which constants of the Triton attention kernel are fastest here: ``python -m benchmarks.gpu.tune_attention``.

For each shape of attention (heads of Llama-3.1-8B and Qwen2.5-32B; decodes, and chunks of prompts) it times launches
with other tiles, warps, stages, sizes of a tile of keys and numbers of programs than ``Tuning`` has, one setting
after the other from the best so far, and prints the best, the default, and the time that reading K and V takes.
What is best for most goes into ``omniserve/ops/kernels/attention_launch.py`` by hand. About four minutes; shapes that
there is no time for are not measured.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from benchmarks.common.timing import median_seconds
from benchmarks.gpu.script import NotHere, Script, argument_parser
from benchmarks.gpu.timing import graph_of
from omniserve.ops.kernels.attention import describe, paged_attention
from omniserve.ops.kernels.attention_launch import Tuning, tuning_for

logger = logging.getLogger(__name__)

_BLOCK = 64
_CALLS = 8
"""In a graph, each of other blocks: what the L2 cache holds of one is not what the next reads."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """One launch: requests with as many query tokens and as long contexts each."""

    heads: tuple[int, int, int]
    """N, K, H."""
    requests: int
    query: int
    context: int
    """Keys of each, its queries' own included."""

    def __str__(self) -> str:
        return f"heads {self.heads[0]}/{self.heads[1]}, {self.requests} x {self.query} of {self.context} keys"

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that have to be read, bf16."""
        return self.requests * self.context * 2 * self.heads[1] * self.heads[2] * 2

    @property
    def flops(self) -> float:
        """Floating-point operations of the two products, causal."""
        seen = self.query * (self.context - (self.query - 1) / 2)
        return 4.0 * self.requests * self.heads[0] * self.heads[2] * seen


LLAMA, QWEN = (32, 8, 128), (40, 8, 128)
LOADS = (
    *(Load(heads=LLAMA, requests=requests, query=1, context=1024) for requests in (32, 256, 8, 1, 128)),
    Load(heads=LLAMA, requests=1, query=2048, context=2048),
    Load(heads=QWEN, requests=32, query=1, context=1024),
    Load(heads=LLAMA, requests=8, query=1, context=16384),
    Load(heads=LLAMA, requests=1, query=8192, context=8192),
    Load(heads=LLAMA, requests=8, query=64, context=1024),
    Load(heads=QWEN, requests=1, query=2048, context=8192),
)
DRY_LOADS = (Load(heads=(4, 2, 16), requests=1, query=1, context=20),)


def _tile(best: Tuning, **changes: int) -> Tuning:
    (tile,) = best.tiles
    return dataclasses.replace(best, tiles=(dataclasses.replace(tile, **changes),))


SETTINGS: dict[str, tuple[tuple[int, ...], Callable[[Tuning, int], Tuning]]] = {
    "rows": ((16, 32, 64, 128), lambda best, value: _tile(best, block_m=value)),
    "warps": ((2, 4, 8), lambda best, value: _tile(best, num_warps=value)),
    "stages": ((2, 3, 4, 5, 6), lambda best, value: _tile(best, num_stages=value)),
    "KiB of keys": ((8, 16, 32), lambda best, value: _tile(best, key_tile_bytes=value << 10)),
    "programs": ((1, 2, 3, 4, 6), lambda best, value: dataclasses.replace(best, programs_per_multiprocessor=value)),
}
"""What is tried, one after the other, each from the best so far: values, and how a tuning with one tile gets them."""


class Case:
    """A load's tensors on the device.

    Args:
        load: What they are of.
        device: Where.
        calls: Launches that are timed together.
    """

    def __init__(self, load: Load, device: torch.device, *, calls: int = _CALLS) -> None:
        num_heads, kv_heads, head_size = load.heads
        blocks = -(-load.context // _BLOCK)
        self.load, self._device = load, device
        self.default = tuning_for(describe(device))

        def rows(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16)

        self._q = rows(load.requests * load.query, num_heads, head_size)
        shape = (calls * load.requests * blocks, kv_heads, _BLOCK, head_size)
        self._k, self._v = rows(*shape), rows(*shape)
        table = torch.randperm(shape[0], device=device).int()
        self._tables = table.view(calls, load.requests, blocks).unbind(0)
        self._starts = torch.arange(load.requests + 1, device=device, dtype=torch.int32) * load.query
        self._lens = torch.full((load.requests,), load.context, device=device, dtype=torch.int32)

    def attend(self, tuning: Tuning, call: int = 0) -> Tensor:
        """Launch once."""
        return paged_attention(
            self._q, self._k, self._v, self._tables[call], self._starts, self._lens, scale=0.1,
            one_query_each=self.load.query == 1, tuning=tuning,
        )  # fmt: skip

    def seconds(self, tuning: Tuning, repeats: int) -> float:
        """Return the seconds of a launch, in a graph of several."""
        run = graph_of(lambda: [self.attend(tuning, call) for call in range(len(self._tables))], self._device)
        return median_seconds(run, self._device, repeats=repeats) / len(self._tables)


def default_tuning(case: Case, repeats: int) -> tuple[float, Tuning]:
    """Return what the default takes, and the one of its tiles that is fastest, as a tuning of its own."""
    default = case.default
    default_s = case.seconds(default, repeats)
    alone = [
        (case.seconds(one, repeats), one) for one in (dataclasses.replace(default, tiles=(t,)) for t in default.tiles)
    ]
    return default_s, min(alone, key=lambda pair: pair[0])[1]


def tune(case: Case, *, ends_s: float, repeats: int, few: bool) -> tuple[float, float, Tuning]:
    """Return the seconds of the default, of the best, and the best.

    Args:
        case: What is attended.
        ends_s: No further variant is tried then, on the monotonic clock.
        repeats: Samples of each.
        few: Try two variants.
    """
    default_s, best = default_tuning(case, repeats)
    best_s = case.seconds(best, repeats)
    expected = case.attend(case.default)
    for name, (values, changed) in SETTINGS.items():
        for tuning in [changed(best, value) for value in (values[:2] if few else values)]:
            if tuning == best or time.monotonic() > ends_s:
                continue
            try:
                taken_s = case.seconds(tuning, repeats)
            except (OutOfResources, CompilationError) as error:  # it does not fit an SM: no candidate
                logger.info("%s, other %s: %s", case.load, name, type(error).__name__)
                continue
            # bf16, summed in another order
            torch.testing.assert_close(case.attend(tuning), expected, rtol=0.05, atol=0.02)
            if taken_s < best_s:
                best_s, best = taken_s, tuning
    return default_s, best_s, best


@torch.inference_mode()
def tune_loads(script: Script, loads: Sequence[Load], *, seconds: float) -> None:
    """Tune for each load in an equal part of the time that is left, the most important first."""
    ends_s = time.monotonic() + seconds
    for number, load in enumerate(loads):
        with script.case(f"{load}: best") as case:
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                raise NotHere("out of time")
            until_s = time.monotonic() + left_s / (len(loads) - number)
            tensors = Case(load, script.device, calls=1 if script.dry else _CALLS)
            default_s, best_s, best = tune(tensors, ends_s=until_s, repeats=1 if script.dry else 10, few=script.dry)
            limits = script.limits
            limit_s = max(load.kv_bytes / limits.copy_bytes_per_s, load.flops / limits.matmul_flops)
            (tile,) = best.tiles
            note = f"default {1e6 * default_s:.4g} us; {tile}, {best.programs_per_multiprocessor} programs to an SM"
            case.figure(
                1e6 * best_s, "us", limit=1e6 * limit_s, note=note, default_us=1e6 * default_s,
                tuning=dataclasses.asdict(best), default=dataclasses.asdict(tensors.default),
            )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=4.0, help="for all shapes (default: %(default)s)")
    args = parser.parse_args(arguments)
    script = Script("tune_attention", args)  # a dry run without a GPU needs TRITON_INTERPRET=1
    tune_loads(script, DRY_LOADS if args.dry else LOADS, seconds=60 * args.minutes)
    return script.end()


if __name__ == "__main__":
    sys.exit(main())

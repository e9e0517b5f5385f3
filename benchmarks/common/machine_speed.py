"""The speed of this machine at one moment: memory read by all threads, and its fastest matrix product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.common.bandwidth import ReadLimit
from benchmarks.common.timing import seconds

_ROWS, _WIDTH = 512, 2048


@dataclass(frozen=True, kw_only=True)
class MachineSpeed:
    """The speed of this machine at one moment."""

    bytes_per_s: float
    """Memory read by all threads at once."""
    flop_per_s: float
    """Dense matrix product, in the arithmetic that is fastest here."""


class SpeedMeter:
    """Measures MachineSpeed again and again; what is fastest here is found at the first time.

    Args:
        cpus: The CPUs that servers get; one thread on each.
        arena_bytes: Memory to read; more than all caches hold.
        seed: Seed of its content.
        repeats: Timings a sample, of which the best is taken: a floor is what the machine can do.
    """

    def __init__(self, cpus: Sequence[int], *, arena_bytes: int = 1 << 30, seed: int = 0, repeats: int = 5) -> None:
        self._cpus, self._repeats = tuple(cpus), repeats
        torch.set_num_threads(len(self._cpus))
        self._read = ReadLimit(arena_bytes, self._cpus, repeats=3, seed=seed)
        self._read.everywhere()
        self._products = {name: make() for name, make in PRODUCTS.items() if name in available_products()}
        self.flop_per_s_by_product: dict[str, float] = {}
        """Operations a second of each arithmetic's product, measured with the first sample."""

    def sample(self) -> MachineSpeed:
        """Return the speeds of this moment; takes about a second, and all CPUs."""
        reads = [self._read.gb_per_s(len(self._cpus)) for _ in range(self._repeats)]
        if not self.flop_per_s_by_product:
            self.flop_per_s_by_product = {name: self._flop_per_s(run) for name, run in self._products.items()}
        best = max(self.flop_per_s_by_product, key=lambda name: self.flop_per_s_by_product[name])
        flop_per_s = self._flop_per_s(self._products[best])
        self._read.everywhere()
        return MachineSpeed(bytes_per_s=max(reads) * 1e9, flop_per_s=flop_per_s)

    def _flop_per_s(self, run: Callable[[], object]) -> float:
        run()
        return 2 * _ROWS * _WIDTH**2 / min(seconds(run) for _ in range(self._repeats))


def available_products() -> list[str]:
    """Return the names of PRODUCTS that oneDNN has on this CPU; without it torch's bf16 products take seconds."""
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return [name for name in PRODUCTS if bf16 or not name.startswith("bf16")]


def _plain(dtype: torch.dtype) -> Callable[[], object]:
    left, right = torch.randn(_ROWS, _WIDTH).to(dtype), torch.randn(_WIDTH, _WIDTH).to(dtype)
    return lambda: torch.mm(left, right)


def _packed(dtype: torch.dtype) -> Callable[[], object]:
    rows, weight = torch.randn(_ROWS, _WIDTH).to(dtype), torch.randn(_WIDTH, _WIDTH).to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda: torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")


PRODUCTS: dict[str, Callable[[], Callable[[], object]]] = {
    "bf16": lambda: _plain(torch.bfloat16),
    "fp32": lambda: _plain(torch.float32),
    "bf16 packed": lambda: _packed(torch.bfloat16),
    "fp32 packed": lambda: _packed(torch.float32),
}
"""Matrix products of ``[512, 2048]`` and ``[2048, 2048]``: torch's, and oneDNN's with a weight in blocks."""

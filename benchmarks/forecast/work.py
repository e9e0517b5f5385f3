"""Work: what one kernel reads, writes and multiplies; and the least time that a GPU takes for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from omniserve.simulate.analytic import Efficiency
from omniserve.simulate.hardware import DeviceSpec

Kind = Literal["product", "rows", "decode", "prefill"]
"""Matrix product; what goes through rows once; attention of decodes; attention of chunks."""

_aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One launch of one kernel."""

    kind: Kind
    name: str
    num_bytes: float
    """Read from and written to device memory, each element once."""
    flops: float = 0.0
    """Of matrix products and attention; what else a kernel computes does not count."""
    bus_bytes: float = 0.0
    """Read from or written to page-locked memory of the host."""


def bound_s(work: Work, device: DeviceSpec) -> float:
    """Return the least time of a launch: memory, arithmetic and bus at the peaks of the data sheet."""
    return max(
        work.num_bytes / device.bytes_per_s, work.flops / device.flops, work.bus_bytes / device.pcie_bytes_per_s
    )  # fmt: skip


def expected_s(work: Work, device: DeviceSpec, efficiency: Efficiency, gap_s: float) -> float:
    """Return the time of a launch at usual shares of the peaks, and the gap to the next one in a graph."""
    of_bytes = {
        "product": efficiency.gemm_bytes, "rows": efficiency.elementwise_bytes,
        "decode": efficiency.decode_bytes, "prefill": efficiency.decode_bytes,
    }[work.kind]  # fmt: skip
    of_flops = efficiency.prefill_flops if work.kind == "prefill" else efficiency.gemm_flops
    slower = replace(work, num_bytes=work.num_bytes / of_bytes, flops=work.flops / of_flops)
    return bound_s(slower, device) + gap_s


class _Noted(TorchDispatchMode):
    """Notes what operators that launch something read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "aten" or any(made.alias_info for made in func._schema.returns):
            return result  # a view, or a question
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if func in (_aten.embedding.default, _aten.index_select.default, _aten.index.Tensor):
            given = [*given[1:], *made]  # of the table only what is looked up
        is_product = func in (_aten.mm.default, _aten.addmm.default)
        self.works.append(
            Work(kind="product" if is_product else "rows", name=func._schema.name, num_bytes=_bytes([*given, *made]))
        )  # fmt: skip
        return result


def eager_work(run: Callable[[], object]) -> tuple[Work, ...]:
    """Return the launches of code that is not compiled; call in the FakeTensorMode of its tensors."""
    noted: list[Work] = []
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        with _Noted() as mode:
            run()
        noted = mode.works
    total = flops.get_total_flops()
    products = [work for work in noted if work.kind == "product"]
    assert len(products) <= 1, "the counter tells the sum of all products"
    return tuple(replace(work, flops=total) if work.kind == "product" else work for work in noted)


def fake_mode() -> FakeTensorMode:
    """Return a mode whose tensors have shapes and no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)

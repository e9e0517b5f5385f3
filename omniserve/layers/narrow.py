"""Narrow linears for a CPU without bf16 products: fp32 weights whose values are exact in bf16 are held in bf16.

A bf16 checkpoint that was loaded as fp32 has such weights. A decode step is bound by reading them, so half the bytes
take up to half the time. Few rows go to ``skinny_linear``, which multiplies fp32 rows by a bf16 weight; for more rows
the weight is widened, piece by piece, in memory that is reused. Activations, products and sums are fp32: only the order
of the sums differs from ``F.linear``. ``python -m benchmarks.cpu_dtypes`` measures it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from omniserve.layers.compiled import GROUP_PRODUCTS
from omniserve.layers.groups import HeldLinear, hide, join, part, plain_linears
from omniserve.layers.head import HAS_VECTOR_KERNEL
from omniserve.ops.isa import has_products

_FEW_FLOATS = 48 << 10  # of rows that fit in L2 beside a group of weights, while all groups are read
_PIECE_BYTES = 16 << 20  # of a widened weight: a head's has hundreds of MiB; small pieces cost more than they save

_memory = threading.local()
_library = torch.library.Library("omniserve", "FRAGMENT")
_library.define("narrow_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def few_rows(num_in: int) -> int:
    """Return the number of rows up to which ``skinny_linear`` is not slower than torch with a widened weight."""
    return max(8, _FEW_FLOATS // num_in)


def _narrow_linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_out, num_in = weight.shape
    rows = x.reshape(-1, num_in)
    if rows.shape[0] <= few_rows(num_in):
        out = torch.ops.omniserve.skinny_linear(rows.contiguous(), weight)
    else:
        out = rows.new_empty(rows.shape[0], num_out)
        step = max(1, _PIECE_BYTES // (4 * num_in))
        for first in range(0, num_out, step):
            narrow = weight[first : first + step]
            wide = _scratch(narrow.numel()).view_as(narrow).copy_(narrow)
            torch.mm(rows, wide.T, out=out[:, first : first + step])
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], num_out)


def _narrow_linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_library.impl("narrow_linear", _narrow_linear_cpu, "CPU")
torch.library.register_fake("omniserve::narrow_linear", _narrow_linear_fake, lib=_library)
GROUP_PRODUCTS.add(torch.ops.omniserve.narrow_linear.default)


def _scratch(num_floats: int) -> Tensor:
    """Return this thread's memory for a widened piece, which stays mapped and in the cache."""
    if not hasattr(_memory, "floats") or _memory.floats.numel() < num_floats:
        with torch.inference_mode(False):  # the tensor may then be written in either mode
            _memory.floats = torch.empty(num_floats)
    floats: Tensor = _memory.floats[:num_floats]
    return floats


class NarrowLinear(HeldLinear):
    """An fp32 ``nn.Linear`` whose weight is held in bf16, as ``group_weight``; ``narrow`` makes it."""

    def held_product(self) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        return torch.ops.omniserve.narrow_linear, (self.group_weight, self.group_bias)

    def dense_group(self) -> Tensor:
        return _widened(self.group_weight)


def narrow(*linears: nn.Linear) -> None:
    """Hold the weights of a linear, or of a group as ``groups_of`` returns it, in bf16, and free the fp32 ones.

    Raises:
        ValueError: A weight has values that are not exact in bf16.
    """
    if not all(_is_exact(linear.weight) for linear in linears):
        raise ValueError("a weight has values that bf16 would round; narrow takes what narrowable returns")
    with torch.inference_mode(False), torch.no_grad():
        weight = torch.cat([_narrowed(linear.weight.data) for linear in linears])
        for linear in linears:
            hide(linear.weight)
        join(linears, NarrowLinear, weight)


def widen(*linears: nn.Linear) -> None:
    """Undo ``narrow`` of the same linears: same class, same Parameter objects, same bits; see ``part``."""
    part(linears, NarrowLinear, lambda: _widened(cast(NarrowLinear, linears[0]).group_weight))


def narrowable(model: nn.Module, candidates: Iterable[nn.Module]) -> list[nn.Linear]:
    """Return the candidates that are better held in bf16: plain fp32 CPU linears with exact weights of their own.

    There are none if the CPU has bf16 products (a model is served in bf16 then) or has no vector kernel for few rows.
    """
    if has_products(torch.bfloat16) or not HAS_VECTOR_KERNEL:
        return []
    linears = plain_linears(model, candidates, ("cpu",), torch.float32)
    return [linear for linear in linears if _is_exact(linear.weight)]


def holds_narrow(model: nn.Module) -> bool:
    """Tell whether a model has narrow linears, or would get some if it were patched."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return any(isinstance(linear, NarrowLinear) or narrowable(model, [linear]) for linear in linears)


def _is_exact(weight: Tensor) -> bool:
    """Tell whether the lower half of every value's bits is zero."""
    return not bool((weight.detach().view(torch.int32) & 0xFFFF).any())


# These copy bits, because a conversion could change the payload of a NaN.
def _narrowed(weight: Tensor) -> Tensor:
    return (weight.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def _widened(weight: Tensor) -> Tensor:
    return (weight.view(torch.int16).to(torch.int32) << 16).view(torch.float32)

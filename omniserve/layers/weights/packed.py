"""Packed linears for the CPU device tier: ``packed_linear``'s panels of 32 features replace the dense weight.

One copy of the weight serves any number of rows: few rows read it at the speed of memory, many multiply it in the
fastest arithmetic that the CPU has (``ops/csrc/linear.h`` describes the layout and the kernels). torch's own product
reorders a bf16 weight at every call, and in fp32 reads it at a fraction of that speed (docs/performance.md).

Sums are in fp32, and an output depends on its own row alone, to the bit: not on the rows beside it. An fp32 weight
whose every value is exact in bf16, as of a bf16 checkpoint that was loaded as fp32, is held in bf16: half the bytes to
read, the same products.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from omniserve import ops  # noqa: F401  registers torch.ops.omniserve
from omniserve.core.pages import ask_for_huge_pages
from omniserve.layers.compiled import GROUP_PRODUCTS
from omniserve.layers.weights.groups import (
    HeldLinear,
    hide,
    is_plain,
    is_watched,
    join_group,
    plain_linears,
    split_group,
)

GROUP_PRODUCTS.add(torch.ops.omniserve.packed_linear.default)

PANEL = 32
"""Features of a panel."""

HAS_VECTOR_KERNEL = torch.backends.cpu.get_cpu_capability().startswith("AVX")
"""The portable kernel, for other CPUs, is slower than torch with many rows."""

_SLAB_BYTES = 32 << 20
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PackedLinear(HeldLinear):
    """An ``nn.Linear`` with a packed weight; ``pack`` makes it. Its ``group_weight`` is ``[panels, steps, ...]``."""

    def held_product(self, input: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        return torch.ops.omniserve.packed_linear, (self.group_weight, self.group_bias, self.group_rows)

    @property
    def dense_dtype(self) -> torch.dtype:
        """The dtype of the dense weight."""
        return cast(Tensor, self._parameters["weight"]).dtype

    def dense_group(self) -> Tensor:
        return _dense(self.group_weight, self.in_features, self.group_rows, self.dense_dtype)


class PackedEmbedding(nn.Embedding):
    """An embedding tied to a packed head: it looks its rows up in the head's weight; ``pack`` makes it.

    ``weight`` is the Parameter that both share, of which only shape and dtype are left; ``state_dict()`` returns the
    dense values.
    """

    group_weight: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return self.held_rows(input.contiguous()).to(self.weight.dtype)

    def held_rows(self, ids: Tensor) -> Tensor:
        """Return the dense rows of some ids, in any dtype that has their values."""
        rows: Tensor = torch.ops.omniserve.packed_rows(ids, self.group_weight, self.embedding_dim, self.num_embeddings)
        return rows

    def dense(self) -> Tensor:
        """Return a dense copy of the weight, bit for bit the original."""
        return _dense(self.group_weight, self.embedding_dim, self.num_embeddings, self.weight.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse("be copied")

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        self._refuse("change its device or dtype")

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("load a state dict")

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with torch.inference_mode(False), torch.no_grad():
            destination[prefix + "weight"] = self.dense()

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(f"an embedding with a prepacked weight cannot {what}; call omniserve.unpatch(model) first")


def pack(*linears: nn.Linear, embedding: nn.Embedding | None = None) -> None:
    """Pack a linear, or a group as ``groups_of`` returns it, in place, and free the dense weights.

    ``embedding`` is the one that a single linear shares its weight with; see ``tied_embedding``.
    """
    weights = [linear.weight for linear in linears]
    with torch.inference_mode(False), torch.no_grad():
        dense = torch.cat([weight.data for weight in weights]) if len(weights) > 1 else weights[0].data
        if _is_exact_in_bf16(dense):
            dense = _narrowed(dense)
        packed = _packed(dense)
        for weight in weights:
            hide(weight)
        join_group(linears, PackedLinear, packed)
        if embedding is not None:
            hold_rows(embedding, PackedEmbedding, packed)


def packed_heads(weight_NOI: Tensor) -> Tensor:
    """Return the weights of several heads packed, as ``torch.ops.omniserve.packed_heads`` takes them."""
    dense_NOI = weight_NOI.contiguous()
    if _is_exact_in_bf16(dense_NOI):
        dense_NOI = _narrowed(dense_NOI)
    packed = _empty(dense_NOI.dtype, *dense_NOI.shape)
    for dense_OI, of_head in zip(dense_NOI, packed, strict=True):
        torch.ops.omniserve.pack_linear(dense_OI, of_head)
    return packed


def unpack(*linears: nn.Linear, embedding: nn.Embedding | None = None) -> None:
    """Undo ``pack`` of the same modules: same class, same Parameter objects, same bits; see ``split_group``."""
    split_group(linears, PackedLinear, lambda: cast(PackedLinear, linears[0]).dense_group())
    if embedding is not None:
        release_rows(embedding)


def hold_rows(embedding: nn.Embedding, kind: type[PackedEmbedding], held: Tensor, **others: Any) -> None:
    """Let an embedding look its rows up in a held weight. The caller changes its Parameter."""
    embedding.__dict__.update(group_weight=held, **others)
    embedding.__class__ = _packed_class(type(embedding), kind)


def release_rows(embedding: nn.Embedding) -> None:
    """Undo ``hold_rows``: the class of before."""
    for name in ("group_weight", "group_form"):
        embedding.__dict__.pop(name, None)
    embedding.__class__ = next(
        each for each in type(embedding).__mro__
        if issubclass(each, nn.Embedding) and not issubclass(each, PackedEmbedding)
    )  # fmt: skip


def keeps_rows(embedding: nn.Embedding, hold: Callable[[], None], release: Callable[[], None]) -> bool:
    """Hold an embedding's weight in another form; return whether it stays so.

    An embedding of another class may do more than look up rows. If it does not do that by ``nn.Embedding.forward``, it
    gives other rows, and all is undone.
    """
    ids = torch.tensor([[0, embedding.num_embeddings - 1]])
    with torch.inference_mode():
        before = embedding(ids)
        hold()
        if torch.equal(embedding(ids), before):
            return True
    release()
    return False


def pack_tied(head: nn.Linear, embedding: nn.Embedding) -> bool:
    """Pack a head with the embedding that ``tied_embedding`` found; return whether they stay packed."""
    return keeps_rows(embedding, lambda: pack(head, embedding=embedding), lambda: unpack(head, embedding=embedding))


def packable(model: nn.Module, candidates: Iterable[nn.Module]) -> list[nn.Linear]:
    """Return the candidates that are better packed: plain CPU linears, on a CPU that the kernels have vectors for.

    Subclasses (quantised, adapters) are not, nor are weights that other modules read; see ``tied_embedding``.
    """
    if not HAS_VECTOR_KERNEL:
        return []
    return [each for each in plain_linears(model, candidates, ("cpu",)) if each.weight.dtype in _DTYPES]


def tied_embedding(model: nn.Module, head: nn.Module, embedding: nn.Module) -> nn.Embedding | None:
    """Return the embedding if ``head`` shares its weight with it and nothing else, and both can be packed."""
    if not HAS_VECTOR_KERNEL or not is_plain(head) or head.weight.device.type != "cpu":
        return None
    if not isinstance(embedding, nn.Embedding) or embedding.weight is not head.weight or is_watched(embedding):
        return None
    uses = Counter(parameter.data_ptr() for _, parameter in model.named_parameters(remove_duplicate=False))
    if uses[head.weight.data_ptr()] != 2 or embedding.max_norm is not None or head.weight.dtype not in _DTYPES:
        return None
    return embedding


def holds_bfloat16(model: nn.Module) -> bool:
    """Tell whether a model in fp32 has linears that are held in bf16, or would get some if it were patched."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    packed = [linear for linear in linears if isinstance(linear, PackedLinear)]
    if any(each.group_weight.dtype is not each.dense_dtype for each in packed):
        return True
    return any(_is_exact_in_bf16(linear.weight.detach()) for linear in packable(model, linears))


_classes: dict[tuple[type[nn.Embedding], type[PackedEmbedding]], type[PackedEmbedding]] = {}


def _packed_class(own: type[nn.Embedding], kind: type[PackedEmbedding]) -> type[PackedEmbedding]:
    """Return the class in which ``nn.Embedding``'s part of ``own`` is that of ``kind``."""
    if own is nn.Embedding:
        return kind
    if (own, kind) not in _classes:
        _classes[own, kind] = type(f"{kind.__name__.removesuffix('Embedding')}{own.__name__}", (own, kind), {})
    return _classes[own, kind]


def _packed(dense: Tensor) -> Tensor:
    packed = _empty(dense.dtype, *dense.shape)
    torch.ops.omniserve.pack_linear(dense.contiguous(), packed)
    return packed


def _empty(dtype: torch.dtype, *sizes: int) -> Tensor:
    """Return memory for packed weights of some sizes, the last two of which are outputs and inputs."""
    *many, num_out, num_in = sizes
    at_once = 2 if dtype is torch.bfloat16 else 1  # inputs
    shape = (*many, -(-num_out // PANEL), -(-num_in // at_once), PANEL * at_once)
    return huge_pages(math.prod(shape), dtype).view(shape)


_slab = torch.empty(0, dtype=torch.uint8)
"""Memory that packed weights share, for small ones would get no huge pages alone: what is left of it."""


def huge_pages(numel: int, dtype: torch.dtype) -> Tensor:
    """Return uninitialised memory in huge pages, aligned to cache lines."""
    global _slab
    nbytes = -(-numel * dtype.itemsize // 64) * 64
    if nbytes >= _SLAB_BYTES:
        own = torch.empty(numel, dtype=dtype)
        ask_for_huge_pages(own.data_ptr(), own.nbytes)
        return own
    if nbytes > _slab.nbytes:
        _slab = torch.empty(_SLAB_BYTES, dtype=torch.uint8)
        ask_for_huge_pages(_slab.data_ptr(), _slab.nbytes)
    taken, _slab = _slab[:nbytes], _slab[nbytes:]
    return taken.view(dtype)[:numel]


def _dense(packed: Tensor, num_in: int, num_out: int, dtype: torch.dtype) -> Tensor:
    dense: Tensor = torch.ops.omniserve.packed_rows(torch.arange(num_out), packed, num_in, num_out)
    return dense if dense.dtype is dtype else _widened(dense)


def _is_exact_in_bf16(weight: Tensor) -> bool:
    """Tell whether a weight is in fp32 and the lower half of every value's bits is zero."""
    if weight.dtype is not torch.float32:
        return False
    bits = weight.view(torch.int32)
    return not bool((bits[:1] & 0xFFFF).any()) and not bool((bits & 0xFFFF).any())  # most tell by their first row


# These copy bits, because a conversion could change the payload of a NaN.
def _narrowed(weight: Tensor) -> Tensor:
    return (weight.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def _widened(weight: Tensor) -> Tensor:
    return (weight.view(torch.int16).to(torch.int32) << 16).view(torch.float32)

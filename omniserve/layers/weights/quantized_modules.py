"""Linears and embeddings with weights of few bits: ``quantized_linear`` reads the codes that a checkpoint has.

A loader notes which codes the dense weights have that transformers made (``quantized.remember``); when the model is
patched, the codes take their place. Groups are those linears of one input whose forms are the same.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from omniserve import ops  # noqa: F401  registers torch.ops.omniserve
from omniserve.layers.compiled import GROUP_PRODUCTS
from omniserve.layers.weights.groups import HeldLinear, hide, is_watched, join_group, plain_linears, split_group
from omniserve.layers.weights.packed import PackedEmbedding, hold_rows, huge_pages, keeps_rows, release_rows
from omniserve.layers.weights.quantized import (
    QuantForm,
    QuantizedWeight,
    forget,
    in_own_order,
    joined,
    pack_quantized,
    packed_shape,
    remembered,
    still_quantized,
)

GROUP_PRODUCTS.add(torch.ops.omniserve.quantized_linear.default)


class QuantizedLinear(HeldLinear):
    """An ``nn.Linear`` whose weight is codes; ``hold`` makes it. Its ``group_weight`` is ``[panels, bytes]``."""

    group_form: QuantForm
    group_order: Tensor | None
    """The order of the inputs, of all members; see ``QuantizedWeight``."""

    def held_product(self, input: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        arguments = (self.group_weight, self.group_bias, self.group_rows, *self.group_form.arguments, self.group_order)
        return torch.ops.omniserve.quantized_linear, arguments

    def dense_group(self) -> Tensor:
        dtype = cast(Tensor, self._parameters["weight"]).dtype
        rows = _rows(torch.arange(self.group_rows), self.group_weight, self.in_features, self.group_rows,
                     self.group_form)  # fmt: skip
        return in_own_order(rows, self.group_order).to(dtype)


class QuantizedEmbedding(PackedEmbedding):
    """An embedding whose weight is codes, alone or tied to the head; ``hold`` makes it."""

    group_form: QuantForm

    def held_rows(self, ids: Tensor) -> Tensor:
        return _rows(ids, self.group_weight, self.embedding_dim, self.num_embeddings, self.group_form)

    def dense(self) -> Tensor:
        return self.held_rows(torch.arange(self.num_embeddings)).to(self.weight.dtype)


def _rows(ids: Tensor, packed: Tensor, num_in: int, num_out: int, form: QuantForm) -> Tensor:
    rows: Tensor = torch.ops.omniserve.quantized_rows(ids, packed, num_in, num_out, *form.arguments)
    return rows


def quantizable(model: nn.Module, candidates: Iterable[nn.Module]) -> list[nn.Linear]:
    """Return the candidates whose weights were made of codes: plain CPU linears that no other module reads."""
    return [each for each in plain_linears(model, candidates, ("cpu",)) if remembered(each.weight) is not None]


def forms_of(model: nn.Module) -> list[str]:
    """Name the forms of the codes that a model has, or gets when it is patched, and how many weights are in each."""
    found = {id(weight): (noted.form, weight.numel()) for weight in model.parameters() if (noted := remembered(weight))}
    for module in model.modules():
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            weight = cast(Tensor, module._parameters["weight"])
            found[id(weight)] = module.group_form, weight.numel()
    sizes = Counter[QuantForm]()
    for form, size in found.values():
        sizes[form] += size
    return [f"{size} of {bits} bits {scales.name} {group}" for (bits, scales, group), size in sorted(sizes.items())]


def kind_of(module: nn.Module) -> tuple[QuantForm, bytes | None] | None:
    """Return the form and the order of inputs of the codes that were noted of a linear's weight."""
    noted = remembered(weight) if isinstance(weight := getattr(module, "weight", None), Tensor) else None
    return noted.kind if noted is not None else None


def hold(*linears: nn.Linear, embedding: nn.Embedding | None = None) -> bool:
    """Put codes in the place of dense weights, of a linear or a group of one kind, in place.

    ``embedding`` is the one that a single linear shares its weight with.

    Returns:
        Whether it was done; a weight that has been changed since it was made of its codes stays dense.
    """
    parts = [still_quantized(linear.weight) for linear in linears]
    whole = [part for part in parts if part is not None]
    if len(whole) < len(parts):
        return False
    with torch.inference_mode(False), torch.no_grad():
        weight = joined(whole)
        packed = _packed(weight)
        for linear in linears:
            hide(linear.weight)
        join_group(linears, QuantizedLinear, packed)
        for linear in linears:
            linear.__dict__.update(group_form=weight.form, group_order=weight.order)
            forget(cast(Tensor, linear._parameters["weight"]))
        if embedding is not None:
            hold_rows(embedding, QuantizedEmbedding, packed, group_form=weight.form)
    return True


def release(*linears: nn.Linear, embedding: nn.Embedding | None = None) -> None:
    """Undo ``hold`` of the same modules: same class, same Parameter objects, same bits."""
    split_group(linears, QuantizedLinear, lambda: cast(QuantizedLinear, linears[0]).dense_group())
    for linear in linears:
        del linear.__dict__["group_form"], linear.__dict__["group_order"]
    if embedding is not None:
        release_rows(embedding)


def hold_tied(head: nn.Linear, embedding: nn.Embedding) -> bool:
    """Put codes in the place of the weight of a head and the embedding that ``tied_embedding`` found, if it has some.

    Returns:
        Whether it was done.
    """
    return _keeps(embedding, functools.partial(hold, head), functools.partial(release, head))


def hold_embedding(model: nn.Module, embedding: nn.Module) -> bool:
    """Put codes in the place of the weight of an embedding on the CPU, if it has some and no other module reads it.

    Returns:
        Whether it was done.
    """
    if not isinstance(embedding, nn.Embedding) or is_watched(embedding) or embedding.max_norm is not None:
        return False
    weights = [weight.data_ptr() for _, weight in model.named_parameters(remove_duplicate=False)]
    if embedding.weight.device.type != "cpu" or weights.count(embedding.weight.data_ptr()) != 1:
        return False

    def hold_alone(embedding: nn.Embedding) -> bool:
        if (weight := still_quantized(embedding.weight)) is None:
            return False
        with torch.inference_mode(False), torch.no_grad():
            packed = _packed(weight)
            hide(embedding.weight)
            hold_rows(embedding, QuantizedEmbedding, packed, group_form=weight.form)
            forget(embedding.weight)
        return True

    return _keeps(embedding, hold_alone, release_embedding)


def release_embedding(embedding: nn.Embedding) -> None:
    """Undo ``hold_embedding``."""
    with torch.inference_mode(False), torch.no_grad():
        dense = cast(QuantizedEmbedding, embedding).dense()
        release_rows(embedding)
        embedding.weight.data = dense


def _keeps(embedding: nn.Embedding, hold: Callable[..., bool], release: Callable[..., None]) -> bool:
    noted = remembered(embedding.weight)
    if noted is None or noted.order is not None:  # a row is looked up in the order of its own columns
        return False
    held = False

    def try_it() -> None:
        nonlocal held
        held = hold(embedding=embedding)

    def undo() -> None:
        if held:
            release(embedding=embedding)

    return keeps_rows(embedding, try_it, undo) and held


def _packed(weight: QuantizedWeight) -> Tensor:
    panels, width = packed_shape(weight.form, *weight.shape)
    packed = huge_pages(panels * width, torch.uint8).view(panels, width)
    pack_quantized(weight, packed)
    return packed

"""The forms in which the weights of a patched model are held: which one a group of linears gets, and the way back."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from omniserve.layers.weights import int8_modules, packed, quantized_modules
from omniserve.layers.weights.groups import HeldForm, groups_of
from omniserve.layers.weights.merged import merge, mergeable, unmerge

logger = logging.getLogger(__name__)

FORMS = (
    HeldForm("quantized", quantized_modules.quantizable, quantized_modules.hold, quantized_modules.release,
             alike=quantized_modules.kind_of),
    HeldForm("in int8", int8_modules.roundable, int8_modules.hold, int8_modules.release, alike=int8_modules.kind_of),
    HeldForm("packed", packed.packable, packed.pack, packed.unpack),
    HeldForm("merged", mergeable, merge, unmerge, takes_single=False),
)  # fmt: skip
"""The first that suits a linear is taken."""


class HeldWeights:
    """Holds the weights of a model's linears, and of its embedding, in the forms that suit them best.

    Args:
        model: The model.
        candidates: The modules of which the linears may be held.
        of_one_input: Modules that have the same input, as ``groups_of`` takes them.
        head: The module that makes logits.
    """

    def __init__(
        self, model: nn.Module, candidates: list[nn.Module], of_one_input: Sequence[Sequence[nn.Module]], *, head: Any
    ) -> None:
        self._groups: list[tuple[HeldForm, list[tuple[nn.Linear, ...]]]] = []
        for form in FORMS:
            groups = groups_of(form.suitable(model, candidates), of_one_input, form.alike)
            groups = [group for group in groups if form.takes_single or len(group) > 1]
            held = [group for group in groups if form.hold(*group) is not False]
            if len(held) < len(groups):
                logger.warning(
                    "%d of %d weights were changed since they were loaded, and are not held %s",
                    len(groups) - len(held), len(groups), form.name,
                )  # fmt: skip
            if held:
                logger.info("%s %d linears as %d weights", form.name, sum(map(len, held)), len(held))
            self._groups.append((form, held))
        self._undo_embedding = _hold_embedding(model, head, candidates)

    @property
    def num_linears(self) -> int:
        """Linears in a form, but for a head that shares its weight with the embedding."""
        return sum(len(group) for _, groups in self._groups for group in groups)

    @property
    def is_empty(self) -> bool:
        """Nothing suits any form."""
        return not self.num_linears and self._undo_embedding is None

    def release(self) -> None:
        """Give every module its dense weight again, bit for bit."""
        for form, groups in self._groups:
            for group in groups:
                form.release(*group)
        if self._undo_embedding is not None:
            self._undo_embedding()


def _hold_embedding(model: Any, head: Any, candidates: list[nn.Module]) -> Callable[[], None] | None:
    """Hold the embedding, with the head if they share their weight; return what undoes it, None if nothing was."""
    embedding = model.get_input_embeddings()
    if head not in candidates or not (tied := packed.tied_embedding(model, head, embedding)):
        held = quantized_modules.hold_embedding(model, embedding)
        return functools.partial(quantized_modules.release_embedding, embedding) if held else None
    if quantized_modules.hold_tied(head, tied):
        return functools.partial(quantized_modules.release, head, embedding=tied)
    return functools.partial(packed.unpack, head, embedding=tied) if packed.pack_tied(head, tied) else None

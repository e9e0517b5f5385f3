"""The inputs of a model's layers: how the model numbers positions, and what it gives each layer and its attention.

LayerArguments has what layers are given beside the layer's input. A tensor that follows from the positions becomes a
``Table``, one that depends on the token a ``Carried`` (a part of its row), a mapping in which layers leave something
for later ones a ``Place``; everything else is a constant. Masks and keywords of the attention function become an
``AttentionSpec``. The rest is found, or checked, by runs of the model with other functions in the place of its layers
(``ModelTracer.run``).

Tensor legend: T tokens, D hidden.
"""

from __future__ import annotations

import math
from collections import UserDict
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from omniserve.core.errors import UnsupportedModelError
from omniserve.core.spec import AttentionSpec
from omniserve.layers.tracing.attention_interface import Mask, described_masks
from omniserve.layers.tracing.batch_layout import RowLayout
from omniserve.layers.tracing.model_tracer import ModelTracer, TracedRun, unsupported
from omniserve.layers.tracing.placeholders import Carried, Place, Table, TableForm, tensors_in

# Arguments of an attention function that change nothing of its result, or that AttentionSpec has.
_KNOWN_ARGUMENTS = frozenset(
    {
        "dropout",
        "scaling",
        "sliding_window",
        "softcap",
        "s_aux",
        "alibi_slopes",
        "is_causal",
        "position_ids",
        "window",
        "logits_to_keep",
    }
)


class LayerArguments:
    """The arguments of all layers of a model, as they are recorded.

    Args:
        model: For errors, and its dtype.
        unused: Names of arguments that no layer reads.
        picks_keys: An indexer in each layer picks the keys that it attends to; it looks into the mask.
    """

    def __init__(self, model: PreTrainedModel, unused: set[str], *, picks_keys: bool) -> None:
        self._model, self._unused, self._picks_keys = model, unused, picks_keys
        self.forms: list[TableForm] = []
        """The form of each table."""
        self.mappings: list[Any] = []
        """The mappings in which layers leave something for later layers."""
        self._tables: list[Tensor] = []
        self._carried_tensors: list[tuple[Tensor, Carried]] = []
        self._masks: dict[int, set[Mask | None]] = {}
        """The masks that each layer gets; without one the attention's own argument tells its window."""

    def _unsupported(self, what: str) -> UnsupportedModelError:
        return unsupported(self._model, what)

    def template(self, index: int, first: Any, same: Any, other: Any) -> Any:
        """Return what stands for an argument of layer ``index``, by its values in three runs.

        ``first`` and ``same`` are of three tokens, not the same ones, at the same positions; ``other`` is of five.
        """
        if isinstance(first, UserDict) and not first:
            if not any(each is first for each in self.mappings):
                self.mappings.append(first)
            return Place(next(number for number, each in enumerate(self.mappings) if each is first), {}, {})
        if isinstance(first, dict):
            return {
                key: None if key in self._unused else self.template(index, first[key], same[key], other[key])
                for key in first
            }
        if type(first) in (tuple, list):
            parts = zip(first, same, other, strict=True)
            return type(first)(self.template(index, one, two, three) for one, two, three in parts)
        if not isinstance(first, Tensor):
            return first
        if hasattr(first, "omniserve_mask"):
            self._masks.setdefault(index, set()).add(first.omniserve_mask)
            return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=first.device) if self._picks_keys else None
        name = f"gives layer {index} a tensor {tuple(first.shape)} beside its input that depends on"
        if first.shape == same.shape == other.shape and torch.equal(first, same) and torch.equal(first, other):
            return first
        row_dims = [d for d in range(first.dim()) if (first.shape[d], other.shape[d]) == (3, 5)]
        if len(row_dims) != 1 or first.shape != same.shape:
            raise self._unsupported(f"{name} how many tokens there are")
        shape = tuple(size for d, size in enumerate(first.shape) if d != row_dims[0])
        form = TableForm(row_dims[0], shape, first.dtype)
        if not torch.equal(first, same):
            return self._carried(name, first, form)
        for number, table in enumerate(self._tables):
            if table is first:
                return Table(number)
        self._tables.append(first)
        self.forms.append(form)
        return Table(len(self.forms) - 1)

    def _carried(self, name: str, tensor: Tensor, form: TableForm) -> Carried:
        if tensor.dtype is not self._model.dtype:
            raise self._unsupported(f"{name} the tokens, of {tensor.dtype}; a row has {self._model.dtype}")
        for each, carried in self._carried_tensors:
            if each is tensor:
                return carried
        self._carried_tensors.append((tensor, Carried(form)))
        return self._carried_tensors[-1][1]

    def spec_of(
        self, index: int, query: Tensor, mask: Any, keywords: dict[str, Any], described: Any = None
    ) -> AttentionSpec:
        """Return what the attention of layer ``index`` is, by the arguments of its attention function.

        ``described`` is the mask that it was given as masks described themselves (``described_masks``).
        """
        for name, value in keywords.items():
            if name == "indices" and self._picks_keys:
                continue
            if not (name in _KNOWN_ARGUMENTS or value is None or isinstance(value, (bool, str))):
                raise self._unsupported(f"gives the attention of layer {index} {name!r}, which no kernel here has")
        if keywords.get("is_causal") is False:
            raise self._unsupported(f"attends to later tokens in layer {index}; only causal layers work")
        if mask is not None and not (self._picks_keys and mask.shape == (1, 1, 1, 1)):
            raise self._unsupported(f"makes a mask of its own in layer {index}")
        scale = keywords.get("scaling")
        of_arguments: set[Mask | None] = self._masks.get(index, set())
        masks = {described.omniserve_mask} if hasattr(described, "omniserve_mask") else of_arguments
        if None in masks or len(masks) > 1:
            raise self._unsupported(f"gives layer {index} a mask that is neither causal, a sliding window nor chunks")
        mask_kind = next(iter(masks), None) or Mask(window=int(keywords.get("sliding_window") or 0))
        if "window" in keywords:  # an override's, which says all that its module masks
            mask_kind = Mask(window=keywords["window"])
        sinks, slopes = (
            self._per_head(index, name, keywords.get(name), query.shape[1]) for name in ("s_aux", "alibi_slopes")
        )
        return AttentionSpec(
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            window=mask_kind.window,
            chunk=mask_kind.chunk,
            softcap=float(keywords.get("softcap") or 0.0),
            sinks=sinks,
            alibi_slopes=slopes,
        )

    def _per_head(self, index: int, name: str, value: Any, num_heads: int) -> tuple[float, ...] | None:
        """Return an argument of a layer's attention that has a number for each query head."""
        if value is None:
            return None
        numbers = tuple(map(float, value.flatten().tolist() if isinstance(value, Tensor) else value))
        if len(numbers) != num_heads or not all(map(math.isfinite, numbers)):
            raise self._unsupported(
                f"gives the attention of layer {index} {name!r} {numbers}; expected a number for each of the "
                f"{num_heads} heads"
            )
        return numbers


_FIRST_POSITIONS = (0, 1, 2, 3)
"""Numbers that a model may give to the first position; those of RoBERTa's kind begin behind the padding token's."""


def find_first_position(model: PreTrainedModel, tracer: ModelTracer) -> int:
    """Return the number that a model gives to the first position of a sequence, if it is told none."""
    unnumbered, *numbered = (
        tracer.run([5, 6, 7], positions, as_sequence=True).inputs[0]
        for positions in (None, *(range(first, first + 3) for first in _FIRST_POSITIONS))
    )
    for first, inputs in zip(_FIRST_POSITIONS, numbered, strict=True):
        if torch.equal(unnumbered, inputs):
            return first
    raise unsupported(model, f"numbers positions from none of {_FIRST_POSITIONS}, or not by ones")


def row_layout(model: PreTrainedModel, tracer: ModelTracer, three: TracedRun, five: TracedRun) -> RowLayout:
    """Return the layout of rows with nothing but the layers' input, from runs on three and on five sequences."""
    first, other = three.inputs[0], five.inputs[0]
    row_dims = [d for d in range(first.dim()) if (first.shape[d], other.shape[d]) == (3, 5)]
    if len(row_dims) != 1 or first.shape[row_dims[0] + 1 : row_dims[0] + 2] != (1,):
        raise unsupported(model, f"gives its layers an input {tuple(first.shape)}, in which no dimension is tokens")
    shape = tuple(size for d, size in enumerate(first.shape) if d != row_dims[0])
    layout = RowLayout(TableForm(row_dims[0], shape, first.dtype))
    sequence = tracer.run([1, 2, 3], [0, 1, 2], as_sequence=True)
    if not torch.equal(first, layout.transposed(sequence.inputs[0])):
        raise unsupported(model, "mixes the rows of tokens before its layers")
    return layout


def check_between_layers(model: PreTrainedModel, tracer: ModelTracer, first: TracedRun) -> bool:
    """See that the layers depend on each other by their rows alone.

    ``first`` is a run of ``[1, 2, 3]`` at positions 0 to 2 with described masks. The result tells whether layers are
    given what others return behind their output.

    Raises:
        UnsupportedModelError: The model changes a layer's output before the next layer gets it, or gives layers a
            tensor that follows from it.
    """
    with described_masks():
        changed = tracer.run([1, 2, 3], [0, 1, 2], output_of=_changed)
        handed = tracer.run([1, 2, 3], [0, 1, 2], behind=1)
    for index, (before, after) in enumerate(pairwise(changed.inputs)):
        if before.shape != after.shape or not torch.equal(_changed(before), after):
            raise unsupported(model, f"changes the rows between layers {index} and {index + 1}")
    for index, (one, other) in enumerate(zip(first.arguments, changed.arguments, strict=True)):
        if not same_tensors(one, other):
            raise unsupported(model, f"gives layer {index} a tensor that depends on the layers before it")
    return not all(map(same_tensors, first.arguments, handed.arguments))


def _changed(hidden: Tensor) -> Tensor:
    return 0.5 * hidden + 1


def same_tensors(one: Any, other: Any) -> bool:
    """Tell whether the tensors among arguments, or among what a layer returned, are equal."""
    pairs = zip(tensors_in(one), tensors_in(other), strict=True)
    return all(first.shape == second.shape and torch.equal(first, second) for first, second in pairs)

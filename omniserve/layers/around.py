"""The model around its layers: how it numbers positions, what its layers' input is, what passes between layers.

Each is found, or checked, by runs of the model with other functions in the place of its layers (``ModelShell.run``).
Tensor legend: T tokens, D hidden.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from omniserve.layers.cut import described_masks
from omniserve.layers.inspection import TableForm, tensors_in
from omniserve.layers.rows import RowLayout
from omniserve.layers.shell import ModelShell, Run, unsupported

_FIRST_POSITIONS = (0, 1, 2, 3)
"""Numbers that a model may give to the first position; those of RoBERTa's kind begin behind the padding token's."""


def find_first_position(model: PreTrainedModel, shell: ModelShell) -> int:
    """Return the number that a model gives to the first position of a sequence, if it is told none."""
    unnumbered, *numbered = (
        shell.run([5, 6, 7], positions, as_sequence=True).inputs[0]
        for positions in (None, *(range(first, first + 3) for first in _FIRST_POSITIONS))
    )
    for first, inputs in zip(_FIRST_POSITIONS, numbered, strict=True):
        if torch.equal(unnumbered, inputs):
            return first
    raise unsupported(model, f"numbers positions from none of {_FIRST_POSITIONS}, or not by ones")


def row_layout(model: PreTrainedModel, shell: ModelShell, three: Run, five: Run) -> RowLayout:
    """Return the layout of rows with nothing but the layers' input, from runs on three and on five sequences."""
    first, other = three.inputs[0], five.inputs[0]
    row_dims = [d for d in range(first.dim()) if (first.shape[d], other.shape[d]) == (3, 5)]
    if len(row_dims) != 1 or first.shape[row_dims[0] + 1 : row_dims[0] + 2] != (1,):
        raise unsupported(model, f"gives its layers an input {tuple(first.shape)}, in which no dimension is tokens")
    shape = tuple(size for d, size in enumerate(first.shape) if d != row_dims[0])
    layout = RowLayout(TableForm(row_dims[0], shape, first.dtype))
    sequence = shell.run([1, 2, 3], [0, 1, 2], as_sequence=True)
    if not torch.equal(first, layout.transposed(sequence.inputs[0])):
        raise unsupported(model, "mixes the rows of tokens before its layers")
    return layout


def check_between_layers(model: PreTrainedModel, shell: ModelShell, first: Run) -> bool:
    """See that the layers depend on each other by their rows alone.

    ``first`` is a run of ``[1, 2, 3]`` at positions 0 to 2 with described masks. The result tells whether layers are
    given what others return behind their output.

    Raises:
        UnsupportedModelError: The model changes a layer's output before the next layer gets it, or gives layers a
            tensor that follows from it.
    """
    with described_masks():
        changed = shell.run([1, 2, 3], [0, 1, 2], output_of=_changed)
        handed = shell.run([1, 2, 3], [0, 1, 2], behind=1)
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

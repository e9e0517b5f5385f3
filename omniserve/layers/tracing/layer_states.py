"""Recurrent states: what layers without KV keep of each request, in slots on the device.

Hugging Face's layers with state (Mamba, gated delta rule, short convolution) read and write it through a cache object,
which is a ``StateCache`` here. It holds the states of the sequences of one call of one layer. Between two calls they
are in a ``StatePool``.

Legend: n sequences of a call, L tokens of each, T rows of a step, S slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

StateKey = tuple[str, int]
"""A state of a layer: ``conv``, ``recurrent`` or ``linear``, and its number among those of this kind."""


class StateForm(NamedTuple):
    """The shape of one request's state, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class RowGroup(NamedTuple):
    """Rows of a step that pass a layer with state together: chunks of the same length."""

    rows_nL: Tensor
    """The rows of each chunk, int64 on the device."""
    slots_n: Tensor
    """The slot of each chunk's request, int64 on the device."""
    is_fresh: bool
    """The chunks are their requests' first ones: they begin without a state, whatever their slots hold."""


class StateCache:
    """Stands for Hugging Face's cache in one call of a layer; it has the methods that layers with state call.

    Without ``states`` the sequences of the call begin with it. A layer may also change a state in place.
    """

    def __init__(self, states: Mapping[StateKey, Tensor] | None = None) -> None:
        self.states = dict(states or {})
        """The states of the n sequences, ``[n, ...]`` each."""
        self.layer_indices: set[int] = set()
        """Indices of the layers that the cache was asked for."""

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._get("conv", layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._get("recurrent", layer_idx, state_idx)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self._get("linear", layer_idx, 0)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Keep the last columns; return all, with the kept ones of before in front, for the convolution to see."""
        before = self._get("conv", layer_idx, state_idx)
        if before is not None:
            width, columns = before.shape[-1], torch.cat([before, conv_states], dim=-1)
        else:
            width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            columns = functional.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        self.states["conv", state_idx] = columns[..., columns.shape[-1] - width :]
        return columns

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self._set("recurrent", recurrent_states, layer_idx, state_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self._set("linear", linear_cache, layer_idx, 0)

    def _get(self, kind: str, layer_idx: int, state_idx: int) -> Tensor | None:
        self.layer_indices.add(layer_idx)
        return self.states.get((kind, state_idx))

    def _set(self, kind: str, state: Tensor, layer_idx: int, state_idx: int) -> Tensor:
        self.layer_indices.add(layer_idx)
        self.states[kind, state_idx] = state
        return state


class StatePool:
    """The states of all requests. ``forms`` has the states of each layer, in the order of the layers."""

    def __init__(self, forms: Sequence[Mapping[StateKey, StateForm]], *, num_slots: int, device: torch.device) -> None:
        self.layers = [
            {key: torch.zeros(num_slots, *form.shape, dtype=form.dtype, device=device) for key, form in layer.items()}
            for layer in forms
        ]
        """States of each layer, ``[S, ...]`` for S slots."""

    def read(self, layer: int, group: RowGroup) -> StateCache:
        """Return the cache of a call with a group of rows."""
        if group.is_fresh:
            return StateCache()
        return StateCache({key: pool.index_select(0, group.slots_n) for key, pool in self.layers[layer].items()})

    def write(self, layer: int, group: RowGroup, cache: StateCache) -> None:
        """Keep the states that a call has left in its cache."""
        for key, pool in self.layers[layer].items():
            pool.index_copy_(0, group.slots_n, cache.states[key])

    def save(self, slot: int) -> bytes:
        """Return the states of a slot, as ``load`` takes them. Waits for the device."""
        parts = [pool[slot].contiguous().view(-1).view(torch.uint8) for layer in self.layers for pool in layer.values()]
        return torch.cat(parts).cpu().numpy().tobytes()

    def load(self, slot: int, data: bytes) -> None:
        """Put states of the same model into a slot.

        Raises:
            ValueError: The states are not as large as those of this model.
        """
        pools = [pool for layer in self.layers for pool in layer.values()]
        sizes = [pool[slot].nbytes for pool in pools]
        if len(data) != sum(sizes):
            raise ValueError(f"recurrent states of {len(data)} bytes, not {sum(sizes)}")
        parts = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(pools[0].device).split(sizes)
        for pool, part in zip(pools, parts, strict=True):
            pool[slot].view(-1).view(torch.uint8).copy_(part)


def state_bytes(layers: Iterable[Mapping[StateKey, StateForm]]) -> int:
    """Return the bytes of one request's states."""
    return sum(form.num_bytes for forms in layers for form in forms.values())

"""make_executors: what starts each type of side work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from omniserve.core.work import CancelTask, KVMove, SideWork, SlotCopy, StateLoad
from omniserve.host.tier import HostTier
from omniserve.kv.storage import DeviceKVStorage
from omniserve.layers.tracing.layer_states import StatePool

Executor = Callable[[Any], object]
"""Starts a piece of side work of the type that it is for."""


def make_executors(
    storage: DeviceKVStorage, states: StatePool, tier: HostTier | None, others: Mapping[type[SideWork], Executor]
) -> dict[type[SideWork], Executor]:
    """Return the executor of each type.

    None of them refers to the runner: a closed runner's KV would stay in memory otherwise. ``others`` are the executors
    of side work that only some engines have.
    """
    executors: dict[type[SideWork], Executor] = {SlotCopy: storage.copy_slots, StateLoad: _load_into(states), **others}
    if tier is not None:
        executors |= {CancelTask: _cancel_in(tier), KVMove: _move_by(tier, storage)}
    return executors


def _cancel_in(tier: HostTier) -> Executor:
    return lambda cancel: tier.cancel(cancel.slot)


def _move_by(tier: HostTier, storage: DeviceKVStorage) -> Executor:
    return lambda move: tier.start_move(move, storage.k_LBKSH, storage.v_LBKSH)


def _load_into(pool: StatePool) -> Executor:
    return lambda load: pool.load(load.state_slot, load.states)

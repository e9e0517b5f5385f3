"""Side work: what a plan starts beside its rows, and the events that tell how it ended.

A plan has one list of side work (``StepPlan.work``). The runner starts each piece with the executor of its type. A
piece that has a ``move_id`` ends as one ``Done``, which goes to the code that began it (``sched/side_work.py``). The
other events are those of the host tier's attention, and of hosts and prefill engines that come and go.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class SideWork:
    """A piece of side work. A feature that has work of its own derives from this, beside its other code.

    A piece with a ``move_id`` ends as one ``Done``; its number comes from the KV manager.
    """

    __slots__ = ()


class MoveDirection(enum.StrEnum):
    """The direction of a move."""

    TO_HOST = "to_host"
    TO_DEVICE = "to_device"


@dataclass(frozen=True, kw_only=True, slots=True)
class KVMove(SideWork):
    """Copy a request's blocks (all layers, K and V) between tiers, beside the steps.

    The request is not schedulable until the move is ``Done``; source and destination stay allocated until then.
    """

    request_id: str
    """Empty: the blocks are of prefixes that no request uses. They may be written meanwhile."""
    move_id: int
    direction: MoveDirection
    src_block_ids: tuple[int, ...]
    dst_block_ids: tuple[int, ...]
    is_checkpoint: bool = False
    """A copy to the host of blocks that are full, and so never written again: the request goes on meanwhile."""
    is_reversed: bool = False
    """The device blocks run from the right; those of the host never do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskCopy(SideWork):
    """Copy host blocks of prefixes (all layers, K and V) to the file of the disk tier, or back, beside the steps."""

    move_id: int
    """Number of the copy, of the same series as ``KVMove``'s."""
    to_disk: bool
    host_block_ids: tuple[int, ...]
    slots: tuple[int, ...]
    """Places in the file."""
    keys: tuple[bytes, ...]
    """Keys of the blocks (``kv.prefix_cache``), which are written with them and compared when they are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemotePrefill(SideWork):
    """Have a prefill engine compute the first tokens of a prompt, and bring their KV into host blocks."""

    move_id: int
    """Number of the prefill, of the same series as ``KVMove``'s."""
    engine: int
    """Number of the prefill engine, from 1."""
    token_ids: tuple[int, ...]
    """Tokens of full blocks, from the prompt's first token on."""
    first_block: int
    """The KV of the blocks before it is here already."""
    host_block_ids: tuple[int, ...]
    """Host blocks for the KV from ``first_block`` on."""
    service_class: str
    ttft_s: float | None
    """Seconds within which the KV should be here for the first token to be in time; None: the request has no objective,
    or is late anyway."""
    cache_salt: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelPrefill(SideWork):
    """Stop a ``RemotePrefill`` whose request has ended; that is still ``Done`` once."""

    move_id: int
    """Number of the prefill."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelTask(SideWork):
    """Cancel the attention task of a request that has ended; its ``AttentionResult`` still comes."""

    slot: int
    """Host slot of the request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotCopy(SideWork):
    """Copy the slots ``[begin, end)`` of a device block (all layers, K and V) into those of another one."""

    source_block: int
    target_block: int
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLoad(SideWork):
    """Put recurrent states that a prefill engine has computed where those of a request are."""

    state_slot: int
    states: bytes = field(repr=False)


HOST_BLOCKS = 1 << 24
"""Ids of blocks for each host (``kHostBlocks`` in ``ops/csrc/host_tier.h``): blocks of host h on the network are from
``h * HOST_BLOCKS`` on, those of this machine's host tier below."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefilledKV:
    """What a prefill engine has brought, whether or not it came to the end."""

    num_blocks: int
    """The first blocks of ``RemotePrefill.host_block_ids``, whose KV has come."""
    at_s: float
    """End of the prefill, seconds on the engine's clock."""
    states: bytes | None = field(default=None, repr=False)
    """The recurrent states behind the last token, if it succeeded and the model has such."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The end of a copy or prefill, told once for each."""

    move_id: int
    ok: bool
    """False: it failed; what it has written is of no use, but for the blocks of a ``PrefilledKV``."""
    seconds: float = 0.0
    """Seconds that a ``DiskCopy`` took from when a thread began it, or a ``RemotePrefill`` behind the one before it."""
    prefilled: PrefilledKV | None = None
    """The outcome of a ``RemotePrefill``; None: it is of another kind of work."""
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionResult:
    """The end of a token's attention at one layer on the host tier. Those of one slot arrive in order."""

    slot: int
    epoch: int
    layer: int
    position: int
    ok: bool = True
    """False: it failed, or was cancelled."""
    message: str = ""


@dataclass(frozen=True, slots=True)
class TierDown:
    """The last host thread died: what is on the host tier must be recomputed on the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostJoined:
    """A CPU host on the network can be used, for the first time or again; it holds nothing."""

    host: int
    """Number of the host, from 1."""
    num_blocks: int
    """KV blocks of the host."""
    num_threads: int
    """Threads that attend there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLost:
    """A CPU host on the network is lost: what is there must be recomputed."""

    host: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class PrefillEngineJoined:
    """A prefill engine can be asked."""

    engine: int
    """Number of the engine, from 1."""


@dataclass(frozen=True, slots=True)
class PrefillEngineLost:
    """A prefill engine can no longer be asked; what it was asked for has failed."""

    engine: int


HostEvent = AttentionResult | Done | TierDown | HostJoined | HostLost | PrefillEngineJoined | PrefillEngineLost
"""Something that happened beside the steps. Events of one slot arrive in order, others in any order."""

"""The messages between an engine and a prefill engine. Pickled (``core.link``); both ends are of the same version.

They begin with a ``handshake``. Blocks are sent as they lie in the sender's host pool. So both ends must have the same
model, the same weights and the same layout of blocks (``AskingEngine.fingerprint``). With several ranks each rank of
the engine has a connection to the one of the prefill engine that has the same part of the model, and gets its part of
the blocks over it.
"""

from __future__ import annotations

from dataclasses import dataclass

from omniserve.core.work import RemotePrefill


@dataclass(frozen=True, slots=True)
class AskingEngine:
    """What an engine that asks for prompts says of itself in its hello."""

    fingerprint: str
    """Fingerprint of the weights, and of how blocks are laid out."""
    block_bytes: int
    classes: tuple[str, ...]
    """Names of the classes of its requests."""
    state_bytes: int = 0
    """Bytes of a request's recurrent states."""
    parallel: tuple[int, int] = (1, 1)
    """The engine's sizes of tensor and of pipeline parallel."""


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """What a prefill engine tells an engine that it welcomes. A rank that is welcome is told nothing."""

    session: str
    """The prefill engine's id of this connection."""
    ranks: tuple[tuple[str, int], ...] = ()
    """Addresses at which the prefill engine's other ranks listen, from rank 1 on."""


@dataclass(frozen=True, slots=True)
class AskingRank:
    """What an engine's further rank says of itself in its hello to the prefill engine's rank with the same part."""

    session: str
    fingerprint: str
    """Fingerprint of the rank's part of the weights."""
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Ask:
    """An engine's request: compute the prompt, and send the KV of its blocks from ``first_block`` on, in their
    order."""

    prefill: RemotePrefill


@dataclass(frozen=True, slots=True)
class Cancel:
    """An engine's word that the request of this prefill has ended. The prefill engine stops it, and answers
    ``Failed``."""

    move_id: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """The next blocks of a prefill, from the prefill engine or a rank of it."""

    move_id: int
    data: bytes
    """``[blocks, L, ...]``, each layer's part as in the host pool."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The prefill engine's word that all blocks of this prefill have been sent."""

    move_id: int
    states: bytes | None = None
    """The recurrent states behind the last token (``StatePool.save``); None: the model has none."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The prefill engine's word that no more blocks of this prefill will be sent."""

    move_id: int
    why: str


@dataclass(frozen=True, slots=True)
class Alive:
    """A sign of life from the prefill engine, about once a second while there is nothing else to send."""

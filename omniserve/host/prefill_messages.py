"""What an engine and a prefill engine tell each other. Pickled (``core.link``); both ends are of the same version.

Blocks are sent as they lie in the sender's host pool. So both ends must have the same model, the same weights and the
same layout of blocks (``Hello.fingerprint``). With several ranks each rank of the engine has a connection to the one of
the prefill engine that has the same part of the model, and gets its part of the blocks over it.
"""

from __future__ import annotations

from dataclasses import dataclass

from omniserve.core.plan import RemotePrefill
from omniserve.core.version import __version__


@dataclass(frozen=True, slots=True)
class Hello:
    """From an engine that has connected. It asks for prompts."""

    fingerprint: str
    """Of the weights, and of how blocks are laid out."""
    block_bytes: int
    classes: tuple[str, ...]
    """Names of the classes of its requests."""
    state_bytes: int = 0
    """Of a request's recurrent states."""
    parallel: tuple[int, int] = (1, 1)
    """Its sizes of tensor and of pipeline parallel."""
    version: str = __version__


@dataclass(frozen=True, slots=True)
class Welcome:
    """To that engine: it may ask. And to its other ranks: they are known."""

    session: str = ""
    """What the prefill engine knows this connection by."""
    ranks: tuple[tuple[str, int], ...] = ()
    """Where its other ranks listen, from rank 1 on."""


@dataclass(frozen=True, slots=True)
class HelloOfRank:
    """From another rank of an engine, to that of the prefill engine."""

    session: str
    fingerprint: str
    """Of its part of the weights."""
    block_bytes: int
    version: str = __version__


@dataclass(frozen=True, slots=True)
class Refused:
    """To it, instead of ``Welcome``."""

    why: str


@dataclass(frozen=True, slots=True)
class Ask:
    """From it: compute the prompt, and send the KV of its blocks from ``first_block`` on, in their order."""

    prefill: RemotePrefill


@dataclass(frozen=True, slots=True)
class Cancel:
    """From it: the request of this prefill has ended. The prefill engine stops it, and answers ``Failed``."""

    move_id: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """To it: the next blocks."""

    move_id: int
    data: bytes
    """``[blocks, L, ...]``, each layer's part as in the host pool."""


@dataclass(frozen=True, slots=True)
class Done:
    """To it: all blocks of this prefill have been sent."""

    move_id: int
    states: bytes | None = None
    """The recurrent states behind the last token (``StatePool.save``); None: the model has none."""


@dataclass(frozen=True, slots=True)
class Failed:
    """To it: no more blocks of this prefill will be sent."""

    move_id: int
    why: str


@dataclass(frozen=True, slots=True)
class Alive:
    """To it, about once a second while there is nothing else to send: the prefill engine is still running."""

"""The messages between the ranks, in the order of a rank's life. Pickled; both ends are of the same version.

The first is a ``remote.handshake.Hello`` with the versions, and as its caller the rank that the process wants, if it
does. Rank 0 welcomes it with an ``Assignment``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omniserve.core.config import LoRAConfig
from omniserve.core.plan import StepPlan
from omniserve.core.setup import RunnerSetup
from omniserve.core.work import HostEvent
from omniserve.ops.collectives import CollectiveCall
from omniserve.parallel.place import Place
from omniserve.remote.prefill_messages import Failed, Finished

# -- start -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assignment:
    """A rank's place, and how the rank loads the model, with its part of each layer."""

    place: Place
    load: Callable[[Place], Any]
    compile: bool
    lora: LoRAConfig
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank's word that its model is loaded and patched; ``summary`` must be rank 0's."""

    summary: str


@dataclass(frozen=True, slots=True)
class Compile:
    """Has a rank take the compiled halves, which rank 0 has kept by now; ``fused`` as in ``PatchedModel.warm_up``."""

    fused: bool


@dataclass(frozen=True, slots=True)
class Connect:
    """Tells a rank where the ranks meet for their collectives."""

    files: Sequence[str] | None
    """Files that the ranks of a stage share, one for each stage. None: collectives go through torch.distributed."""
    store: tuple[str, int] | None
    """Address of the store at which they meet for torch.distributed. None: nothing goes through it."""


@dataclass(frozen=True, slots=True)
class RunCollectives:
    """Has a rank call these collectives, to measure them."""

    calls: Sequence[CollectiveCall]
    rows: int


@dataclass(frozen=True, slots=True)
class PassRows:
    """Has a rank pass ``rows`` rows on from stage to stage, to measure that."""

    rows: int


@dataclass(frozen=True, slots=True)
class BeginEngine:
    """Has a rank make its runner."""

    setup: RunnerSetup


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank's word that it is done with what it was told."""


# -- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """Has a rank run this step."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Decided:
    """Tells a rank what rank 0 has decided in the middle of a step (``RankBroadcast.agree``)."""

    value: Any


@dataclass(frozen=True, slots=True)
class Forget:
    """Tells a rank that a request has ended."""

    request_id: str


@dataclass(frozen=True, slots=True)
class DropHost:
    """Tells a rank, also in the middle of a step, that another one has lost this CPU host."""

    host: int


@dataclass(frozen=True, slots=True)
class AllowHost:
    """Has a rank connect to this CPU host again, as all ranks have lost it."""

    host: int


@dataclass(frozen=True, slots=True)
class JoinPrefillEngine:
    """Has a rank, also in the middle of a step, connect to its peer of a prefill engine that rank 0 has joined: the
    rank with the same part of the model."""

    number: int
    session: str
    address: tuple[str, int]


@dataclass(frozen=True, slots=True)
class DropPrefillEngine:
    """Tells a rank, also in the middle of a step, that another one has lost this prefill engine."""

    number: int


@dataclass(frozen=True, slots=True)
class Inject:
    """Puts faults into a rank's host tier, in tests: the arguments of ``HostTier.inject``."""

    faults: dict[str, Any]


# -- a prefill engine ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServePrefills:
    """Has a rank of a prefill engine listen for the ranks of engines."""

    address: tuple[str, int]
    """Port 0: any."""
    is_local: bool
    """The rank is on the machine of rank 0. Else it listens at its own address instead."""
    secret_file: str


@dataclass(frozen=True, slots=True)
class Listens:
    """A rank's address for the ranks of engines. An empty host: the one at which rank 0 listens."""

    address: tuple[str, int]


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """Has a rank send its part of the next blocks of a prompt."""

    session: str
    move_id: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendEnd:
    """Tells a rank that the prompt has ended."""

    session: str
    message: Finished | Failed


@dataclass(frozen=True, slots=True)
class EndSession:
    """Tells a rank that an engine is lost."""

    session: str


# -- the end ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EndEngine:
    """Has a rank end its runner, and keep the model for the next one."""


@dataclass(frozen=True, slots=True)
class Close:
    """Has a rank end."""


@dataclass(frozen=True, slots=True)
class Events:
    """A rank's report: the events of its host tier, and whether the tier is well."""

    events: list[HostEvent]
    is_healthy: bool
    is_stalled: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a rank ends, from that rank."""

    why: str

"""What the ranks tell each other, in the order of their lives. Pickled; both ends are of the same version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omniserve.core.plan import HostEvent, StepPlan
from omniserve.core.setup import RunnerSetup
from omniserve.host.prefill_messages import Done, Failed
from omniserve.ops.collectives import CollectiveCall
from omniserve.parallel.place import Place

# -- start -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """From a rank that comes: its versions, and the rank that it wants, if it does."""

    versions: str
    rank: int | None


@dataclass(frozen=True, slots=True)
class Welcome:
    """To it: its place, and how it loads the model, with its part of each layer."""

    place: Place
    load: Callable[[Place], Any]
    compile: bool
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """To it, in the place of a welcome."""

    why: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """From it: the model is loaded and patched; ``summary`` must be rank 0's."""

    summary: str


@dataclass(frozen=True, slots=True)
class Compile:
    """To it: take the compiled halves, which rank 0 has kept by now; ``fused`` as in ``PatchedModel.warm_up``."""

    fused: bool


@dataclass(frozen=True, slots=True)
class Connect:
    """To it: where the ranks meet for their collectives."""

    files: Sequence[str] | None
    """For each stage a file that its ranks share. None: collectives go through torch.distributed."""
    store: tuple[str, int] | None
    """Address of the store at which they meet for torch.distributed. None: nothing goes through it."""


@dataclass(frozen=True, slots=True)
class RunCollectives:
    """To it: call these, to measure them."""

    calls: Sequence[CollectiveCall]
    rows: int


@dataclass(frozen=True, slots=True)
class PassRows:
    """To it: pass so many rows on from stage to stage, to measure that."""

    rows: int


@dataclass(frozen=True, slots=True)
class BeginEngine:
    """Has a rank make its runner."""

    setup: RunnerSetup


@dataclass(frozen=True, slots=True)
class Ready:
    """From it: done with what it was told."""


# -- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """To a rank: run this step."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Decided:
    """To a rank: what rank 0 has decided in the middle of a step (``Lockstep.agree``)."""

    value: Any


@dataclass(frozen=True, slots=True)
class Forget:
    """To a rank: a request has ended."""

    request_id: str


@dataclass(frozen=True, slots=True)
class DropHost:
    """To a rank, also in the middle of a step: another one has lost this CPU host."""

    host: int


@dataclass(frozen=True, slots=True)
class AllowHost:
    """To a rank: all have lost this CPU host; connect to it again."""

    host: int


@dataclass(frozen=True, slots=True)
class JoinPrefillEngine:
    """To a rank, also in the middle of a step: rank 0 has joined it; connect to its rank that has the same part."""

    number: int
    session: str
    address: tuple[str, int]


@dataclass(frozen=True, slots=True)
class DropPrefillEngine:
    """To a rank, also in the middle of a step: another one has lost this prefill engine."""

    number: int


@dataclass(frozen=True, slots=True)
class Inject:
    """To a rank, in tests: faults of its host tier, the arguments of ``HostTier.inject``."""

    faults: dict[str, Any]


# -- a prefill engine ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServePrefills:
    """To a rank of a prefill engine: listen for the ranks of engines."""

    address: tuple[str, int]
    """Port 0: any."""
    is_local: bool
    """It is on the machine of rank 0. Else it listens at its own address instead."""
    secret_file: str


@dataclass(frozen=True, slots=True)
class Listens:
    """From it: where. An empty host: where rank 0 listens."""

    address: tuple[str, int]


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """To it: send its part of the next blocks of a prompt."""

    session: str
    move_id: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendEnd:
    """To it: the prompt has ended."""

    session: str
    message: Done | Failed


@dataclass(frozen=True, slots=True)
class EndSession:
    """To it: an engine is lost."""

    session: str


# -- the end ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EndEngine:
    """To a rank: end the runner, and keep the model for the next one."""


@dataclass(frozen=True, slots=True)
class Close:
    """To a rank: end."""


@dataclass(frozen=True, slots=True)
class Events:
    """From a rank: what its host tier has done, and whether it is well."""

    events: list[HostEvent]
    is_healthy: bool
    is_stalled: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """From a rank that ends: why."""

    why: str

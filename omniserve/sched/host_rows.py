"""HostRows: the rows of a step that the host tier attends for; AwayToken: the token of a request that is away there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omniserve.core.plan import Decision, DeviceChunk, LeftOut, PiggybackEntry, PiggybackJoin, StepPlan
from omniserve.core.work import SideWork


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRows:
    """The rows of a step that the host tier attends for; see StepPlan."""

    entries: Sequence[PiggybackEntry] = ()
    joins: Sequence[PiggybackJoin] = ()
    joins_as_one: bool = False
    max_rows: int | None = None
    """Most entries and joins of the step, their drafts included; None: as many as find seats."""
    pipelined: Sequence[PiggybackEntry | PiggybackJoin] = ()
    left_out: tuple[LeftOut, ...] = ()
    """Rows of this kind that could have been in the step and are not."""

    def in_plan(
        self,
        step_id: int,
        *,
        num_seats: int,
        chunks: tuple[DeviceChunk, ...],
        work: tuple[SideWork, ...],
        decision: Decision | None,
    ) -> StepPlan:
        """Return the plan of a step with these rows, beside the chunks of its device rows."""
        return StepPlan(
            step_id=step_id,
            chunks=chunks,
            entries=tuple(self.entries),
            joins=tuple(self.joins),
            joins_as_one=self.joins_as_one,
            num_piggyback_seats=num_seats,
            work=work,
            pipelined=tuple(self.pipelined),
            decision=decision,
        )


NO_HOST_ROWS = HostRows()


@dataclass(slots=True, eq=False)
class AwayToken:
    """The one token of a HOST request that is on its way through the layers, with drafts of the tokens behind it."""

    position: int
    layer: int
    """The layer whose attention is being computed for the token, or is done and waits to join."""
    ready: bool = False
    entered: int = 0
    """The step in which it went away at layer 0, by their number since the start."""
    sent: int = 0
    """The step in which its row was sent to this layer's attention."""
    was_passed_over: bool = False
    """The last step had no seat for it, as its result was not expected in time."""
    draft_ids: tuple[int, ...] = ()
    before: AwayToken | None = None
    """The token's place if it misses the step in flight that it is assumed to join; None: its place is certain."""
    may_be_expected: bool = False
    """The host tier may still expect its row of a step in flight, which will not send it."""

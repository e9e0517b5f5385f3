"""The queue of side work: what was begun is for one plan, and its end is told to whoever began it."""

from __future__ import annotations

import pytest

from omniserve.core.work import CancelTask, Done, SlotCopy
from omniserve.sched.side_work import SideWorkQueue


def test_work_is_taken_once_and_in_the_order_in_which_it_was_begun() -> None:
    queue = SideWorkQueue()
    works = (CancelTask(slot=3), SlotCopy(source_block=0, target_block=1, begin=0, end=2), CancelTask(slot=1))
    for work in works:
        queue.begin(work)
    assert queue.is_pending
    assert queue.take() == works
    assert queue.take() == () and not queue.is_pending


def test_an_end_is_told_to_whoever_began_it_and_to_nobody_else() -> None:
    queue = SideWorkQueue()
    told: list[tuple[str, Done]] = []
    for move_id, name in enumerate("abc"):
        queue.expect(move_id, lambda done, name=name: told.append((name, done)))  # type: ignore[misc]
    queue.expect(1, lambda done: told.append(("abandoned", done)))
    ends = [Done(move_id=move_id, ok=move_id != 2) for move_id in (2, 1, 0)]
    for end in ends:
        queue.finish(end)
    assert told == [("c", ends[0]), ("abandoned", ends[1]), ("a", ends[2])]
    with pytest.raises(KeyError):  # it ends once
        queue.finish(ends[0])

"""Service disciplines: the orders in which several policies put the requests of a queue into a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from omniserve.core.plan import Bound
from omniserve.core.request import ServiceClass
from omniserve.sched.batch import Batch
from omniserve.sched.request_queue import by_arrival
from omniserve.sched.state import Phase, RequestState
from omniserve.sched.view import RequestView


def runnable(batch: Batch, view: RequestView, kind: ServiceClass) -> Iterator[RequestState]:
    """Yield the DEVICE requests of one kind that the batch lacks, decodes before prefills.

    Requests before one may have taken its memory, so each is looked at only when it is its turn.
    """
    for decodes in (True, False):
        for state in view.device[kind]:
            if state.phase is Phase.DEVICE and state.decodes is decodes and state not in batch:
                yield state


def run_admitted(batch: Batch, view: RequestView, kind: ServiceClass, *, victims: Iterable[ServiceClass]) -> None:
    """Schedule the DEVICE requests of one kind, decodes before prefills; see ``Batch.run_or_preempt``."""
    for state in runnable(batch, view, kind):
        batch.run_or_preempt(state, victims)


def run_by_arrival(batch: Batch, view: RequestView, kinds: Iterable[ServiceClass]) -> None:
    """Schedule the DEVICE requests of some kinds, oldest first; if blocks are short, recompute the youngest of all.

    In arrival order the youngest is never in the batch already.
    """
    for state in by_arrival(view.device[kind] for kind in kinds):
        while state.phase is Phase.DEVICE and batch.add(state) is Bound.MEMORY:
            youngest = max((s for queue in view.device.values() for s in queue.everyone()), key=lambda s: s.order)
            if youngest in view.pinned:
                return  # it gives way when it is not any more
            batch.preempt(youngest)


def admit_waiting(
    batch: Batch, view: RequestView, kind: ServiceClass, *, victims: Iterable[ServiceClass] = ()
) -> Bound | None:
    """Admit waiting requests of one kind in order, until one is kept out; return by what.

    Requests of the kinds ``victims`` are recomputed if that makes room for one.
    """
    memory = view.memory
    for state in view.waiting[kind]:
        refused_by = batch.admit(state)
        if refused_by is Bound.MEMORY and batch.make_room(memory.blocks_for(state), victims):
            refused_by = batch.admit(state)
        if refused_by is not None:
            return refused_by
    return None

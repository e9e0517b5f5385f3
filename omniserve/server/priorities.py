"""The integer ``priority`` of a request, as vLLM has it: how far its class is from that of ``service_tier``."""

from __future__ import annotations

from collections.abc import Sequence

from omniserve.core.request import ClassSpec, ServiceClass
from omniserve.server.protocol import class_of_tier


def prioritised_tier(
    tier: str, priority: int, classes: Sequence[ClassSpec], *, kind: ServiceClass | None = None
) -> str:
    """Return the tier of a request with a priority: each unit is one class, and a lower number is handled earlier.

    With 0 the tier is the one that was asked for. With 1 it is that of the next lower class, with -1 that of the next
    higher one, and so on; beyond the first and the last class it is that of these.

    Args:
        tier: The ``service_tier`` that the request asks for.
        priority: The request's priority.
        classes: The engine's classes, highest priority first.
        kind: Kind of the tier's class and of those that a priority can make of it; None: any.

    Raises:
        ApiError: There is no such tier.
    """
    reachable = [spec for spec in classes if kind is None or spec.kind == kind]
    rank = reachable.index(class_of_tier(tier, classes))
    wanted = min(max(rank + priority, 0), len(reachable) - 1)
    return tier if wanted == rank else tier_of_class(reachable[wanted], classes)


def tier_of_class(spec: ClassSpec, classes: Sequence[ClassSpec]) -> str:
    """Return the ``service_tier`` that answers of a class name: OpenAI's, or the class's own name where that has none.

    The classes are the engine's, highest priority first.
    """
    tiers = ("default", "priority", "flex")
    return next((tier for tier in tiers if class_of_tier(tier, classes) is spec), spec.name)

"""The class of a request: by its ``service_tier``, and by its ``priority``, how far it is from that (as vLLM's)."""

from __future__ import annotations

from collections.abc import Sequence

from omniserve.core.request import ClassSpec, ServiceClass
from omniserve.server.errors import ApiError

TIERS = ("auto", "default", "priority", "fast", "scale", "flex")
"""OpenAI's, beside which every class's name is one."""


def class_of_tier(tier: str, classes: Sequence[ClassSpec]) -> ClassSpec:
    """Return the class that a request with this ``service_tier`` is of.

    A class's own name always means that class. ``priority``, ``fast`` and ``scale`` are the first latency-sensitive
    class, ``default`` and ``auto`` the one named LS or else the last such class, ``flex`` the one named BE or else the
    first best-effort class.

    The classes are the engine's, highest priority first, and at least one of each kind.

    Raises:
        ApiError: There is no such tier; the message lists them all.
    """
    by_name = {spec.name: spec for spec in classes}
    sensitive, best_effort = ([s for s in classes if s.kind == kind] for kind in (ServiceClass.LS, ServiceClass.BE))
    if tier in by_name:
        return by_name[tier]
    if tier in ("priority", "fast", "scale"):
        return sensitive[0]
    if tier in ("default", "auto"):
        return by_name.get(ServiceClass.LS, sensitive[-1])
    if tier == "flex":
        return by_name.get(ServiceClass.BE, best_effort[0])
    known = ", ".join(repr(name) for name in dict.fromkeys((*TIERS, *by_name)))
    raise ApiError(f"service_tier: must be one of {known}; got {tier!r}", param="service_tier", code="invalid_value")


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

"""Which class of requests a ``service_tier`` means."""

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

    Args:
        tier: From the request.
        classes: The engine's, highest priority first; at least one of each kind.

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

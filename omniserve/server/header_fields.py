"""Headers that stand for fields of a request, where a program or a gateway cannot set those."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from omniserve.server.errors import ApiError
from omniserve.server.fields import without_nulls

_SERVICE_TIER_HEADER = "x-omniserve-service-tier"
_SESSION_HEADERS = ("x-session-id", "session_id", "session-id", "x-claude-code-session-id")
"""Headers in which clients name a session, the first before the others."""
SLO_HEADERS: Mapping[str, str] = {
    "x-llm-d-slo-ttft-ms": "ttft_s",
    "x-llm-d-slo-tpot-ms": "tpot_s",
    # Their names before llm-d took them over from the Gateway API Inference Extension.
    "x-slo-ttft-ms": "ttft_s",
    "x-slo-tpot-ms": "tpot_s",
}
"""Header, in milliseconds -> the field of ``slo`` that it stands for; of two of a field the first one counts."""


@dataclass(frozen=True, slots=True)
class HeaderFields:
    """The fields that a request's headers stand for. What its body says counts more."""

    service_tier: str | None = None
    slo: Mapping[str, float] = field(default_factory=dict)
    """Fields of ``slo``."""
    session_id: str | None = None

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Self:
        """Return the fields of some headers.

        Raises:
            ApiError: One is ill-formed; the message names it.
        """
        session_id = next((value for name in _SESSION_HEADERS if (value := headers.get(name))), None)
        return cls(headers.get(_SERVICE_TIER_HEADER), _slo_of(headers), session_id)

    def add_to(self, fields: dict[str, Any]) -> None:
        """Add what a body does not say itself to its fields."""
        for name, value in (("service_tier", self.service_tier), ("session_id", self.session_id)):
            if value is not None and fields.get(name) is None:
                fields[name] = value
        if self.slo:
            said = {} if fields.get("slo") is None else fields["slo"]
            if isinstance(said, dict):
                fields["slo"] = {**self.slo, **without_nulls(said)}


NO_HEADERS = HeaderFields()


def _slo_of(headers: Mapping[str, str]) -> dict[str, float]:
    """Return the fields of ``slo`` that a request's headers stand for; 0 asks for nothing, as with llm-d.

    Raises:
        ApiError: A header is no number of milliseconds; the message names it.
    """
    fields: dict[str, float] = {}
    for name, field_name in SLO_HEADERS.items():
        if (text := headers.get(name)) is None:
            continue
        milliseconds = _number(text)
        if milliseconds is None:
            raise ApiError(
                f"the header {name} must be a number of milliseconds, such as 250, got {text[:80]!r}",
                param=name,
                code="invalid_value",
            )
        if milliseconds > 0:
            fields.setdefault(field_name, milliseconds / 1e3)
    return fields


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None

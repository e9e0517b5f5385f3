"""DirectedTables: block tables, and from which side a request's tokens fill its device blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from omniserve.kv.tiered import Table


@dataclass(slots=True)
class DirectedTables:
    """What is known of all requests. The manager writes it; the other parts of this package only read it."""

    tables: dict[str, Table]
    """Block tables of requests that are not evicted."""
    num_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens that each of these tables is for."""
    best_effort: set[str] = field(default_factory=set)
    """BE requests: their tokens run from the right of their device blocks."""

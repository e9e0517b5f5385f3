"""HostSpeed: what the host tier needs for the attention of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from omniserve.latency.profile import Profile
from omniserve.latency.regression import fit_terms


@dataclass(frozen=True, slots=True)
class HostSpeed:
    """``(per_key context + per_request requests) / threads + per_call``, seconds; a regression over the profile."""

    per_key_s: float
    per_request_s: float
    per_call_s: float
    threads: int
    """Threads of the host tier."""

    @classmethod
    def from_profile(cls, profile: Profile) -> Self | None:
        """Fit it to what was measured; None without a host tier."""
        if not profile.host_attention:
            return None
        rows = [
            (context / threads, requests / threads, 1.0) for requests, context, threads, _ in profile.host_attention
        ]
        per_key_s, per_request_s, per_call_s = fit_terms(rows, [row[-1] for row in profile.host_attention])
        return cls(per_key_s, per_request_s, per_call_s, max(1, profile.fingerprint.host_threads))

    def __call__(self, requests: int, context: float) -> float:
        """Return the seconds for one layer's tasks, with so many keys together, on all host threads."""
        if requests <= 0:
            return 0.0
        work_s = self.per_key_s * context + self.per_request_s * requests
        return work_s / self.threads + self.per_call_s

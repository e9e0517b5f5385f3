"""EngineLoad: what an engine says of its load, for those that choose among several engines. Plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PROMPT_SIZES = (1, 256, 1024, 4096, 16384)
"""Prompts of so many tokens have their time to first token forecast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """The load of an engine at a moment."""

    num_taken: int
    """Requests that it had taken or refused since its start; what was sent later is not in the forecast."""
    ttft_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By latency-sensitive class: the TTFT in seconds that a request with none of its prompt cached would have, for
    each of ``PROMPT_SIZES``; without the class if the policy predicts none."""
    be_tokens: int = 0
    """Counter: tokens of prompts and outputs of best-effort requests that were computed."""

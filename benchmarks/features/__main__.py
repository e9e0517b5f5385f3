"""Run the cases of all features."""

from __future__ import annotations

import sys

from benchmarks.features import (
    FEATURES,
    drafts,
    host,
    kv_dtype,
    latents,
    loras,
    moves,
    preemption,
    stock,
    token_deferral,
)

__all__ = [
    "drafts",
    "host",
    "kv_dtype",
    "latents",
    "loras",
    "moves",
    "preemption",
    "stock",
    "token_deferral",
]  # they have the cases

if __name__ == "__main__":
    sys.exit(FEATURES.main())

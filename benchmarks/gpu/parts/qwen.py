"""Decode steps and prompts of Qwen2.5-32B's shape, whose weights take most of a GPU's memory."""

from __future__ import annotations

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines import modes
from benchmarks.gpu.models import QWEN_32B
from benchmarks.gpu.parts.decode import BATCHES, DRY_BATCHES, time_batches
from benchmarks.gpu.parts.prefill import time_prompts


def run(bench: Bench) -> None:
    """Time the batches that fit, and one prompt."""
    model = bench.shelf.patched(QWEN_32B)
    time_batches(bench, model, QWEN_32B, DRY_BATCHES if bench.dry else BATCHES, mode=modes()[0])
    time_prompts(bench, model, QWEN_32B, (32,) if bench.dry else (2048,))

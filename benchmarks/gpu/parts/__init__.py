"""PARTS: what is measured, in the order of its worth: a run that is cut has the best first.

Nothing heavy is imported before a part is loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.bench import Bench


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the run."""

    module: str
    """In this package; its ``run(bench)`` is called."""
    about: str
    """A line for the table."""
    share: float
    """Of the time that is left, in relation to the parts that follow."""

    def load(self) -> Callable[[Bench], None]:
        """Import the part and return what runs it."""
        run: Callable[[Bench], None] = importlib.import_module(f"{__name__}.{self.module}").run
        return run


PARTS: dict[str, Part] = {
    "floors": Part(module="floors", about="what the hardware allows", share=12),
    "exactness": Part(module="exactness", about="tests marked gpu; kernels under compute-sanitizer", share=85),
    "decode": Part(module="decode", about="decode steps of Llama-3.1-8B's shape, context 1k", share=60),
    "prefill": Part(module="prefill", about="prompts of Llama-3.1-8B's shape", share=18),
    "attention": Part(module="attention", about="device attention, implementation by implementation", share=25),
    "piggyback": Part(module="piggyback", about="what piggyback rows cost a step", share=30),
    "moves": Part(module="moves", about="KV between device and host, alone and beside decode steps", share=15),
    "host": Part(module="host", about="host attention, sustained, and LS steps beside it", share=90),
    "coserving": Part(module="coserving", about="policies on one load, device KV short", share=95),
    "safepoints": Part(module="safepoints", about="rows that leave between two layers", share=15),
    "qwen": Part(module="qwen", about="decode steps and prompts of Qwen2.5-32B's shape", share=30),
    "transformers": Part(module="transformers_beside", about="transformers on the shapes of decode", share=35),
}
"""In this order."""


def limit_of(name: str, names: Sequence[str], left_s: float) -> float:
    """Return the time of a part: its share of what is left among itself and those that follow."""
    following = names[names.index(name) :]
    return left_s * PARTS[name].share / sum(PARTS[part].share for part in following)

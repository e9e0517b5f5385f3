"""What routers are measured with: single requests, chats and floods, at times and of lengths of recorded traces."""

from __future__ import annotations

import csv
import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.client import BE_TIER, LS_TIER, TEXT
from omniserve.simulate.load import gamma

_CHARS = 4.0
"""Letters of a token of TEXT, about."""


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """What comes."""

    engines: int
    seconds: float
    singles_per_s: float
    """Single requests a second and engine."""
    chats_per_s: float
    """Conversations that begin in a second, for each engine."""
    be_per_flood: int
    """Best-effort requests of a flood, for each engine."""
    flood_every_s: float = 20.0
    speed: float = 0.5
    """Speed of an engine's machine beside an A10."""
    ttft_s: float = 2.0
    """Objectives of latency-sensitive requests in seconds."""
    tpot_s: float = 0.2


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """A request to send."""

    at_s: float
    prompt: str
    max_tokens: int
    tier: str


def asks(workload: Workload, traces: Path, seed: int) -> list[Ask]:
    """Return the requests of a run, in their order."""
    rng = random.Random(seed)
    texts = _Texts(rng)
    found = [*_singles(workload, traces, rng, texts), *_chats(workload, traces, rng, texts)]
    return sorted([*found, *_floods(workload, traces, rng, texts)], key=lambda ask: ask.at_s)


class _Texts:
    """Pieces of a text, no two of which begin alike."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._num = rng, 0

    def __call__(self, tokens: int) -> str:
        self._num += 1
        chars = max(1, int(tokens * _CHARS) - 8)
        begin = self._rng.randrange(len(TEXT) - chars)
        return f"{self._num}: {TEXT[begin : begin + chars]}\n"


def _singles(workload: Workload, traces: Path, rng: random.Random, texts: _Texts) -> Iterator[Ask]:
    rows = _read(traces / "servegen_mmid_1h.csv")
    rate = len(rows) / rows[-1][0]
    stretch = rate / (workload.singles_per_s * workload.engines)
    from_s = rng.random() * (rows[-1][0] - workload.seconds / stretch)
    for at_s, asked, answered in rows:
        at_s = (at_s - from_s) * stretch
        if 0 <= at_s < workload.seconds:
            yield Ask(at_s, texts(min(asked, 4000)), min(answered, 300), LS_TIER)


def _chats(workload: Workload, traces: Path, rng: random.Random, texts: _Texts) -> Iterator[Ask]:
    rows = _read(traces / "lengths" / "sharegpt_v3_first_turn.csv")
    systems = [texts(1024) for _ in range(4)]
    for at_s in gamma(workload.chats_per_s * workload.engines, 2.5, workload.seconds, rng):
        said = rng.choice(systems) if rng.random() < 1 / 3 else ""
        for _ in range(1 + min(int(rng.expovariate(0.4)), 8)):
            asked, answered = rng.choice(rows)
            said, answered = said + texts(min(asked, 1500)), min(answered, 200)
            if at_s >= workload.seconds or len(said) > 5000 * _CHARS:
                break
            yield Ask(at_s, said, answered, LS_TIER)
            said += texts(answered)
            at_s += answered * workload.tpot_s / 2 + rng.expovariate(1 / 6)  # it is read, and the next question written


def _floods(workload: Workload, traces: Path, rng: random.Random, texts: _Texts) -> Iterator[Ask]:
    rows = _read(traces / "lengths" / "arxiv_summarization_llama2.csv")
    at_s = 0.0
    while at_s < workload.seconds:
        for _ in range(workload.be_per_flood * workload.engines):
            asked, answered = rng.choice(rows)
            yield Ask(at_s + 0.5 * rng.random(), texts(min(asked, 4000)), min(answered, 400), BE_TIER)
        at_s += workload.flood_every_s


def _read(path: Path) -> list[tuple[Any, ...]]:
    with path.open(newline="") as file:
        rows = csv.reader(file)
        next(rows)
        return [(float(row[0]), *map(int, row[1:])) if len(row) == 3 else tuple(map(int, row)) for row in rows]

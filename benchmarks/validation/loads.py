"""The loads of ``simulator_validation``: arrivals and lengths like those of services, on small models.

Lengths are cut so that a model with 2,048 positions takes them. Rates are for SmolLM-135M's shape on two cores; a
faster model has them multiplied (``speed``).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from omniserve.simulate import Load
from omniserve.simulate.load import Lengths, TraceRequest, gamma, lognormal_lengths, read_trace, requests

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """Requests that come by themselves."""

    rate: float
    """Requests a second."""
    cv: float = 1.0
    """Coefficient of variation of the gaps between them: 1 is a Poisson process."""
    lengths: Lengths

    def draw(self, seconds: float, speed: float, rng: random.Random) -> list[TraceRequest]:
        """Return the requests of so many seconds."""
        return requests(gamma(speed * self.rate, self.cv, seconds, rng), self.lengths, rng)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pile:
    """Best-effort requests that are there as the load begins."""

    rate: float
    """Number of them for each second of the load."""
    lengths: Lengths

    def draw(self, seconds: float, speed: float, rng: random.Random) -> list[TraceRequest]:
        """Return the requests for so many seconds."""
        return requests([0.0] * max(1, round(speed * self.rate * seconds)), self.lengths, rng)


@dataclass(frozen=True, kw_only=True, slots=True)
class Backlog:
    """Best-effort requests of which so many are kept unfinished until the load ends."""

    size: int
    lengths: Lengths

    def draw(self, seconds: float, speed: float, rng: random.Random) -> list[TraceRequest]:
        """Return more requests than so many seconds are enough for."""
        return requests([0.0] * int(100 * seconds), self.lengths, rng)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice(Stream):
    """A part of a recorded trace; without the trace, the stream that is like it."""

    file: str = "azure2023_conv.csv"
    """Name of the trace's file."""
    start_s: float
    """Begin of the part, in the trace's time."""
    share: float
    """Share of the part's requests that is sent."""
    scale: float
    """Factor of both lengths."""
    most: tuple[int, int] = (768, 128)
    """Longest prompt and output, tokens; longer ones are cut off there."""

    def read(self, folder: Path, seconds: float, speed: float, rng: random.Random) -> list[TraceRequest]:
        """Return the requests of the trace in this folder.

        Raises:
            OSError, ValueError: The trace cannot be read.
        """
        found = []
        for row in read_trace(folder / self.file):
            at_s = (row.arrival_s - self.start_s) / speed
            if 0 <= at_s < seconds and rng.random() < self.share:
                prompt, output = (
                    max(1, min(round(self.scale * tokens), most))
                    for tokens, most in zip((row.input_tokens, row.output_tokens), self.most, strict=True)
                )
                found.append(TraceRequest(at_s, prompt, output))
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """A load of both classes."""

    device_kv_bytes: int
    ls: Stream
    be: Stream | Pile | Backlog

    def load(self, seconds: float, seed: int, *, speed: float = 1.0, trace_dir: Path | None = None) -> Load:
        """Draw the load.

        Args:
            seconds: Time in which requests come.
            seed: Seed of arrivals and lengths.
            speed: Factor of the rates.
            trace_dir: Folder of the traces that a ``Slice`` names; None: requests like theirs are drawn.
        """
        rng = random.Random(seed)

        def requests_of(side: Stream | Pile | Backlog) -> list[TraceRequest]:
            if trace_dir is not None and isinstance(side, Slice):
                return side.read(trace_dir, seconds, speed, rng)
            return side.draw(seconds, speed, rng)

        return Load(
            latency_sensitive=requests_of(self.ls), best_effort=requests_of(self.be), duration_s=seconds,
            backlog=self.be.size if isinstance(self.be, Backlog) else 0,
        )  # fmt: skip


_CHAT = lognormal_lengths(128, 24, sigma=0.5, max_input=512, max_output=96)
_PILE = lognormal_lengths(256, 64, sigma=0.5, max_input=768, max_output=192)
LOADS = {
    "servegen": Mix(
        device_kv_bytes=512 * MIB,
        ls=Stream(rate=2.0, cv=2.5, lengths=lognormal_lengths(96, 24, sigma=0.9, max_input=768, max_output=128)),
        be=Stream(rate=0.6, cv=3.0, lengths=lognormal_lengths(192, 48, sigma=0.8, max_input=1024, max_output=192)),
    ),
    "azure": Mix(
        device_kv_bytes=512 * MIB,
        ls=Slice(
            start_s=600.0, share=0.5, scale=0.1, rate=2.8, cv=1.1,
            lengths=lognormal_lengths(102, 13, sigma=0.9, max_input=768, max_output=128),
        ),
        be=Slice(
            start_s=1800.0, share=0.12, scale=0.25, rate=0.66, cv=1.1,
            lengths=lognormal_lengths(255, 32, sigma=0.9, max_input=768, max_output=128),
        ),
    ),
    "batch": Mix(
        device_kv_bytes=24 * MIB,
        ls=Stream(rate=1.2, lengths=lognormal_lengths(96, 24, sigma=0.4, max_input=256, max_output=96)),
        be=Pile(rate=1.5, lengths=lognormal_lengths(128, 96, sigma=0.5, max_input=384, max_output=192)),
    ),
    "half": Mix(device_kv_bytes=512 * MIB, ls=Stream(rate=0.8, lengths=_CHAT), be=Backlog(size=4, lengths=_PILE)),
    "residents": Mix(
        device_kv_bytes=16 * MIB,
        ls=Stream(rate=0.8, lengths=lognormal_lengths(96, 24, sigma=0.4, max_input=256, max_output=96)),
        be=Backlog(size=24, lengths=lognormal_lengths(48, 160, sigma=0.4, max_input=128, max_output=256)),
    ),
}  # fmt: skip
"""Loads by name.

* ``servegen``: bursts, and lengths with a long tail, as ServeGen (arXiv 2505.09999) finds them in services.
* ``azure``: Azure's conversations of 2023, lengths divided by ten, best-effort ones by four.
* ``batch``: all best-effort requests come at once, to a device that does not hold their KV: they decode on the host if
  the scheduler knows how.
* ``half``: for engines that have one core each.
* ``residents``: best-effort prompts are short, and soon many decode on the host.
"""
USUAL = ("servegen", "azure", "batch")
"""The loads that are served if none is named."""
_OTHER_CHAT = lognormal_lengths(96, 32, sigma=0.7, max_input=400, max_output=96)
_OTHER_PILE = lognormal_lengths(180, 80, sigma=0.7, max_input=600, max_output=160)
CALIBRATION = (
    Mix(
        device_kv_bytes=512 * MIB, ls=Stream(rate=1.7, lengths=_OTHER_CHAT), be=Backlog(size=6, lengths=_OTHER_PILE)
    ),
    Mix(
        device_kv_bytes=48 * MIB, ls=Stream(rate=1.7, lengths=_OTHER_CHAT), be=Backlog(size=10, lengths=_OTHER_PILE)
    ),
)  # fmt: skip
"""Loads of the calibration, with other rates, lengths and seeds, and the scheduler ``omniserve`` alone: its host tier
works if memory is short."""

"""Loads that the engine and the simulator both serve."""

from __future__ import annotations

import random
from dataclasses import dataclass

from omniserve.simulate import Load
from omniserve.simulate.load import Lengths, gamma, lognormal_lengths, requests

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """A load that can be drawn."""

    device_kv_bytes: int
    rate: float
    """Latency-sensitive requests a second."""
    cv: float = 1.0
    """Of the gaps between them: 1 is a Poisson process."""
    ls_lengths: Lengths
    backlog: int
    """Best-effort requests that are kept unfinished."""
    be_lengths: Lengths

    def load(self, seconds: float, seed: int) -> Load:
        rng = random.Random(seed)
        return Load(
            latency_sensitive=requests(gamma(self.rate, self.cv, seconds, rng), self.ls_lengths, rng),
            best_effort=requests([0.0] * int(100 * seconds), self.be_lengths, rng),
            backlog=self.backlog,
            duration_s=seconds,
        )


_CHAT = lognormal_lengths(128, 24, sigma=0.5, max_input=512, max_output=96)
_PILE = lognormal_lengths(256, 64, sigma=0.5, max_input=768, max_output=192)
LOADS = {
    "steady": Mix(device_kv_bytes=512 * MIB, rate=2.0, ls_lengths=_CHAT, backlog=8, be_lengths=_PILE),
    "bursts": Mix(device_kv_bytes=512 * MIB, rate=2.5, cv=3.0, ls_lengths=_CHAT, backlog=4, be_lengths=_PILE),
    "short memory": Mix(device_kv_bytes=64 * MIB, rate=2.0, ls_lengths=_CHAT, backlog=12, be_lengths=_PILE),
}
"""In the last the device does not hold all, and best-effort requests decode on the host if the scheduler knows how."""
_OTHER_CHAT = lognormal_lengths(96, 32, sigma=0.7, max_input=400, max_output=96)
_OTHER_PILE = lognormal_lengths(180, 80, sigma=0.7, max_input=600, max_output=160)
CALIBRATION = (
    Mix(device_kv_bytes=512 * MIB, rate=1.5, ls_lengths=_OTHER_CHAT, backlog=6, be_lengths=_OTHER_PILE),
    Mix(device_kv_bytes=48 * MIB, rate=1.5, ls_lengths=_OTHER_CHAT, backlog=10, be_lengths=_OTHER_PILE),
)
"""Other rates, lengths and seeds, and only the scheduler ``omniserve``: its host tier works if memory is short."""

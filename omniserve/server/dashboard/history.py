"""The last minutes of a server, a sample a second, in bounded memory."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omniserve.core.request import ClassSpec
from omniserve.server.dashboard.series import Reading, Value, chart_values

INTERVAL_S = 1.0
_NUM_SAMPLES = 900
_WINDOW_S = 60.0
_RATE_S = 5.0
_SIGNIFICANT_DIGITS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    number: int
    time_s: float
    values: tuple[Value, ...]


class History:
    """Samples of all series, the newest 15 minutes of them.

    A reading of all metrics is kept for the length of the sliding window only, a sample for as long as charts go back.

    Args:
        take_reading: Looks at the metrics.
        classes: The engine's.
    """

    def __init__(self, take_reading: Callable[[], Awaitable[Reading]], classes: Sequence[ClassSpec]) -> None:
        self._take_reading = take_reading
        self._classes = classes
        self._readings: deque[Reading] = deque()
        self._samples: deque[_Sample] = deque(maxlen=_NUM_SAMPLES)
        self._names: tuple[str, ...] = ()
        self._run = uuid.uuid4().hex
        self._num_samples = 0

    async def keep(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.add(await self._take_reading())
            await asyncio.sleep(INTERVAL_S)

    def add(self, reading: Reading) -> None:
        """Add a sample."""
        values = chart_values(self._classes, reading, self._before(reading, _RATE_S), self._before(reading, _WINDOW_S))
        self._names = tuple(values)
        # The clock may be set back; charts need times that rise.
        time_s = max(reading.time_s, self._samples[-1].time_s + 0.001) if self._samples else reading.time_s
        self._samples.append(
            _Sample(
                number=self._num_samples,
                time_s=round(time_s, 3),
                values=tuple(None if v is None else float(f"{v:.{_SIGNIFICANT_DIGITS}g}") for v in values.values()),
            )
        )
        self._num_samples += 1
        self._readings.append(reading)
        while reading.clock_s - self._readings[0].clock_s > _WINDOW_S:
            self._readings.popleft()

    def _before(self, reading: Reading, seconds: float) -> Reading | None:
        """Return the oldest reading that is at most ``seconds`` older."""
        return next((old for old in self._readings if reading.clock_s - old.clock_s <= seconds), None)

    def since(self, run: str | None, number: int) -> dict[str, Any]:
        """Return the samples after a number, column by column, as plain data.

        Args:
            run: The server run that the number is of: each has its own. Of another run, all samples are new.
            number: Number of the newest sample that is known already; -1 for none.
        """
        new = [sample for sample in self._samples if run not in (None, self._run) or sample.number > number]
        columns: Iterable[Sequence[Value]] = zip(*(sample.values for sample in new), strict=True)
        return {
            "run": self._run,
            "last": self._num_samples - 1,
            "interval_s": INTERVAL_S,
            "window_s": _WINDOW_S,
            "capacity": _NUM_SAMPLES,
            "times": [sample.time_s for sample in new],
            "series": dict(zip(self._names, columns, strict=True)) if new else {},
            "latest": _latest(self._readings[-1]) if self._readings else {},
        }


def _latest(reading: Reading) -> Mapping[str, Any]:
    """Return the values that have no history."""
    total = reading.total
    return {
        "engine": reading.engine,
        "restarts": total("omniserve_engine_restarts_total"),
        "rejected": total("omniserve_requests_rejected_total"),
        "host_requests": total("omniserve_host_requests"),
        "host_healthy": reading.values.get(("omniserve_host_healthy",)) != 0,
        "kv_blocks": {
            tier: [total("omniserve_kv_blocks_used", tier), total("omniserve_kv_blocks", tier)]
            for tier in ("device", "host")
        },
    }

"""Arrival processes, length distributions and traces. Seeded: the same ``random.Random`` gives the same load."""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TOKENS = ("input_tokens", "output_tokens")
_MOONCAKE = {"arrival_s": "timestamp", "input_tokens": "input_length", "output_tokens": "output_length"}

MOST_HASH_IDS = 1 << 48
"""Upper bound, exclusive, of the hash ids of a trace."""

Lengths = Callable[[random.Random], tuple[int, int]]
"""Draws (input tokens, output tokens) of one request."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace: its arrival and its lengths."""

    arrival_s: float
    """Seconds from the start of the trace."""
    input_tokens: int
    output_tokens: int
    service_class: str | None = None
    """The name of its class; None: the highest of its kind."""
    hash_ids: tuple[int, ...] = ()
    """A number for each full piece of ``Load.hash_tokens`` of the prompt, from its begin on: two requests begin with
    the same text as far as their first numbers agree. Pieces without a number are like no other. The traces
    of Mooncake (Qin et al., FAST 2025) have this form."""
    deadline_s: float | None = None
    """Seconds from arrival within which the whole output is wanted, as in ``Request``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The arrivals of both kinds; classes are those of the engine's configuration."""

    latency_sensitive: Sequence[TraceRequest] = ()
    """LS requests by arrival."""
    best_effort: Sequence[TraceRequest] = ()
    """BE requests by arrival; with a backlog only their lengths count."""
    backlog: int = 0
    """Number of best-effort requests that are kept unfinished until the load ends, of ``best_effort`` over and over: a
    pile of batch work that has no end. 0: they arrive."""
    hash_tokens: int = 512
    """Tokens that one of a request's ``hash_ids`` stands for."""
    duration_s: float | None = None
    """Seconds of the load; None: up to the last arrival."""
    warm_up_s: float = 0.0
    """Seconds at the start that are left out of all figures, with their requests: pools and queues fill first."""


# -- arrivals ----------------------------------------------------------------------------------------------------------


def poisson(rate: float, duration_s: float, rng: random.Random) -> list[float]:
    """Return the times of a Poisson process, ascending, in ``[0, duration_s)``; as ``gamma`` with a cv of 1."""
    return gamma(rate, 1.0, duration_s, rng)


def gamma(rate: float, cv: float, duration_s: float, rng: random.Random) -> list[float]:
    """Return the times of a renewal process with gamma-distributed gaps, ascending, in ``[0, duration_s)``.

    Args:
        rate: Mean arrivals a second, >= 0; 0 gives none.
        cv: Coefficient of variation of the gaps, > 0: 1 is a Poisson process, more is burstier.

    Raises:
        ValueError: A number is out of range.
    """
    _not_negative(rate=rate, duration_s=duration_s)
    if not (math.isfinite(cv) and cv > 0):
        raise ValueError(f"cv must be a number > 0 (1 is a Poisson process), got {cv}")
    if rate == 0:
        return []
    times: list[float] = []
    shape = 1.0 / cv**2
    scale = 1.0 / (rate * shape)
    now_s = rng.gammavariate(shape, scale)
    while now_s < duration_s:
        times.append(now_s)
        now_s += rng.gammavariate(shape, scale)
    return times


def square_wave(low: float, high: float, period_s: float, duration_s: float, rng: random.Random) -> list[float]:
    """Return Poisson times whose rate alternates: ``low`` for half a period, then ``high``; in ``[0, duration_s)``.

    Raises:
        ValueError: A number is negative or not finite, or the period is 0.
    """
    _not_negative(low=low, high=high, period_s=period_s, duration_s=duration_s)
    if period_s == 0:
        raise ValueError("period_s must be > 0")
    times: list[float] = []
    half_s, begin_s, rate = period_s / 2, 0.0, low
    while begin_s < duration_s:
        length_s = min(half_s, duration_s - begin_s)
        times += [begin_s + time_s for time_s in poisson(rate, length_s, rng)]
        begin_s += half_s
        rate = high if rate == low else low
    return times


# -- lengths -----------------------------------------------------------------------------------------------------------


def fixed_lengths(input_tokens: int, output_tokens: int) -> Lengths:
    """Return lengths that never vary.

    Raises:
        ValueError: A length is below 1.
    """
    if min(input_tokens, output_tokens) < 1:
        raise ValueError(f"fixed lengths must be >= 1 token, got {input_tokens}, {output_tokens}")
    return lambda rng: (input_tokens, output_tokens)


def lognormal_lengths(
    input_median: float, output_median: float, *, sigma: float = 1.0, max_input: int = 8192, max_output: int = 2048
) -> Lengths:
    """Return independent log-normal lengths, cut to ``[1, max]``: many short requests and a long tail, as in chats.

    ``sigma`` is the standard deviation of the logarithms; at 1 the mean is 1.65 medians.

    Raises:
        ValueError: A median or maximum is below 1, or sigma is negative.
    """
    _not_negative(sigma=sigma)
    if min(input_median, output_median, max_input, max_output) < 1:
        raise ValueError("medians and maxima of lengths must be >= 1 token")

    def draw(rng: random.Random) -> tuple[int, int]:
        tokens_in = input_median * math.exp(sigma * rng.gauss(0.0, 1.0))
        tokens_out = output_median * math.exp(sigma * rng.gauss(0.0, 1.0))
        return max(1, min(round(tokens_in), max_input)), max(1, min(round(tokens_out), max_output))

    return draw


def sampled_lengths(pairs: Sequence[tuple[int, int]]) -> Lengths:
    """Return lengths drawn, with replacement, from measured (input, output) pairs.

    Raises:
        ValueError: There are none.
    """
    if not pairs:
        raise ValueError("there are no lengths to draw from")
    return lambda rng: rng.choice(pairs)


def requests(times: Sequence[float], lengths: Lengths, rng: random.Random) -> list[TraceRequest]:
    """Return one request per arrival time, its lengths drawn from ``lengths``."""
    return [TraceRequest(time_s, *lengths(rng)) for time_s in times]


# -- files -------------------------------------------------------------------------------------------------------------


def read_trace(path: Path | str) -> list[TraceRequest]:
    """Read a CSV file (or .csv.gz) with the columns ``arrival_s,input_tokens,output_tokens``, others ignored.

    With a column ``hash_ids``, numbers with spaces between them, requests may begin alike. A file whose name ends with
    .jsonl is of Mooncake's form: a JSON object a line, with ``timestamp`` (ms), ``input_length``, ``output_length`` and
    ``hash_ids``.

    Returns:
        The requests by arrival.

    Raises:
        OSError: The file cannot be read.
        ValueError: A column is missing or a value is out of range; the message names file and line.
    """
    if Path(path).suffix == ".jsonl":
        found = _mooncake(Path(path))
    else:
        rows = _rows(Path(path), "arrival_s", *_TOKENS, optional=("hash_ids",))
        found = [TraceRequest(row[0], row[1], row[2], hash_ids=row[3]) for row in rows]
    return sorted(found, key=lambda request: request.arrival_s)


def _mooncake(path: Path) -> list[TraceRequest]:
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            lengths = [_number(name, str(row[field])) for name, field in _MOONCAKE.items()]
            ids = tuple(_hash_id(value) for value in row.get("hash_ids", ()))
            found.append(TraceRequest(lengths[0] / 1e3, int(lengths[1]), int(lengths[2]), hash_ids=ids))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: no object with {', '.join(_MOONCAKE.values())}") from error
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"{path} has no requests")
    return found


def read_lengths(path: Path | str) -> list[tuple[int, int]]:
    """Read the (input, output) lengths of a CSV file with the columns ``input_tokens,output_tokens``; a trace is one.

    Raises:
        OSError: The file cannot be read.
        ValueError: A column is missing or a value is out of range; the message names file and line.
    """
    return [(input_tokens, output_tokens) for input_tokens, output_tokens in _rows(Path(path), *_TOKENS)]


def _rows(path: Path, *columns: str, optional: Sequence[str] = ()) -> list[list[Any]]:
    """Return the numbers in the named columns of each row of a CSV file, and tuples of numbers of ``optional`` ones."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text(encoding="utf-8")
    reader = csv.reader(text.splitlines())
    header = [name.strip() for name in next(reader, [])]
    if missing := [name for name in columns if name not in header]:
        raise ValueError(
            f"{path}, line 1: the header must name {', '.join(columns)}; missing: {', '.join(missing)}, "
            f"found: {', '.join(header) or 'nothing'}"
        )
    rows = []
    for row in filter(None, reader):
        try:
            if len(row) != len(header):
                raise ValueError(f"{len(row)} fields where the header has {len(header)}")
            several = [row[header.index(name)].split() if name in header else () for name in optional]
            rows.append(
                [_number(name, row[header.index(name)]) for name in columns]
                + [tuple(map(_hash_id, each)) for each in several]
            )
        except ValueError as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
    if not rows:
        raise ValueError(f"{path} has no rows below its header")
    return rows


def _number(name: str, text: str) -> float | int:
    """Return an arrival as a float, a length as an int."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {text!r}") from None
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {text!r}")
    if name not in _TOKENS:
        if value < 0:
            raise ValueError(f"{name} must be >= 0, got {text!r}")
        return value
    if value < 1 or value != int(value):
        raise ValueError(f"{name} must be a whole number >= 1, got {text!r}")
    return int(value)


def _hash_id(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number < MOST_HASH_IDS:
        raise ValueError(f"hash_ids must be whole numbers in [0, 2^48), got {value!r}")
    return number


def _not_negative(**numbers: float) -> None:
    for name, value in numbers.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a number >= 0, got {value}")

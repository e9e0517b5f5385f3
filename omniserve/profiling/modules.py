"""Dense halves, head and device attention: Algorithm 1 over rows, grids over loads.

Paper: omniserve 3.3.1, which models each dense module by itself. Here the two halves of a layer are one curve, and the
head is another; powers of two are measured beside the points that Algorithm 1 asks for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, TypedDict

from omniserve.core.config import EngineConfig
from omniserve.host.cores import CoreSplit
from omniserve.latency.fitting import explore
from omniserve.latency.profile import STATES, Fingerprint, Points, Table
from omniserve.layers.patched_model import PatchedModel
from omniserve.profiling.bench import ModuleBench
from omniserve.profiling.timer import Point, Progress, Timer

# Shares of the time limit at which each part is over.
_CURVES_END, _POWERS_END, _MODULES_END = 0.2, 0.3, 0.5
_MAX_POOL_BYTES = 512 << 20
_MAX_CONTEXT = 4096
_FIRST_SAMPLES = 3
_MUST_MEASURE = 4  # points of each grid, however slow the machine
_GROWTH = 4  # of the rows, while it is not known how many a sample may have


class ModuleTimes(TypedDict):
    """Fields of a Profile; see there."""

    dense: dict[str, Points]
    head: dict[str, Points]
    prefill_attention: dict[str, Table]
    decode_attention: dict[str, Table]


class _Sampler:
    """Takes samples of a module in a state of the cores; a module is made ready once."""

    def __init__(self, bench: ModuleBench, timer: Timer, cores: CoreSplit) -> None:
        self._bench, self._timer, self._cores = bench, timer, cores
        self._runs: dict[tuple[str, Point], Callable[[], object]] = {}

    def sample(self, state: str, module: str, point: Point) -> None:
        """Take one sample."""
        self._timer.give_way()
        self._cores.apply(host_works=state == "shared")
        if (module, point) not in self._runs:
            with self._timer.preparing():
                self._runs[module, point] = self._make(module, point)
                self._runs[module, point]()  # pays for memory and, on a GPU, for choosing and compiling kernels
        self._timer.add(f"{module}, {state}", point, self._timer.time(self._runs[module, point]))

    def _make(self, module: str, point: Point) -> Callable[[], object]:
        first, second = point
        if module == "dense":
            return self._bench.dense(first)
        if module == "head":
            return self._bench.head(first)
        return self._bench.attention([(first, second)] if module == "prefill" else [(1, second - 1)] * first)

    def latency(self, state: str, module: str) -> Callable[[int], float]:
        """Return the latency over rows, for ``explore``."""

        def latency(rows: int) -> float:
            for _ in range(_FIRST_SAMPLES):
                self.sample(state, module, (rows, 0))
            return self._timer.typical(f"{module}, {state}", (rows, 0))

        return latency


def measure_modules(
    model: PatchedModel, config: EngineConfig, fingerprint: Fingerprint, timer: Timer, progress: Progress
) -> ModuleTimes:
    """Measure what runs on the device tier, in both states of the cores."""
    timer.give_way()
    longest, total = _context_limits(model, config, timer.most_pool_bytes(_MAX_POOL_BYTES))
    cores = CoreSplit(
        device=model.device, device_threads=fingerprint.device_threads, host_threads=fingerprint.host_threads
    )
    # With a GPU, or without a host tier, sharing changes nothing: one set of measurements serves as both.
    states = STATES if fingerprint.shared_threads != fingerprint.device_threads else STATES[:1]
    sampler = _Sampler(ModuleBench(model, config, total), timer, cores)
    most_rows = {
        "dense": config.max_num_batched_tokens + config.max_piggyback_seats,
        "head": min(config.max_num_seqs, config.max_num_batched_tokens),
    }
    if timer.longest_s < math.inf:
        most_rows = {module: _most_rows(sampler, module, most, timer.longest_s) for module, most in most_rows.items()}
    curves = [(state, module) for state in states for module in most_rows]
    for number, (state, module) in enumerate(curves):
        end = _CURVES_END * (number + 1) / len(curves)
        progress(f"{module}, {state}", timer.spent)
        explore(sampler.latency(state, module), 1, most_rows[module], go_on=lambda end=end: timer.spent < end)  # type: ignore[misc]

    _measure_powers_of_two(sampler, states, most_rows, timer, progress)
    grids = {"prefill": _prefill_grid(longest, config), "decode": _decode_grid(longest, total, config)}
    grid_points = [(module, point, i) for module, grid in grids.items() for i, point in enumerate(grid)]
    grid_points.sort(key=lambda entry: entry[2])  # the smallest of both first: a slow machine leaves out the largest
    slowest = dict.fromkeys(grids, 0.0)  # seconds of a key that a row sees
    for module, point, i in grid_points:
        load = _load(module, point)
        if i >= _MUST_MEASURE and timer.spent > _MODULES_END:
            continue
        if slowest[module] * load > timer.longest_s:
            continue
        progress(f"{module} attention", timer.spent)
        for state in states:
            sampler.sample(state, module, point)
        slowest[module] = timer.typical(f"{module}, {states[-1]}", point) / load
    _repeat(sampler, timer, progress)
    return _collect(timer, states, len(model.layers))


def _most_rows(sampler: _Sampler, module: str, most: int, longest_s: float) -> int:
    """Return the most rows of which a sample lasts no longer: time grows at most in proportion to rows."""
    rows = 1
    while rows < most:
        largest = int(rows * longest_s / sampler.latency(STATES[0], module)(rows))
        if largest <= rows:
            break
        rows = min(most, _GROWTH * rows, largest)
    return rows


def _load(module: str, point: Point) -> int:
    """Return the keys that the rows of a point of a grid see, about."""
    first, second = point
    return first * (first + second) if module == "prefill" else first * second


def _measure_powers_of_two(
    sampler: _Sampler, states: tuple[str, ...], most_rows: dict[str, int], timer: Timer, progress: Progress
) -> None:
    """Add the sizes that kernels are made for, small ones first: between 1 and 16 rows Algorithm 1 asks nothing."""
    for exponent in range(1, max(most_rows.values()).bit_length()):
        for module, most in most_rows.items():
            if 2**exponent >= most or timer.spent > _POWERS_END:
                continue
            progress(f"{module}, {2**exponent} rows", timer.spent)
            for state in states:
                sampler.latency(state, module)(2**exponent)


def _repeat(sampler: _Sampler, timer: Timer, progress: Progress) -> None:
    """Measure every point again, in random order, as often as there is time."""
    known = [
        (state, module, point)
        for state in STATES
        for module in ("dense", "head", "prefill", "decode")
        for point, _ in timer.typicals(f"{module}, {state}")
    ]
    rng = random.Random(0)
    while timer.spent < _MODULES_END:
        rng.shuffle(known)
        for state, module, point in known:
            if timer.spent >= _MODULES_END:
                return
            progress("all modules again", timer.spent)
            sampler.sample(state, module, point)


def _collect(timer: Timer, states: tuple[str, ...], num_layers: int) -> ModuleTimes:
    def by_state(module: str, row: Callable[[int, int, float], tuple[float, ...]]) -> dict[str, Any]:
        found = {s: tuple(row(*point, t) for point, t in timer.typicals(f"{module}, {s}")) for s in states}
        return {state: found.get(state, found[STATES[0]]) for state in STATES}

    return ModuleTimes(
        dense=by_state("dense", lambda rows, _, t: (rows, t / num_layers)),
        head=by_state("head", lambda rows, _, t: (rows, t)),
        prefill_attention=by_state("prefill", lambda chunk, before, t: (chunk, before, t / num_layers)),
        # The context of all requests together is kept.
        decode_attention=by_state("decode", lambda count, context, t: (count, count * context, t / num_layers)),
    )


def _context_limits(model: PatchedModel, config: EngineConfig, pool_bytes: int) -> tuple[int, int]:
    """Return the longest context to measure, and how many tokens of KV there may be in all."""
    spec = model.spec
    blocks = max(
        1, min(config.device_kv_bytes, pool_bytes) // spec.kv_block_bytes(config.block_size, config.execution.kv_dtype)
    )
    longest = min(config.max_model_len or spec.max_model_len, _MAX_CONTEXT, blocks * config.block_size)
    return longest, blocks * config.block_size


def _prefill_grid(longest: int, config: EngineConfig) -> list[Point]:
    """Return (chunk, context before it), smallest load first."""
    most = min(config.max_num_batched_tokens, longest)
    chunks = sorted({max(2, most // part) for part in (32, 8, 2, 1)})
    grid = {(chunk, start) for chunk in chunks for start in (0, longest // 8, longest // 2) if chunk + start <= longest}
    return sorted(grid, key=lambda point: _load("prefill", point))


def _decode_grid(longest: int, total: int, config: EngineConfig) -> list[Point]:
    """Return (requests, context of each), smallest load first."""
    requests = [r for r in (1, 4, 16, 64, 256) if r <= min(config.max_num_seqs, config.max_num_batched_tokens)]
    lengths = sorted({max(1, longest // part) for part in (64, 8, 2, 1)})
    fits = {(r, n) for r in requests for n in lengths if r * -(-n // config.block_size) * config.block_size <= total}
    return sorted(fits, key=lambda point: _load("decode", point))

"""``omniserve``: dense and attention modules apart, layer by layer, and the step's own overhead.

Paper: omniserve 3.3.1.

What the paper leaves out and a small batch consists of: the head, and an overhead per step, request and row
(scheduling, tensors of the plan, sampling, launches). Modules are measured alone, and measured steps then scale each
term: a module between others finds other caches than one in a loop.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self

from omniserve.latency.base import LATENCY_MODELS, LatencyModel
from omniserve.latency.features import BatchFeatures
from omniserve.latency.fitting import fit_terms
from omniserve.latency.profile import STATES, Profile, StepSample, Table

# A measured module weighs as much as this many steps against what the steps say of it.
_PRIOR_STEPS = 10.0
# And that there is no overhead, as this many: steps of one kind of load cannot tell overheads apart.
_NO_OVERHEAD_STEPS = 3.0
# Up to so many rows the halves mostly read weights; what more rows add is mostly arithmetic.
_FEW_ROWS = 16
# (a, per row or request, per call) of an attention module.
Attention = tuple[float, float, float]


class Curve:
    """A non-decreasing function through measured points: linear between them, and on at the end.

    A measurement above one of more rows was disturbed, which only makes it longer: it is lowered to that one. So the
    curve never falls, and a policy may search by bisection. Paper: omniserve 3.3.1.

    Args:
        points: (rows >= 1, seconds), in any order; at least one.

    Raises:
        ValueError: No points, or two at the same place.
    """

    __slots__ = ("_slope", "_xs", "_ys")

    def __init__(self, points: Iterable[tuple[int, float]]) -> None:
        ordered = sorted(points)
        self._xs = [x for x, _ in ordered]
        if not ordered or len(set(self._xs)) < len(self._xs):
            raise ValueError(f"a curve needs points at different places, got {ordered}")
        self._ys = lower_envelope([y for _, y in ordered])
        # The slope beyond the end, from the upper half of the range: two neighbours would be all noise.
        first = min(bisect_right(self._xs, self._xs[-1] / 2), len(self._xs) - 2) if len(ordered) > 1 else 0
        span = self._xs[-1] - self._xs[first]
        self._slope = (self._ys[-1] - self._ys[first]) / span if span else self._ys[-1] / self._xs[-1]

    def __call__(self, x: float) -> float:
        """Return seconds for ``x`` rows; 0 for none."""
        xs, ys = self._xs, self._ys
        if x <= xs[0]:
            return ys[0] if x > 0 else 0.0
        if x >= xs[-1]:
            return ys[-1] + self._slope * (x - xs[-1])
        i = bisect_right(xs, x)
        low = xs[i - 1]
        return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - low) / (xs[i] - low)


def lower_envelope(values: list[float]) -> list[float]:
    """Return the largest non-decreasing sequence that is nowhere above ``values``."""
    return list(itertools.accumulate(reversed(values), min))[::-1]


@dataclass(frozen=True, slots=True)
class HostSpeed:
    """The time that the host tier needs for the attention of one layer.

    ``(per_key context + per_draft_key draft_keys + per_request requests) / threads + per_call``, seconds; a regression
    over the profile. ``draft_keys`` are the keys that drafts see, those of each draft counted: they are read for the
    draft's token already, so they take less than the others.
    """

    per_key_s: float
    per_request_s: float
    per_call_s: float
    threads: int
    """Threads of the host tier."""
    per_draft_key_s: float = 0.0

    @classmethod
    def from_profile(cls, profile: Profile) -> Self | None:
        """Fit it to what was measured; None without a host tier."""
        if not profile.host_attention:
            return None
        rows = [(context / n, requests / n, 1.0, 0.0) for requests, context, n, _ in profile.host_attention]
        rows += [
            (context / n, requests / n, 1.0, context * drafts / n)
            for requests, context, drafts, n, _ in profile.host_drafts
        ]
        seconds = [row[-1] for row in (*profile.host_attention, *profile.host_drafts)]
        per_key_s, per_request_s, per_call_s, per_draft_key_s = fit_terms(rows, seconds)
        threads = max(1, profile.fingerprint.host_threads)
        return cls(per_key_s, per_request_s, per_call_s, threads, per_draft_key_s if profile.host_drafts else per_key_s)

    def __call__(self, requests: int, context: float, draft_keys: float = 0.0) -> float:
        """Return the seconds for one layer's tasks, with ``context`` keys together, on all host threads."""
        if requests <= 0:
            return 0.0
        work_s = self.per_key_s * context + self.per_draft_key_s * draft_keys + self.per_request_s * requests
        return work_s / self.threads + self.per_call_s


def pipeline_wait_s(
    features: BatchFeatures, host: HostSpeed | None, *, dense_s: float, attention_s: float, second_s: float
) -> float:
    """Return the seconds that the device waits for the host in each layer of a step with two sub-batches.

    The host attends for one sub-batch at a time, for each between its pre-attention and its post-attention. Paper: apex
    figure 2.

    Args:
        features: The step; host rows see equally many keys.
        host: The host tier's speed; None: it takes no time.
        dense_s: Dense halves of the first sub-batch, a layer.
        attention_s: Attention of the first sub-batch on the device, a layer.
        second_s: Dense halves of the second sub-batch, a layer.
    """
    if host is None:
        return 0.0
    rows, load = features.pipelined_rows, features.pipelined_load
    first_host_s, second_host_s = (
        host(count, load * count / rows) if count else 0.0 for count in (features.hybrid_rows, features.second_rows)
    )
    device_s = dense_s + attention_s + second_s
    # What a layer takes at least: for the host, and for either sub-batch by itself.
    cycle_s = max(first_host_s + second_host_s, first_host_s + dense_s, second_host_s + second_s)
    return max(0.0, cycle_s - device_s)


@LATENCY_MODELS.register("omniserve")
class OmniServeModel(LatencyModel):
    """``layers * (f_D(n) + f_PA(c_PA) + f_DA(c_DA, g) + w + gamma_T(n)) + head(rows) + overhead + gamma_P(n)``.

    f_D is interpolated, its first 16 rows being one term and the others another; f_PA = a c_PA + h rows + b and
    f_DA = a c_DA + h g + b are regressions (h of f_PA is storing K and V, which the paper's GPU hides). Each has a set
    for either state of the cores.

    Args:
        scales: What each term is multiplied by; None: 1 for modules, and no overhead.
    """

    term_names = (
        "dense, few rows",
        "dense, more rows",
        "prefill attention",
        "decode attention",
        "dense, few rows, shared cores",
        "dense, more rows, shared cores",
        "prefill attention, shared cores",
        "decode attention, shared cores",
        "piggyback",
        "piggyback layers",
        "tensor parallel",
        "pipelined rows",
        "waiting for the host",
        "pipeline parallel",
        "head",
        "step overhead",
        "request overhead",
        "row overhead",
    )
    layer_terms = slice(0, 13)
    attention_terms = (2, 3, 6, 7)
    _PRIOR = (1.0,) * 9 + (0.0,) + (1.0,) * 5 + (0.0,) * 3
    """1: a measured module; 0: an overhead that only whole steps show."""

    def __init__(self, profile: Profile, scales: Sequence[float] | None = None) -> None:
        self._profile = profile
        self.num_layers = profile.shape.num_layers
        self._dense = [Curve(profile.dense[state]) for state in STATES]
        self._few_rows = [curve(_FEW_ROWS) for curve in self._dense]
        self._head = [Curve(profile.head[state]) for state in STATES]
        self._prefill = [_fit_attention(profile.prefill_attention[state], _prefill_loads(profile)) for state in STATES]
        self._decode = [_fit_attention(profile.decode_attention[state], _decode_loads(profile)) for state in STATES]
        self._piggyback = [0.0] * 4
        if profile.piggyback:  # else there is no host tier
            quantities = [(1.0, seats, rows > 0, rows) for seats, rows, _ in profile.piggyback]
            self._piggyback = fit_terms(quantities, [row[-1] for row in profile.piggyback])
        self._host = HostSpeed.from_profile(profile)
        self.scales = tuple(scales) if scales is not None else self._PRIOR
        """Factors for each module's time, and the overheads in seconds, as measured steps give them."""

    @classmethod
    def from_profile(cls, profile: Profile) -> Self:
        model = cls(profile)
        return model.fit(profile.steps) if profile.steps else model

    def fit(self, samples: Sequence[StepSample]) -> Self:
        """Return the model with its terms scaled, and its overheads found, by measured steps.

        First all scales are multiplied by one factor, then each may differ from that. So where samples say little (no
        step with shared cores, say), a module is taken to be as much slower within a step as the others.
        """
        if not samples:
            raise ValueError("fitting needs measured steps, got none")
        rows = [self._quantities(sample.features) for sample in samples]
        seconds = [sample.seconds for sample in samples]
        common = median(s / self.step_s(sample.features) for s, sample in zip(seconds, samples, strict=True))
        scales = fit_terms(
            rows,
            seconds,
            prior=[common * scale for scale in self.scales],
            prior_weight=_PRIOR_STEPS,
            ridge=_NO_OVERHEAD_STEPS,
        )
        return type(self)(self._profile, scales)

    def terms(self, features: BatchFeatures) -> tuple[float, ...]:
        return tuple([scale * x for scale, x in zip(self.scales, self._quantities(features), strict=True)])

    def _quantities(self, features: BatchFeatures) -> tuple[float, ...]:
        """Return what the scales multiply: unscaled seconds of each module, and counts for the overheads."""
        f = features
        layers, shared = self.num_layers, f.host_works
        n = f.rows
        dense = self._dense[shared](n)
        few_rows = min(dense, self._few_rows[shared])
        few, more = f.dense_layers * few_rows, f.dense_layers * (dense - few_rows)
        prefill = decode = piggyback = 0.0
        if f.prefill_tokens:
            a, h, b = self._prefill[shared]
            prefill = layers * (a * f.prefill_load + h * f.prefill_tokens + b)
        if f.decode_requests:
            a, h, b = self._decode[shared]
            decode = layers * (a * f.decode_load + h * f.decode_requests + b)
        if f.seats:
            per_pass, per_seat, per_call, per_row = self._piggyback
            # The seats are there wherever a half runs; each row passes a layer once.
            piggyback = f.dense_layers * (per_pass + per_seat * f.seats)
            piggyback += per_call * f.piggyback_layers + per_row * f.piggyback_rows
        second = waiting = 0.0
        if f.pipelined_rows:
            second_s = self._dense[shared](f.second_rows) if f.second_rows else 0.0
            second = f.pipelined_layers * second_s
            waiting = f.pipelined_layers * pipeline_wait_s(
                f,
                self._host,
                dense_s=(few + more + piggyback) / layers,
                attention_s=(prefill + decode) / layers,
                second_s=second_s,
            )
        idle, collectives = (0.0, 0.0, 0.0, 0.0), self._profile.tensor_parallel
        modules = (*idle, few, more, prefill, decode) if shared else (few, more, prefill, decode, *idle)
        return (
            *modules,
            piggyback,
            float(f.piggyback_layers),
            f.dense_layers * collectives(n) + f.pipelined_layers * collectives(f.second_rows),
            second,
            waiting,
            self._profile.pipeline_parallel(n),
            self._head[shared](f.sampled_rows),
            1.0,
            float(f.prefill_requests + f.decode_requests + f.pipelined_rows),
            float(n + f.second_rows),
        )


Loads = Callable[[float, float], tuple[float, float]]


def _prefill_loads(profile: Profile) -> Loads:
    return lambda chunk, context: (profile.shape.keys_seen(int(context), int(chunk)), chunk)


def _decode_loads(profile: Profile) -> Loads:
    """Return the loads of requests of equal context, each row seeing its request's keys up to itself."""
    return lambda requests, context: (requests * profile.shape.keys_seen(int(context / requests) - 1, 1), requests)


def _fit_attention(table: Table, loads: Loads) -> Attention:
    a, h, b = fit_terms([(*loads(first, second), 1.0) for first, second, _ in table], [row[-1] for row in table])
    return a, h, b

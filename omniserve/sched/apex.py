"""``apex``: asymmetric pipelining where an inequality says that it pays, else asynchronous overlap. Paper: apex 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omniserve.core.plan import Bound, StepPlan
from omniserve.core.work import AttentionResult, HostEvent
from omniserve.latency import BatchFeatures, HostSpeed
from omniserve.sched.batch import Batch
from omniserve.sched.best_effort import BestEffortWork
from omniserve.sched.co_serving import CoServingPolicy, CoServingStep
from omniserve.sched.host_rows import HostRows
from omniserve.sched.options import APEXOptions, PolicyOptions
from omniserve.sched.piggyback import put_rows
from omniserve.sched.seats import rows_within
from omniserve.sched.second_batch import SecondBatch
from omniserve.sched.state import RequestState
from omniserve.sched.step_cost import Forecast, left_out
from omniserve.sched.view import RequestView

_RATE = 0.05  # of learning the host's speed
_BOUNDS = (0.25, 4.0)


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer."""

    linear_s: float
    """T_glinear of the decodes alone."""
    attention_s: float
    """T_gatt of the decodes alone."""
    overlap_s: float
    """Time the host has beside a step with two sub-batches: 2 T_glinear + T_gatt, or its form with prefill."""
    beside_first_s: float = 0.0
    """The part of it in which the device attends and then runs the second sub-batch's dense halves: the time that the
    host has for host rows of the first sub-batch."""


def pipelining_pays(num_device: int, host_rate: float, times: LayerTimes) -> bool:
    """Return whether inequality (5), with prefill its form in Algorithm 1, holds.

    N_G T_gatt is the number of device decodes, ``host_rate`` is N_C, the decodes a second that the host attends for in
    one layer. With prefill too, Algorithm 1 has the decode-only denominators; so has this.
    """
    alone_s = times.linear_s + times.attention_s
    if num_device == 0 or alone_s <= 0:
        return True
    both = num_device + host_rate * times.overlap_s
    return both / (2 * times.linear_s + times.attention_s) > num_device / alone_s


class APEXPolicy(CoServingPolicy):
    """Device first; what memory cannot hold decodes on the host, by one of two strategies each step (Algorithm 1).

    Asynchronous overlap moves all host requests as one cohort: they enter together, and their results join together
    once all are there, one layer a step (the paper's "all requests for a single layer within one iteration"). Whether
    they are is asked as the step reaches the layer, and again in the next step (3.4). A cohort begins if it has at
    least ``min_host_per_device`` requests for each request of the step on the device (4.2: eight times), if it takes
    every seat, or if there is no device request. A smaller one waits for more requests, at most ``max_cohort_wait_s``.
    If the step's bound has no time for all its rows, a cohort splits. The host's speed is watched while it works, and
    corrects N_C (section 6, online profiling). ``strategy`` forces one of the two, to see what the choice brings. With
    pipeline stages it must be ``overlapped``: the cohort goes one layer on with every step in flight, so its results
    wait for the time of a step in one stage (section 6, pipeline parallelism).

    What differs from the paper: LS before BE, under the latency control of ``omniserve``; the paper has no limit on the
    wait of a small cohort; the first sub-batch has host rows only with ``hybrid_first_batch``. Prompts are computed
    into device memory as a whole; where their KV went to the host layer by layer, they would need less of it. BE
    decodes come before BE prompts, unless ``be_order`` is ``prefill``, as in Algorithm 1. Without a latency model it
    overlaps always, unless ``strategy`` is ``pipelined``.
    """

    options_type = APEXOptions
    options: APEXOptions
    awaits_host = True

    @classmethod
    def awaits_host_with(cls, options: PolicyOptions) -> bool:
        return not (isinstance(options, APEXOptions) and options.strategy == "overlapped")

    def set_up(self) -> None:
        self.rows = PipelinedOrOverlapped(self.view, self.options, self.forecast)
        best_effort = BestEffortWork.of(self.view, self.options, self.forecast)
        self.step = CoServingStep.of(self.view, self.options, self.forecast, best_effort, self.rows)

    def on_host_events(self, events: Sequence[HostEvent]) -> None:
        if self.rows.watch is not None:
            done = [e for e in events if isinstance(e, AttentionResult) and e.ok]
            self.rows.watch.note(len(done), sum(event.position + 1 for event in done))

    def schedule(self, now_s: float) -> StepPlan:
        if self.rows.watch is not None:
            self.rows.watch.tick(now_s, is_busy=self.host.is_busy)
        return super().schedule(now_s)


class PipelinedOrOverlapped:
    """Chooses a second sub-batch where that pays, else the cohort of asynchronous overlap (a ``HostRowChoice``).

    The option ``strategy`` may leave it no choice.
    """

    def __init__(self, view: RequestView, options: APEXOptions, forecast: Forecast | None) -> None:
        self._view, self._options, self._forecast = view, options, forecast
        speed = forecast.host if forecast is not None else None
        self.watch = HostWatch(speed, follows=options.watch_host) if speed is not None else None
        """The host tier's speed; None: it is not known."""
        self._second = SecondBatch(view, furthest_first=options.partial_progress_first)
        self._cohort = Cohort(view, options)

    def reserve_s(self, batch: Batch, bound_s: float) -> float:
        """Return the seconds that device work leaves for a second sub-batch."""
        self._second.hybrid_share = 0.0
        return self._second.reserve_s(batch, bound_s)

    def choose(self, batch: Batch, bound_s: float) -> HostRows:
        """Choose the strategy of this step, and its rows (Algorithm 1)."""
        self._second.hybrid_share = 0.0
        if not self._view.host_is_up:
            return HostRows()
        if self._options.strategy == "overlapped":
            return self._cohort.choose(batch, bound_s)
        states = self._second.candidates()
        if self._options.strategy == "pipelined":
            return self._second.run_through(batch, states, self._most_pipelined(batch, states, bound_s))
        count = self._num_pipelined(batch, states, bound_s)
        if not count:
            return self._cohort.choose(batch, bound_s)
        return self._second.run_through(batch, states, count)

    def _most_pipelined(self, batch: Batch, states: Sequence[RequestState], bound_s: float) -> int:
        """Return how many of ``states`` run in a second sub-batch, whether that pays or not.

        Without a latency model, or beside no device rows, the host has time for all of them.
        """
        most = len(states)
        if self.watch is None or batch.cost is None or not states:
            return most
        if batch.chunks:
            context = sum(state.num_tokens for state in states) / most
            times = self._layer_times(batch.cost.features)
            most = max(1, min(most, int(self.watch.rate(most, context) * times.overlap_s)))
            if self._options.hybrid_first_batch and times.overlap_s > 0:
                self._second.hybrid_share = times.beside_first_s / times.overlap_s
        else:  # an idle machine works, whatever the bound
            bound_s = max(bound_s, self._second.seconds_with(batch.cost, states[:1]))
        while most and self._second.seconds_with(batch.cost, states[:most]) > bound_s:
            most //= 2
        return most

    def _num_pipelined(self, batch: Batch, states: Sequence[RequestState], bound_s: float) -> int:
        """Return how many of ``states`` run in a second sub-batch: what the host attends for in time, or none."""
        if self.watch is None or self._forecast is None or batch.cost is None or not states or not batch.chunks:
            return 0
        features = batch.cost.features
        times = self._layer_times(features)
        context = sum(state.num_tokens for state in states) / len(states)
        rate = self.watch.rate(len(states), context)
        if not pipelining_pays(features.decode_requests, rate, times):
            return 0
        most = min(len(states), int(rate * times.overlap_s))
        if most == 0:
            return 0
        if self._options.hybrid_first_batch:
            self._second.hybrid_share = times.beside_first_s / times.overlap_s
        while most and self._second.seconds_with(batch.cost, states[:most]) > bound_s:
            most //= 2
        return most

    def _layer_times(self, features: BatchFeatures) -> LayerTimes:
        assert self._forecast is not None
        decodes = BatchFeatures(
            decode_requests=features.decode_requests,
            decode_context=features.decode_context,
            decode_load=features.decode_load,
            dense_layers=features.dense_layers,
            host_works=True,
        )
        linear_s, attention_s = self._forecast.predictor.modules_s(decodes)
        with_s, attention_with_s = self._forecast.predictor.modules_s(features)
        overlap_s = with_s + linear_s + attention_with_s
        return LayerTimes(linear_s, attention_s, overlap_s, beside_first_s=linear_s + attention_with_s)


class Cohort:
    """The host requests of asynchronous overlap, which enter together and join together, one layer a step."""

    def __init__(self, view: RequestView, options: APEXOptions) -> None:
        self._host, self._limits, self._options = view.host, view.limits, options
        self._max_rows = options.most_rows(view.limits)
        self._small_since_s: float | None = None
        """Time at which residents began to wait for a larger cohort; None: none wait."""

    def choose(self, batch: Batch, bound_s: float) -> HostRows:
        """Let the cohort join when all of it is there, and the next one enter when none is away."""
        host = self._host
        away = [state for state in host.queue if state.away is not None]
        expected = host.expected(has_device_rows=True) if batch.chunks else None
        num_late = sum(state.away is not None and not state.away.ready for state in away)
        if num_late > (sum(map(len, expected)) if expected is not None else 0):
            return HostRows()
        seats = self._limits.config.max_piggyback_seats
        entering = 0 if away else host.num_at_token_boundary
        joinable = host.num_joinable(expected) if expected is not None else host.num_ready
        most = min(self._max_rows, min(entering, seats) + sum(min(count, seats) for count in joinable))
        within = most
        if batch.cost is not None and batch.chunks:
            within, _ = rows_within(batch.cost, entering, joinable, seats=seats, max_rows=most, bound_s=bound_s)
        if away:
            work, wanted, limit = "piggyback join", sum(joinable), Bound.TIME if within < most else Bound.SEATS
            rows = HostRows(joins=host.plan_joins(within, seats, expected))
        else:
            work, wanted, limit = "piggyback entry", entering, Bound.TIME if within < most else Bound.SEATS
            if self._may_begin(batch, within):
                rows = HostRows(entries=batch.plan_entries(within))
                limit = Bound.HOST_MEMORY if len(rows.entries) < within else limit
            else:
                rows, limit = HostRows(), Bound.COHORT if within else limit
        if batch.cost is not None and (rows.entries or rows.joins):
            put_rows(batch.cost, rows, self._limits, self._max_rows)
        kept_out = left_out(work, wanted - len(rows.joins) - len(rows.entries), limit)
        return HostRows(
            entries=rows.entries, joins=rows.joins, joins_as_one=True, max_rows=self._max_rows, left_out=kept_out
        )

    def _may_begin(self, batch: Batch, size: int) -> bool:
        """Return whether a cohort of this size enters now: it is large enough, or has waited long enough (apex 4.2)."""
        if size == 0:
            if self._host.num_at_token_boundary == 0:
                self._small_since_s = None
            return False
        seats = min(self._limits.config.max_piggyback_seats, self._max_rows)
        if size < min(self._options.min_host_per_device * len(batch.chunks), seats):
            if self._small_since_s is None:
                self._small_since_s = batch.now_s
            if batch.now_s - self._small_since_s < self._options.max_cohort_wait_s:
                return False
        self._small_since_s = None
        return True


class HostWatch:
    """The host tier's speed, as profiled and, if it ``follows``, as seen (apex 6: online profiling)."""

    def __init__(self, speed: HostSpeed, *, follows: bool = True) -> None:
        self._speed, self._follows = speed, follows
        self.factor = 1.0
        """Ratio of the seconds that tasks take to the profile's prediction."""
        self._tasks, self._keys = 0, 0
        self._since_s: float | None = None

    def note(self, num_tasks: int, keys: int) -> None:
        """Take note of finished tasks."""
        self._tasks += num_tasks
        self._keys += keys

    def tick(self, now_s: float, *, is_busy: bool) -> None:
        """Compare what finished since the last tick with the profile, if the host tier was never idle meanwhile."""
        if self._follows and self._since_s is not None and is_busy and self._tasks:
            expected_s = self._speed(self._tasks, self._keys)
            if now_s > self._since_s and expected_s > 0:
                ratio = (now_s - self._since_s) / expected_s
                self.factor += _RATE * (min(max(ratio, _BOUNDS[0]), _BOUNDS[1]) - self.factor)
        self._tasks = self._keys = 0
        self._since_s = now_s if is_busy else None

    def rate(self, num_requests: int, context: float) -> float:
        """Return N_C: requests a second, one layer, of ``num_requests`` with a mean context."""
        return num_requests / (self.factor * self._speed(num_requests, num_requests * context))

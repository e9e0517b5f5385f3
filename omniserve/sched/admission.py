"""Admission control: which LS requests are let in, and which objectives hold for them. Paper: omniserve 3.3.3.

The rules, each with its test, are in docs/admission.md. The paper rejects whatever is predicted to miss its TTFT. Here
a refusal is for load, that is, for other LS requests: a retry can succeed. Only a request that brought an objective of
its own can be refused because its prompt is too long for it.

``add`` predicts the time to first token and rejects what would come too late because of other LS requests, with a
margin that learns from the requests that it admitted.
"""

from __future__ import annotations

import dataclasses
import math

from omniserve.core.errors import RequestRejected
from omniserve.core.request import SLO
from omniserve.sched.state import RequestState
from omniserve.sched.step_cost import USUAL_HEADROOMS, Forecast, Headrooms
from omniserve.sched.ttft import TTFTPrediction

FIRST_MARGIN, LEAST_MARGIN, LARGEST_MARGIN = 0.2, 0.1, 0.5
MISSES_AIMED_AT = 0.03
"""Share of the admitted requests that may miss their TTFT."""
_GAIN = 0.08
_CLOSE = 0.5  # requests predicted to take less of their TTFT than this say nothing of the margin
_MARGIN_HALF_LIFE_S = 60.0

SLO_SCALE = 2.0
"""Factor of an objective that a request cannot keep alone, over what the request takes alone."""
UNSEEN_ERROR = 16.0
"""Factor by which a coarse profile's prediction may be too long, for steps that it was never compared with."""
FIRST_PROBE_S, LAST_PROBE_S = 2.0, 60.0
"""Seconds between a refusal for size and the next request that is let in all the same; they double up to the last."""


class AdmissionMargin:
    """The share of a TTFT that admission control leaves; it learns from those that were admitted.

    No model knows which requests arrive next, or how a busy machine slows down. So errors are measured:
    a miss raises the margin, a kept objective lowers it a little, and the two balance where ``MISSES_AIMED_AT`` of the
    admitted miss (adaptive conformal inference, Gibbs and Candes 2021, equation 2). While nothing is learned, the
    margin returns to what it was at first, by half in a minute.
    """

    def __init__(self) -> None:
        self.share = FIRST_MARGIN
        self._last_s = -math.inf

    def at(self, now_s: float) -> None:
        """Let what was learned lose its say as time passes."""
        if now_s > self._last_s:
            self.share = FIRST_MARGIN + (self.share - FIRST_MARGIN) * 0.5 ** (
                (now_s - self._last_s) / _MARGIN_HALF_LIFE_S
            )
            self._last_s = now_s

    def learn(self, *, predicted_s: float, actual_s: float, required_s: float) -> None:
        """Learn from an admitted request's first token: the soonest TTFT predicted, the actual one, its objective."""
        if predicted_s < _CLOSE * (1 - self.share) * required_s:
            return
        missed = float(actual_s > required_s)
        share = self.share + _GAIN * (missed - MISSES_AIMED_AT)
        self.share = min(max(share, LEAST_MARGIN), LARGEST_MARGIN)


class SizeProbes:
    """Says when a request is let in although its prompt alone is predicted to miss the request's own TTFT.

    A prediction that is too long would otherwise refuse such requests for ever, as none would show what they take.
    Each probe that is late doubles the time until the next one; one that is in time shows that the prediction is wrong.
    """

    def __init__(self) -> None:
        self._interval_s = FIRST_PROBE_S
        self._due_s: float | None = None

    def is_due(self, now_s: float) -> bool:
        """Return whether the next one is let in; without a refusal before it, it is not."""
        if self._due_s is None:
            self._due_s = now_s + self._interval_s
        return now_s >= self._due_s

    def learn(self, now_s: float, *, is_late: bool) -> None:
        """Learn from a probe's first token."""
        self._interval_s = min(2 * self._interval_s, LAST_PROBE_S) if is_late else FIRST_PROBE_S
        self._due_s = now_s + (self._interval_s if is_late else 0.0)


class Admission:
    """Lets LS requests in, scales objectives that they cannot keep, and learns from what becomes of those let in.

    Args:
        refuses: Requests are refused; False: all are let in.
        has_margin: Part of a TTFT is left for what no prediction knows.
    """

    def __init__(
        self, forecast: Forecast, *, refuses: bool, has_margin: bool = True, headrooms: Headrooms = USUAL_HEADROOMS
    ) -> None:
        self._forecast, self._headrooms = forecast, headrooms
        self.refuses = refuses
        self._margin = AdmissionMargin()
        self._has_margin = has_margin
        self._probes = SizeProbes()

    @property
    def margin(self) -> float:
        """The share of a TTFT that is left, in [0, 1)."""
        return self._margin.share if self._has_margin else 0.0

    def least_s(self, required_s: float, now_s: float) -> float:
        """Return how long a first token may be predicted to take at most, of a request with this TTFT objective."""
        self._margin.at(now_s)
        return (1 - self.margin) * required_s

    def scale(self, state: RequestState, prediction: TTFTPrediction) -> None:
        """Scale what a request cannot keep of its class's objectives to what it takes alone."""
        if state.request.slo is not None:
            return
        ttft_s, tpot_s = state.slo.ttft_s, state.slo.tpot_s
        if ttft_s is not None and prediction.idle_s > (1 - self._headrooms.ttft) * ttft_s:
            scaled_s = SLO_SCALE * prediction.idle_s
            state.slo, state.later_s = dataclasses.replace(state.slo, ttft_s=scaled_s), scaled_s - ttft_s
        if tpot_s is not None and self._forecast.predictor.has_seen(1):
            step, num_tokens = self._forecast.step(), state.num_tokens
            step.add_decodes(1, num_tokens, self._forecast.shape.keys_seen(num_tokens, 1), samples=1)
            if step.seconds() > (1 - self._headrooms.ls) * tpot_s:
                state.slo = dataclasses.replace(state.slo, tpot_s=SLO_SCALE * step.seconds())
                state.has_scaled_tpot = True

    def judge(
        self,
        state: RequestState,
        prediction: TTFTPrediction,
        *,
        now_s: float,
        waited_s: float,
        is_idle: bool,
        elsewhere_s: float | None = None,
    ) -> None:
        """Let a request in, or refuse it.

        Args:
            prediction: Its TTFT from now on, here.
            waited_s: Seconds from its arrival until a step can have it.
            is_idle: There is no other LS request.
            elsewhere_s: Its TTFT from now on if a prefill engine computes its prompt; None: none would.

        Raises:
            RequestRejected: It would come too late for its objective, because of other LS requests, or because its
                prompt alone takes longer than the objective that it brought.
        """
        required_s = state.slo.ttft_s
        if not self.refuses or required_s is None:
            return
        least_s = self.least_s(required_s, now_s)
        if (
            elsewhere_s is not None
            and waited_s + elsewhere_s <= (1 - max(self._headrooms.ttft, self.margin)) * required_s
        ):
            return
        is_known = self._forecast.predictor.has_seen(prediction.step_rows)
        if state.request.slo is not None and prediction.best_s > required_s:
            is_credible = is_known or prediction.best_s > UNSEEN_ERROR * required_s
            if is_credible and not (is_idle and self._probes.is_due(now_s)):
                raise _too_long(prediction, required_s)
            state.is_probe = True
        elif waited_s + prediction.soonest_s <= least_s:
            state.soonest_ttft_s = waited_s + prediction.soonest_s
        elif is_known and not is_idle:
            raise _too_late(prediction, waited_s, required_s, least_s)
        if not is_known:
            state.unseen_rows = prediction.step_rows

    def learn(self, state: RequestState, now_s: float) -> None:
        """Learn from a request's first token."""
        required_s, actual_s = (state.told_slo or state.slo).ttft_s, now_s - state.arrival_s
        if required_s is None:
            return
        self._margin.at(now_s)
        if state.unseen_rows:
            self._forecast.predictor.note_prompt(state.unseen_rows)
        if state.is_probe:
            self._probes.learn(now_s, is_late=actual_s > required_s)
        if state.soonest_ttft_s is not None:
            self._margin.learn(predicted_s=state.soonest_ttft_s, actual_s=actual_s, required_s=required_s)


def _too_long(prediction: TTFTPrediction, required_s: float) -> RequestRejected:
    return RequestRejected(
        f"the request asks for its first token in {required_s:.3g} s, and its {prediction.num_prompt_tokens} prompt "
        f"tokens alone take {prediction.best_s:.3g} s here: shorten the prompt, relax slo.ttft_s or send it as best "
        "effort",
        predicted_ttft_s=prediction.idle_s,
        required_ttft_s=required_s,
    )


def _too_late(prediction: TTFTPrediction, waited_s: float, required_s: float, least_s: float) -> RequestRejected:
    predicted_s = waited_s + prediction.soonest_s
    # The work in front of it shrinks by a second a second, if nothing else is admitted; without any it is let in.
    retry_after_s = max(prediction.soonest_s - max(least_s, prediction.idle_s), 0.0)
    return RequestRejected(
        f"with the requests before it the first token would take {predicted_s:.3g} s, and its objective is "
        f"{required_s:.3g} s; try again in {retry_after_s:.3g} s, relax slo.ttft_s or send it as best effort",
        retry_after_s=retry_after_s,
        predicted_ttft_s=predicted_s,
        required_ttft_s=required_s,
    )


def scaled_slo(state: RequestState) -> SLO | None:
    """Return the objectives of a request if admission has scaled those of its class; else None."""
    return (state.told_slo or state.slo) if state.has_scaled_ttft or state.has_scaled_tpot else None

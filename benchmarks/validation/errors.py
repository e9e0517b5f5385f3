"""Errors of single requests and steps: the same requests on the engine and on the simulator, one by one."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from omniserve.latency import Predictor, StepSample
from omniserve.simulate.results import RequestResult

FIGURES = ("e2e_s", "ttft_s", "tpot_s")
"""Times of a request: from its arrival to its last token, to its first one, and per token after that."""

Pairs = list[tuple[RequestResult, RequestResult]]


def pairs_of(real: Iterable[RequestResult], simulated: Iterable[RequestResult]) -> Pairs:
    """Return the requests that ended in both runs of a load, one beside the other; those of a class keep their order.

    Raises:
        ValueError: The runs are not of the same requests.
    """
    found: Pairs = []
    ours, others = _by_class(real), _by_class(simulated)
    for name in ours.keys() | others.keys():
        # Of a pile, one run may have begun more than the other.
        for one, other in zip(ours.get(name, ()), others.get(name, ()), strict=False):
            if (one.input_tokens, one.output_tokens) != (other.input_tokens, other.output_tokens):
                raise ValueError(f"these are runs of different loads: {one} stands where {other} does")
            if one.finished_s is not None and other.finished_s is not None:
                found.append((one, other))
    return found


def _by_class(results: Iterable[RequestResult]) -> dict[str, list[RequestResult]]:
    found: dict[str, list[RequestResult]] = {}
    for result in results:
        found.setdefault(result.service_class, []).append(result)
    return found


def request_errors(pairs: Pairs) -> dict[str, list[float]]:
    """Return (simulated - real) / real of each figure, of the requests that have it."""
    found: dict[str, list[float]] = {name: [] for name in FIGURES}
    for real, simulated in pairs:
        for name in FIGURES:
            measured_s, found_s = _figure(real, name), _figure(simulated, name)
            if measured_s and found_s is not None:
                found[name].append(found_s / measured_s - 1)
    return found


def _figure(result: RequestResult, name: str) -> float | None:
    if name == "e2e_s":
        return None if result.finished_s is None else result.finished_s - result.arrival_s
    return result.ttft_s if name == "ttft_s" else result.tpot_s


def step_errors(model: Predictor, steps: Sequence[StepSample]) -> list[float]:
    """Return (predicted - measured) / measured of steps."""
    return [model.step_s(step.features) / step.seconds - 1 for step in steps]


def summed_up(errors: Sequence[float]) -> dict[str, float]:
    """Return the mean of the absolute errors (MAPE), their median, the mean with signs, and how many they are.

    Raises:
        ValueError: There are none.
    """
    if not errors:
        raise ValueError("no request ended in both runs: the load is too short or too light to compare with")
    sizes = [abs(error) for error in errors]
    return {
        "mape": statistics.fmean(sizes), "median": statistics.median(sizes), "bias": statistics.fmean(errors),
        "count": len(errors),
    }  # fmt: skip

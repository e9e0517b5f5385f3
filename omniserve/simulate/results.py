"""The results of a simulation: times of each request, and figures of each class."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from omniserve.core.request import SLO


@dataclass(slots=True)
class RequestResult:
    """The times of a request; None for what it did not reach."""

    service_class: str
    arrival_s: float
    input_tokens: int
    output_tokens: int
    """Wanted."""
    first_token_s: float | None = None
    finished_s: float | None = None
    num_output_tokens: int = 0
    num_host_tokens: int = 0
    """Number of output tokens with attention on the host tier."""
    rejected: bool = False
    num_cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache had; told when it has finished."""
    deadline_s: float | None = None
    """Seconds from arrival within which the whole output was wanted."""

    @property
    def met_deadline(self) -> bool:
        """True if there was a deadline and the whole output came by then."""
        if self.deadline_s is None or self.finished_s is None or self.num_output_tokens < self.output_tokens:
            return False
        return self.finished_s - self.arrival_s <= self.deadline_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None with one token, or if it did not finish."""
        if self.finished_s is None or self.first_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.num_output_tokens - 1)

    def meets_ttft(self, slo: SLO) -> bool:
        return slo.ttft_s is None or (self.ttft_s is not None and self.ttft_s <= slo.ttft_s)

    def meets_tpot(self, slo: SLO) -> bool:
        """Return whether the output kept its pace to the end; one that was cut off by the end of the run did not."""
        if slo.tpot_s is None:
            return self.finished_s is not None
        return self.finished_s is not None and (self.tpot_s is None or self.tpot_s <= slo.tpot_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassResult:
    """Figures of one class. Shares are of all its requests that came; a rejected one met nothing."""

    num_requests: int
    num_rejected: int
    num_finished: int
    ttft_p50_s: float
    """Seconds, over the requests that got a first token, as are the other percentiles; NaN without any."""
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    ttft_attainment: float
    """NaN if none came, as the two below."""
    tpot_attainment: float
    attainment: float
    """Share of requests that met both objectives."""
    goodput: float
    """Requests a second that met both."""
    output_tokens_per_s: float
    """Tokens a second during the load, as are the figures below."""
    prompt_tokens_per_s: float
    """Tokens of prompts that were computed to their end, or found."""
    cached_share: float = 0.0
    """Share of the prompt tokens that the prefix cache had as their requests began, those from prefill engines
    included; 0 without prompts."""
    prefilled_share: float = 0.0
    """Share of the prompt tokens whose KV came from prefill engines."""
    num_deadlines: int = 0
    """Admitted requests with a deadline for the whole output."""
    num_deadlines_met: int = 0
    """Number of these whose output was complete by their deadline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a simulation. Times are simulated seconds."""

    duration_s: float
    """Seconds of the load without its warm-up; rates are over it."""
    end_s: float
    """Time at which the last LS request had ended, or the run was stopped."""
    num_steps: int
    classes: Mapping[str, ClassResult]
    host_share: float
    """Share of the best-effort output tokens with attention on the host tier."""
    host_tier_busy: float
    """Share of the time that the hosts attended, their mean; 0 without a host tier."""
    host_steps_per_layer: float
    """Steps that a token of the host tier took for a layer, 1 at best; 0 if there was none."""
    accepted_drafts: int
    """Output tokens of the whole run that were guessed right."""
    rejected_drafts: int
    """Drafts of the whole run that were not."""
    warm_up_output_tokens: int
    """Best-effort output tokens until the warm-up's end, which no other figure counts."""
    preemptions: int
    """Preemptions of the whole run; the moves are counted over it, too."""
    swaps_out: int
    swaps_in: int
    num_too_long: int
    """Requests left out because they are longer than the context or the pool."""
    wall_s: float
    """Real seconds of simulating."""
    requests: tuple[RequestResult, ...]
    """The requests that came after the warm-up."""


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the linearly interpolated percentile (as NumPy's default); NaN for no values.

    Raises:
        ValueError: ``percent`` is outside [0, 100].
    """
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be in [0, 100], got {percent}")
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(
    requests: Iterable[RequestResult],
    slo: SLO,
    *,
    duration_s: float,
    output_tokens: int,
    prompt_tokens: int,
    cached_tokens: int = 0,
    prefilled_tokens: int = 0,
) -> ClassResult:
    """Return the figures of one class.

    Args:
        requests: Requests of the class.
        slo: Its objectives.
        duration_s: Length of the load, > 0.
        output_tokens: Tokens that were sampled by its end.
        prompt_tokens: Tokens of prompts whose first token was sampled by its end.
        cached_tokens: Tokens found in the cache, of prompts that began by its end.
        prefilled_tokens: Tokens of prompts whose KV came from prefill engines by its end.
    """
    group = list(requests)
    ttfts = [r.ttft_s for r in group if r.ttft_s is not None]
    tpots = [r.tpot_s for r in group if r.tpot_s is not None]
    met_ttft, met_tpot = [r.meets_ttft(slo) for r in group], [r.meets_tpot(slo) for r in group]
    met = sum(a and b for a, b in zip(met_ttft, met_tpot, strict=True))
    count = len(group) or math.nan  # a share of none is no number
    return ClassResult(
        num_requests=len(group),
        num_rejected=sum(r.rejected for r in group),
        num_finished=sum(r.finished_s is not None for r in group),
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p99_s=percentile(ttfts, 99),
        tpot_p50_s=percentile(tpots, 50),
        tpot_p99_s=percentile(tpots, 99),
        ttft_attainment=sum(met_ttft) / count,
        tpot_attainment=sum(met_tpot) / count,
        attainment=met / count,
        goodput=met / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        prompt_tokens_per_s=prompt_tokens / duration_s,
        cached_share=min(1.0, cached_tokens / prompt_tokens) if prompt_tokens else 0.0,
        prefilled_share=min(1.0, prefilled_tokens / prompt_tokens) if prompt_tokens else 0.0,
        num_deadlines=sum(r.deadline_s is not None and not r.rejected for r in group),
        num_deadlines_met=sum(r.met_deadline for r in group),
    )

"""The scheduler's state of one request."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TypeVar, cast

from omniserve.core.lora import LoRA
from omniserve.core.plan import PENDING_TOKEN, PooledRows, PromptScores
from omniserve.core.request import (
    INPUT_COST,
    OUTPUT_COST,
    SLO,
    FinishReason,
    Pooling,
    Request,
    RequestOutput,
    RequestTimes,
    SamplingParams,
    ServiceClass,
    Stay,
    TokenLogprob,
    add_stay,
)
from omniserve.kv.prefix_cache import PrefixKeys
from omniserve.sched.fairness import Account
from omniserve.sched.host_rows import AwayToken

F = TypeVar("F")
LS, BE = ServiceClass.LS, ServiceClass.BE


class Phase(enum.StrEnum):
    """The place of a request's KV, and with it what the scheduler may do with the request."""

    WAITING = "waiting"  # has no block table: new, or preempted
    LOADING = "loading"  # likewise, and waits for KV of its first tokens from a source, or for its LoRA adapter
    DEVICE = "device"  # KV on the device
    ENDING = "ending"  # its last token is pending: it needs no KV any more, and is not scheduled
    MOVING = "moving"  # KV is being copied; not schedulable
    HOST = "host"  # KV on the host tier; decodes there
    DRAINING = "draining"  # ended, but a copy or a host task still touches its KV
    FINISHED = "finished"


@dataclass(slots=True)
class PrefixUse:
    """A request's part in the prefix cache, and in KV that comes from the host or from a source."""

    keys: PrefixKeys
    num_found: int = 0
    """First blocks that the cache had at the last look; only a WAITING request is looked up."""
    num_shared: int = 0
    """Blocks that other requests used when it was admitted, and that it uses since."""
    num_published: int = 0
    """First blocks of a DEVICE request that have been published since its admission."""
    num_coming: int = 0
    """Blocks behind those found that the host will have when the copy is done that the request waits for."""
    was_computed_elsewhere: bool = False
    """Its KV was computed elsewhere for it alone, and has come, since it began to wait: it is not computed again."""
    states: bytes | None = None
    """The recurrent states that came with it, until the KV has been copied to the device, too."""
    may_restore: bool = True
    """A copy of its prefix from the host has not failed yet."""
    num_prompt_tokens: int | None = None
    """Tokens of the prompt that were found at the first admission; None: there was none yet."""


class NewestTokens:
    """The end of a request's tokens: those that steps in flight sample, and what ends the request.

    Args:
        token_ids: The request's tokens, which this changes.
        sampling: What the request asked for.
        max_num_tokens: Tokens of the prompt and the longest output.
    """

    __slots__ = ("_max_num_tokens", "_sampling", "_token_ids", "num_pending")

    def __init__(self, token_ids: list[int], sampling: SamplingParams, max_num_tokens: int) -> None:
        self._token_ids, self._sampling, self._max_num_tokens = token_ids, sampling, max_num_tokens
        self.num_pending = 0
        """Number of PENDING_TOKEN at the end of the tokens."""

    def expect(self, max_model_len: int) -> bool:
        """Append a pending token; return whether it will be the last, whatever it is."""
        if self._sampling.max_tokens > 0:  # else what the prompt tells is all that is asked for
            self._token_ids.append(PENDING_TOKEN)
            self.num_pending += 1
        num_tokens = len(self._token_ids)
        return num_tokens >= self._max_num_tokens or num_tokens >= max_model_len

    def put(self, token_id: int) -> None:
        """Say what the first pending token is."""
        self._token_ids[-self.num_pending] = token_id
        self.num_pending -= 1

    def drop_pending(self) -> None:
        """Forget pending tokens: the request has ended before them."""
        if self.num_pending:
            del self._token_ids[-self.num_pending :]
            self.num_pending = 0

    def finish_reason(
        self, token_id: int, eos_token_ids: tuple[int, ...], max_model_len: int
    ) -> tuple[FinishReason | None, int | None]:
        """Return why the newest token that is not pending ends the request, and the stop token if it is one."""
        if token_id in self._sampling.stop_token_ids:
            return FinishReason.STOP, token_id
        if not self._sampling.ignore_eos and token_id in eos_token_ids:
            return FinishReason.STOP, None
        num_tokens = len(self._token_ids) - self.num_pending
        if num_tokens >= self._max_num_tokens or num_tokens >= max_model_len:
            return FinishReason.LENGTH, None
        return None, None


@dataclass(slots=True)
class HostStays:
    """A request's stays on the host tier: from when it got a slot of the tier until it gave the slot back."""

    since_s: float | None = None
    """Time at which the present stay began; None: the request had no slot when the last step was planned."""
    ended: list[Stay] = field(default_factory=list)
    """Stays that ended and were not told yet."""

    def note(self, has_slot: bool, now_s: float) -> None:
        """Note whether the request has a slot now: a stay begins or ends if that has changed."""
        if has_slot and self.since_s is None:
            self.since_s = now_s
        elif not has_slot and self.since_s is not None:
            add_stay(self.ended, (self.since_s, now_s))
            self.since_s = None

    def take_ended(self) -> tuple[Stay, ...]:
        """Return the stays that have ended since the last call."""
        if not self.ended:
            return ()
        stays, self.ended = tuple(self.ended), []
        return stays


@dataclass(slots=True, eq=False)
class RequestState:
    """The mutable side of a request.

    ``token_ids[:num_computed_tokens]`` have their KV; there is no prefill or decode phase: a step lets
    ``num_computed_tokens`` catch up with ``num_tokens``, and the last known token yields the next.
    """

    request_id: str
    request: Request
    slo: SLO
    """The objectives that hold: its own or its class's, which admission may have scaled (``sched/admission.py``)."""
    kind: ServiceClass
    """The kind of service that the request gets, whatever its class is called."""
    priority_key: tuple[int, float, int]
    """(rank of its class, due time, arrival number): the order among requests of its kind and tenant. The due time is
    that of a BE request's deadline for the whole output; infinity: there is none. LS requests go by their
    objectives."""
    account: Account
    """What its tenant was given of its class."""
    arrival_s: float
    token_ids: list[int]
    lora: LoRA | None = None
    """The adapter that computes it; None: the model alone."""
    lora_slot: int = 0
    """Slot of the adapter; 0: it has none, or waits for it."""
    phase: Phase = Phase.WAITING
    start_tag: float | None = None
    """Virtual time of its tenant as its prompt was counted; None: it has not been admitted yet."""
    num_computed_tokens: int = 0
    slot: int = -1
    epoch: int = -1
    state_slot: int = -1
    """Slot of the recurrent states; -1: no token is computed, or the model has no such states."""
    away: AwayToken | None = None
    num_host_tokens: int = 0
    blocked_since_s: float | None = None
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    predicted_ttft_s: float | None = None
    predicted_here_s: float | None = None
    """The TTFT predicted for a prompt that no prefill engine computes; None: there was none to be asked."""
    soonest_ttft_s: float | None = None
    """The TTFT predicted if BE work gives way entirely; None: admission does not learn from it."""
    later_s: float = 0.0
    """Seconds by which its class's TTFT was scaled up, as its prompt alone takes longer; 0: it was not."""
    told_slo: SLO | None = None
    """The objectives that hold, if a deadline for the whole output has tightened those that it is scheduled by."""
    has_scaled_tpot: bool = False
    """The TPOT of its class was scaled to what its tokens take alone."""
    unseen_rows: int = 0
    """Rows of the steps that were predicted for it and of which none was compared with its prediction yet, which is why
    admission let it in; 0: that was not why."""
    is_probe: bool = False
    """Admission let it in to see whether its prompt really takes longer than its own objective allows."""
    host_stays: HostStays = field(default_factory=HostStays)
    moved_s: float = -math.inf
    """Time at which the request last began to move to another tier."""
    max_num_tokens: int = field(init=False)
    newest: NewestTokens = field(init=False)
    num_scored_rows: int = 0
    """Rows of the prompt that have told their successor's log-probability. A preemption takes nothing back."""
    num_rows_to_score: int = field(init=False)
    """Rows of the prompt whose successor's log-probability is wanted: none unless asked for."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_pooled_rows: int = 0
    """First rows of the prompt that are in the sum of a mean. A preemption takes nothing back."""
    prefix: PrefixUse | None = None
    """The request's part in the prefix cache; None: it has none."""
    facts: dict[type, object] = field(default_factory=dict)
    """Records of features that only some engines have, by type; see ``fact``."""

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.max_num_tokens = len(self.token_ids) + sampling.max_tokens
        self.newest = NewestTokens(self.token_ids, sampling, self.max_num_tokens)
        self.num_rows_to_score = self.request.num_rows_to_score

    @property
    def service_class(self) -> str:
        """The name of its class."""
        return self.request.service_class

    @property
    def adapter(self) -> str:
        """The digest of its LoRA adapter; empty: it has none."""
        return self.lora.digest if self.lora is not None else ""

    @property
    def has_scaled_ttft(self) -> bool:
        return self.later_s > 0

    @property
    def prefill_key(self) -> tuple[int, float, int]:
        """The order of LS prompts: best class first, then by arrival.

        One with a scaled TTFT is computed as if it had come that much later. So a long prompt does not hold up short
        ones, which could still be in time, and is not held up by those that come once it is due itself.
        """
        return (self.priority_key[0], self.arrival_s + self.later_s, self.order)

    @property
    def order(self) -> int:
        """Arrival number."""
        return self.priority_key[2]

    @property
    def has_due_time(self) -> bool:
        """True for a BE request with a deadline."""
        return self.priority_key[1] < math.inf

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def next_cost(self) -> float:
        """Cost for its tenant of what the request gets next: its prompt, or an output token."""
        if self.start_tag is None:
            return INPUT_COST * (self.num_prompt_tokens - self.num_ready_tokens)
        return OUTPUT_COST

    def note_admission(self) -> None:
        """Count the prompt, without what need not be computed, unless it was counted before a preemption."""
        if self.start_tag is None:
            self.start_tag = self.account.admit(max(0, self.num_prompt_tokens - self.num_computed_tokens))

    def fact(self, kind: type[F]) -> F:
        """Return what a feature knows of the request, in a record of the feature's own; a new one at first."""
        if (found := self.facts.get(kind)) is None:
            found = self.facts[kind] = kind()
        return cast(F, found)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the output, pending ones included."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Number of PENDING_TOKEN at the end of ``token_ids``: steps in flight sample them."""
        return self.newest.num_pending

    @property
    def num_ready_tokens(self) -> int:
        """First tokens that have their KV; while it has no block table, those that it will find in the prefix cache."""
        if self.prefix is not None and self.phase in (Phase.WAITING, Phase.LOADING):
            num_coming = self.prefix.num_coming if self.phase is Phase.LOADING else 0
            return (self.prefix.num_found + num_coming) * self.prefix.keys.block_size
        return self.num_computed_tokens

    @property
    def has_kv(self) -> bool:
        """The request has begun and was not preempted since: it holds KV on a tier, or is about to end."""
        return self.phase not in (Phase.WAITING, Phase.LOADING)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def decodes(self) -> bool:
        """The newest token alone is uncomputed, and there is output already."""
        return self.num_uncomputed_tokens == 1 and self.num_output_tokens > 0

    @property
    def needs_all_rows(self) -> bool:
        """Rows that the prefix cache has are computed all the same, for what they tell."""
        return self.num_rows_to_score > self.num_scored_rows or self.request.sampling.pooling == Pooling.MEAN

    def num_logits(self, start: int, count: int) -> int:
        """Return how many of the rows ``[start, start + count)`` become logits."""
        if self.request.sampling.pooling is not None:
            return 0
        num_scored = min(start + count, self.num_rows_to_score) - max(start, self.num_scored_rows)
        return (start + count == len(self.token_ids)) + max(0, num_scored)

    def scores(self, start: int, count: int) -> PromptScores | None:
        """Return what the rows ``[start, start + count)`` have to tell of the prompt's log-probabilities."""
        first, end = max(start, self.num_scored_rows), min(start + count, self.num_rows_to_score)
        num_top = self.request.sampling.prompt_logprobs
        if first >= end or num_top is None:
            return None
        return PromptScores(
            first_row=first - start, token_ids=tuple(self.token_ids[first + 1 : end + 1]), num_top=num_top
        )

    def pooled(self, start: int, count: int) -> PooledRows | None:
        """Return which of the rows ``[start, start + count)`` are pooled."""
        pooling, end = self.request.sampling.pooling, start + count
        if pooling is None:
            return None
        if pooling == Pooling.LAST:
            return PooledRows(first_row=count - 1, total=1) if end == self.num_tokens else None
        if (first := max(start, self.num_pooled_rows)) >= end:
            return None
        return PooledRows(first_row=first - start, total=end if end == self.num_tokens else None)

    def output(
        self,
        new_token_ids: tuple[int, ...] = (),
        new_logprobs: tuple[TokenLogprob, ...] = (),
        *,
        prompt_logprobs: tuple[TokenLogprob, ...] = (),
        embedding: tuple[float, ...] = (),
        reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        now_s: float | None = None,
    ) -> RequestOutput:
        """Return a RequestOutput of the present state; ``now_s`` is the finish time if there is a reason.

        Pending tokens do not count. Stays on the host tier are told once.
        """
        if reason is not None and now_s is not None:
            self.host_stays.note(False, now_s)
        return RequestOutput(
            request_id=self.request_id,
            service_class=self.service_class,
            new_token_ids=new_token_ids,
            new_logprobs=new_logprobs,
            prompt_logprobs=prompt_logprobs,
            embedding=embedding,
            finish_reason=reason,
            stop_reason=stop_reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens - self.num_pending_tokens,
            num_host_tokens=self.num_host_tokens,
            num_cached_tokens=self.prefix.num_prompt_tokens or 0 if self.prefix is not None else 0,
            times=RequestTimes(
                arrival_s=self.arrival_s,
                first_scheduled_s=self.first_scheduled_s,
                first_token_s=self.first_token_s,
                finished_s=now_s if reason is not None else None,
                predicted_ttft_s=self.predicted_ttft_s,
                host_since_s=self.host_stays.since_s,
            ),
            host_stays=self.host_stays.take_ended(),
        )

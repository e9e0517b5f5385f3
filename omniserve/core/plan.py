"""The decision of a scheduler (StepPlan) and what comes of it (StepOutput). Ids and counts, no tensors.

A step runs the batch ``[device rows | P piggyback seats]`` through all layers (one pass: the papers' iteration).

The number of rows is constant through a step, and P is one of a small set of buckets, so one compiled function serves
every layer. The number changes within a step only at a safepoint, or where rows that left come back. A step without
piggyback rows is plain continuous batching with chunked prefill.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeVar

from omniserve.core.request import TokenLogprob
from omniserve.core.work import SideWork

W = TypeVar("W", bound=SideWork)

PENDING_TOKEN = -1
"""Stands for a request's newest token in a plan that was made before the host knew it: the step in flight samples it,
and it never leaves the device on its way into this one."""


MAX_DRAFTS = 8
"""Most drafts of a request in a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptScores:
    """Rows of a chunk: the log-probabilities of the prompt tokens that follow them are returned."""

    first_row: int
    """Index in the chunk."""
    token_ids: tuple[int, ...]
    """The tokens that follow this row and each of the next."""
    num_top: int
    """Likeliest tokens to tell beside each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledRows:
    """Rows of a chunk, up to its end, whose hidden states are pooled."""

    first_row: int
    """Index in the chunk."""
    total: int | None
    """Number of rows of the request that are pooled in all, if these are the last of them; None: more follow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceChunk:
    """Tokens ``[start, start + len(token_ids))`` of one request, attended on the device."""

    request_id: str
    token_ids: tuple[int, ...]
    """The last may be PENDING_TOKEN."""
    start: int
    """Position of the first token; KV of ``[0, start)`` is on the device already."""
    block_ids: tuple[int, ...]
    """Device blocks that cover ``[0, start + len(token_ids))``, in order."""
    samples: bool
    """The newest known token is among the rows, so a new token is sampled from its row."""
    num_drafts: int = 0
    """Number of drafts at the end of ``token_ids``: guesses at the tokens that follow the newest known one. A token is
    sampled from their rows, too, and what a draft's row gives counts if the row before it has given the draft."""
    is_reversed: bool = False
    """The blocks run from the right: offset i of a block is its slot ``block_size - 1 - i``."""
    from_layer: int = 0
    """Above 0: these very tokens left an earlier step before this layer, and go on there (``StepOutput.halted``)."""
    leaves_at: int = 0
    """Above 0: the rows leave the step before this layer, as planned, and go on there in a later one (omniserve 6)."""
    is_preemptible: bool = False
    """The rows may be asked to leave the step between two layers (conserve 4.3, omniserve 6), by policies whose options
    have ``preempts``."""
    scores: PromptScores | None = None
    """Scores of the prompt that the rows tell; None unless the request asked for log-probabilities of its prompt and
    these rows are the first to tell them."""
    pooled: PooledRows | None = None
    """Rows that are pooled; None unless the request asked for an embedding and some of these rows are part of it. No
    token is sampled for such a request: its embedding is known with its last token's row."""
    state_slot: int = -1
    """Slot of the request's recurrent states, if the model has such; a chunk that starts at 0 begins with none."""
    lora_slot: int = 0
    """Slot of the request's LoRA adapter; 0: it has none."""

    @property
    def drafts(self) -> tuple[int, ...]:
        """The drafts among its tokens, in order."""
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    @property
    def num_sampled_rows(self) -> int:
        """Rows that a token is sampled from."""
        return self.samples * (1 + self.num_drafts) if self.pooled is None else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PiggybackEntry:
    """A BE token that begins its way on the host tier: embedded and sent through pre-attention of layer 0."""

    request_id: str
    token_id: int
    """The token's id. May be PENDING_TOKEN, but not in ``StepPlan.pipelined``."""
    position: int
    slot: int
    """Host slot: the row in the residual store and in the host tier's queues."""
    epoch: int
    """The slot's epoch, raised whenever the slot changes hands; a result with another epoch is stale."""
    block_ids: tuple[int, ...]
    """Host blocks that cover ``[0, position + num_rows)``, in order."""
    state_slot: int = -1
    """Slot of the request's recurrent states, as in ``DeviceChunk``."""
    lora_slot: int = 0
    """Slot of the request's adapter, as in ``DeviceChunk``. Its rows keep it from here on: a join does not say it."""
    draft_ids: tuple[int, ...] = ()
    """Drafts of the tokens behind it. They pass the layers with it, a row each, and are verified after the last one."""
    is_hybrid: bool = False
    """In ``StepPlan.pipelined``: its row is in the first sub-batch, a hybrid one then, and runs the dense halves
    with the device rows (apex figure 2). Such a step has device rows in every layer, and no other piggyback rows."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token, and its drafts behind it."""
        return (self.token_id, *self.draft_ids)

    @property
    def num_rows(self) -> int:
        """Rows of the step, side by side: the token's, then those of its drafts."""
        return 1 + len(self.draft_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class PiggybackJoin:
    """A BE token that joins this step at ``layer``, where its attention comes back from the host tier."""

    request_id: str
    position: int
    slot: int
    epoch: int
    layer: int
    state_slot: int = -1
    """Slot of the request's recurrent states, as in ``DeviceChunk``."""
    draft_ids: tuple[int, ...] = ()
    """The drafts that go on with it: those that entered with it, or the first of them."""
    is_ready: bool = True
    """False: a late join. Its result is expected by the time the step reaches the layer; if it is not there then, the
    seat stays empty and the token stays away (``StepOutput.missed``)."""

    @property
    def num_rows(self) -> int:
        """Rows of the token and its drafts, as in ``PiggybackEntry``."""
        return 1 + len(self.draft_ids)


class Bound(enum.StrEnum):
    """The reason that kept work out of a step."""

    TIME = "time"  # the step would have become longer than its bound, or, of host rows, bring less a second
    TOKENS = "tokens"  # max_num_batched_tokens
    REQUESTS = "requests"  # max_num_seqs
    MEMORY = "memory"  # no device blocks
    HOST_MEMORY = "host memory"  # no host blocks
    SEATS = "seats"  # max_piggyback_seats or max_piggyback_rows
    COHORT = "cohort"  # too few host requests for those on the device: they wait for more (apex)
    DEFERRED = "deferred"  # its rows left a step for a higher class, and have slack to wait for it (omniserve 6)
    ORDER = "order"  # a request before it was kept out, which it must not overtake


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """Work of one kind that could have been in a step and was not."""

    work: str
    """``LS prefill``, ``LS deferred``, ``BE prefill``, ``BE decode``, ``piggyback entry``, ``piggyback join``,
    ``pipelined row``."""
    num_requests: int
    first_request_id: str
    bound: Bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The reasons why a step is what it is. Seconds; None where the policy has no latency model."""

    predicted_s: float | None = None
    """The whole step."""
    predicted_ls_s: float | None = None
    """The step without its best-effort work."""
    bound_s: float | None = None
    """The bound up to which best-effort work was added, in seconds; None without a bound."""
    bound_by: str = ""
    """The source of the bound: ``tpot of <request>``, ``tpot of class <class>``, ``ttft of <request>``, ``ttft of a new
    request``, ``residual time of <request>``."""
    left_out: tuple[LeftOut, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """A step; it has nothing to run (``is_empty``) if all requests wait for the host tier."""

    step_id: int
    chunks: tuple[DeviceChunk, ...] = ()
    entries: tuple[PiggybackEntry, ...] = ()
    joins: tuple[PiggybackJoin, ...] = ()
    """Tokens that join, with at most ``num_piggyback_seats`` rows a layer."""
    joins_as_one: bool = False
    """A late join that misses its layer keeps all others of that layer away, too (apex 3.3: one cohort)."""
    num_piggyback_seats: int = 0
    """P: seats for piggyback rows, one of a small set of buckets; 0 is plain continuous batching."""
    work: tuple[SideWork, ...] = ()
    """Side work to start before anything of the step's rows, in this order."""
    pipelined: tuple[PiggybackEntry | PiggybackJoin, ...] = ()
    """The second sub-batch of asymmetric pipelining: entries, then joins by layer, without drafts, that pass all layers
    they have left in this very step, while the device waits for each of their results (NEO; apex 2.3, 3.2)."""
    decision: Decision | None = None
    """The reasons for the plan, for traces; None if the policy gives none."""

    def side_work(self, kind: type[W]) -> list[W]:
        """Return the side work of one type, in its order."""
        return [work for work in self.work if isinstance(work, kind)]

    @property
    def num_device_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def preemptible(self) -> frozenset[str]:
        """Requests whose rows may be asked to leave the step."""
        return frozenset(chunk.request_id for chunk in self.chunks if chunk.is_preemptible)

    @property
    def stops(self) -> bool:
        """Rows may be asked to leave the step between two layers, or leave it there as planned."""
        return any(chunk.is_preemptible or chunk.leaves_at for chunk in self.chunks)

    @property
    def hybrid(self) -> frozenset[str]:
        """Requests of ``pipelined`` whose rows are in the first sub-batch."""
        return frozenset(row.request_id for row in self.pipelined if isinstance(row, PiggybackEntry) and row.is_hybrid)

    @property
    def doubtful(self) -> frozenset[str]:
        """Requests of ``joins`` that may miss the step: late ones, and with ``joins_as_one`` all at their layers."""
        late = [join for join in self.joins if not join.is_ready]
        if not (late and self.joins_as_one):
            return frozenset(join.request_id for join in late)
        layers = {join.layer for join in late}
        return frozenset(join.request_id for join in self.joins if join.layer in layers)

    @property
    def has_host_rows(self) -> bool:
        """Rows of the step are attended on the host tier."""
        return bool(self.entries or self.joins or self.pipelined)

    @property
    def begun(self) -> tuple[PiggybackEntry, ...]:
        """The tokens that begin their way on the host tier."""
        return self.entries + tuple(row for row in self.pipelined if isinstance(row, PiggybackEntry))

    @property
    def is_empty(self) -> bool:
        """True when no row is computed (side work may still start)."""
        return not (self.chunks or self.entries or self.joins or self.pipelined)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledToken:
    """A new token."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """The result of a plan that the runner has run."""

    tokens: Mapping[str, tuple[SampledToken, ...]] = field(default_factory=dict)
    """Request id -> new tokens, for every sampling chunk, every join at the last layer and all of ``pipelined``: one,
    and one more for each draft that the rows before it have confirmed."""
    prompt_logprobs: Mapping[str, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    """Request id -> what its chunk's ``scores`` asked for, unless it was halted or has failed."""
    embeddings: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Request id -> its embedding, if its chunk has the last of the rows that are pooled, unless it was halted."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Request id -> message, for requests that cannot go on (non-finite logits, say)."""
    unverified: frozenset[str] = frozenset()
    """Requests with drafts that got non-finite logits, maybe because of a draft: nothing of their chunks counts."""
    halted: Mapping[str, int] = field(default_factory=dict)
    """Request id -> layer, for chunks that were asked to leave: the first layer that was not computed; 0: what was
    computed is dropped."""
    lost: frozenset[str] = frozenset()
    """Requests of ``pipelined`` that must be recomputed, as their host attention failed."""
    missed: frozenset[str] = frozenset()
    """Requests of ``joins`` that did not join: the results of late ones were not there in time."""


def drafts_of(plan: StepPlan, last_layer: int, absent: Set[str]) -> dict[str, tuple[int, ...]]:
    """Return the drafts that a step verifies, by request: those of device rows, and of joins at the last layer.

    ``absent`` are requests whose joins did not join.
    """
    drafts = {chunk.request_id: chunk.drafts for chunk in plan.chunks if chunk.num_drafts}
    for join in plan.joins:
        if join.draft_ids and join.layer == last_layer and join.request_id not in absent:
            drafts[join.request_id] = join.draft_ids
    return drafts


def without_missed(plan: StepPlan, missed: Set[str]) -> StepPlan:
    """Return a plan with only the joins that joined; ``missed`` as in StepOutput."""
    if not missed:
        return plan
    return dataclasses.replace(plan, joins=tuple(join for join in plan.joins if join.request_id not in missed))


def joins_by_layer(plan: StepPlan) -> Mapping[int, Sequence[PiggybackJoin]]:
    """Return the joins of a plan by layer, in the order of their seats."""
    joining: defaultdict[int, list[PiggybackJoin]] = defaultdict(list)
    for join in plan.joins:
        joining[join.layer].append(join)
    return joining


def is_whole(plan: StepPlan, halted: Mapping[str, int]) -> bool:
    """Return True if all rows of a step passed all layers: only then did it take the time of its rows.

    ``halted`` as in StepOutput.
    """
    return not halted and all(chunk.from_layer == 0 for chunk in plan.chunks)

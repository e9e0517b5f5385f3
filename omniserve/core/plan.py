"""The decision of a scheduler (StepPlan) and what comes of it (StepOutput, HostEvent). Ids and counts, no tensors.

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

from omniserve.core.request import TokenLogprob

PENDING_TOKEN = -1
"""Stands for a request's newest token in a plan that was made before the host knew it: the step in flight samples it,
and it never leaves the device on its way into this one."""


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
    scores: PromptScores | None = None
    """Scores of the prompt that the rows tell; None unless the request asked for log-probabilities of its prompt and
    these rows are the first to tell them."""
    state_slot: int = -1
    """Slot of the request's recurrent states, if the model has such; a chunk that starts at 0 begins with none."""

    @property
    def drafts(self) -> tuple[int, ...]:
        """The drafts among its tokens, in order."""
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    @property
    def num_sampled_rows(self) -> int:
        """Rows that a token is sampled from."""
        return self.samples * (1 + self.num_drafts)


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
    draft_ids: tuple[int, ...] = ()
    """Drafts of the tokens behind it. They pass the layers with it, a row each, and are verified after the last one."""

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


class MoveDirection(enum.StrEnum):
    """The direction of a move."""

    TO_HOST = "to_host"
    TO_DEVICE = "to_device"


@dataclass(frozen=True, kw_only=True, slots=True)
class KVMove:
    """Copy a request's blocks (all layers, K and V) between tiers, beside the steps.

    The request is not schedulable until the move's HostEvent arrives; source and destination stay allocated until then.
    """

    request_id: str
    """Empty: the blocks are of prefixes that no request uses. They may be written meanwhile."""
    move_id: int
    direction: MoveDirection
    src_block_ids: tuple[int, ...]
    dst_block_ids: tuple[int, ...]
    is_checkpoint: bool = False
    """A copy to the host of blocks that are full, and so never written again: the request goes on meanwhile."""
    is_reversed: bool = False
    """The device blocks run from the right; those of the host never do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskCopy:
    """Copy host blocks of prefixes (all layers, K and V) to the file of the disk tier, or back, beside the steps."""

    move_id: int
    """Number of the copy, of the same series as ``KVMove``'s; its event is MOVE_DONE or MOVE_FAILED, too."""
    to_disk: bool
    host_block_ids: tuple[int, ...]
    slots: tuple[int, ...]
    """Places in the file."""
    keys: tuple[bytes, ...]
    """Keys of the blocks (``kv.prefix_cache``), which are written with them and compared when they are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemotePrefill:
    """Have a prefill engine compute the first tokens of a prompt, and bring their KV into host blocks."""

    move_id: int
    """Number of the prefill, of the same series as ``KVMove``'s; its event is PREFILL_DONE or PREFILL_FAILED."""
    engine: int
    """Number of the prefill engine, from 1."""
    token_ids: tuple[int, ...]
    """Tokens of full blocks, from the prompt's first token on."""
    first_block: int
    """The KV of the blocks before it is here already."""
    host_block_ids: tuple[int, ...]
    """Host blocks for the KV from ``first_block`` on."""
    service_class: str
    ttft_s: float | None
    """Seconds within which the KV should be here for the first token to be in time; None: the request has no objective,
    or is late anyway."""
    cache_salt: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotCopy:
    """Copy the slots ``[begin, end)`` of a device block (all layers, K and V) into those of another one."""

    source_block: int
    target_block: int
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLoad:
    """Put recurrent states that a prefill engine has computed where those of a request are."""

    state_slot: int
    states: bytes = field(repr=False)


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
    """The source of the bound: ``tpot of <request>``, ``ttft of <request>``, ``ttft of a new request``, ``residual time
    of <request>``."""
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
    state_loads: tuple[StateLoad, ...] = ()
    """Recurrent states to put into their slots before anything else of the step reads or writes."""
    relocations: tuple[SlotCopy, ...] = ()
    """Slots to copy, in this order, before anything else of the step reads or writes."""
    moves: tuple[KVMove, ...] = ()
    """Copies to start; they run beside the steps."""
    disk_copies: tuple[DiskCopy, ...] = ()
    """Copies to and from the disk to start; they run beside the steps."""
    prefills: tuple[RemotePrefill, ...] = ()
    """Prompts to ask prefill engines for."""
    prefill_cancels: tuple[int, ...] = ()
    """``move_id`` of earlier prefills whose requests have ended: they are stopped. Each still has its event."""
    pipelined: tuple[PiggybackEntry | PiggybackJoin, ...] = ()
    """The second sub-batch of asymmetric pipelining: entries, then joins by layer, without drafts, that pass all layers
    they have left in this very step, while the device waits for each of their results (NEO; apex 2.3, 3.2)."""
    hybrid: frozenset[str] = frozenset()
    """Requests among the entries of ``pipelined`` whose rows are in the first sub-batch, which then is a hybrid one:
    they run the dense halves with the device rows (apex figure 2). Such a step has device rows in every layer, and no
    other piggyback rows."""
    preemptible: frozenset[str] = frozenset()
    """Requests whose device rows may be asked to leave between two layers (conserve 4.3, omniserve 6), under a policy
    whose options say that it ``preempts``."""
    cancels: tuple[int, ...] = ()
    """Host slots of aborted requests: their tasks are cancelled; each still reports an event."""
    decision: Decision | None = None
    """The reasons for the plan, for traces; None if the policy gives none."""

    @property
    def num_device_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def doubtful(self) -> frozenset[str]:
        """Requests of ``joins`` that may miss the step: late ones, and with ``joins_as_one`` all at their layers."""
        late = [join for join in self.joins if not join.is_ready]
        if not (late and self.joins_as_one):
            return frozenset(join.request_id for join in late)
        layers = {join.layer for join in late}
        return frozenset(join.request_id for join in self.joins if join.layer in layers)

    @property
    def is_empty(self) -> bool:
        """True when no row is computed (moves may still start)."""
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


HOST_BLOCKS = 1 << 24
"""Ids of blocks for each host (``kHostBlocks`` in ``ops/csrc/host_tier.h``): blocks of host h on the network are from
``h * HOST_BLOCKS`` on, those of this machine's host tier below."""


class HostEventKind(enum.StrEnum):
    """An event that the host tier or a KV copy reports."""

    ATTENTION_DONE = "attention_done"
    ATTENTION_FAILED = "attention_failed"
    MOVE_DONE = "move_done"
    MOVE_FAILED = "move_failed"
    TIER_DOWN = "tier_down"
    """The last host thread died: what is on the host tier must be recomputed on the device."""
    PREFILL_DONE = "prefill_done"
    PREFILL_FAILED = "prefill_failed"
    """The KV of a ``RemotePrefill`` has come; if it failed, that of its first ``num_blocks`` blocks."""
    PREFILL_JOINED = "prefill_joined"
    """A prefill engine can be asked; its number is ``host``."""
    PREFILL_LOST = "prefill_lost"
    """A prefill engine, ``host``, can no longer be asked; what it was asked for has failed."""
    HOST_LOST = "host_lost"
    """A CPU host on the network is lost: what is there must be recomputed."""
    HOST_JOINED = "host_joined"
    """A CPU host on the network can be used, for the first time or again; it holds nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostEvent:
    """Something that finished beside the steps. Events of one slot arrive in order, those of others in any."""

    kind: HostEventKind
    slot: int = -1
    epoch: int = -1
    layer: int = -1
    position: int = -1
    move_id: int = -1
    host: int = 0
    """Number of the network host or prefill engine, from 1; 0: this machine's host tier."""
    num_blocks: int = 0
    """HOST_JOINED: KV blocks of the new host. PREFILL_DONE and PREFILL_FAILED: blocks whose KV has come."""
    num_threads: int = 0
    """HOST_JOINED: threads that attend on the new host."""
    seconds: float = 0.0
    """Seconds that a ``DiskCopy`` took, from when a thread began it, or a ``RemotePrefill`` behind the one before
    it."""
    at_s: float = 0.0
    """End of a ``RemotePrefill``, seconds on the engine's clock."""
    states: bytes | None = field(default=None, repr=False)
    """PREFILL_DONE: the recurrent states behind the last token, if the model has such."""
    message: str = ""

"""ModelRunner: StepPlan -> layers -> token ids, whatever the policy. Paper: omniserve 3.2, 4.

Batch rows are ``[device rows | P piggyback seats]``. They pass the layers in constant shapes where such were captured
(``cuda_graphs``), else in shapes of their own (``LayerLoop``). In layer l a seat holds, up to the attention, the token
that came through layer l-1 (or, at layer 0, one that enters); from the attention on, a token whose attention at l came
back from the host tier.

Legend: T rows, D hidden, N query heads, K KV heads, H head size, P seats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from omniserve import ops  # noqa: F401  registers torch.ops.omniserve
from omniserve.core.plan import PiggybackEntry, StepOutput, StepPlan
from omniserve.core.setup import RunnerSetup
from omniserve.core.work import CancelTask, HostEvent, KVMove, SideWork, SlotCopy, StateLoad, TierDown
from omniserve.host.cores import CoreSplit
from omniserve.host.tier import HostTier
from omniserve.kv.storage import DeviceKVStorage
from omniserve.layers.patching import PatchedModel
from omniserve.layers.tracing.layer_states import StatePool
from omniserve.ops.attention import DeviceAttention, resolve_attention
from omniserve.ops.attention.native import attend_triton
from omniserve.ops.stage_link import StageLink
from omniserve.ops.streams import StreamEvent
from omniserve.runner.capturable import make_graphs
from omniserve.runner.late_results import LateResults
from omniserve.runner.layer_loop import LayerLoop
from omniserve.runner.piggyback_rows import PiggybackRows
from omniserve.runner.rank_broadcast import RankBroadcast
from omniserve.runner.states import StepStates
from omniserve.runner.step_inputs import LayersOutput, PendingTokens
from omniserve.runner.strategies import make_strategies
from omniserve.runner.warm_up import warm_up_attention
from omniserve.sampling.prompt_scores import score_prompts
from omniserve.sampling.sampler import PendingSample, Sampler

Executor = Callable[[Any], object]
"""Starts a piece of side work of the type that it is for."""


class EventSource(Protocol):
    """Something that works beside the steps."""

    def poll(self) -> Sequence[HostEvent]:
        """Return the events since the last call. Never blocks."""
        ...


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose work the device has been given."""

    output: StepOutput
    """The step's output without its tokens."""
    sample: PendingSample | None
    """The tokens; None: the step samples nothing."""
    end: StreamEvent | None = None
    """The end of a step that computes something but samples nothing."""
    doubtful: Callable[[], frozenset[str]] | None = None
    """Waits for the step, and returns more requests whose joins did not join."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerParts:
    """The parts of a runner that belong to its process."""

    model: PatchedModel
    sampler: Sampler | None = None
    """The sampler; None: this rank does not sample."""
    tier: HostTier | None = None
    executors: Mapping[type[SideWork], Executor] = field(default_factory=dict)
    """Executors of the side work that only some engines have."""
    sources: Sequence[EventSource] = ()
    """What tells events, the host tier first; none: it is all there is."""
    safepoint: Callable[[], Set[str]] = frozenset
    """Asked between two layers which requests' rows must leave the step, on rank 0, if the setup has safepoints."""
    broadcast: RankBroadcast = field(default_factory=RankBroadcast)
    stage: StageLink = field(default_factory=StageLink)


class ModelRunner:
    """Executes plans; the sampler must know every request that may sample.

    A runner begins with its kernels compiled, and its steps captured if the settings ask for that.

    Raises:
        ValueError: The settings ask for a device attention or graphs that this device or model does not allow.
    """

    def __init__(self, setup: RunnerSetup, parts: RunnerParts) -> None:
        config, model, tier = setup.config, parts.model, parts.tier
        self._model, self._sampler, self._tier, self._broadcast = model, parts.sampler, tier, parts.broadcast
        self._sources = parts.sources or ((tier,) if tier is not None else ())
        self._storage = DeviceKVStorage(
            model.spec,
            num_blocks=setup.num_device_blocks,
            block_size=config.block_size,
            dtype=model.dtype,
            device=model.device,
            layers=model.layers,
        )
        threads = setup.host_tier.num_threads if setup.host_tier is not None else 0
        self._cores = CoreSplit(device=model.device, device_threads=config.device_threads, host_threads=threads)
        self.host_works = False
        """The host tier attended, or was given a task, when the last step began. Moves do not count: a copy takes a
        small part of a step, and the step would have half of the cores for all of its time."""
        self._late_results = LateResults(tier, parts.broadcast)
        self._host_was_healthy = True
        self._ended: Set[str] = frozenset()
        """Requests that have ended since the step that is launched was planned: they need no token."""
        self._pending = PendingTokens(model.device)
        self.states = StepStates(model, num_slots=setup.num_state_slots)
        """The recurrent states of all requests, if the model has such."""
        self._executors = _executors(parts, self._storage, self.states)
        name = config.execution.attention
        attend = resolve_attention(name, model.device, model.spec.attention, is_directed=setup.is_directed)
        self._rows = PiggybackRows(model, tier, config.max_host_requests if tier is not None else 0)
        self.loop = LayerLoop(
            model=model,
            storage=self._storage,
            attend=attend,
            rows=self._rows,
            pending=self._pending,
            states=self.states,
            stage=parts.stage,
        )
        """Runs the steps that fit no captured shape."""
        self.strategies = make_strategies(
            setup,
            self.loop,
            tier=tier,
            late_results=self._late_results,
            broadcast=parts.broadcast,
            safepoint=parts.safepoint,
        )
        """The kinds of steps that need hooks."""
        self.graphs = make_graphs(setup, self.loop, parts.broadcast)
        """Runs the steps that fit a captured shape; None: nothing is captured."""
        self._warm_up(setup, attend)

    def _warm_up(self, setup: RunnerSetup, attend: DeviceAttention) -> None:
        """Compile kernels, and capture steps if the settings ask for that."""
        config, model = setup.config, self._model
        if model.device.type == "cuda" and attend is attend_triton:  # others choose no kernel by shape
            warm_up_attention(
                attend,
                self._storage,
                model.spec,
                max_rows=config.max_num_batched_tokens,
                max_requests=2 * config.max_num_seqs,  # best-effort ones come beside as many latency-sensitive ones
                max_blocks=-(-setup.max_model_len // config.block_size),
                is_directed=setup.is_directed,
            )
        if self.graphs is not None:
            model.warm_up(fused=True)  # also the layers that no graph calls by themselves
            self.graphs.capture_all()

    @property
    def steps_by_threads(self) -> Mapping[int, int]:
        """The number of steps that ran with each number of the device tier's CPU threads; empty with a GPU."""
        return self._cores.steps_by_threads

    def collect(self, step: LaunchedStep) -> StepOutput:
        """Wait for a launched step's end or tokens, and for nothing that was launched after it. Call this once a step.

        A step without tokens is waited for, too: otherwise the host could launch any number of them ahead of the
        device, and a new request would wait for all.
        """
        if step.end is not None:
            step.end.wait("a step")
        output = step.output
        if step.doubtful is not None:
            output = dataclasses.replace(output, missed=output.missed | step.doubtful())
        if step.sample is None:
            return output
        sampled, failed = step.sample.result()
        tokens = {request_id: some for request_id, some in sampled.items() if some}
        return dataclasses.replace(
            output,
            tokens=tokens,
            failed={**output.failed, **failed},
            unverified=frozenset(sampled.keys() - tokens.keys()),
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step on the device; a CPU has run it when this returns.

        This waits for the host tier only if the plan has a second sub-batch, and for the device only if rows may leave
        between two layers, or if log-probabilities of a prompt are wanted.
        """
        for work in plan.work:
            self._executors[type(work)](work)
        if plan.is_empty:
            return LaunchedStep(StepOutput(), None)
        self._begin_tokens(plan)
        if plan.entries or plan.joins:
            self._rows.announce(plan)
            self._rows.bring(plan)
        has_host_rows = bool(plan.entries or plan.joins or plan.pipelined)
        self.host_works = has_host_rows or (self._tier is not None and self._tier.attends)
        self._cores.apply(host_works=self.host_works)
        layers = self._run_layers(plan)
        if not self.loop.stage.is_last:
            return LaunchedStep(StepOutput(), None, end=StreamEvent(self._model.device))
        return self._sample(plan, layers)

    def _run_layers(self, plan: StepPlan) -> LayersOutput:
        hooks = [hooks for strategy in self.strategies if (hooks := strategy.hooks(plan)) is not None]
        if self.graphs is not None and (layers := self.graphs.run(plan, hooks)) is not None:
            return layers
        return self.loop.run_with(plan, hooks) if hooks else self.loop.run(plan)

    def _sample(self, plan: StepPlan, layers: LayersOutput) -> LaunchedStep:
        """Launch what follows the last layer: logits, and the tokens of the rows that are sampled."""
        wanted = layers.sampled.scores
        scores, failed = score_prompts(self._model.logits, layers.hidden_TD, wanted) if wanted else ({}, {})
        hidden_TD = layers.hidden_TD[layers.sampled.rows]
        request_ids = list(layers.sampled.request_ids)
        output = dataclasses.replace(layers.outcome, prompt_logprobs=scores, failed=failed)
        if not request_ids:
            return LaunchedStep(output, None, end=StreamEvent(self._model.device), doubtful=layers.doubtful)
        drafts = {chunk.request_id: chunk.drafts for chunk in plan.chunks if chunk.num_drafts}
        last = self._model.num_layers - 1
        drafts |= {
            join.request_id: join.draft_ids
            for join in plan.joins
            if join.draft_ids and join.layer == last and join.request_id not in output.missed
        }
        logits_RV = self._model.logits(hidden_TD)
        if self._ended:
            here = [row for row, request_id in enumerate(request_ids) if request_id not in self._ended]
            logits_RV, request_ids = logits_RV[here], [request_ids[row] for row in here]
            if not here:
                return LaunchedStep(output, None, end=StreamEvent(self._model.device))
        if self._sampler is None:
            tokens_R = torch.empty(len(logits_RV), dtype=torch.int64, device=self._model.device)
            self._broadcast.share(tokens_R)
            self._pending.note(request_ids, tokens_R)
            return LaunchedStep(output, None, end=StreamEvent(self._model.device), doubtful=layers.doubtful)
        sample = self._sampler.launch(logits_RV, request_ids, drafts)
        self._broadcast.share(sample.tokens_R)
        self._pending.note(request_ids, sample.tokens_R)
        return LaunchedStep(output, sample, doubtful=layers.doubtful)

    def poll_host(self) -> list[HostEvent]:
        """Return the events of side work, first those that came during a step that waited; once, the tier's death."""
        if self._tier is None:
            return []
        events = self._late_results.take_events()
        for source in self._sources:
            events += source.poll()
        if self._host_was_healthy and not self._tier.healthy:
            self._host_was_healthy = False
            events.append(TierDown())
        return events

    def forget(self, request_id: str) -> None:
        """Drop what the sampler and the strategies keep of a request, which has ended."""
        if self._sampler is not None:
            self._sampler.remove(request_id)
        for strategy in self.strategies:
            strategy.forget(request_id)

    def _begin_tokens(self, plan: StepPlan) -> None:
        """Bind the slots of tokens that begin their way on the host tier."""
        if self._tier is None:
            return
        pipelined = (row for row in plan.pipelined if isinstance(row, PiggybackEntry))
        for entry in (*plan.entries, *pipelined):
            self._tier.begin_token(entry.slot, entry.epoch, entry.position, entry.block_ids, entry.num_rows)


def _executors(parts: RunnerParts, storage: DeviceKVStorage, states: StepStates) -> dict[type[SideWork], Executor]:
    """Return what starts each type of side work. None of it refers to the runner, which would keep its KV if closed."""
    executors: dict[type[SideWork], Executor] = {
        SlotCopy: storage.copy_slots,
        StateLoad: _load_into(states.pool),
        **parts.executors,
    }
    if parts.tier is not None:
        executors |= {CancelTask: _cancel_in(parts.tier), KVMove: _move_by(parts.tier, storage)}
    return executors


def _cancel_in(tier: HostTier) -> Executor:
    return lambda cancel: tier.cancel(cancel.slot)


def _move_by(tier: HostTier, storage: DeviceKVStorage) -> Executor:
    return lambda move: tier.start_move(move, storage.k_LBKSH, storage.v_LBKSH)


def _load_into(pool: StatePool) -> Executor:
    return lambda load: pool.load(load.state_slot, load.states)

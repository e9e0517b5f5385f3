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
from typing import Protocol

import torch

from omniserve import ops  # noqa: F401  registers torch.ops.omniserve
from omniserve.core.plan import StepOutput, StepPlan, drafts_of
from omniserve.core.setup import RunnerSetup
from omniserve.core.work import HostEvent, SideWork, TierDown
from omniserve.host.arrived_results import StageEvents
from omniserve.host.cores import CoreSplit
from omniserve.host.tier import HostTier
from omniserve.kv.storage import DeviceKVStorage
from omniserve.layers.patched_model import PatchedModel
from omniserve.ops.streams import StreamEvent
from omniserve.runner.capturable import make_graphs
from omniserve.runner.executors import Executor, make_executors
from omniserve.runner.layer_loop import HeldEvents, LayerLoop, MakeLoop
from omniserve.runner.piggyback_rows import PiggybackRows
from omniserve.runner.rank_broadcast import RankBroadcast
from omniserve.runner.replayed_steps import make_replayed
from omniserve.runner.states import StepStates
from omniserve.runner.step_inputs import LayersOutput, PendingTokens
from omniserve.runner.strategies import MakeStrategies, StrategyContext, make_strategies
from omniserve.runner.warm_up import device_attention, warm_up
from omniserve.sampling.pooler import PendingEmbeddings, Pooler
from omniserve.sampling.prompt_scores import score_prompts
from omniserve.sampling.sampler import PendingSample, Sampler


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
    amend: Callable[[StepOutput], StepOutput] | None = None
    """Waits for the step, and returns the output with what is known only then."""
    embeddings: PendingEmbeddings | None = None
    """The embeddings that the step has completed; None: there are none."""


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
    strategies: MakeStrategies = make_strategies
    """Makes the strategies for steps that need hooks."""
    broadcast: RankBroadcast = field(default_factory=RankBroadcast)
    make_loop: MakeLoop = LayerLoop
    stage_events: StageEvents | None = None
    """What the host tier has told, on a rank of a stage; None: there are no stages."""


class ModelRunner:
    """Executes plans; the sampler must know every request that may sample.

    A runner begins with its kernels compiled, and its steps captured if the settings ask for that.

    Raises:
        ValueError: The settings ask for a device attention or graphs that this device or model does not allow.
    """

    def __init__(self, setup: RunnerSetup, parts: RunnerParts) -> None:
        config, model, tier = setup.config, parts.model, parts.tier
        self._model, self._sampler, self._tier, self._broadcast = model, parts.sampler, tier, parts.broadcast
        self._pooler = Pooler(model.last_hidden)
        self._sources = parts.sources or ((tier,) if tier is not None else ())
        self._storage = DeviceKVStorage(
            model.spec,
            num_blocks=setup.num_device_blocks,
            block_size=config.block_size,
            dtype=model.dtype,
            device=model.device,
            layers=model.layers,
            kv_dtype=config.execution.kv_dtype,
        )
        threads = setup.host_tier.num_threads if setup.host_tier is not None else 0
        self._cores = CoreSplit(device=model.device, device_threads=config.device_threads, host_threads=threads)
        self.host_works = False
        """The host tier attended, or was given a task, when the last step began. Moves do not count: a copy takes a
        small part of a step, and the step would have half of the cores for all of its time."""
        self._held = HeldEvents()
        self._host_was_healthy = True
        self._ended: Set[str] = frozenset()
        """Requests that have ended since the step that is launched was planned: they need no token and no embedding."""
        self._pending = PendingTokens(model.device)
        self.states = StepStates.of(model, setup)
        self._executors = make_executors(self._storage, self.states.pool, tier, parts.executors)
        attend = device_attention(setup, model)
        self._rows = PiggybackRows(model, tier, config.max_host_requests if tier is not None else 0)
        self.loop = parts.make_loop(
            model=model,
            storage=self._storage,
            attend=attend,
            rows=self._rows,
            pending=self._pending,
            states=self.states,
        )
        """Runs the steps that fit no captured shape."""
        context = StrategyContext(
            loop=self.loop, tier=tier, held=self._held, broadcast=parts.broadcast, stage_events=parts.stage_events
        )
        self.strategies = parts.strategies(setup, context)
        """The kinds of steps that need hooks."""
        self.graphs = make_graphs(setup, self.loop, parts.broadcast)
        """Runs the steps that fit a captured shape; None: nothing is captured."""
        self._replayed = make_replayed(setup, self.loop)
        """Runs the decode steps whose calls were noted; None: there are none."""
        warm_up(setup, model, self._storage, attend)
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
        if step.amend is not None:
            output = step.amend(output)
        if step.embeddings is not None:
            embeddings, failed = step.embeddings.result()
            output = dataclasses.replace(output, embeddings=embeddings, failed={**output.failed, **failed})
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

        This waits for the device only if log-probabilities of a prompt are wanted, or a strategy does; for the host
        tier only if a strategy does.
        """
        for work in plan.work:
            self._executors[type(work)](work)
        if plan.is_empty:
            return LaunchedStep(StepOutput(), None)
        self._begin_tokens(plan)
        if plan.entries or plan.joins:
            self._rows.announce(plan)
            self._rows.bring(plan)
        self.host_works = plan.has_host_rows or (self._tier is not None and self._tier.attends)
        self._cores.apply(host_works=self.host_works)
        return self._sample(plan, self._run_layers(plan))

    def _run_layers(self, plan: StepPlan) -> LayersOutput:
        hooks = [hooks for strategy in self.strategies if (hooks := strategy.hooks(plan)) is not None]
        if self.graphs is not None and (layers := self.graphs.run(plan, hooks)) is not None:
            return layers
        if hooks:
            return self.loop.run_with(plan, hooks)
        if self._replayed is not None and (layers := self._replayed.run(plan)) is not None:
            return layers
        return self.loop.run(plan)

    def _sample(self, plan: StepPlan, layers: LayersOutput) -> LaunchedStep:
        """Launch what follows the last layer: tokens, and embeddings where rows are pooled."""
        step = self._sample_tokens(plan, layers)
        pooled = [rows for rows in layers.sampled.pooled if rows[0] not in self._ended]
        if pooled and self._sampler is not None:
            embeddings = self._pooler.launch(layers.hidden_TD, pooled)
            step = dataclasses.replace(step, embeddings=embeddings)
        return step

    def _sample_tokens(self, plan: StepPlan, layers: LayersOutput) -> LaunchedStep:
        """Launch the logits, and the tokens of the rows that are sampled."""
        wanted = layers.sampled.scores
        scores, failed = score_prompts(self._model.logits, layers.hidden_TD, wanted) if wanted else ({}, {})
        hidden_TD = layers.hidden_TD[layers.sampled.rows]
        request_ids = list(layers.sampled.request_ids)
        output = dataclasses.replace(layers.outcome, prompt_logprobs=scores, failed=failed)
        if not request_ids:
            return LaunchedStep(output, None, end=StreamEvent(self._model.device), amend=layers.amend)
        logits_RV = self._model.logits(hidden_TD)
        if self._ended:
            here = [row for row, request_id in enumerate(request_ids) if request_id not in self._ended]
            logits_RV, request_ids = logits_RV[here], [request_ids[row] for row in here]
            if not here:
                return LaunchedStep(output, None, end=StreamEvent(self._model.device), amend=layers.amend)
        if self._sampler is None:
            tokens_R = torch.empty(len(logits_RV), dtype=torch.int64, device=self._model.device)
            self._broadcast.share(tokens_R)
            self._pending.note(request_ids, tokens_R)
            return LaunchedStep(output, None, end=StreamEvent(self._model.device), amend=layers.amend)
        drafts = drafts_of(plan, self._model.num_layers - 1, output.missed)
        sample = self._sampler.launch(logits_RV, request_ids, drafts)
        self._broadcast.share(sample.tokens_R)
        self._pending.note(request_ids, sample.tokens_R)
        return LaunchedStep(output, sample, amend=layers.amend)

    def poll_host(self) -> list[HostEvent]:
        """Return the events of side work, first those that came during a step that waited; once, the tier's death."""
        events = self._held.take()
        for source in self._sources:
            events += source.poll()
        if self._tier is not None and self._host_was_healthy and not self._tier.healthy:
            self._host_was_healthy = False
            events.append(TierDown())
        return events

    def forget(self, request_id: str) -> None:
        """Drop what the sampler and the strategies keep of a request, which has ended."""
        if self._sampler is not None:
            self._sampler.remove(request_id)
        self._pooler.remove(request_id)
        for strategy in self.strategies:
            strategy.forget(request_id)

    def _begin_tokens(self, plan: StepPlan) -> None:
        """Bind the slots of tokens that begin their way on the host tier."""
        if self._tier is None:
            return
        for entry in plan.begun:
            self._tier.begin_token(entry.slot, entry.epoch, entry.position, entry.block_ids, entry.num_rows)

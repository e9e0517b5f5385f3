"""ModelRunner: StepPlan -> layers -> token ids, whatever the policy. Paper: omniserve 3.2, 4.

Batch rows are ``[device rows | P piggyback seats]``. They pass the layers in constant shapes where such were captured
(``cuda_graphs``), else in shapes of their own (``LayerLoop``). In layer l a seat holds, up to the attention, the token
that came through layer l-1 (or, at layer 0, one that enters); from the attention on, a token whose attention at l came
back from the host tier.

Legend: T rows, D hidden, N query heads, K KV heads, H head size, P seats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat

import torch
from torch import Tensor

from omniserve import ops  # noqa: F401  registers torch.ops.omniserve
from omniserve.core.config import EngineConfig
from omniserve.core.plan import HostEvent, HostEventKind, PiggybackEntry, StepOutput, StepPlan
from omniserve.host.cores import CoreSplit
from omniserve.host.tier import HostTier
from omniserve.kv.storage import DeviceKVStorage
from omniserve.layers.patching import BetweenHook, PatchedModel, Rotary
from omniserve.ops.attention import DeviceAttention, resolve_attention
from omniserve.ops.attention.native import attend_triton
from omniserve.ops.streams import StreamEvent, upload
from omniserve.runner.cuda_graphs.graph_runner import CudaGraphRunner, wants_graphs
from omniserve.runner.late_results import LateResults, MissedJoins
from omniserve.runner.piggyback_rows import PiggybackRows
from omniserve.runner.pipelining import AwaitedResults, HybridRows, SecondBatch, hybrid_entries, with_seats
from omniserve.runner.safepoint import HaltedRows, Safepoints
from omniserve.runner.states import StepStates
from omniserve.runner.step_inputs import (
    LayersOutput,
    PendingTokens,
    SeatRows,
    StepInputs,
    joins_by_layer,
    make_step_inputs,
    requests_in_seats,
    sampled_rows,
    stops_between_layers,
)
from omniserve.runner.warm_up import warm_up_attention
from omniserve.sampling.prompt_scores import score_prompts
from omniserve.sampling.sampler import PendingSample, Sampler

# Looked up once: the attribute chain costs as much as a small operator.
_store_kv = torch.ops.omniserve.store_kv.default


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose work the device has been given."""

    output: StepOutput
    """The step's output without its tokens."""
    sample: PendingSample | None
    """The tokens; None: the step samples nothing."""
    end: StreamEvent | None = None
    """The end of a step that computes something but samples nothing."""
    doubtful: MissedJoins | None = None
    """Joins of which the device tells whether they have joined."""


class ModelRunner:
    """Executes plans; the sampler must know every request that may sample.

    It begins with its kernels compiled, and its steps captured if the settings ask for that. With ``is_directed`` KV
    blocks may run from the right. ``keep_halted`` and ``safepoint`` as in ``HaltedRows`` and ``LayerLoop``.

    Raises:
        ValueError: The settings ask for a device attention or graphs that this device or model does not allow.
    """

    def __init__(
        self, config: EngineConfig, *, model: PatchedModel, storage: DeviceKVStorage, sampler: Sampler,
        tier: HostTier | None, host_threads: int, max_model_len: int, is_directed: bool, keep_halted: bool,
        safepoint: Callable[[], Set[str]] | None, num_state_slots: int,
    ) -> None:  # fmt: skip
        self._model, self._storage, self._sampler, self._tier = model, storage, sampler, tier
        self._cores = CoreSplit(
            device=model.device, device_threads=config.device_threads,
            host_threads=host_threads if tier is not None else 0,
        )  # fmt: skip
        self.host_works = False
        """The host tier attended, or was given a task, when the last step began. Moves do not count: a copy takes a
        small part of a step, and the step would have half of the cores for all of its time."""
        self._late_results = LateResults(tier)
        self._host_was_healthy = True
        self.halted = HaltedRows(keep=keep_halted)
        """Rows that left a step between two layers."""
        self._pending = PendingTokens(model.device)
        self.states = StepStates(model, num_slots=num_state_slots)
        """The recurrent states of all requests, if the model has such."""
        attend = resolve_attention(
            config.execution.attention, model.device, model.spec.attention, is_directed=is_directed
        )
        self._rows = rows = PiggybackRows(model, tier, config.max_host_requests if tier is not None else 0)
        self.graphs: CudaGraphRunner | None = None
        """Runs the steps that fit a captured shape; None: nothing is captured."""
        if wants_graphs(config, model, attend):
            self.graphs = CudaGraphRunner(
                config, model=model, storage=storage, attention=attend, rows=rows, max_model_len=max_model_len,
                has_host_tier=tier is not None, is_directed=is_directed,
            )  # fmt: skip
        self.loop = LayerLoop(
            model=model, storage=storage, attend=attend, rows=rows, late_results=self._late_results,
            halted=self.halted, pending=self._pending, states=self.states, safepoint=safepoint,
        )  # fmt: skip
        """Runs the other steps."""
        if model.device.type == "cuda" and attend is attend_triton:  # others choose no kernel by shape
            warm_up_attention(
                attend, storage, model.spec, max_rows=config.max_num_batched_tokens,
                max_requests=2 * config.max_num_seqs,  # best-effort ones come beside as many latency-sensitive ones
                max_blocks=-(-max_model_len // config.block_size), is_directed=is_directed,
            )  # fmt: skip
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
            output = dataclasses.replace(output, missed=output.missed | step.doubtful.result())
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
        if plan.relocations:
            self._storage.copy_slots(plan.relocations)
        self._hand_over(plan)
        if plan.is_empty:
            return LaunchedStep(StepOutput(), None)
        if plan.entries or plan.joins:
            self._rows.announce(plan)
            self._rows.bring(plan)
        has_host_rows = bool(plan.entries or plan.joins or plan.pipelined)
        self.host_works = has_host_rows or (self._tier is not None and self._tier.attends)
        self._cores.apply(host_works=self.host_works)
        if self.halted.rows:
            self.halted.forget(chunk.request_id for chunk in plan.chunks if not chunk.from_layer)
        second, hybrid = self._sub_batches(plan) if plan.pipelined else (None, None)
        layers = self._run_layers(plan, second, hybrid)
        wanted = layers.sampled.scores
        scores, failed = score_prompts(self._model.logits, layers.hidden_TD, wanted) if wanted else ({}, {})
        hidden_TD = layers.hidden_TD[layers.sampled.rows]
        request_ids, lost = list(layers.sampled.request_ids), frozenset[str]()
        if second is not None:
            second_TD, second_ids, lost = second.result()
            hidden_TD, request_ids = torch.cat([hidden_TD, second_TD]), request_ids + second_ids
        output = StepOutput(
            prompt_logprobs=scores, failed=failed, halted=layers.halted, lost=lost | layers.lost, missed=layers.missed
        )
        if not request_ids:
            return LaunchedStep(output, None, end=StreamEvent(self._model.device), doubtful=layers.doubtful)
        drafts = {chunk.request_id: chunk.drafts for chunk in plan.chunks if chunk.num_drafts}
        last = self._model.num_layers - 1
        drafts |= {
            join.request_id: join.draft_ids
            for join in plan.joins
            if join.draft_ids and join.layer == last and join.request_id not in layers.missed
        }
        sample = self._sampler.launch(self._model.logits(hidden_TD), request_ids, drafts)
        self._pending.note(request_ids, sample.tokens_R)
        return LaunchedStep(output, sample, doubtful=layers.doubtful)

    def _run_layers(self, plan: StepPlan, second: SecondBatch | None, hybrid: HybridRows | None) -> LayersOutput:
        if self.graphs is not None and (shape := self.graphs.shape_for(plan)) is not None:
            return self.graphs.run(plan, shape, self._pending)
        if hybrid is not None:
            return self.loop.run_hybrid(plan, second, hybrid)
        if stops_between_layers(plan):
            return self.loop.run_one_by_one(plan, second)
        return self.loop.run(plan)

    def poll_host(self) -> list[HostEvent]:
        """Return the host tier's events, those first that came while a step waited for other ones; once, its death."""
        if self._tier is None:
            return []
        events = self._late_results.take_events() + self._tier.poll()
        if self._host_was_healthy and not self._tier.healthy:
            self._host_was_healthy = False
            events.append(HostEvent(kind=HostEventKind.TIER_DOWN))
        return events

    def forget(self, request_id: str) -> None:
        """Drop what the sampler and halted rows keep of a request, which has ended."""
        self._sampler.remove(request_id)
        if self.halted.rows:
            self.halted.forget([request_id])

    def _sub_batches(self, plan: StepPlan) -> tuple[SecondBatch | None, HybridRows | None]:
        """Return the second sub-batch of a step, and the host rows of the first, if there are any."""
        assert self._tier is not None
        awaited = AwaitedResults(self._tier, self._late_results.keep)
        rows = tuple(row for row in plan.pipelined if row.request_id not in plan.hybrid)
        second = SecondBatch(
            rows, model=self._model, awaited=awaited,
            residuals_SD=self._rows.residuals_SD[:: self._rows.max_rows],  # those of tokens, without drafts
            between=self.states.of_decodes(rows),
        ) if rows else None  # fmt: skip
        return second, HybridRows(hybrid_entries(plan), awaited, second) if plan.hybrid else None

    def _hand_over(self, plan: StepPlan) -> None:
        """Give the host tier what does not depend on this step's layers: cancels, moves, and tokens that begin."""
        if self._tier is None:
            return
        for slot in plan.cancels:
            self._tier.cancel(slot)
        for move in plan.moves:
            self._tier.start_move(move, self._storage.k_LBKSH, self._storage.v_LBKSH)
        pipelined = (row for row in plan.pipelined if isinstance(row, PiggybackEntry))
        for entry in (*plan.entries, *pipelined):
            self._tier.begin_token(entry.slot, entry.epoch, entry.position, entry.block_ids, entry.num_rows)


@dataclass(kw_only=True, slots=True)
class LayerLoop:
    """Runs the layers of any plan."""

    model: PatchedModel
    storage: DeviceKVStorage
    attend: DeviceAttention
    rows: PiggybackRows
    late_results: LateResults
    halted: HaltedRows
    """Holds the rows that leave a step between two layers until a later step goes on with them."""
    pending: PendingTokens
    states: StepStates
    safepoint: Callable[[], Set[str]] | None
    """Asked between the layers of a step with preemptible rows which requests' rows must leave. None: they never do."""

    def run(self, plan: StepPlan) -> LayersOutput:
        """Run the layers of a step whose rows are the same in all of them."""
        inputs, rotary, hidden_TD = self._begin(plan)
        between = self.states.of_plan(plan, inputs.missed)
        hidden_TD = self._run_layers(range(self.model.num_layers), inputs, rotary, between, hidden_TD)
        return self._output(plan, inputs, hidden_TD)

    def run_one_by_one(self, plan: StepPlan, second: SecondBatch | None) -> LayersOutput:
        """Run a step's layers, stopping at each of them.

        Rows may leave the step and rejoin it before a layer. A second sub-batch runs its pre-attention before the layer
        and its post-attention after it.
        """
        safepoints = Safepoints(plan, halted=self.halted, must_leave=self.safepoint, device=self.model.device)
        present = safepoints.present
        inputs, rotary, hidden_TD = self._begin(present)
        between = self.states.of_plan(present, inputs.missed)
        for layer in range(self.model.num_layers):
            hidden_TD = safepoints.before_layer(layer, hidden_TD)
            if safepoints.present is not present:
                present, before = safepoints.present, inputs
                # The seats are the same as before, and so is what is known of late joins.
                inputs = dataclasses.replace(
                    self._inputs(present), joining=before.joining, missed=before.missed, found=before.found
                )
                rotary = islice(self._rotary(inputs), layer, None)
                between = self.states.of_plan(present, inputs.missed)
            if second is not None:
                second.begin_layer(layer)
            hidden_TD = self._run_layers(range(layer, layer + 1), inputs, rotary, between, hidden_TD)
            if second is not None:
                second.end_layer(layer)
        return self._output(present, inputs, hidden_TD, safepoints.left)

    def run_hybrid(self, plan: StepPlan, second: SecondBatch | None, hybrid: HybridRows) -> LayersOutput:
        """Run the layers of a step whose first sub-batch has host rows; see ``pipelining``."""
        plan = with_seats(plan, self.model.num_layers)
        inputs, rotary, hidden_TD = self._begin(plan)
        attend = partial(self._attend_hybrid, inputs, hybrid)
        between = self.states.of_plan(plan, frozenset())
        hidden_TD = self.model.run_layers(range(self.model.num_layers), hidden_TD, rotary, attend, between=between)
        if second is not None:
            second.end_layer(self.model.num_layers - 1)
        inputs.missed.update(hybrid.lost)
        output = self._output(plan, inputs, hidden_TD)
        return dataclasses.replace(output, lost=output.missed, missed=frozenset())

    def _attend_hybrid(
        self, inputs: StepInputs, hybrid: HybridRows, layer: int, hidden_TD: Tensor, q_TNH: Tensor, k_TKH: Tensor,
        v_TKH: Tensor,
    ) -> Tensor:  # fmt: skip
        n = inputs.num_device_rows
        hybrid.send(layer, q_TNH[n:], k_TKH[n:], v_TKH[n:])
        attn_TD = self._attend_device(inputs, layer, hidden_TD, q_TNH[:n], k_TKH[:n], v_TKH[:n])
        return torch.cat([attn_TD, hybrid.results(layer, hidden_TD.device)])

    def _output(
        self, plan: StepPlan, inputs: StepInputs, hidden_TD: Tensor, halted: Mapping[str, int] | None = None
    ) -> LayersOutput:
        sampled, missed = inputs.sampled, frozenset(inputs.missed)
        if missed:
            sampled = sampled_rows(
                plan, num_layers=self.model.num_layers, first_seat=inputs.num_device_rows, device=self.model.device,
                missed=missed,
            )  # fmt: skip
        doubtful: MissedJoins | None = None
        if inputs.found:
            joining = joins_by_layer(plan)
            seats = [requests_in_seats(joining[layer], inputs.num_seats) for layer in inputs.found]
            doubtful = MissedJoins(list(chain.from_iterable(seats)), torch.stack([*inputs.found.values()]))
        return LayersOutput(hidden_TD, sampled, halted or {}, missed, doubtful)

    def _begin(self, plan: StepPlan) -> tuple[StepInputs, Iterator[Rotary], Tensor]:
        """Return the inputs of a plan, the rotary tables of its layers, and what the first layer is given."""
        inputs = self._inputs(plan)
        self.pending.fill(inputs.token_ids_T, plan)
        hidden_TD = self.model.embed(inputs.token_ids_T, inputs.positions_T)
        return inputs, self._rotary(inputs), hidden_TD

    def _inputs(self, plan: StepPlan) -> StepInputs:
        block_size, num_layers = self.storage.block_size, self.model.num_layers
        return make_step_inputs(
            plan, block_size=block_size, num_layers=num_layers, max_host_rows=self.rows.max_rows,
            device=self.model.device,
        )  # fmt: skip

    def _rotary(self, inputs: StepInputs) -> Iterator[Rotary]:
        """Return (cos, sin) ``[T, H]`` of each layer's pre-attention; in the seats each layer has other tokens."""
        if inputs.num_seats:
            return self.rows.rotary_per_layer(inputs)
        return repeat(self.model.rotary(inputs.positions_T) or (None, None), self.model.num_layers)

    def _run_layers(
        self, layers: range, inputs: StepInputs, rotary: Iterator[Rotary], between: BetweenHook | None,
        hidden_TD: Tensor,
    ) -> Tensor:  # fmt: skip
        if not inputs.num_device_rows:
            return self._run_seats(layers, inputs, rotary, between, hidden_TD)
        attend = self._attend_with_seats if inputs.num_seats else self._attend_device
        return self.model.run_layers(layers, hidden_TD, rotary, partial(attend, inputs), between=between)

    def _attend_device(
        self, inputs: StepInputs, layer: int, hidden_TD: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor
    ) -> Tensor:
        k_cache, v_cache = self.storage.k_layers[layer], self.storage.v_layers[layer]
        _store_kv(k_TKH, v_TKH, k_cache, v_cache, inputs.slot_mapping)
        out_TNH = self.attend(q_TNH, k_cache, v_cache, inputs.attention, self.model.spec.attention[layer])
        return out_TNH.view(inputs.num_device_rows, -1)

    def _attend_with_seats(
        self, inputs: StepInputs, layer: int, hidden_TD: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor
    ) -> Tensor:
        if (leaving := inputs.leaving(layer)) is not None:
            self.rows.leave(layer, leaving, hidden_TD, q_TNH, k_TKH, v_TKH)
        n = inputs.num_device_rows
        attn_TD = self._attend_device(inputs, layer, hidden_TD, q_TNH[:n], k_TKH[:n], v_TKH[:n])
        joining = self._joining(inputs, layer)
        rows_P = joining.rows_P if joining is not None else self.rows.empty_seats(inputs.num_seats)
        return self.rows.join(rows_P, attn_TD, hidden_TD)

    def _joining(self, inputs: StepInputs, layer: int) -> SeatRows | None:
        """Return the seats into which results come at a layer; None if all stay empty. Late joins are settled here."""
        seats = inputs.joining.get(layer)
        if seats is None or not seats.late:
            return seats
        if self.rows.are_received:
            inputs.joining[layer] = self._receive(inputs, layer, seats)
        else:
            inputs.settle(layer, self.late_results.settle(seats.late, as_one=inputs.joins_as_one))
        return inputs.joining.get(layer)

    def _receive(self, inputs: StepInputs, layer: int, seats: SeatRows) -> SeatRows:
        """Let the device find out which joins of a layer have their results; no row of others is sent on."""
        assert seats.wanted_P is not None
        joined_P = torch.empty_like(seats.wanted_P)
        as_one_1 = upload(torch.tensor([int(inputs.joins_as_one)]), joined_P.device)
        self.rows.receive(seats.rows_P, seats.wanted_P, as_one_1, joined_P)
        inputs.found[layer] = joined_P
        return SeatRows(rows_P=joined_P, slots_P=seats.slots_P, positions=seats.positions)

    def _run_seats(
        self, layers: range, inputs: StepInputs, rotary: Iterator[Rotary], between: BetweenHook | None,
        hidden_TD: Tensor,
    ) -> Tensor:  # fmt: skip
        """Run only the halves that rows in seats need, in a step without device rows."""
        for layer, (cos, sin) in zip(layers, rotary, strict=False):
            if (leaving := inputs.leaving(layer)) is not None:
                if between is not None:
                    hidden_TD = between(layer, hidden_TD)
                q_TNH, k_TKH, v_TKH = self.model.pre_attention(layer, hidden_TD, cos, sin)
                self.rows.leave(layer, leaving, hidden_TD, q_TNH, k_TKH, v_TKH)
            if (joining := self._joining(inputs, layer)) is not None:
                attn_TD = self.rows.join(joining.rows_P, self.rows.no_results, hidden_TD)
                hidden_TD = self.model.post_attention(layer, attn_TD, hidden_TD)
        if between is not None and layers.stop - 1 in inputs.joining and layers.stop == self.model.num_layers:
            hidden_TD = between(layers.stop, hidden_TD)
        return hidden_TD

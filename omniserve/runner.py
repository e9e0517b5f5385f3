"""ModelRunner: StepPlan -> tensors -> layers -> token ids. One loop for every policy.

Batch rows are ``[device rows | P piggyback seats]``. In layer l a seat holds, up to the attention, the token that came
through layer l-1 (or, at layer 0, one that enters); from the attention on, a token whose attention at l came back from
the host tier. Between the layers a second sub-batch may run (``pipelining``). Paper: omniserve 3.2, 4.

Legend: T rows, D hidden, N query heads, K KV heads, H head size, P seats, L layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from omniserve import ops  # noqa: F401  registers torch.ops.omniserve
from omniserve.cores import CoreSplit
from omniserve.host.tier import HostTier
from omniserve.kv.storage import DeviceKVStorage
from omniserve.ops.attention import DeviceAttention
from omniserve.patching import PatchedModel
from omniserve.pending_tokens import PendingTokens
from omniserve.piggyback_rows import Parcel, PiggybackRows
from omniserve.pipelining import SecondBatch
from omniserve.plan import HostEvent, PiggybackEntry, StepOutput, StepPlan
from omniserve.prompt_scores import score_prompts
from omniserve.safepoint import HaltedRows, until_layer, without
from omniserve.sampling import PendingSample, Sampler
from omniserve.step_inputs import StepInputs, make_step_inputs

# Looked up once: the attribute chain costs as much as a small operator.
_store_kv = torch.ops.omniserve.store_kv.default
_piggyback_concat = torch.ops.omniserve.piggyback_concat.default
_residual_store = torch.ops.omniserve.residual_store.default
_residual_fetch = torch.ops.omniserve.residual_fetch.default


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device has been given."""

    output: StepOutput
    """What is known of it already: all but the tokens."""
    sample: PendingSample | None
    """None: it samples nothing."""


class ModelRunner:
    """Executes plans.

    Args:
        model: The patched model.
        storage: The device tier's KV.
        attend: Device attention.
        sampler: Knows every request that may sample.
        tier: The host tier, or None.
        num_slots: Rows of the residual store.
        cores: Told before each step whether the host tier works.
        keep_halted: Keep what rows that leave a step between two layers had computed.
        safepoint: Asked between the layers of a step with preemptible rows: must they leave? None: they never do.
    """

    def __init__(
        self,
        *,
        model: PatchedModel,
        storage: DeviceKVStorage,
        attend: DeviceAttention,
        sampler: Sampler,
        tier: HostTier | None,
        num_slots: int,
        cores: CoreSplit,
        keep_halted: bool = True,
        safepoint: Callable[[], bool] | None = None,
    ) -> None:
        self._model = model
        self._storage = storage
        self._attend = attend
        self._sampler = sampler
        self._tier = tier
        self._cores = cores
        self.host_works = False
        """The host tier attended, or was given something to, when the last step began. Moves do not count: a copy takes
        a small part of a step, and would cost all of it half of the cores."""
        self._early_events: list[HostEvent] = []
        self.halted = HaltedRows(keep=keep_halted)
        """Rows that left a step between two layers."""
        self.safepoint = safepoint
        """Asked between the layers of a step with preemptible rows: must they leave?"""
        self._residuals_SD = torch.zeros(num_slots, model.spec.hidden_size, dtype=model.dtype, device=model.device)
        self._rows = PiggybackRows(model, tier)
        self._pending = PendingTokens(model.device)

    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one step to its end."""
        return self.collect(self.launch(plan))

    def collect(self, step: LaunchedStep) -> StepOutput:
        """Wait for a launched step's tokens, and for nothing that was launched after it; to be called once."""
        if step.sample is None:
            return step.output
        tokens, failed = step.sample.result()
        return dataclasses.replace(step.output, tokens=tokens, failed={**step.output.failed, **failed})

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Give the device all of a step; the CPU has run it then.

        Waits for the host tier only if the plan has a second sub-batch, and for the device if there is something to
        decide between its layers, or a prompt's log-probabilities to tell.
        """
        self._storage.copy_slots(plan.relocations)
        self._hand_over(plan)
        if plan.is_empty:
            return LaunchedStep(StepOutput(), None)
        has_host_rows = bool(plan.entries or plan.joins or plan.pipelined)
        self.host_works = has_host_rows or (self._tier is not None and self._tier.attends)
        self._cores.apply(host_works=self.host_works)
        self.halted.forget(chunk.request_id for chunk in plan.chunks if not chunk.from_layer)
        second = self._second_batch(plan)
        hidden_TD, inputs, halted = self._run_layers(plan, second)
        scores, unscored = score_prompts(self._model.logits, hidden_TD, inputs.scores) if inputs.scores else ({}, {})
        hidden_TD = hidden_TD[inputs.sampling_rows]
        request_ids, lost = list(inputs.sampling_request_ids), frozenset[str]()
        if second is not None:
            second_TD, second_ids, lost = second.result()
            hidden_TD, request_ids = torch.cat([hidden_TD, second_TD]), request_ids + second_ids
        output = StepOutput(prompt_logprobs=scores, failed=unscored, halted=halted, lost=lost)
        if not request_ids:
            return LaunchedStep(output, None)
        sample = self._sampler.launch(self._model.logits(hidden_TD), request_ids)
        self._pending.note(request_ids, sample.tokens_R)
        return LaunchedStep(output, sample)

    def take_events(self) -> list[HostEvent]:
        """Return, once, the host tier's events that came while a step waited for others."""
        events, self._early_events = self._early_events, []
        return events

    def _second_batch(self, plan: StepPlan) -> SecondBatch | None:
        if not plan.pipelined:
            return None
        assert self._tier is not None
        return SecondBatch(
            plan.pipelined,
            model=self._model,
            tier=self._tier,
            residuals_SD=self._residuals_SD,
            keep=self._early_events.append,
        )

    def _hand_over(self, plan: StepPlan) -> None:
        """Tell the host tier what does not depend on this step's layers."""
        if self._tier is None:
            return
        for slot in plan.cancels:
            self._tier.cancel(slot)
        for move in plan.moves:
            self._tier.start_move(move, self._storage.k_LBKSH, self._storage.v_LBKSH)
        pipelined = (row for row in plan.pipelined if isinstance(row, PiggybackEntry))
        for entry in (*plan.entries, *pipelined):
            self._tier.begin_token(entry.slot, entry.epoch, entry.position, entry.block_ids)

    def _inputs(self, plan: StepPlan) -> StepInputs:
        return make_step_inputs(
            plan,
            block_size=self._storage.block_size,
            num_layers=self._model.num_layers,
            device=self._model.device,
        )

    def _run_layers(self, plan: StepPlan, second: SecondBatch | None) -> tuple[Tensor, StepInputs, dict[str, int]]:
        """Return the rows' hidden states, the inputs of the last layer, and the layers that chunks left before."""
        model, num_seats = self._model, plan.num_piggyback_slots
        halted: dict[str, int] = {}
        going_on = {chunk.from_layer for chunk in plan.chunks if chunk.from_layer}
        present = until_layer(plan, 0) if going_on else plan
        inputs = self._inputs(present)
        results_RD, result_rows = self._rows.stage(inputs)
        away: list[Parcel] = []
        self._pending.fill(inputs.token_ids_T, present)
        hidden_TD = model.embed(inputs.token_ids_T, inputs.positions_T)
        attn_dev_TD = self._rows.no_results
        rotary_per_layer = self._rows.rotary_per_layer(inputs, num_seats)
        for layer in range(model.num_layers):
            if going_on or plan.preemptible:
                before = present
                if layer and plan.preemptible and self._must_leave(present):
                    present, hidden_TD = self._leave(present, inputs, layer, hidden_TD, halted)
                    later = (c for c in plan.chunks if c.from_layer >= layer and c.request_id in plan.preemptible)
                    halted |= {chunk.request_id: chunk.from_layer for chunk in later}  # they stay where they are
                    plan = without(plan, halted)
                if layer in going_on:
                    present, hidden_TD = self._rejoin(plan, layer, hidden_TD)
                if present is not before:
                    inputs, attn_dev_TD = self._inputs(present), self._rows.no_results
                    rotary_per_layer = islice(self._rows.rotary_per_layer(inputs, num_seats), layer, None)
            num_device_rows, rotary = inputs.num_device_rows, next(rotary_per_layer)
            leaving = inputs.joining.get(layer - 1) if layer else inputs.entering
            joining = inputs.joining.get(layer)
            if second is not None:
                second.begin_layer(layer)
            # With device rows every layer runs; without, only those that somebody is at.
            if num_device_rows or leaving is not None:
                q_TNH, k_TKH, v_TKH = model.pre_attention(layer, hidden_TD, *rotary)
                if leaving is not None:
                    _residual_store(hidden_TD, self._residuals_SD, leaving.slots_P)
                    parcel = Parcel(layer, leaving, q_TNH[-num_seats:], k_TKH[-num_seats:], v_TKH[-num_seats:])
                    self._rows.send(parcel, away)
                if num_device_rows:
                    attn_dev_TD = self._attend_device(layer, inputs, q_TNH, k_TKH, v_TKH)
            if num_device_rows or joining is not None:
                attn_TD = attn_dev_TD
                if num_seats:
                    rows_P = result_rows[layer] if joining is not None else self._rows.empty_seats(num_seats)
                    slots_P = joining.slots_P if joining is not None else rows_P
                    attn_TD = _piggyback_concat(attn_dev_TD, results_RD, rows_P)
                    _residual_fetch(self._residuals_SD, slots_P, hidden_TD)
                hidden_TD = model.post_attention(layer, attn_TD, hidden_TD)
            if second is not None:
                second.end_layer(layer)
        self._rows.send_deferred(away)
        return hidden_TD, inputs, halted

    # -- rows that leave between layers, and go on there later (conserve 4.3) ------------------------------------------

    def _must_leave(self, plan: StepPlan) -> bool:
        is_there = any(chunk.request_id in plan.preemptible for chunk in plan.chunks)
        if not is_there or self.safepoint is None:
            return False
        if self._model.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # else the answer comes before the layers that it is about
        return self.safepoint()

    def _leave(
        self, plan: StepPlan, inputs: StepInputs, layer: int, hidden_TD: Tensor, halted: dict[str, int]
    ) -> tuple[StepPlan, Tensor]:
        """Halt the preemptible chunks; return the plan and the rows without them."""
        kept: list[Tensor] = []
        row = 0
        for chunk in plan.chunks:
            rows_TD = hidden_TD[row : row + len(chunk.token_ids)]
            row += len(chunk.token_ids)
            if chunk.request_id in plan.preemptible:
                halted[chunk.request_id] = self.halted.halt(chunk, layer, rows_TD)
            else:
                kept.append(rows_TD)
        return without(plan, halted), torch.cat([*kept, hidden_TD[inputs.num_device_rows :]])

    def _rejoin(self, plan: StepPlan, layer: int, hidden_TD: Tensor) -> tuple[StepPlan, Tensor]:
        """Put the rows that left an earlier step before this layer behind the other device rows."""
        present = until_layer(plan, layer)
        back = [self.halted.take(chunk) for chunk in present.chunks if chunk.from_layer == layer]
        n = sum(len(chunk.token_ids) for chunk in present.chunks) - sum(map(len, back))
        return present, torch.cat([hidden_TD[:n], *back, hidden_TD[n:]])

    def _attend_device(self, layer: int, inputs: StepInputs, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        n = inputs.num_device_rows
        if n < q_TNH.shape[0]:
            q_TNH, k_TKH, v_TKH = q_TNH[:n], k_TKH[:n], v_TKH[:n]
        k_cache, v_cache = self._storage.k_layers[layer], self._storage.v_layers[layer]
        _store_kv(k_TKH, v_TKH, k_cache, v_cache, inputs.slot_mapping)
        out_TNH = self._attend(
            q_TNH,
            k_cache,
            v_cache,
            inputs.block_table_RM,
            inputs.query_start_R1,
            inputs.seq_lens_R,
            self._model.spec.attention[layer],
            lengths=inputs.lengths,
            reversed_RM=inputs.reversed_RM,
        )
        return out_TNH.view(n, -1)

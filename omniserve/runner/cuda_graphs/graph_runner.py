"""CudaGraphRunner: captures CUDA graphs of steps of constant shapes, and runs the steps that fit one of them.

A step in which every request has one device row (decodes, and any rows of the host tier) is one FULL graph and one
launch. A step with longer chunks is captured PIECEWISE, because its attention depends on the chunks' lengths.
``LayerLoop`` runs the steps that fit no captured shape, without padding. Capturing ends when its budget is spent.

Legend: T device rows, P piggyback seats, D hidden, N query heads, K KV heads, H head size, L layers.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
from torch import Tensor
from tqdm import tqdm

from omniserve.core.config import GIB
from omniserve.core.plan import StepPlan
from omniserve.core.setup import RunnerSetup
from omniserve.kv.storage import DeviceKVStorage
from omniserve.layers.patched_model import PatchedModel, Rotary
from omniserve.ops.attention import AttentionMetadata, DeviceAttention
from omniserve.runner.cuda_graphs.budget import Budget
from omniserve.runner.cuda_graphs.capture import Attend, Capture, CudaGraphCapture, FullStep, PiecewiseStep
from omniserve.runner.cuda_graphs.inputs import InputMemory, StaticInputs
from omniserve.runner.cuda_graphs.shapes import (
    CHUNK_ROWS,
    DECODE_ROWS,
    ShapeTable,
    StepShape,
    capture_order,
    size,
    smallest_fitting,
)
from omniserve.runner.late_results import MissedJoins
from omniserve.runner.layer_loop import LayerLoop, StepHooks
from omniserve.runner.piggyback_rows import PiggybackRows
from omniserve.runner.rank_broadcast import RankBroadcast
from omniserve.runner.step_inputs import DeviceRows, LayersOutput, make_device_rows, sampled_rows

logger = logging.getLogger(__name__)

_store_kv = torch.ops.omniserve.store_kv.default


class CudaGraphRunner:
    """Runs the layers of the steps that fit a shape; nothing is captured before ``capture_all``.

    ``loop`` is what runs the other steps.
    """

    keeps_layer_input = False
    """The input of the running layer is kept (``StaticInputs.layer_input_TD``)."""

    def __init__(self, setup: RunnerSetup, *, loop: LayerLoop, broadcast: RankBroadcast) -> None:
        config, model = setup.config, loop.model
        device, spec = model.device, model.spec
        seats = config.max_piggyback_seats if setup.host_tier is not None else 0
        # A best-effort request may be admitted beside as many latency-sensitive ones.
        most = min(2 * config.max_num_seqs, config.max_num_batched_tokens)
        decodes = ShapeTable.of(DECODE_ROWS, max_rows=most, max_seats=seats)
        # With more rows, launching the kernels of a layer takes less time than running them, captured or not.
        most = min(config.max_num_batched_tokens, CHUNK_ROWS[-1])
        chunks = ShapeTable.of(CHUNK_ROWS, max_rows=most, max_seats=seats)
        self._loop, self._broadcast = loop, broadcast
        self._layers = PaddedLayers(model, loop.storage, loop.attend, loop.rows)
        self._memory = InputMemory(
            StepShape(max(decodes.rows[-1], chunks.rows[-1]), seats),
            num_layers=spec.num_layers,
            max_blocks=-(-setup.max_model_len // config.block_size),
            device=device,
            is_directed=setup.is_directed,
            layer_input=(spec.hidden_size, model.dtype) if self.keeps_layer_input else None,
            max_host_rows=loop.rows.max_rows,
        )
        self._capture = Capture()
        if device.type == "cuda":
            self._capture = CudaGraphCapture((chunks.rows[-1], spec.num_heads, spec.head_size), model.dtype, device)
        self._order = capture_order(decodes, chunks)
        self._block_size, self._execution = config.block_size, config.execution
        self._decodes: dict[StepShape, tuple[StaticInputs, FullStep]] = {}
        self._chunks: dict[StepShape, tuple[StaticInputs, PiecewiseStep]] = {}
        self._decode_shapes: list[StepShape] = []  # the captured ones, by size
        self._chunk_shapes: list[StepShape] = []
        self.num_decode_steps = 0
        """Counter: steps with at most one row a request that ran in a constant shape."""
        self.num_chunk_steps = 0
        """Counter: other steps that began in a constant shape."""

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture the shapes, the most useful ones first, until the budget is spent, with a progress bar."""
        device = self._memory.device
        limit_s, limit_gib = self._execution.step_graphs_limit_s, self._execution.step_graphs_gib
        budget = Budget(limit_s=limit_s, limit_bytes=int(limit_gib * GIB), used_bytes=lambda: _used_bytes(device))
        gc.collect()
        gc.disable()  # it is an error to free a graph while another one is being captured
        try:
            for index, (shape, is_decode) in enumerate(tqdm(self._order, desc="capturing steps", disable=None)):
                kind = is_decode, index < 2  # the first two, the largest, pay for the pool and most of the compiling
                if self._broadcast.agree(partial(budget.admits, kind)):
                    with budget.spending(kind):
                        self._capture_shape(shape, is_decode=is_decode)
        finally:
            gc.enable()
        self._decode_shapes, self._chunk_shapes = sorted(self._decodes, key=size), sorted(self._chunks, key=size)
        num_captured, num_shapes = len(self._decodes) + len(self._chunks), len(self._order)
        seconds, num_bytes = budget.spent()
        logger.info(
            "captured %d of %d step shapes in %.1f s and %.2f GiB", num_captured, num_shapes, seconds, num_bytes / GIB
        )
        if num_captured < num_shapes:
            logger.warning(
                "%d step shapes are not captured: such steps are padded further or run without graphs; for more, raise "
                "step_graphs_limit_s (%g) or step_graphs_gib (%g)",
                num_shapes - num_captured,
                limit_s,
                limit_gib,
            )

    def _capture_shape(self, shape: StepShape, *, is_decode: bool) -> None:
        inputs = StaticInputs(shape, self._memory)
        # For an empty step, which stores and sends nothing.
        inputs.fill(_EMPTY, make_device_rows(_EMPTY, block_size=1), decodes=is_decode)
        if is_decode:
            self._decodes[shape] = inputs, self._capture.full(partial(self._layers.run_decodes, inputs))
        else:
            run = partial(self._layers.run, inputs, layer_input_TD=inputs.layer_input_TD)
            self._chunks[shape] = inputs, self._capture.piecewise(run)

    def shape_for(self, plan: StepPlan) -> StepShape | None:
        """Return the captured shape to which a step is padded; None: none fits."""
        shapes = self._decode_shapes if self._is_one_graph(plan) else self._chunk_shapes
        return smallest_fitting(shapes, plan.num_device_tokens, plan.num_piggyback_seats)

    def run(self, plan: StepPlan, hooks: Sequence[StepHooks]) -> LayersOutput | None:
        """Run a step's layers in a captured shape; None: none fits, or what the hooks do cannot be captured.

        The output is valid until the next step.
        """
        if not all(each.fits_graphs for each in hooks) or (shape := self.shape_for(plan)) is None:
            return None
        rows = make_device_rows(plan, block_size=self._block_size)
        if self._is_one_graph(plan):
            self.num_decode_steps += 1
            inputs, replay = self._decodes[shape]
            self._fill(inputs, plan, rows, decodes=True)
            return self._output(plan, inputs, replay())
        self.num_chunk_steps += 1
        inputs, replay_with = self._chunks[shape]
        self._fill(inputs, plan, rows, decodes=False)
        metadata = rows.attention_metadata(self._memory.device)
        attend = partial(self._layers.attend_padded, metadata=metadata, num_rows=len(rows.token_ids))
        return self._run_pieces(plan, hooks, inputs, replay_with, attend)

    def _fill(self, inputs: StaticInputs, plan: StepPlan, rows: DeviceRows, *, decodes: bool) -> None:
        inputs.fill(plan, rows, decodes=decodes)
        self._loop.pending.fill(inputs.token_ids_T, plan, first_seat=inputs.shape.rows)

    def _is_one_graph(self, plan: StepPlan) -> bool:
        """Tell whether a step runs as a FULL graph: every request has at most one device row."""
        return all(len(chunk.token_ids) == 1 for chunk in plan.chunks)

    def _run_pieces(
        self,
        plan: StepPlan,
        hooks: Sequence[StepHooks],
        inputs: StaticInputs,
        replay_with: PiecewiseStep,
        attend: Attend,
    ) -> LayersOutput:
        """Run a PIECEWISE step, whose attention is ``attend``."""
        return self._output(plan, inputs, replay_with(attend))

    def _output(self, plan: StepPlan, inputs: StaticInputs, hidden_TD: Tensor) -> LayersOutput:
        num_layers, device = self._memory.num_layers, self._memory.device
        amend = None
        if plan.doubtful:
            # A copy, as the next step writes to the same memory.
            amend = MissedJoins(plan, range(num_layers - 1), inputs.joined_LP[:-1].clone()).amend
        sampled = sampled_rows(plan, num_layers=num_layers, first_seat=inputs.shape.rows, device=device)
        return LayersOutput(hidden_TD, sampled, amend=amend)


@dataclass(frozen=True, slots=True)
class PaddedLayers:
    """Runs the layers of steps whose shapes do not depend on the requests in them.

    Every seat takes part in every layer, empty or not, and no branch depends on the values of tensors. So the work of
    one run can be replayed with other inputs at the same addresses.
    """

    model: PatchedModel
    storage: DeviceKVStorage
    attention: DeviceAttention
    rows: PiggybackRows

    def run_decodes(self, inputs: StaticInputs) -> Tensor:
        """Run the layers of a step in which every request has one device row; return ``[T + P, D]``."""
        return self.run(inputs, partial(self.attend, metadata=inputs.attention))

    def run(self, inputs: StaticInputs, attend: Attend, *, layer_input_TD: Tensor | None = None) -> Tensor:
        """Run the layers with ``attend`` as the attention of the device rows; return ``[T + P, D]``.

        What goes into a layer is written to ``layer_input_TD`` before its attention.
        """
        model, num_rows, num_seats = self.model, inputs.shape.rows, inputs.shape.seats

        def attend_with_seats(layer: int, hidden_TD: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
            if num_seats:
                self.rows.post(inputs.rows_leaving(layer), hidden_TD, q_TNH, k_TKH, v_TKH)
            if layer_input_TD is not None:
                layer_input_TD.copy_(hidden_TD)
            attn_TD = self.rows.no_results
            if num_rows:
                k_cache, v_cache = self.storage.k_layers[layer], self.storage.v_layers[layer]
                _store_kv(k_TKH[:num_rows], v_TKH[:num_rows], k_cache, v_cache, inputs.slot_mapping_T)
                attn_TD = attend(layer, q_TNH[:num_rows])
            if num_seats:
                attn_TD = self.rows.join(self._rows_joined(inputs, layer), attn_TD, hidden_TD)
            return attn_TD

        hidden_TD = model.embed(inputs.token_ids_T, inputs.positions_T, inputs.lora_slots_T)
        rotary = self._rotary_per_layer(inputs)
        return model.run_layers(range(model.num_layers), hidden_TD, rotary, attend_with_seats, fused=True)

    def _rows_joined(self, inputs: StaticInputs, layer: int) -> Tensor:
        """Find out which rows join at a layer, and return them, ``[P]``.

        No join is late at the last layer (``sched.late_joins.late_layers``), so there all planned rows join.
        """
        rows_P = inputs.rows_joining(layer)
        if layer == self.model.num_layers - 1:
            return rows_P
        joined_P = inputs.joined_LP[layer]
        self.rows.receive(rows_P, inputs.wanted(layer), inputs.as_one_1, joined_P)
        return joined_P

    def attend(self, layer: int, q_TNH: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Return attention rows ``[T, N * H]``."""
        k_cache, v_cache = self.storage.k_layers[layer], self.storage.v_layers[layer]
        return self.attention(q_TNH, k_cache, v_cache, metadata, self.model.spec.attention[layer]).flatten(1)

    def attend_padded(self, layer: int, q_TNH: Tensor, metadata: AttentionMetadata, num_rows: int) -> Tensor:
        """Attend for the first ``num_rows`` of the T rows; the rows that only pad become zeros."""
        out_TD = torch.zeros_like(q_TNH, memory_format=torch.contiguous_format).flatten(1)
        out_TD[:num_rows] = self.attend(layer, q_TNH[:num_rows], metadata)
        return out_TD

    def _rotary_per_layer(self, inputs: StaticInputs) -> Iterator[Rotary]:
        """Yield (cos, sin) ``[T + P, H]`` for each layer; in the seats each layer has other tokens."""
        rows, seats, num_layers = inputs.shape.rows, inputs.shape.seats, self.model.num_layers
        rotary = self.model.rotary(torch.cat([inputs.positions_T[:rows], inputs.seat_positions]))
        if rotary is None or not seats:
            yield from repeat(rotary or (None, None), num_layers)
            return
        device = inputs.positions_T.device
        of_seats = rows + torch.arange(num_layers * seats, device=device).view(num_layers, seats)
        index = torch.cat([torch.arange(rows, device=device).expand(num_layers, rows), of_seats], dim=1)
        cos_LTH, sin_LTH = (
            table.index_select(0, index.flatten()).view(num_layers, rows + seats, -1) for table in rotary
        )
        yield from zip(cos_LTH, sin_LTH, strict=True)


_EMPTY = StepPlan(step_id=0)


def _used_bytes(device: torch.device) -> int:
    """Return how much of a GPU's memory is in use, including the driver's memory for graphs; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free

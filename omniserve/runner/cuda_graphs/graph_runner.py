"""CudaGraphRunner: captures CUDA graphs of steps of constant shapes, and runs the steps that fit one of them.

A step in which every request has one device row (decodes, and any rows of the host tier) is one FULL graph and one
launch. A step with longer chunks is captured PIECEWISE, because its attention depends on the chunks' lengths; between
its pieces rows may leave, and ``LayerLoop`` then runs the layers that are left. It also runs the steps that fit no
captured shape, without padding. Capturing ends when its budget is spent.

Legend: T device rows, P piggyback seats, D hidden, N query heads, K KV heads, H head size, L layers.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
from torch import Tensor
from tqdm import tqdm

from omniserve.core.config import GIB, EngineConfig
from omniserve.core.plan import StepPlan
from omniserve.core.setup import RunnerSetup
from omniserve.kv.storage import DeviceKVStorage
from omniserve.layers.patching import PatchedModel, Rotary
from omniserve.ops.attention import AttentionMetadata, DeviceAttention, is_graph_safe
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
from omniserve.runner.layer_loop import LayerLoop
from omniserve.runner.piggyback_rows import PiggybackRows
from omniserve.runner.rank_broadcast import RankBroadcast
from omniserve.runner.safepoint import Safepoints
from omniserve.runner.step_inputs import (
    LayersOutput,
    PendingTokens,
    make_device_rows,
    sampled_rows,
)

logger = logging.getLogger(__name__)

_store_kv = torch.ops.omniserve.store_kv.default


class CudaGraphRunner:
    """Runs the layers of the steps that fit a shape; nothing is captured before ``capture_all``.

    ``loop`` runs the rest of a step that rows have left.
    """

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
            StepShape(max(decodes.rows[-1], chunks.rows[-1]), seats), num_layers=spec.num_layers,
            max_blocks=-(-setup.max_model_len // config.block_size), device=device, is_directed=setup.is_directed,
            layer_input=(spec.hidden_size, model.dtype) if loop.safepoint is not None else None,
            max_host_rows=loop.rows.max_rows,
        )  # fmt: skip
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
        """Counter: other steps that ran in a constant shape, at least until rows left them."""
        self.num_steps_left = 0
        """Counter: steps in a constant shape that rows left before their end."""

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
                num_shapes - num_captured, limit_s, limit_gib,
            )  # fmt: skip

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
        """Return the captured shape to which a step is padded; None: none fits, or its rows differ from the start."""
        if plan.pipelined or any(chunk.from_layer for chunk in plan.chunks):
            return None
        shapes = self._decode_shapes if is_one_graph(plan) else self._chunk_shapes
        return smallest_fitting(shapes, plan.num_device_tokens, plan.num_piggyback_seats)

    def run(self, plan: StepPlan, shape: StepShape, pending: PendingTokens) -> LayersOutput:
        """Run a step's layers in the shape that ``shape_for`` returned; the output is valid until the next step."""
        rows = make_device_rows(plan, block_size=self._block_size)
        if is_one_graph(plan):
            self.num_decode_steps += 1
            inputs, replay = self._decodes[shape]
            inputs.fill(plan, rows, decodes=True)
            pending.fill(inputs.token_ids_T, plan, first_seat=shape.rows)
            hidden_TD = replay()
        else:
            self.num_chunk_steps += 1
            inputs, replay_with = self._chunks[shape]
            inputs.fill(plan, rows, decodes=False)
            pending.fill(inputs.token_ids_T, plan, first_seat=shape.rows)
            metadata, num_rows = rows.attention_metadata(self._memory.device), len(rows.token_ids)
            safepoints = self._loop.safepoints(plan) if plan.preemptible else None

            def attend(layer: int, q_TNH: Tensor) -> Tensor:
                if safepoints is not None and layer and (leaving := safepoints.leaving()):
                    raise _RowsLeave(layer, leaving)
                return self._layers.attend_padded(layer, q_TNH, metadata, num_rows)

            try:
                hidden_TD = replay_with(attend)
            except _RowsLeave as stop:
                assert safepoints is not None
                return self._go_on(plan, inputs, safepoints, stop)
        num_layers, device = self._memory.num_layers, self._memory.device
        doubtful: MissedJoins | None = None
        if plan.doubtful:
            # A copy, as the next step writes to the same memory.
            doubtful = MissedJoins(plan, range(num_layers - 1), inputs.joined_LP[:-1].clone())
        sampled = sampled_rows(plan, num_layers=num_layers, first_seat=shape.rows, device=device)
        return LayersOutput(hidden_TD, sampled, doubtful=doubtful)

    def _go_on(self, plan: StepPlan, inputs: StaticInputs, safepoints: Safepoints, stop: _RowsLeave) -> LayersOutput:
        """Run the layers that are left of a step, without padding and without the rows that leave."""
        self.num_steps_left += 1
        input_TD, num_seats = inputs.layer_input_TD, plan.num_piggyback_seats
        assert input_TD is not None, "rows leave a step that has not kept what goes into its layers"
        of_rows, of_seats = input_TD[: plan.num_device_tokens], input_TD[inputs.shape.rows :]
        return self._loop.go_on(
            plan, safepoints, leaving=stop.request_ids, layer=stop.layer,
            hidden_TD=torch.cat([of_rows, of_seats[:num_seats]]),
            # A copy, as the next step writes to the same memory.
            joined_LP=inputs.joined_LP[: stop.layer, :num_seats].clone(),
        )  # fmt: skip


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

        hidden_TD = model.embed(inputs.token_ids_T, inputs.positions_T)
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


def wants_graphs(config: EngineConfig, model: PatchedModel, attention: DeviceAttention) -> bool:
    """Tell whether an engine's steps are captured, as its settings and its device say.

    Raises:
        ValueError: The settings ask for graphs, which the device attention or the model does not allow.
    """
    wanted = config.execution.step_graphs
    if wanted == "off" or (wanted == "auto" and model.device.type != "cuda"):
        return False
    if reason := why_not_captured(model, attention, config):
        if wanted == "on":
            raise ValueError(f"step_graphs={wanted!r} is not possible: {reason}")
        logger.warning("steps are not captured: %s", reason)
    return not reason


def why_not_captured(model: PatchedModel, attention: DeviceAttention, config: EngineConfig) -> str:
    """Return why a CUDA graph cannot hold a model's steps, and what to do about it; empty if it can."""
    if config.parallel.pipeline_parallel_size > 1:
        return "a graph holds all layers, and with pipeline_parallel_size a rank has some; set step_graphs='off'"
    if model.has_between:
        return (
            "some layers do not attend or have state beside their attention, and the rows that pass there differ from "
            "step to step; set step_graphs='off'"
        )
    if model.device.type != "cuda":
        return ""
    if not is_graph_safe(attention):
        return (
            f"device attention {config.execution.attention!r} launches what lengths on the host say; set "
            "attention='triton' or 'flex'"
        )
    return model.family.why_not_captured()


def is_one_graph(plan: StepPlan) -> bool:
    """Tell whether a step runs as a FULL graph: every request has at most one device row, and no row may leave."""
    return not plan.preemptible and all(len(chunk.token_ids) == 1 for chunk in plan.chunks)


class _RowsLeave(Exception):
    """Ends the replay of a step at the attention of a layer, as rows of some requests must leave before the layer."""

    def __init__(self, layer: int, request_ids: Set[str]) -> None:
        super().__init__(layer)
        self.layer, self.request_ids = layer, request_ids


_EMPTY = StepPlan(step_id=0)


def _used_bytes(device: torch.device) -> int:
    """Return how much of a GPU's memory is in use, including the driver's memory for graphs; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free

"""ConstantSteps: which steps run in constant shapes, and their recordings.

A step in which every request has one device row (decodes, and any rows of the host tier) is one recording: one launch.
One with longer chunks is recorded in pieces between the attentions, which depend on the chunks' lengths. What fits no
recording runs as it is: see ``ModelRunner``.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Self

import torch
from torch import Tensor
from tqdm import tqdm

from omniserve.config import EngineConfig
from omniserve.device_copies import upload
from omniserve.graphs.inputs import ConstantInputs, InputMemory
from omniserve.graphs.layers import ChunkTensors, ConstantLayers
from omniserve.graphs.recorder import Attend, GraphRecorder, PlainRecorder, Recorder
from omniserve.graphs.shapes import CHUNK_ROWS, DECODE_ROWS, ShapeTable, StepShape
from omniserve.kv.storage import DeviceKVStorage
from omniserve.layer_loop import LayersOutput
from omniserve.ops.attention import DeviceAttention, is_graph_safe
from omniserve.patching import PatchedModel
from omniserve.pending_tokens import PendingTokens
from omniserve.piggyback_rows import PiggybackRows
from omniserve.plan import StepPlan
from omniserve.step_inputs import make_device_rows, prompt_scores, sampling_rows

logger = logging.getLogger(__name__)


class ConstantSteps:
    """Runs the layers of the steps that fit a shape.

    Args:
        layers: What a step is made of.
        memory: For the inputs, large enough for all shapes.
        recorder: Makes the recordings.
        decodes: Shapes of steps with one row a request.
        chunks: Shapes of other steps.
        block_size: Tokens per KV block.
    """

    def __init__(
        self,
        layers: ConstantLayers,
        memory: InputMemory,
        recorder: Recorder,
        *,
        decodes: ShapeTable,
        chunks: ShapeTable,
        block_size: int,
    ) -> None:
        self._layers = layers
        self._memory = memory
        self._recorder = recorder
        self._decode_shapes = decodes
        self._chunk_shapes = chunks
        self._block_size = block_size
        self._decodes: dict[StepShape, tuple[ConstantInputs, Callable[[], Tensor]]] = {}
        self._chunks: dict[StepShape, tuple[ConstantInputs, Callable[[Attend], Tensor]]] = {}
        self.num_decode_steps = 0
        """Counter: steps with at most one row a request that ran in a constant shape."""
        self.num_chunk_steps = 0
        """Counter: the others that did."""

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        *,
        model: PatchedModel,
        storage: DeviceKVStorage,
        attention: DeviceAttention,
        rows: PiggybackRows,
        max_model_len: int,
        has_host_tier: bool,
    ) -> Self | None:
        """Return an engine's, nothing recorded yet; None: its steps all run in their own shapes.

        Raises:
            ValueError: The settings ask for constant shapes, which the device attention or the model cannot have.
        """
        device, spec = model.device, model.spec
        if config.step_graphs == "off" or (config.step_graphs == "auto" and device.type != "cuda"):
            return None
        if reason := why_not_recorded(model, attention, config):
            if config.step_graphs == "auto":
                logger.warning("steps are not recorded: %s", reason)
                return None
            raise ValueError(f"step_graphs={config.step_graphs!r} is not possible: {reason}")
        seats = config.max_piggyback_slots if has_host_tier else 0
        # A best-effort request may be admitted beside as many latency-sensitive ones.
        most = min(2 * config.max_num_requests, config.max_step_tokens)
        decodes = ShapeTable.of(DECODE_ROWS, max_rows=most, max_seats=seats)
        # Beyond that, launching the pieces of a layer takes less time than running them, recorded or not.
        most = min(config.max_step_tokens, CHUNK_ROWS[-1])
        chunks = ShapeTable.of(CHUNK_ROWS, max_rows=most, max_seats=seats)
        largest = StepShape(max(decodes.rows[-1], chunks.rows[-1]), seats)
        memory = InputMemory(
            largest, num_layers=spec.num_layers, max_blocks=-(-max_model_len // config.block_size), device=device
        )
        attention_shape = (chunks.rows[-1], spec.num_heads, spec.head_size)
        recorder = GraphRecorder(attention_shape, model.dtype, device) if device.type == "cuda" else PlainRecorder()
        return cls(
            ConstantLayers(model, storage, attention, rows), memory, recorder,
            decodes=decodes, chunks=chunks, block_size=config.block_size,
        )  # fmt: skip

    @torch.inference_mode()
    def record_all(self) -> None:
        """Record every shape, so that no step has to wait for it; on a terminal, with a progress bar."""
        started_s = time.perf_counter()
        gc.collect()
        gc.disable()  # to free a graph while another is being recorded is an error
        try:
            self._record_all()
        finally:
            gc.enable()
        num_shapes, seconds = len(self._decodes) + len(self._chunks), time.perf_counter() - started_s
        logger.info("recorded %d step shapes in %.1f s", num_shapes, seconds)

    def _record_all(self) -> None:
        shapes = [*((shape, True) for shape in self._decode_shapes), *((shape, False) for shape in self._chunk_shapes)]
        for shape, decodes in tqdm(shapes, desc="recording steps", disable=None):
            inputs = ConstantInputs(shape, self._memory)
            # Nobody is in it, so nothing is stored or sent.
            inputs.fill(_NOBODY, make_device_rows(_NOBODY, block_size=1), decodes=decodes)
            if decodes:
                self._decodes[shape] = inputs, self._recorder.whole(partial(self._layers.whole, inputs))
            else:
                self._chunks[shape] = inputs, self._recorder.in_pieces(partial(self._layers.pieces, inputs))
                if self._memory.device.type == "cuda" and not shape.seats:
                    self._layers.warm_up_attention(shape.rows, self._memory.max_blocks)

    def shape_for(self, plan: StepPlan) -> StepShape | None:
        """Return the shape that a plan's step is padded to; None: it fits none, or its rows may come and go."""
        if plan.preemptible or plan.pipelined:
            return None
        if any(chunk.from_layer or chunk.is_reversed for chunk in plan.chunks):
            return None
        shapes = self._decode_shapes if decodes_only(plan) else self._chunk_shapes
        return shapes.fitting(plan.num_device_tokens, plan.num_piggyback_slots)

    def run(self, plan: StepPlan, shape: StepShape, pending: PendingTokens) -> LayersOutput:
        """Run a step's layers; the hidden states are valid until the next step.

        Args:
            plan: The step.
            shape: What ``shape_for`` says of it.
            pending: Knows tokens that the host does not know yet.
        """
        rows = make_device_rows(plan, block_size=self._block_size)
        if decodes_only(plan):
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
            chunks = ChunkTensors.of(rows, self._memory.device)
            hidden_TD = replay_with(lambda layer, q_TNH: self._layers.attend_chunks(layer, q_TNH, chunks))
        at_last_layer = [join for join in plan.joins if join.layer == self._memory.num_layers - 1]
        sampled, request_ids = sampling_rows(rows, at_last_layer, first_seat=shape.rows)
        return LayersOutput(
            hidden_TD=hidden_TD,
            sampling_rows=upload(torch.from_numpy(sampled), self._memory.device),
            sampling_request_ids=request_ids,
            scores=prompt_scores(plan, rows),
            halted={},
        )


def why_not_recorded(model: PatchedModel, attention: DeviceAttention, config: EngineConfig) -> str:
    """Return why a CUDA graph cannot hold a model's steps, and what to do about it; empty: nothing is in its way."""
    if model.device.type != "cuda":
        return ""
    if not is_graph_safe(attention):
        return (
            f"device attention {config.attention!r} launches what lengths on the host say; set attention='triton' or "
            "'flex'"
        )
    return model.family.why_not_recorded()


def decodes_only(plan: StepPlan) -> bool:
    """Tell whether every request of a plan has at most one device row."""
    return all(len(chunk.token_ids) == 1 for chunk in plan.chunks)


_NOBODY = StepPlan(step_id=0)

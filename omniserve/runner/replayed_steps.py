"""ReplayedSteps: decode steps on a CPU, whose layers C++ runs without Python between them.

For each number of rows the calls of all layers are noted once (``layers/noted_half.py``): the kernels and products of
the compiled halves, ``store_kv`` and attention. A step then writes its ids, positions and blocks into the memory that
the calls read, and has them made again. They are the same calls in the same order as those of ``LayerLoop``, so the
results are the same bits.

Legend: T rows, which are one request's each, M blocks of a request, D hidden, H head size.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from omniserve.core.plan import DeviceChunk, StepPlan
from omniserve.core.setup import RunnerSetup
from omniserve.layers.noted_half import Buffers, Noter, NotNoted
from omniserve.layers.patched_model import Rotary
from omniserve.ops.attention import AttentionMetadata
from omniserve.ops.attention.native import attend_cpu
from omniserve.ops.replay import Replay
from omniserve.runner.layer_loop import LayerLoop
from omniserve.runner.step_inputs import LayersOutput, SampledRows, sampled_rows

logger = logging.getLogger(__name__)

MOST_ROWS = 32
"""A step of more rows is not replayed: its kernels take long enough, and each number of rows has its own replay."""


def make_replayed(setup: RunnerSetup, loop: LayerLoop) -> ReplayedSteps | None:
    """Make what replays an engine's decode steps; None: they are not replayed.

    They are on a CPU, if all layers are in this process and compiled, and attend and do nothing else between them.
    """
    execution, model = setup.config.execution, loop.model
    is_possible = (
        execution.step_graphs == "auto"
        and execution.compile
        and model.device.type == "cpu"
        and loop.attend is attend_cpu
        and not model.has_between
        and len(model.layers) == model.num_layers
    )
    if not is_possible:
        return None
    return ReplayedSteps(loop, max_blocks=-(-setup.max_model_len // setup.config.block_size))


class ReplayedSteps:
    """Runs the steps whose rows are one token of each request, if they need no hooks.

    Args:
        max_blocks: Most blocks of a request.
    """

    def __init__(self, loop: LayerLoop, *, max_blocks: int) -> None:
        self._loop = loop
        self._max_blocks = max_blocks
        self._steps: dict[int, _ReplayedStep] = {}
        """By number of rows."""
        self._may_be_possible = True
        """False: a half makes calls that cannot be noted."""

    def run(self, plan: StepPlan) -> LayersOutput | None:
        """Run the layers of a step without hooks; None: it is not one that is replayed.

        The first step with a number of rows also notes its calls, which takes some milliseconds.
        """
        if not self._may_be_possible or plan.has_host_rows or not 0 < len(plan.chunks) <= MOST_ROWS:
            return None
        if not all([_is_one_token(chunk) for chunk in plan.chunks]):
            return None
        step = self._steps.get(len(plan.chunks)) or self._note(len(plan.chunks))
        return None if step is None else step.run(plan)

    def _note(self, num_rows: int) -> _ReplayedStep | None:
        """Note the steps with so many rows; return None if that is not possible, or not yet."""
        if not self._loop.model.is_bound:
            return None
        try:
            self._steps[num_rows] = _ReplayedStep(self._loop, num_rows, self._max_blocks)
        except NotNoted as reason:
            self._may_be_possible = False
            logger.info("decode steps run from Python: a layer's half cannot be replayed, for %s", reason)
            return None
        return self._steps[num_rows]


def _is_one_token(chunk: DeviceChunk) -> bool:
    return (
        len(chunk.token_ids) == 1
        and chunk.scores is None
        and chunk.pooled is None
        and not (chunk.is_reversed or chunk.from_layer or chunk.leaves_at)
    )


class _ReplayedStep:
    """The layers of a step with ``num_rows`` rows, and the memory of what goes into them."""

    def __init__(self, loop: LayerLoop, num_rows: int, max_blocks: int) -> None:
        self._loop = loop
        self._token_ids, self._positions, self._slots, self._lora_slots = np.zeros((4, num_rows), np.int64)
        self._seq_lens = np.ones(num_rows, np.int32)
        self._block_table = np.zeros((num_rows, max_blocks), np.int32)
        self._token_ids_T, self._positions_T = map(torch.from_numpy, (self._token_ids, self._positions))
        self._lora_slots_T = torch.from_numpy(self._lora_slots)
        metadata = AttentionMetadata(
            block_table_RM=torch.from_numpy(self._block_table),
            query_start_loc_R1=torch.arange(num_rows + 1, dtype=torch.int32),
            seq_lens_R=torch.from_numpy(self._seq_lens),
        )
        self._rows = torch.arange(num_rows)
        hidden_TD, rotary = self._embedded()
        self._first_hidden_TD = torch.empty_like(hidden_TD, memory_format=torch.contiguous_format)
        cos, sin = (None if each is None else torch.empty_like(each) for each in rotary)
        self._rotary: Rotary = cos, sin
        self._replay, buffers = Replay(), Buffers()
        slots_T, storage, attention = torch.from_numpy(self._slots), loop.storage, loop.model.spec.attention

        def attend(layer: int, hidden_TD: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
            k_cache, v_cache = storage.k_layers[layer], storage.v_layers[layer]
            self._replay.add_store_kv(k_TKH, v_TKH, k_cache, v_cache, slots_T)
            out_TNH = buffers.rows(q_TNH.shape, q_TNH.dtype)
            self._replay.add_attention(q_TNH, k_cache, v_cache, metadata, attention[layer], out_TNH)
            return out_TNH.view(num_rows, -1)

        noter = Noter(self._replay, buffers)
        self._hidden_TD = loop.model.note_layers(noter, self._first_hidden_TD, self._rotary, attend)

    def run(self, plan: StepPlan) -> LayersOutput:
        """Run the layers of a step; its hidden states are valid until the next step."""
        block_size = self._loop.storage.block_size
        for row, chunk in enumerate(plan.chunks):
            position, block_ids = chunk.start, chunk.block_ids
            self._token_ids[row] = chunk.token_ids[0]
            self._positions[row] = position
            self._slots[row] = block_ids[position // block_size] * block_size + position % block_size
            self._seq_lens[row] = position + 1
            self._lora_slots[row] = chunk.lora_slot
            self._block_table[row, : len(block_ids)] = block_ids
        self._loop.pending.fill(self._token_ids_T, plan)
        hidden_TD, rotary = self._embedded()
        self._first_hidden_TD.copy_(hidden_TD)
        for own, table in zip(self._rotary, rotary, strict=True):
            if own is not None and table is not None:
                own.copy_(table)
        self._replay.run()
        return LayersOutput(self._hidden_TD, self._sampled(plan))

    def _embedded(self) -> tuple[Tensor, Rotary]:
        """Return the hidden states of the rows and their rotary tables."""
        model = self._loop.model
        hidden_TD = model.embed(self._token_ids_T, self._positions_T, self._lora_slots_T)
        return hidden_TD, model.rotary(self._positions_T) or (None, None)

    def _sampled(self, plan: StepPlan) -> SampledRows:
        if all([chunk.num_sampled_rows == 1 for chunk in plan.chunks]):
            return SampledRows(self._rows, tuple([chunk.request_id for chunk in plan.chunks]), ())
        return sampled_rows(
            plan, num_layers=self._loop.model.num_layers, first_seat=len(plan.chunks), device=self._loop.model.device
        )

"""Served: how an engine launches what is measured, so that it is measured as it will run.

By default (``step_graphs="auto"``) an engine on a GPU runs steps in constant shapes: rows pass the dense halves in CUDA
graphs, decodes attend in them, too, and rows reach the host tier through its mailbox. So these are measured as replays
of a graph of all layers, in which launching costs what it costs there: nothing for each kernel. What is launched
one by one there is so here: attention to longer chunks, the head, and more rows than any captured shape has. Padding to
a shape is not measured: it is part of what measured steps add to their modules.

Without a GPU nothing is captured; with ``step_graphs="on"`` the same code runs there without graphs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch import Tensor

from omniserve.core.config import EngineConfig
from omniserve.engine.capacity import max_model_len
from omniserve.engine.fingerprint import has_constant_steps
from omniserve.layers.patching import PatchedModel
from omniserve.ops.attention import resolve_attention
from omniserve.runner.cuda_graphs.capture import Capture, CudaGraphCapture
from omniserve.runner.cuda_graphs.graph_runner import why_not_captured
from omniserve.runner.cuda_graphs.shapes import CHUNK_ROWS


class Served:
    """Says what an engine with these settings captures, and captures it.

    Args:
        model: The model.
        config: The settings it will be served with.
        capture: Makes the graphs; None: CUDA graphs on a GPU, else nothing is captured.
    """

    def __init__(self, model: PatchedModel, config: EngineConfig, *, capture: Capture | None = None) -> None:
        spec, on_cuda = model.spec, model.device.type == "cuda"
        self.attend = resolve_attention(config.execution.attention, model.device)
        """Device attention."""
        self.constant = has_constant_steps(config, model.device) and not why_not_captured(model, self.attend, config)
        """Steps run in constant shapes."""
        self.mailbox = on_cuda or config.execution.step_graphs == "on"
        """Rows reach the host tier through its mailbox; else they are handed over by a call."""
        self.max_blocks = -(-max_model_len(config, spec) // config.block_size)
        """Width of the block table in constant shapes; attention is launched for it, whatever the lengths are."""
        device_rows = min(max(2 * config.max_num_seqs, CHUNK_ROWS[-1]), config.max_num_batched_tokens)
        self._most_rows = device_rows + config.max_piggyback_seats
        if capture is None and self.constant and on_cuda:
            capture = CudaGraphCapture((0, spec.num_heads, spec.head_size), model.dtype, model.device)
        self._capture = capture or Capture()

    def is_constant(self, num_rows: int) -> bool:
        """Whether a step of so many rows, seats included, runs in a constant shape."""
        return self.constant and num_rows <= self._most_rows

    def launched(self, run: Callable[[], Tensor], *, num_rows: int = 0) -> Callable[[], Tensor]:
        """Return what does a pass's device work as an engine does: a replay where such rows are captured.

        Args:
            run: The pass, over tensors that stay where they are. It runs at least once if it is captured.
            num_rows: Rows of the step, seats included.
        """
        if not self.is_constant(num_rows):
            return run
        was_enabled = gc.isenabled()
        gc.disable()  # to free a graph while another is being captured is an error
        try:
            return self._capture.full(run)
        finally:
            if was_enabled:
                gc.enable()

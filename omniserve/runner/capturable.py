"""make_graphs: whether the steps of an engine are captured as CUDA graphs, by what, and why not."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from omniserve.core.config import EngineConfig
from omniserve.core.setup import RunnerSetup
from omniserve.layers.patched_model import PatchedModel
from omniserve.ops.attention import DeviceAttention, is_graph_safe
from omniserve.runner.layer_loop import LayerLoop
from omniserve.runner.rank_broadcast import RankBroadcast

if TYPE_CHECKING:
    from omniserve.runner.cuda_graphs.graph_runner import CudaGraphRunner

logger = logging.getLogger(__name__)


def make_graphs(setup: RunnerSetup, loop: LayerLoop, broadcast: RankBroadcast) -> CudaGraphRunner | None:
    """Make what captures an engine's steps, and runs them; None: they are not captured.

    Raises:
        ValueError: As in ``wants_graphs``.
    """
    if not wants_graphs(setup.config, loop.model, loop.attend):
        return None
    if setup.has_safepoints:
        from omniserve.runner.cuda_graphs.safepoints import LeavableGraphRunner

        return LeavableGraphRunner(setup, loop=loop, broadcast=broadcast)
    from omniserve.runner.cuda_graphs.graph_runner import CudaGraphRunner

    return CudaGraphRunner(setup, loop=loop, broadcast=broadcast)


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

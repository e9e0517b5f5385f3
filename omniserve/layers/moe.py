"""Mixtral and Qwen3-MoE: the feed-forward module routes each token to a few experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from omniserve.core.errors import UnsupportedModelError
from omniserve.layers.base import LAYER_FAMILIES
from omniserve.layers.llama import LlamaFamily
from omniserve.layers.qwen3 import Qwen3Family

# HF's eager experts loop over the experts that were chosen, which no single graph can hold.
_GRAPH_EXPERTS = ("grouped_mm", "batched_mm")
# Major compute capabilities on which torch's grouped product of bf16 does not make the host wait. On others, and in
# other dtypes, the host reads how many rows each expert has.
_GROUPED_ON_DEVICE = (9, 10)


class _SparseFeedForward(LlamaFamily):
    """Calls HF's sparse blocks, which need a batch dimension."""

    def feed_forward(self, mlp: nn.Module, normed_TD: Tensor) -> Tensor:
        return mlp(normed_TD[None])[0]

    def check(self) -> None:
        super().check()
        implementation = self.config._experts_implementation
        if implementation not in _GRAPH_EXPERTS:
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: experts implementation {implementation!r} cannot be compiled as one "
                f"graph; call model.set_experts_implementation() with one of {', '.join(_GRAPH_EXPERTS)}"
            )

    def why_not_captured(self) -> str:
        if self._probe.device.type != "cuda" or self.config._experts_implementation != "grouped_mm":
            return ""
        major, minor = torch.cuda.get_device_capability(self._probe.device)
        if self._probe.dtype is torch.bfloat16 and major in _GROUPED_ON_DEVICE:
            return ""
        return (
            f"experts implementation 'grouped_mm' waits for the device in {self._probe.dtype} on compute capability "
            f"{major}.{minor}; load the model in bfloat16 on a GPU of capability "
            f"{' or '.join(f'{one}.x' for one in _GROUPED_ON_DEVICE)}, or set step_graphs='off' (for a small model, "
            "set_experts_implementation('batched_mm') does as well, which copies an expert's weights for every row)"
        )


@LAYER_FAMILIES.register("mixtral")
class MixtralFamily(_SparseFeedForward):
    """Mixtral: every layer is sparse."""


@LAYER_FAMILIES.register("qwen3_moe")
class Qwen3MoeFamily(_SparseFeedForward, Qwen3Family):
    """Qwen3-MoE: q/k norm; dense layers may stand between the sparse ones."""

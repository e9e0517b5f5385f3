"""Mixtral and Qwen3-MoE: the feed-forward module routes each token to a few experts."""

from __future__ import annotations

from torch import Tensor, nn

from omniserve.core.errors import UnsupportedModelError
from omniserve.layers.base import LAYER_FAMILIES, why_grouped_mm_waits
from omniserve.layers.llama import LlamaFamily
from omniserve.layers.qwen3 import Qwen3Family

# HF's eager experts loop over the experts that were chosen, which no single graph can hold.
_GRAPH_EXPERTS = ("grouped_mm", "batched_mm")


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
        if self.config._experts_implementation != "grouped_mm":
            return ""
        return why_grouped_mm_waits(self._probe.device, self._probe.dtype)


@LAYER_FAMILIES.register("mixtral")
class MixtralFamily(_SparseFeedForward):
    """Mixtral: every layer is sparse."""


@LAYER_FAMILIES.register("qwen3_moe")
class Qwen3MoeFamily(_SparseFeedForward, Qwen3Family):
    """Qwen3-MoE: q/k norm; dense layers may stand between the sparse ones."""

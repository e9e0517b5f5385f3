"""Qwen3: Llama's layer with an RMS norm on every query and key head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from omniserve.layers.base import LAYER_FAMILIES
from omniserve.layers.llama import LlamaFamily


@LAYER_FAMILIES.register("qwen3")
class Qwen3Family(LlamaFamily):
    """Qwen3 dense."""

    norms_heads = True

    def norm_heads(self, attention: Any, q_TNH: Tensor, k_TKH: Tensor) -> tuple[Tensor, Tensor]:
        return attention.q_norm(q_TNH), attention.k_norm(k_TKH)

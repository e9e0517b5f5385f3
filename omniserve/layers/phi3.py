"""Phi-3: q, k and v come from one projection, gate and up from another, and rotary may cover part of a head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from omniserve.layers.base import LAYER_FAMILIES
from omniserve.layers.llama import LlamaFamily


@LAYER_FAMILIES.register("phi3")
class Phi3Family(LlamaFamily):
    """Phi-3; with longrope (the 128k models) up to the length at which its frequencies change."""

    def pre_attention(
        self, layer: Any, hidden_TD: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        attention = layer.self_attn
        num_kv_heads = attention.num_key_value_heads
        num_heads = num_kv_heads * attention.num_key_value_groups, num_kv_heads, num_kv_heads
        return self.cut_and_rotate(attention, attention.qkv_proj(layer.input_layernorm(hidden_TD)), num_heads, cos, sin)

    def linear_groups(self, layer: nn.Module) -> list[tuple[nn.Module, ...]]:
        return []  # they are fused in the checkpoint

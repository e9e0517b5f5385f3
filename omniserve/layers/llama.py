"""Llama and the architectures with its layer: separate q, k, v, rotary, two norms, one feed-forward module.

Copy this file to add an architecture. Tensor legend: T packed tokens, D hidden, N query heads, K KV heads, H head size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from omniserve.layers.base import LAYER_FAMILIES, LayerFamily, split_heads


@LAYER_FAMILIES.register("llama")
@LAYER_FAMILIES.register("mistral")
@LAYER_FAMILIES.register("qwen2")
class LlamaFamily(LayerFamily):
    """Llama (Yi, TinyLlama, SmolLM), Mistral (sliding window), Qwen2 (bias on q, k, v)."""

    def pre_attention(
        self, layer: Any, hidden_TD: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        normed = layer.input_layernorm(hidden_TD)
        attention = layer.self_attn
        q_TNH = split_heads(attention.q_proj(normed), attention.head_dim)
        k_TKH = split_heads(attention.k_proj(normed), attention.head_dim)
        v_TKH = split_heads(attention.v_proj(normed), attention.head_dim)
        q_TNH, k_TKH = self.norm_heads(attention, q_TNH, k_TKH)
        q_TNH, k_TKH = self.modeling.apply_rotary_pos_emb(q_TNH, k_TKH, cos, sin)
        return q_TNH, k_TKH, v_TKH

    def post_attention(self, layer: Any, attn: Tensor, hidden_TD: Tensor) -> Tensor:
        hidden_TD = hidden_TD + layer.self_attn.o_proj(attn)
        return hidden_TD + self.feed_forward(layer.mlp, layer.post_attention_layernorm(hidden_TD))

    def norm_heads(self, attention: Any, q_TNH: Tensor, k_TKH: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise heads before rotary; Llama does not."""
        return q_TNH, k_TKH

    def feed_forward(self, mlp: nn.Module, normed_TD: Tensor) -> Tensor:
        """Run the layer's feed-forward module on packed rows."""
        return mlp(normed_TD)

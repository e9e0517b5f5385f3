"""Llama and the architectures with its layer: separate q, k, v, rotary, two norms, one feed-forward module.

Copy this file to add an architecture. Tensor legend: T packed tokens, D hidden, N query heads, K KV heads, H head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from omniserve.layers.base import LAYER_FAMILIES, LayerFamily, split_heads
from omniserve.layers.groups import fused, project

# HF's modules with the forward ``down(act(gate(x)) * up(x))``.
_GATED = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "Gemma2MLP"})


@LAYER_FAMILIES.register("llama")
@LAYER_FAMILIES.register("mistral")
@LAYER_FAMILIES.register("qwen2")
class LlamaFamily(LayerFamily):
    """Llama (Yi, TinyLlama, SmolLM), Mistral (sliding window), Qwen2 (bias on q, k, v)."""

    norms_heads = False
    """Queries and keys are normalised before rotary, each by its own norm."""

    def pre_attention(
        self, layer: Any, hidden_TD: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        normed = layer.input_layernorm(hidden_TD)
        attention = layer.self_attn
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        if fused(*projections) and not self.norms_heads:
            counts = [projection.out_features // attention.head_dim for projection in projections]
            return self.cut_and_rotate(attention, attention.q_proj.group_product(normed), counts, cos, sin)
        q_TNH, k_TKH, v_TKH = (split_heads(each, attention.head_dim) for each in project(normed, *projections))
        q_TNH, k_TKH = self.norm_heads(attention, q_TNH, k_TKH)
        q_TNH, k_TKH = self.modeling.apply_rotary_pos_emb(q_TNH, k_TKH, cos, sin)
        return q_TNH, k_TKH, v_TKH

    def cut_and_rotate(
        self, attention: Any, rows: Tensor, num_heads: Sequence[int], cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Cut q, k and v from one product with these numbers of heads; one rotation, and so one kernel, for q and k."""
        num_q, num_k, num_v = num_heads
        qk, v_TKH = split_heads(rows, attention.head_dim).split((num_q + num_k, num_v), dim=1)
        qk, _ = self.modeling.apply_rotary_pos_emb(qk, qk.narrow(1, 0, 0), cos, sin)
        q_TNH, k_TKH = qk.split((num_q, num_k), dim=1)
        return q_TNH, k_TKH, v_TKH

    def post_attention(self, layer: Any, attn: Tensor, hidden_TD: Tensor) -> Tensor:
        hidden_TD = hidden_TD + layer.self_attn.o_proj(attn)
        return hidden_TD + self.feed_forward(layer.mlp, layer.post_attention_layernorm(hidden_TD))

    def norm_heads(self, attention: Any, q_TNH: Tensor, k_TKH: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise heads before rotary; Llama does not."""
        return q_TNH, k_TKH

    def feed_forward(self, mlp: Any, normed_TD: Tensor) -> Tensor:
        """Run the layer's feed-forward module on packed rows."""
        watched = mlp._forward_hooks or mlp._forward_pre_hooks
        if watched or not self.is_gated(mlp) or not fused(mlp.gate_proj, mlp.up_proj):
            return mlp(normed_TD)
        gate, up = project(normed_TD, mlp.gate_proj, mlp.up_proj)
        return mlp.down_proj(mlp.act_fn(gate) * up)

    def is_gated(self, mlp: Any) -> bool:
        """Tell whether a feed-forward module is HF's own gated one, whose forward is known."""
        name = type(mlp).__name__
        return name in _GATED and type(mlp) is getattr(self.modeling, name, None) and "forward" not in mlp.__dict__

    def linear_groups(self, layer: Any) -> list[tuple[nn.Module, ...]]:
        attention, mlp = layer.self_attn, layer.mlp
        groups: list[tuple[nn.Module, ...]] = [(attention.q_proj, attention.k_proj, attention.v_proj)]
        if self.is_gated(mlp):
            groups.append((mlp.gate_proj, mlp.up_proj))
        return groups

"""GPT-NeoX (Pythia): one interleaved QKV projection, rotary on part of a head, attention beside the feed-forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from omniserve.layers.base import LAYER_FAMILIES, LayerFamily, split_heads


@LAYER_FAMILIES.register("gpt_neox")
class GPTNeoXFamily(LayerFamily):
    """GPT-NeoX with parallel or serial residual."""

    attention_name = "attention"

    @property
    def backbone(self) -> Any:
        return self.model.gpt_neox

    def pre_attention(
        self, layer: Any, hidden_TD: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        attention = layer.attention
        qkv = split_heads(attention.query_key_value(layer.input_layernorm(hidden_TD)), 3 * attention.head_size)
        q_TNH, k_TKH, v_TKH = qkv.chunk(3, dim=-1)
        q_TNH, k_TKH = self.modeling.apply_rotary_pos_emb(q_TNH, k_TKH, cos, sin)
        return q_TNH, k_TKH, v_TKH.contiguous()

    def post_attention(self, layer: Any, attn: Tensor, hidden_TD: Tensor) -> Tensor:
        attended_TD = layer.attention.dense(attn)
        if layer.use_parallel_residual:
            return layer.mlp(layer.post_attention_layernorm(hidden_TD)) + attended_TD + hidden_TD
        attended_TD = attended_TD + hidden_TD
        return layer.mlp(layer.post_attention_layernorm(attended_TD)) + attended_TD

    def final_norm(self, hidden_RD: Tensor) -> Tensor:
        return self.backbone.final_layer_norm(hidden_RD)

    def head_size(self, layer: nn.Module) -> int:
        return int(self.attention_module(layer).head_size)

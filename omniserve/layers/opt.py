"""OPT: learned positions, LayerNorm before or after each block, a plain two-layer feed-forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from omniserve.core.spec import AttentionSpec
from omniserve.layers.base import LAYER_FAMILIES, LayerFamily, split_heads
from omniserve.layers.groups import project


@LAYER_FAMILIES.register("opt")
class OPTFamily(LayerFamily):
    """OPT, with the 350m variant (norms after the blocks, embeddings narrower than the layers)."""

    @property
    def backbone(self) -> Any:
        return self.model.model.decoder

    def embed(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        hidden = self.backbone.embed_tokens(token_ids_T)
        if self.backbone.project_in is not None:
            hidden = self.backbone.project_in(hidden)
        return hidden + self.backbone.embed_positions(None, position_ids=positions_T)

    def rotary(self, positions_T: Tensor) -> None:
        return None

    def pre_attention(
        self, layer: Any, hidden_TD: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if layer.do_layer_norm_before:
            hidden_TD = layer.self_attn_layer_norm(hidden_TD)
        attention = layer.self_attn
        rows = project(hidden_TD, attention.q_proj, attention.k_proj, attention.v_proj)
        q_TNH, k_TKH, v_TKH = (split_heads(each, attention.head_dim) for each in rows)
        return q_TNH * attention.scaling, k_TKH, v_TKH

    def linear_groups(self, layer: Any) -> list[tuple[nn.Module, ...]]:
        attention = layer.self_attn
        return [(attention.q_proj, attention.k_proj, attention.v_proj)]

    def post_attention(self, layer: Any, attn: Tensor, hidden_TD: Tensor) -> Tensor:
        norm_before = layer.do_layer_norm_before
        hidden_TD = hidden_TD + layer.self_attn.out_proj(attn)
        if not norm_before:
            hidden_TD = layer.self_attn_layer_norm(hidden_TD)
        fed_TD = layer.final_layer_norm(hidden_TD) if norm_before else hidden_TD
        hidden_TD = hidden_TD + layer.fc2(layer.activation_fn(layer.fc1(fed_TD)))
        return hidden_TD if norm_before else layer.final_layer_norm(hidden_TD)

    def attention_spec(self, layer: nn.Module) -> AttentionSpec:
        return AttentionSpec(scale=1.0)  # q is scaled in pre_attention, as HF does, for the same rounding

    def final_norm(self, hidden_RD: Tensor) -> Tensor:
        if self.backbone.final_layer_norm is not None:
            hidden_RD = self.backbone.final_layer_norm(hidden_RD)
        if self.backbone.project_out is not None:
            hidden_RD = self.backbone.project_out(hidden_RD)
        return hidden_RD

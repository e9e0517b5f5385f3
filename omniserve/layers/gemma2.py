"""Gemma-2: norms before and after both blocks, alternating windows, soft-capped scores and logits."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from omniserve.core.spec import AttentionSpec
from omniserve.layers.base import LAYER_FAMILIES
from omniserve.layers.llama import LlamaFamily


@LAYER_FAMILIES.register("gemma2")
class Gemma2Family(LlamaFamily):
    """Gemma-2; the embedding module scales by itself."""

    def post_attention(self, layer: Any, attn: Tensor, hidden_TD: Tensor) -> Tensor:
        hidden_TD = hidden_TD + layer.post_attention_layernorm(layer.self_attn.o_proj(attn))
        fed_TD = self.feed_forward(layer.mlp, layer.pre_feedforward_layernorm(hidden_TD))
        return hidden_TD + layer.post_feedforward_layernorm(fed_TD)

    def attention_spec(self, layer: nn.Module) -> AttentionSpec:
        softcap = self.attention_module(layer).attn_logit_softcapping
        return dataclasses.replace(super().attention_spec(layer), softcap=softcap or 0.0)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        logits_RV = super().logits(hidden_RD)
        softcap = self.config.final_logit_softcapping
        return logits_RV if softcap is None else torch.tanh(logits_RV / softcap) * softcap

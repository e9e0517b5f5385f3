"""Llama 4: chunks with rotary embedding, and layers without either, whose queries grow with their position.

These layers count their position by the length of the cache, which a half has not: to it every token is the first one,
whose queries are as they are. So they are scaled here. Tensor legend: T packed tokens, N query heads, H head size, K KV
heads, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniserve.layers.tracing.placeholders import Table, filled
from omniserve.layers.tracing.traced import LAYER_FAMILIES, TracedFamily

_CHECKED_ROWS = 3
"""Rows of the sequence with which halves are compared."""


@LAYER_FAMILIES.register("llama4")
@LAYER_FAMILIES.register("llama4_text")
class Llama4Family(TracedFamily):
    """Llama 4, with the temperature of its layers without rotary embedding ("attn_temperature_tuning")."""

    _has_temperature = False

    def _check_halves(self, inputs: list[Tensor], tables: tuple[Tensor | None, Tensor | None]) -> None:
        scaled = [layer for layer in self.layers if _has_temperature(layer)]
        positions: set[int] = set()
        for layer in scaled:
            if (first := layer.layer.self_attn.floor_scale - 1) < _CHECKED_ROWS:
                raise self._unsupported(f"scales queries of layer {layer.layer_idx} from position {first} on")
            table = layer.arguments[1].get("position_ids")
            if not isinstance(table, Table):
                raise self._unsupported(f"gives layer {layer.layer_idx} no position_ids")
            positions.add(table.number)
        super()._check_halves(inputs, tables)  # without the temperature, which its few rows do not have
        self._has_temperature = bool(scaled)
        self._tables.keep(sorted({*self._tables.kept, *positions}))

    def pre_attention(
        self, layer: Any, hidden_TD: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_TNH, k_TKH, v_TKH = super().pre_attention(layer, hidden_TD, cos, sin)
        if self._has_temperature and _has_temperature(layer):
            attention = layer.layer.self_attn
            arguments = filled(layer.arguments[1], self._tables.from_rows(hidden_TD, cos, sin))
            steps_T = torch.floor((arguments["position_ids"].flatten().float() + 1.0) / attention.floor_scale)
            scale_T = torch.log1p(steps_T) * attention.attn_scale + 1.0
            q_TNH = (q_TNH * scale_T[:, None, None]).to(q_TNH.dtype)
        return q_TNH, k_TKH, v_TKH


def _has_temperature(layer: Any) -> bool:
    attention = layer.layer.self_attn
    return bool(attention.attn_temperature_tuning and not attention.use_rope)

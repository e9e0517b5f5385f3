"""LayerHalves: what comes before a layer's attention, and what comes behind it.

A half is the layer's own forward with another attention function: in pre-attention that function hands out q, k and v
and ends the layer, in post-attention it returns the attention rows. What post-attention computes before them is dead
code in the traced graph, which the compiler drops; without the compiler it is computed once more. Each row is a
sequence of one token.

Tensor legend: T packed tokens, D columns of a row, N query heads, K KV heads, H head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import functional

from omniserve.layers.cut import AttentionFunction, Cut, calling
from omniserve.layers.inspection import filled
from omniserve.layers.rows import RowLayout, write_left
from omniserve.layers.shell import ModelShell
from omniserve.layers.tables import PositionTables


class LayerHalves:
    """The halves of all layers of a model, which has one KV cache for all."""

    def __init__(self, shell: ModelShell, rows: RowLayout, tables: PositionTables) -> None:
        self._shell, self._rows, self._tables = shell, rows, tables
        self.num_heads = self.num_kv_heads = self.head_size = 0
        """Heads of the KV cache and their size; known when each layer has run (``call``, ``forward``)."""

    def pre_attention(
        self, layer: Any, hidden_TD: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run a layer up to its attention; return ``(q_TNH, k_TKH, v_TKH)``, model dtype, perhaps views."""
        heads: list[Tensor] = []
        places: dict[int, Any] = {}

        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, keywords: Any) -> Tensor:
            heads.extend(self.heads(query, key, value))
            raise Cut

        try:
            self.call(layer, hidden_TD, cos, sin, attend, places)
        except Cut:
            pass
        write_left(layer.arguments, places, hidden_TD)
        q_TNH, k_TKH, v_TKH = heads
        return q_TNH, k_TKH, v_TKH

    def post_attention(self, layer: Any, attn: Tensor, hidden_TD: Tensor) -> Tensor:
        """Run a layer from its attention on; return its output ``[T, D]``.

        ``attn`` is ``[T, N * H]``, contiguous, in the model's dtype; ``hidden_TD`` is the layer's input, the residual.
        """

        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, keywords: Any) -> Tensor:
            return attn.reshape(attn.shape[0], 1, -1, self.head_size)[..., : value.shape[3]]

        return self.call(layer, hidden_TD, None, None, attend)

    def heads(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Tensor]:
        """Yield q, k and v as rows ``[T, heads, H]``."""
        counts = self.num_heads, self.num_kv_heads, self.num_kv_heads
        for each, num_heads in zip((query, key, value), counts, strict=True):
            yield self._fit(each[:, :, 0], num_heads)

    def _fit(self, rows: Tensor, num_heads: int) -> Tensor:
        """Bring heads ``[T, heads, size]`` of one layer to the number and the size that the KV cache has for all.

        Zeros behind a head change no score, and add zeros to the result; a KV head that is there twice serves half as
        many query heads each.
        """
        if rows.shape[2] < self.head_size:
            rows = functional.pad(rows, (0, self.head_size - rows.shape[2]))
        return rows if rows.shape[1] == num_heads else rows.repeat_interleave(num_heads // rows.shape[1], dim=1)

    def call(
        self,
        layer: Any,
        hidden_TD: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        attend: AttentionFunction,
        places: dict[int, Any] | None = None,
    ) -> Tensor:
        """Run a layer's forward on rows; ``places`` are the mappings in which it leaves something for later ones."""
        output = self.forward(layer, hidden_TD, cos, sin, attend, {} if places is None else places)
        return self._rows.next(layer.turn, output if isinstance(output, Tensor) else output[0], hidden_TD)

    def forward(
        self, layer: Any, hidden_TD: Tensor, cos: Any, sin: Any, attend: AttentionFunction, places: dict[int, Any]
    ) -> Any:
        """Run a layer's forward on rows, and return what it returns."""
        args, kwargs = filled(layer.arguments, self._tables.from_rows(hidden_TD, cos, sin), hidden_TD, places)

        def mix(module: Any, args: Any, kwargs: Any) -> Tensor:
            return self._rows.mixed(hidden_TD)

        with calling(attend, self._shell.configs, self._shell.overridden, mix):
            return layer.layer(self._rows.hidden(hidden_TD), *args, **kwargs)

"""The parts of a model's forward: LayerHalves before and behind each attention, EmbeddingAndHead around all layers.

A half is the layer's own forward with another attention function: in pre-attention that function hands out q, k and v
and ends the layer, in post-attention it returns the attention rows. What post-attention computes before them is dead
code in the traced graph, which the compiler drops; without the compiler it is computed once more. Each row is a
sequence of one token.

What comes before the first layer and behind the last one is the model's own forward with its layers replaced
(``ModelTracer``), or single modules where these alone compute the same: the embedding, the rotary module, the last norm
with the head.

Tensor legend: T packed tokens, R rows that need logits, D columns of a row, N query heads, K KV heads, H head size, W
values of all tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from omniserve.layers.tracing.attention_interface import AttentionFunction, StopForward, attention_replaced
from omniserve.layers.tracing.batch_layout import PositionTables, RowLayout, write_left
from omniserve.layers.tracing.model_tracer import ModelTracer, at_least_one, unsupported
from omniserve.layers.tracing.placeholders import collect_tables, filled


class LayerHalves:
    """The halves of all layers of a model, which has one KV cache for all."""

    def __init__(self, tracer: ModelTracer, rows: RowLayout, tables: PositionTables) -> None:
        self._tracer, self._rows, self._tables = tracer, rows, tables
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
            raise StopForward

        try:
            self.call(layer, hidden_TD, cos, sin, attend, places)
        except StopForward:
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

        with attention_replaced(attend, self._tracer.configs, self._tracer.overridden, mix):
            return layer.layer(self._rows.hidden(hidden_TD), *args, **kwargs)


class EmbeddingAndHead:
    """A model but for its layers; ``find_shortcuts`` finds the modules that compute the same alone."""

    def __init__(self, model: PreTrainedModel, tracer: ModelTracer, rows: RowLayout, tables: PositionTables) -> None:
        self._model, self._tracer, self._rows, self._tables = model, tracer, rows, tables
        self.lm_head: Any = model.get_output_embeddings()
        self.vocab_size = 0
        """The number of logits in a row."""
        self.probe = torch.empty(0, dtype=model.dtype, device=model.device)
        """An empty tensor for rotary modules, which read its dtype and device."""
        self._embeds_alone = False
        self._rotary_module: Any = None
        self._last_norm: Any = None

    def embed(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Turn int64 token ids and positions ``[T]`` into the first layer's input ``[T, D]``."""
        if self._embeds_alone:
            return self._model.get_input_embeddings()(token_ids_T)
        ids_T, positions_T, num_tokens = at_least_one(token_ids_T), at_least_one(positions_T), len(token_ids_T)
        if not self._rows.carries:
            return self._rows.hidden_rows(self._tracer.first_input(ids_T, positions_T))[:num_tokens]
        run = self._tracer.run(ids_T, positions_T)
        return self._rows.first(run, [layer.arguments for layer in self._tracer.layers])[:num_tokens]

    def rotary(self, positions_T: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return what the layers are given beside their input, as rows ``[T, W]``: cos and sin, or all twice."""
        if not self._tables.kept:
            return None
        if self._rotary_module is not None:
            cos, sin = self._rotary_module(self.probe, position_ids=at_least_one(positions_T)[None])
            return cos[0][: len(positions_T)], sin[0][: len(positions_T)]
        found: dict[int, Tensor] = {}
        some_T = at_least_one(positions_T)
        arguments = self._tracer.run(torch.ones_like(some_T), some_T).arguments
        for layer, given in zip(self._tracer.layers, arguments, strict=True):
            collect_tables(layer.arguments, given, found)
        all_TW = self._tables.to_rows(found)[: len(positions_T)]
        return all_TW, all_TW

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Turn rows of the last layer's output into logits ``[R, vocabulary]``, model dtype."""
        if self._last_norm is not None:
            output_RD = self._rows.plain(hidden_RD)
            assert output_RD is not None
            return self.lm_head(self._last_norm(output_RD))
        return self._tracer.logits(self._rows.hidden(hidden_RD), hidden_RD.shape[0])

    def last_hidden(self, hidden_RD: Tensor) -> Tensor:
        """Turn rows of the last layer's output into the last hidden states of the model, ``[R, D]``, model dtype."""
        if self._last_norm is not None:
            output_RD = self._rows.plain(hidden_RD)
            assert output_RD is not None
            return self._last_norm(output_RD)
        return self._tracer.last_hidden(self._rows.hidden(hidden_RD), hidden_RD.shape[0])

    def find_shortcuts(self, positions: Sequence[int]) -> None:
        """See which modules alone compute what the model's forward does, at three positions, a late one included.

        Raises:
            UnsupportedModelError: A token's tables depend on the other positions of a step.
        """
        ids_T, positions_T = self._tracer.int64([1, 2, 3]), self._tracer.int64(positions)
        hidden_TD = self.embed(ids_T, positions_T)
        embedded_TD = self._model.get_input_embeddings()(ids_T)
        self._embeds_alone = embedded_TD.shape == hidden_TD.shape and torch.equal(embedded_TD, hidden_TD)
        rotary = getattr(self._tracer.backbone, "rotary_emb", None)
        if isinstance(rotary, nn.Module) and len(self._tables.kept) == 2:
            wanted = self.rotary(positions_T)
            try:
                made = rotary(self.probe, position_ids=positions_T[None])
            except TypeError:  # it takes more than positions
                made = None
            if isinstance(made, tuple) and len(made) == 2 and wanted is not None:
                rows = torch.cat([table[0] for table in made], dim=-1)
                if rows.dtype is wanted[0].dtype and torch.equal(rows, wanted[0]):
                    self._rotary_module, self._tables.are_cos_and_sin = rotary, True
        near_TW, far_TW = self.rotary(positions_T[:2]), self.rotary(positions_T)
        if near_TW is not None and far_TW is not None and not torch.equal(near_TW[0], far_TW[0][:2]):
            raise unsupported(self._model, "gives a token other rotary tables if there is a later one beside it")
        logits_RV = self.logits(hidden_TD)
        self.vocab_size = int(logits_RV.shape[1])
        output_TD = self._rows.plain(hidden_TD)
        width = None if output_TD is None else output_TD.shape[1:]
        for module in self._tracer.backbone.children() if output_TD is not None else ():
            if "norm" not in type(module).__name__.lower() or getattr(module, "weight", hidden_TD).shape[-1:] != width:
                continue
            if torch.equal(self.lm_head(module(output_TD)), logits_RV):
                self._last_norm = module

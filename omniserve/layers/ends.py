"""ModelEnds: what a model does before its first layer and behind its last one, and what it gives its layers.

That is the model's own forward with its layers replaced (``ModelShell``), or single modules where these alone compute
the same: the embedding, the rotary module, the last norm with the head.

Tensor legend: T packed tokens, R rows that need logits, D columns of a row, W values of all tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from omniserve.layers.inspection import collect
from omniserve.layers.rows import RowLayout
from omniserve.layers.shell import ModelShell, some, unsupported
from omniserve.layers.tables import PositionTables


class ModelEnds:
    """The ends of one model; ``find_shortcuts`` finds the modules that do for them."""

    def __init__(self, model: PreTrainedModel, shell: ModelShell, rows: RowLayout, tables: PositionTables) -> None:
        self._model, self._shell, self._rows, self._tables = model, shell, rows, tables
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
        ids_T, positions_T, num_tokens = some(token_ids_T), some(positions_T), len(token_ids_T)
        if not self._rows.carries:
            return self._rows.hidden_rows(self._shell.first_input(ids_T, positions_T))[:num_tokens]
        run = self._shell.run(ids_T, positions_T)
        return self._rows.first(run, [layer.arguments for layer in self._shell.layers])[:num_tokens]

    def rotary(self, positions_T: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return what the layers are given beside their input, as rows ``[T, W]``: cos and sin, or all twice."""
        if not self._tables.kept:
            return None
        if self._rotary_module is not None:
            cos, sin = self._rotary_module(self.probe, position_ids=some(positions_T)[None])
            return cos[0][: len(positions_T)], sin[0][: len(positions_T)]
        found: dict[int, Tensor] = {}
        some_T = some(positions_T)
        arguments = self._shell.run(torch.ones_like(some_T), some_T).arguments
        for layer, given in zip(self._shell.layers, arguments, strict=True):
            collect(layer.arguments, given, found)
        all_TW = self._tables.to_rows(found)[: len(positions_T)]
        return all_TW, all_TW

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Turn rows of the last layer's output into logits ``[R, vocabulary]``, model dtype."""
        if self._last_norm is not None:
            output_RD = self._rows.plain(hidden_RD)
            assert output_RD is not None
            return self.lm_head(self._last_norm(output_RD))
        return self._shell.logits(self._rows.hidden(hidden_RD), hidden_RD.shape[0])

    def find_shortcuts(self, positions: Sequence[int]) -> None:
        """See which modules alone compute what the model's forward does, at three positions, a late one included.

        Raises:
            UnsupportedModelError: A token's tables depend on the other positions of a step.
        """
        ids_T, positions_T = self._shell.int64([1, 2, 3]), self._shell.int64(positions)
        hidden_TD = self.embed(ids_T, positions_T)
        embedded_TD = self._model.get_input_embeddings()(ids_T)
        self._embeds_alone = embedded_TD.shape == hidden_TD.shape and torch.equal(embedded_TD, hidden_TD)
        rotary = getattr(self._shell.backbone, "rotary_emb", None)
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
        for module in self._shell.backbone.children() if output_TD is not None else ():
            if "norm" not in type(module).__name__.lower() or getattr(module, "weight", hidden_TD).shape[-1:] != width:
                continue
            if torch.equal(self.lm_head(module(output_TD)), logits_RV):
                self._last_norm = module

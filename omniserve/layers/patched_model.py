"""PatchedModel: a model without its attention, as the engine calls it; ``patching`` installs it as ``model.omniserve``.

Tensor legend: T packed tokens, R rows that need logits, D hidden, N query heads, K KV heads, H head size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from omniserve.layers.bound_half import BoundHalf
from omniserve.layers.compile_cache import CompileCache
from omniserve.layers.compiled import USUAL_TOKENS, compile_halves, source_digest
from omniserve.layers.noted_half import Noter
from omniserve.layers.tracing.layer_states import RowGroup, StatePool
from omniserve.layers.tracing.traced import TracedFamily
from omniserve.layers.weights.lora import LoRAStacks, rows_with
from omniserve.ops.collectives import alone

Rotary = tuple[Tensor | None, Tensor | None]
"""cos and sin ``[T, H]`` for a layer's pre-attention."""

AttentionHook = Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(layer, its input ``[T, D]``, q, k, v) -> attention rows ``[T, N * H]``, contiguous."""

BetweenHook = Callable[[int, Tensor], Tensor]
"""(attention layer, the output of the one before it ``[T, D]``) -> its input; for the number of layers: the last
output, which becomes logits."""

_WARM_UP_ROWS = {"cuda": USUAL_TOKENS}


class PatchedModel:
    """A model without its attention, for the engine. Call all methods under ``torch.inference_mode()``.

    Hidden states, q, k, v and logits are in the model's ``dtype``. If adapters can be named (``lora``), the last column
    of hidden states is the slot of a row's adapter; 0: it has none.
    """

    def __init__(
        self, family: TracedFamily, *, compile: bool, kept: KeptLayers | None = None, lora: LoRAStacks | None = None
    ) -> None:
        self.family = family
        self.lora = lora
        """The adapters that rows can name; None: there are none."""
        spec = family.spec()
        self.spec = spec if lora is None else dataclasses.replace(spec, hidden_size=spec.hidden_size + 1)
        self.num_layers = self.spec.num_layers
        self.layers, self.freed = kept or KeptLayers(range(self.num_layers), frozenset())
        self.dtype: torch.dtype = family.model.dtype
        self.device: torch.device = family.model.device
        self.rotary = family.embedding_and_head.rotary
        self.has_between = any(family.between)
        """Some layers do not attend, or have state beside their attention; ``run_between`` runs these."""

        # These are plain functions because aot_compile loses the self of a bound method.
        def pre(layer: nn.Module, hidden_TD: Tensor, cos: Tensor | None, sin: Tensor | None) -> Any:
            for table in (cos, sin):
                torch._check(table is None or table.shape[0] == hidden_TD.shape[0])
            if lora is None:
                return family.pre_attention(layer, hidden_TD, cos, sin)
            with rows_with(hidden_TD[:, -1]):
                return family.pre_attention(layer, hidden_TD[:, :-1], cos, sin)

        def post(layer: nn.Module, attn: Tensor, hidden_TD: Tensor) -> Tensor:
            torch._check(attn.shape[0] == hidden_TD.shape[0])
            if lora is None:
                return family.post_attention(layer, attn, hidden_TD)
            with rows_with(hidden_TD[:, -1]):
                output_TD = family.post_attention(layer, attn, hidden_TD[:, :-1])
            return torch.cat([output_TD, hidden_TD[:, -1:]], dim=1)

        def post_pre(
            layer: nn.Module, after: nn.Module, attn: Tensor, hidden_TD: Tensor, cos: Tensor | None, sin: Tensor | None
        ) -> Any:
            hidden_TD = post(layer, attn, hidden_TD)
            return hidden_TD, *pre(after, hidden_TD, cos, sin)

        own = [family.layers[layer] for layer in self.layers]
        alone = [(layer,) for layer in own]
        self._compile_cache = CompileCache(family.model, source_digest)

        def halves(half: Any, entries: list[Any], name: str) -> dict[int, Any]:
            made: Sequence[Any]
            if compile:
                made = compile_halves(half, entries, name, family.compiling, self._compile_cache)
            else:
                made = [functools.partial(half, *layers) for layers in entries]
            return dict(zip(self.layers, made, strict=False))

        self._pre = halves(pre, alone, "pre-attention")
        self._post = halves(post, alone, "post-attention")
        self._post_pre = halves(post_pre, [*pairwise(own)], "post-attention with the next pre-attention")

    def embed(self, token_ids_T: Tensor, positions_T: Tensor, lora_slots_T: Tensor | None = None) -> Tensor:
        """Turn int64 token ids and positions ``[T]`` into the first layer's input ``[T, D]``.

        ``lora_slots_T`` are the slots of the rows' adapters; None: they have none.
        """
        hidden_TD = self.family.embedding_and_head.embed(token_ids_T, positions_T)
        if self.lora is None:
            return hidden_TD
        column_T1 = hidden_TD.new_zeros(len(hidden_TD), 1) if lora_slots_T is None else lora_slots_T[:, None]
        return torch.cat([hidden_TD, column_T1.to(hidden_TD.dtype)], dim=1)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Turn rows of the last layer's output into logits ``[R, vocabulary]``, model dtype."""
        return self.family.embedding_and_head.logits(hidden_RD if self.lora is None else hidden_RD[:, :-1])

    def last_hidden(self, hidden_RD: Tensor) -> Tensor:
        """Turn rows of the last layer's output into the model's last hidden states ``[R, D]``, behind its norm."""
        return self.family.embedding_and_head.last_hidden(hidden_RD if self.lora is None else hidden_RD[:, :-1])

    def pre_attention(
        self, layer: int, hidden_TD: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(q_TNH, k_TKH, v_TKH)`` of layer ``layer``; inputs contiguous, T >= 1, cos and sin from rotary."""
        return self._pre[layer](hidden_TD, cos, sin)

    def post_attention(self, layer: int, attn: Tensor, hidden_TD: Tensor) -> Tensor:
        """Return the layer's output ``[T, D]`` from attention rows ``[T, N * H]`` and the layer's input, contiguous."""
        return self._post[layer](attn, hidden_TD)

    def post_pre(
        self, layer: int, attn: Tensor, hidden_TD: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run ``post_attention`` of a layer and ``pre_attention`` of the next; return the results of both.

        They are compiled as one function, so that a residual sum and the norm behind it are one kernel.
        """
        hidden_TD, q_TNH, k_TKH, v_TKH = self._post_pre[layer](attn, hidden_TD, cos, sin)
        return hidden_TD, q_TNH, k_TKH, v_TKH

    def run_between(self, layer: int, hidden_TD: Tensor, groups: Sequence[RowGroup], states: StatePool) -> Tensor:
        """Return the input of an attention layer: what the layers that do not attend make of the output before it.

        A module with state beside that layer's attention runs here, too.

        ``layer`` is ``num_layers`` for those behind the last one. Those with state read and write the slots of
        ``groups``, which hold all rows that are to pass.
        """
        if not self.family.between[layer]:
            return hidden_TD
        rows_TD = hidden_TD if self.lora is None else hidden_TD[:, :-1]
        for between in self.family.between[layer]:
            rows_TD = between.run(rows_TD, groups, states)
        return rows_TD if self.lora is None else torch.cat([rows_TD, hidden_TD[:, -1:]], dim=1)

    def run_layers(
        self,
        layers: range,
        hidden_TD: Tensor,
        rotary: Iterable[Rotary],
        attend: AttentionHook,
        *,
        between: BetweenHook | None = None,
        fused: bool = False,
    ) -> Tensor:
        """Pass rows, contiguous and T >= 1, through consecutive layers; return the last one's output ``[T, D]``.

        ``rotary`` has an entry for each layer; entries behind these are not taken. ``attend`` may write to the layer's
        input, to which post-attention adds. With ``fused`` the halves between two attentions run as ``post_pre``.
        ``between`` runs the layers that do not attend; None leaves them out.
        """
        if not fused:
            for layer, (cos, sin) in zip(layers, rotary, strict=False):
                if between is not None:
                    hidden_TD = between(layer, hidden_TD)
                q_TNH, k_TKH, v_TKH = self.pre_attention(layer, hidden_TD, cos, sin)
                attn_TD = attend(layer, hidden_TD, q_TNH, k_TKH, v_TKH)
                hidden_TD = self.post_attention(layer, attn_TD, hidden_TD)
            if between is not None and layers.stop == self.num_layers:
                hidden_TD = between(self.num_layers, hidden_TD)
            return hidden_TD
        assert between is None, "nothing runs between two attentions that are compiled as one function"
        tables, last = iter(rotary), layers[-1]
        q_TNH, k_TKH, v_TKH = self.pre_attention(layers[0], hidden_TD, *next(tables))
        for layer in layers[:-1]:
            attn_TD = attend(layer, hidden_TD, q_TNH, k_TKH, v_TKH)
            hidden_TD, q_TNH, k_TKH, v_TKH = self.post_pre(layer, attn_TD, hidden_TD, *next(tables))
        return self.post_attention(last, attend(last, hidden_TD, q_TNH, k_TKH, v_TKH), hidden_TD)

    @property
    def is_bound(self) -> bool:
        """All halves are compiled and called without torch's own code around them, so that they may be noted."""
        return all(
            isinstance(half, BoundHalf) and half.is_direct for half in (*self._pre.values(), *self._post.values())
        )

    def note_layers(self, noter: Noter, hidden_TD: Tensor, rotary: Rotary, attend: AttentionHook) -> Tensor:
        """Note the calls of all layers here, as ``run_layers`` makes them; return the tensor of the last one's output.

        Raises:
            NotNoted: A half makes calls that cannot be noted.
        """
        for layer in self.layers:
            noter.begin_layer()
            q_TNH, k_TKH, v_TKH = self._pre[layer].note(noter, hidden_TD, *rotary)
            attn_TD = attend(layer, hidden_TD, q_TNH, k_TKH, v_TKH)
            hidden_TD = self._post[layer].note(noter, attn_TD, hidden_TD)
        return hidden_TD

    def find_compiled(self, *, else_compile: bool, fused: bool = False) -> bool:
        """Take the halves that were compiled and cached before; return whether all are compiled now.

        The others run as they are until the next call of this, or, with ``else_compile``, are compiled here. With
        ``fused`` it looks for ``post_pre``, too.
        """
        self._compile_cache.deferred = not else_compile
        self._compile_cache.missing.clear()
        self.warm_up(fused=fused)
        return not self._compile_cache.missing

    def warm_up(self, *, fused: bool = False) -> None:
        """Run every half that is here once, with ``fused`` also ``post_pre``, so that no request waits for compiling.

        They run on one row; on a GPU on a usual number of rows, because kernels are tuned to the first that they see.
        """

        def attend(layer: int, hidden_TD: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
            return q_TNH.flatten(1).contiguous()

        with torch.inference_mode(), alone():
            num_rows = _WARM_UP_ROWS.get(self.device.type, 1)
            positions_T = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
            hidden_TD = self.embed(positions_T, positions_T)
            rotary = repeat(self.rotary(positions_T) or (None, None))
            for is_fused in (False, True)[: 1 + fused]:
                hidden_TD = self.run_layers(self.layers, hidden_TD, rotary, attend, fused=is_fused)
            self.logits(hidden_TD[:1])  # the head is not compiled, and with many rows it takes much memory


class KeptLayers(NamedTuple):
    """The layers that a process has: all, or one stage's."""

    layers: range
    freed: frozenset[int]
    """``id()`` of each module whose weights were freed, because its layer belongs to another stage."""

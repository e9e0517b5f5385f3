"""TracedFamily: the halves of any decoder whose layers call Hugging Face's attention interface once.

Nothing is written for an architecture. A half is the layer's own forward with another attention function: in
pre-attention that function hands out q, k and v, in post-attention it returns the attention rows. What the other half
needs is dead code in the traced graph, so the compiler drops it; without the compiler pre-attention ends at the
attention, and post-attention computes what comes before it once more. Each row is a sequence of one token. The
embedding, the position tables and the head are the model's own forward with its layers replaced.

What a layer is given beside its input (rotary tables, positions) is recorded from one run of the model. It must follow
from the positions, or else from the token: then it is part of the token's row (``RowLayout``). Tensor legend: T packed
tokens, R rows that need logits, D columns of a row, W values of all tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from omniserve.core.errors import UnsupportedModelError
from omniserve.core.registry import Registry
from omniserve.core.spec import AttentionSpec, ModelSpec
from omniserve.layers.arguments import LayerArguments
from omniserve.layers.around import check_between_layers, find_first_position, row_layout, same_tensors
from omniserve.layers.between import BetweenLayer, number_states
from omniserve.layers.checks import (
    USUAL_LENGTH,
    max_positions,
    refuse_dynamic_rope,
    rope_parameters,
    why_grouped_mm_waits,
)
from omniserve.layers.compiled import structure
from omniserve.layers.cut import AttentionFunction, calling, described_masks
from omniserve.layers.head import head_product
from omniserve.layers.inspection import (
    DataDependent,
    LinearWatch,
    OperatorLog,
    collect,
    filled,
)
from omniserve.layers.overrides import unused_arguments
from omniserve.layers.rows import WatchedPlace, places_in, write_left
from omniserve.layers.shell import Cut, ModelShell, no_attention, some, stand_in, unsupported
from omniserve.layers.states import state_bytes


class TracedFamily:
    """Any Hugging Face decoder, by its own code, without state apart from its model.

    Every tensor is token-packed: the rows of all requests in one ``[T, D]``, no batch dimension and no padding. One
    compiled function serves all layers of the same structure (``compiled.structure``).

    Raises:
        UnsupportedModelError: The model does something that the halves or the attention kernels do not have.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.lm_head = model.get_output_embeddings()
        if self.lm_head is None:
            raise self._unsupported("has no language modelling head; load it with AutoModelForCausalLM")
        refuse_dynamic_rope(model)
        self._picks_keys = getattr(self.config, "index_topk", None) is not None
        """An indexer in a layer picks the keys that it attends to: all, if there are no more than ``index_topk``."""
        self._probe = torch.empty(0, dtype=model.dtype, device=model.device)
        # Modules that alone compute what the model's forward does around its layers, where there are such.
        self._embeds_alone = False
        self._rotary_module: Any = None
        self._last_norm: Any = None
        with torch.inference_mode():
            self._shell = ModelShell(model)
            self.layers: list[Any] = self._shell.layers
            self._shell.first_position = find_first_position(model, self._shell)
            # What depends on a position may do so only for late ones.
            self._positions = [1, 2, min(self.limits().values()) - 1]
            self._record_arguments()
            self._record_layers()
            self._find_shortcuts()
            self._record_between()

    def _unsupported(self, what: str) -> UnsupportedModelError:
        return unsupported(self.model, what)

    # --- what the model is made of ----------------------------------------------------------------------------------

    def _record_arguments(self) -> None:
        """Find out which arguments of the layers follow from the positions, and which are always the same."""
        with described_masks():
            first, same = self._shell.run([1, 2, 3], [0, 1, 2]), self._shell.run([4, 2, 5], [0, 1, 2])
            other = self._shell.run([1, 2, 3, 4, 5], [3, 4, 5, 6, self._positions[-1]])
        self._rows = row_layout(self.model, self._shell, first, other)
        self._hands_over = check_between_layers(self.model, self._shell, first)
        """Layers are given what others return behind their output."""
        unused = unused_arguments(self._shell.overridden)
        self._arguments = LayerArguments(self.model, unused, picks_keys=self._picks_keys)
        for index, layer in enumerate(self.layers):
            layer.arguments = self._arguments.template(index, *(run.arguments[index] for run in (first, same, other)))
        self._forms = self._arguments.forms
        self._keep_tables([*range(len(self._forms))])
        self._rows.place_arguments([layer.arguments for layer in self.layers])
        for layer in self.layers:
            layer.turn = self._rows.turn(layer.layer_idx)

    def _keep_tables(self, kept: Sequence[int]) -> None:
        """Choose the tables that ``rotary`` makes; the others are zeros."""
        self._kept = list(kept)
        dtypes = [self._forms[number].dtype for number in kept]
        real = {dtype.to_real() if dtype.is_complex else dtype for dtype in dtypes}
        # One dtype holds them all: an integer below 2^24 is a float32, and bf16 and back is exact.
        self._table_dtype = real.pop() if len(real) == 1 else reduce(torch.promote_types, real, torch.float32)

    def _find_left(self) -> None:
        """Find what layers leave for later ones, and give it columns in the rows."""
        cos, sin = self.rotary(self._shell.int64(self._positions)) or (None, None)
        rows_TD = self.embed(self._shell.int64([1, 2, 3]), self._shell.int64(self._positions))
        left: dict[int, dict[Any, Any]] = {}
        of_layers: list[dict[int, WatchedPlace]] = []

        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, keywords: Any) -> Tensor:
            return stand_in(query, value)

        for layer in self.layers:
            places = {each.number: WatchedPlace(left.get(each.number, {})) for each in places_in(layer.arguments)}
            rows_TD = self._call_layer(layer, rows_TD, cos, sin, attend, places)
            of_layers.append(places)
            left.update({number: dict(place) for number, place in places.items()})
        self._rows.place_left([layer.arguments for layer in self.layers], of_layers)

    def _record_layers(self) -> None:
        """Run each layer: its attention, its linears that read the same rows, and what it computes."""
        cos, sin = self.rotary(self._shell.int64(self._positions)) or (None, None)
        if self._arguments.mappings:
            self._find_left()
        hidden_TD = self.embed(self._shell.int64([1, 2, 3]), self._shell.int64(self._positions))
        inputs: list[Tensor] = []
        self._specs: list[AttentionSpec] = []
        self._groups: list[list[tuple[nn.Module, ...]]] = []
        self._operators: set[str] = set()
        sizes: set[tuple[int, ...]] = set()
        for layer in self.layers:

            def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, keywords: Any) -> Tensor:
                heads = (query, key, value)
                sizes.add((*(each.shape[1] for each in heads), *(each.shape[3] for each in heads)))
                index = len(self._specs)
                described = self._shell.masks[index]
                self._specs.append(self._arguments.spec_of(index, query, mask, keywords, described))
                return stand_in(query, value)

            inputs.append(hidden_TD)
            places: dict[int, Any] = {}
            try:
                with LinearWatch(layer) as linears, OperatorLog() as operators:
                    output = self._forward(layer, hidden_TD, cos, sin, attend, places)
            except DataDependent as error:
                raise self._unsupported(
                    f"calls {error} in layer {layer.layer_idx}, whose result has a shape that depends on values; for a "
                    "mixture of experts call model.set_experts_implementation('grouped_mm') first"
                ) from None
            except UnsupportedModelError:
                raise
            except Exception as error:  # of the layer's own code, which may read its mask
                what = f"{type(error).__name__}: {error}"
                raise self._unsupported(f"does not run layer {layer.layer_idx} without a mask ({what})") from error
            behind = [] if isinstance(output, Tensor) else list(output[1:])
            if self._hands_over and not same_tensors(behind, layer.returned_behind(len(hidden_TD), 0)):
                raise self._unsupported(f"hands other layers what layer {layer.layer_idx} computes beside its output")
            hidden_TD = self._rows.next(layer.turn, output if isinstance(output, Tensor) else output[0], hidden_TD)
            write_left(layer.arguments, places, hidden_TD)
            self._groups.append(linears.groups())
            layer.computes = operators.digest(repr(layer.arguments))
            self._operators |= operators.names
        query_heads, kv_heads, _, query_sizes, _, value_sizes = map(set, zip(*sizes, strict=True))
        self._num_heads, self._num_kv_heads = max(query_heads), max(kv_heads)
        self._head_size = max(*query_sizes, *value_sizes)
        if len(query_heads) > 1 or any(self._num_kv_heads % number for number in kv_heads):
            raise self._unsupported(f"has layers whose numbers of heads do not fit one KV cache: {sorted(sizes)}")
        if any(size[1] != size[2] or size[3] != size[4] for size in sizes):
            raise self._unsupported(f"has queries, keys and values that do not match: {sorted(sizes)}")
        self._check_halves(inputs, (cos, sin))

    def _check_halves(self, inputs: list[Tensor], tables: tuple[Tensor | None, Tensor | None]) -> None:
        """See that rows do not depend on each other, that outputs need no table, and which tables matter.

        Of layers that differ in nothing but their weights, the first and the last are tried.
        """
        used: set[int] = set()
        sequence = self._shell.run([1, 2, 3], self._positions, as_sequence=True)
        kinds = [structure(layer) for layer in self.layers]
        last = {kind: index for index, kind in enumerate(kinds)}
        tried = {kinds.index(kind) for kind in last} | set(last.values())
        for layer, hidden_TD, (args, kwargs) in zip(self.layers, inputs, sequence.arguments, strict=True):
            if layer.layer_idx not in tried:
                continue
            heads = self.pre_attention(layer, hidden_TD, *tables)
            attn = heads[0].flatten(1).contiguous()
            output_TD = self.post_attention(layer, attn, hidden_TD)
            together: list[Tensor] = []

            def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, keywords: Any) -> Tensor:
                is_sequence = query.shape[0] == 1
                if is_sequence:
                    together.extend(self._heads(*(each.transpose(0, 2) for each in (query, key, value))))  # noqa: B023
                rows = attn.reshape(attn.shape[0], 1, -1, self._head_size)[..., : value.shape[3]]  # noqa: B023
                return rows.transpose(0, 1) if is_sequence else rows

            with calling(attend, self._shell.configs, self._shell.overridden):
                output = layer.layer(self._rows.transposed(self._rows.hidden(hidden_TD)), *args, **kwargs)
            output = self._rows.transposed(output if isinstance(output, Tensor) else output[0])
            together.append(self._rows.next(layer.turn, output, hidden_TD))
            for one, other in zip((*heads, output_TD), together, strict=True):
                if not torch.allclose(one.float(), other.float(), rtol=1e-2, atol=1e-3 * float(one.abs().max())):
                    raise self._unsupported(f"mixes the rows of layer {layer.layer_idx} outside of its attention")
            if not torch.equal(output_TD, self._call_layer(layer, hidden_TD, *tables, attend)):
                raise self._unsupported(f"uses positions in layer {layer.layer_idx} after its attention")
            for number in set(self._kept) - used:
                kept = self._kept
                self._keep_tables([other for other in kept if other != number])
                rows_TD = hidden_TD.clone()
                without = self.pre_attention(layer, rows_TD, *self._drop_table(tables, kept, number))
                self._keep_tables(kept)
                if not all(map(torch.equal, (*heads, hidden_TD), (*without, rows_TD))):
                    used.add(number)
        self._keep_tables(sorted(used))

    def _record_between(self) -> None:
        """Find out what the layers without attention keep of a request."""
        self.between: list[list[BetweenLayer]] = self._shell.between
        """Layers that do not attend: those before the first that does, before the second, ..., behind the last."""
        ids_T = self._shell.int64(range(1, 15))
        hidden = self._shell.first_input(ids_T, torch.arange(14, device=ids_T.device))
        if any(self.between) and hidden.shape != (14, 1, self._rows.width):
            raise self._unsupported("hands more than hidden states to its layers, of which some do not attend")
        hidden_nLD = hidden.flatten(0, 1).unflatten(0, (-1, 7))
        arguments = self._shell.run([1, 2, 3], [0, 1, 2]).between
        layers = [layer for each in self.between for layer in each]
        for layer, given in zip(layers, arguments, strict=True):
            layer.prepare(given, hidden_nLD)
        self.state_forms = [*number_states(self.between)]
        """The states of those of them that have state."""

    def _find_shortcuts(self) -> None:
        """See which modules alone compute what the model's forward does around its layers."""
        ids_T, positions_T = self._shell.int64([1, 2, 3]), self._shell.int64(self._positions)
        hidden_TD = self.embed(ids_T, positions_T)
        embedded_TD = self.model.get_input_embeddings()(ids_T)
        self._embeds_alone = embedded_TD.shape == hidden_TD.shape and torch.equal(embedded_TD, hidden_TD)
        rotary = getattr(self._shell.backbone, "rotary_emb", None)
        if isinstance(rotary, nn.Module) and len(self._kept) == 2:
            wanted = self.rotary(positions_T)
            try:
                made = rotary(self._probe, position_ids=positions_T[None])
            except TypeError:  # it takes more than positions
                made = None
            if isinstance(made, tuple) and len(made) == 2 and wanted is not None:
                rows = torch.cat([table[0] for table in made], dim=-1)
                if rows.dtype is wanted[0].dtype and torch.equal(rows, wanted[0]):
                    self._rotary_module = rotary
        near_TW, far_TW = self.rotary(positions_T[:2]), self.rotary(positions_T)
        if near_TW is not None and far_TW is not None and not torch.equal(near_TW[0], far_TW[0][:2]):
            raise self._unsupported("gives a token other rotary tables if there is a later one beside it")
        logits_RV = self.logits(hidden_TD)
        self._vocab_size = int(logits_RV.shape[1])
        output_TD = self._rows.plain(hidden_TD)
        width = None if output_TD is None else output_TD.shape[1:]
        for module in self._shell.backbone.children() if output_TD is not None else ():
            if "norm" not in type(module).__name__.lower() or getattr(module, "weight", hidden_TD).shape[-1:] != width:
                continue
            if torch.equal(self.lm_head(module(output_TD)), logits_RV):
                self._last_norm = module

    # --- a half: the layer's own forward ----------------------------------------------------------------------------

    def pre_attention(
        self, layer: Any, hidden_TD: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run a layer up to its attention; return ``(q_TNH, k_TKH, v_TKH)``, model dtype, perhaps views."""
        heads: list[Tensor] = []
        places: dict[int, Any] = {}

        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, keywords: Any) -> Tensor:
            heads.extend(self._heads(query, key, value))
            if not torch.compiler.is_compiling():
                raise Cut
            return stand_in(query, value)

        try:
            self._call_layer(layer, hidden_TD, cos, sin, attend, places)
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
            return attn.reshape(attn.shape[0], 1, -1, self._head_size)[..., : value.shape[3]]

        return self._call_layer(layer, hidden_TD, None, None, attend)

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Tensor]:
        """Yield q, k and v as rows ``[T, heads, H]``."""
        counts = self._num_heads, self._num_kv_heads, self._num_kv_heads
        for each, num_heads in zip((query, key, value), counts, strict=True):
            yield self._fit(each[:, :, 0], num_heads)

    def _fit(self, rows: Tensor, num_heads: int) -> Tensor:
        """Bring heads ``[T, heads, size]`` of one layer to the number and the size that the KV cache has for all.

        Zeros behind a head change no score, and add zeros to the result; a KV head that is there twice serves half as
        many query heads each.
        """
        if rows.shape[2] < self._head_size:
            rows = functional.pad(rows, (0, self._head_size - rows.shape[2]))
        return rows if rows.shape[1] == num_heads else rows.repeat_interleave(num_heads // rows.shape[1], dim=1)

    def _call_layer(
        self,
        layer: Any,
        hidden_TD: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        attend: AttentionFunction,
        places: dict[int, Any] | None = None,
    ) -> Tensor:
        """Run a layer's forward on rows; ``places`` are the mappings in which it leaves something for later ones."""
        output = self._forward(layer, hidden_TD, cos, sin, attend, {} if places is None else places)
        return self._rows.next(layer.turn, output if isinstance(output, Tensor) else output[0], hidden_TD)

    def _forward(
        self, layer: Any, hidden_TD: Tensor, cos: Any, sin: Any, attend: AttentionFunction, places: dict[int, Any]
    ) -> Any:
        """Run a layer's forward on rows, and return what it returns."""
        args, kwargs = filled(layer.arguments, self._tables(hidden_TD, cos, sin), hidden_TD, places)
        with calling(attend, self._shell.configs, self._shell.overridden):
            return layer.layer(self._rows.hidden(hidden_TD), *args, **kwargs)

    def _tables(self, hidden_TD: Tensor, cos: Tensor | None, sin: Tensor | None) -> list[Tensor]:
        """Return all tables as the layers want them; those that were not kept, or not given, are zeros."""
        tables = [form.from_rows(hidden_TD.new_zeros(hidden_TD.shape[0], form.width)) for form in self._forms]
        if cos is None:
            return tables
        kept = [self._forms[number] for number in self._kept]
        rows = [cos, sin] if self._rotary_module is not None else cos.split([form.width for form in kept], dim=-1)
        for number, form, rows_TW in zip(self._kept, kept, rows, strict=True):
            tables[number] = form.from_rows(rows_TW)
        return tables

    def _drop_table(self, tables: Any, kept: Sequence[int], number: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the rows of all tables without those of one."""
        rows = list(tables[0].split([self._forms[each].width for each in kept], dim=-1))
        del rows[list(kept).index(number)]
        left = torch.cat(rows, dim=-1) if rows else None
        return left, left

    # --- around the layers ------------------------------------------------------------------------------------------

    def embed(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Turn int64 token ids and positions ``[T]`` into the first layer's input ``[T, D]``."""
        if self._embeds_alone:
            return self.model.get_input_embeddings()(token_ids_T)
        ids_T, positions_T, num_tokens = some(token_ids_T), some(positions_T), len(token_ids_T)
        if not self._rows.carries:
            return self._rows.hidden_rows(self._shell.first_input(ids_T, positions_T))[:num_tokens]
        run = self._shell.run(ids_T, positions_T)
        return self._rows.first(run, [layer.arguments for layer in self.layers])[:num_tokens]

    def rotary(self, positions_T: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return what the layers are given beside their input, as rows ``[T, W]``: cos and sin, or all twice."""
        if not self._kept:
            return None
        if self._rotary_module is not None:
            cos, sin = self._rotary_module(self._probe, position_ids=some(positions_T)[None])
            return cos[0][: len(positions_T)], sin[0][: len(positions_T)]
        found: dict[int, Tensor] = {}
        some_T = some(positions_T)
        arguments = self._shell.run(torch.ones_like(some_T), some_T).arguments
        for layer, given in zip(self.layers, arguments, strict=True):
            collect(layer.arguments, given, found)
        rows = [self._forms[number].to_rows(found[number]).to(self._table_dtype) for number in self._kept]
        all_TW = torch.cat(rows, dim=-1)[: len(positions_T)]
        return all_TW, all_TW

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Turn rows of the last layer's output into logits ``[R, vocabulary]``, model dtype."""
        if self._last_norm is not None:
            output_RD = self._rows.plain(hidden_RD)
            assert output_RD is not None
            return head_product(self.lm_head, self._last_norm(output_RD))
        return self._shell.logits(self._rows.hidden(hidden_RD), hidden_RD.shape[0])

    # --- for the engine ---------------------------------------------------------------------------------------------

    def compiling(self) -> AbstractContextManager[None]:
        """Enter this while halves are traced: the compiler cannot change a model's config."""
        return calling(no_attention, self._shell.configs, self._shell.overridden)

    def why_not_captured(self) -> str:
        """Return why a CUDA graph cannot hold the halves, and what to do about it; empty if it can."""
        if not any("grouped_mm" in name for name in self._operators):
            return ""
        return why_grouped_mm_waits(self._probe.device, self._probe.dtype)

    def linear_groups(self, layer: Any) -> list[tuple[nn.Module, ...]]:
        """Return the linears of a layer that read the same rows: disjoint groups, in the order called."""
        return self._groups[layer.layer_idx]

    def limits(self) -> dict[str, int]:
        """Return how many tokens a sequence may have, by each reason that limits them."""
        limits = {"its number of positions": (max_positions(self.config) or USUAL_LENGTH) - self._shell.first_position}
        for rope in rope_parameters(self.model):
            if rope.get("rope_type") == "longrope":
                limits["longrope's other frequencies for longer ones"] = int(rope["original_max_position_embeddings"])
        if self._picks_keys:
            limits["it picks keys among more than index_topk"] = int(self.config.index_topk)
        return limits

    def spec(self, max_model_len: int | None = None) -> ModelSpec:
        """Return the model's sizes; ``max_model_len``, the longest prompt plus output, is by default the model's.

        Raises:
            ValueError: ``max_model_len`` is not in ``[1, the model's]``.
        """
        limit, why = min((length, reason) for reason, length in self.limits().items())
        if max_model_len is not None and not 1 <= max_model_len <= limit:
            raise ValueError(f"max_model_len must be in [1, {limit}] for this model ({why}), got {max_model_len}")
        sources = (self.model.generation_config, self.config)
        eos = next((e for source in sources if (e := getattr(source, "eos_token_id", None)) is not None), ())
        return ModelSpec(
            num_layers=len(self.layers),
            hidden_size=self._rows.width,
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            head_size=self._head_size,
            vocab_size=self._vocab_size,
            max_model_len=max_model_len or limit,
            eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos),
            dtype_bytes=self.model.dtype.itemsize,
            attention=tuple(self._specs),
            state_bytes=state_bytes(self.state_forms),
        )


LAYER_FAMILIES: Registry[type[TracedFamily]] = Registry("layer family", package="omniserve.layers")
"""HF ``config.model_type`` -> its family, for a type that differs from all others."""


def family_of(model: PreTrainedModel) -> TracedFamily:
    """Return the layers of a Hugging Face model, cut around their attention.

    Raises:
        UnsupportedModelError: The model does something that the halves or the attention kernels do not have.
    """
    model_type = model.config.model_type
    family = LAYER_FAMILIES.get(model_type) if model_type in LAYER_FAMILIES.names() else TracedFamily
    return family(model)

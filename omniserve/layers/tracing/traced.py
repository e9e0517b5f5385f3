"""TracedFamily: any decoder whose layers call Hugging Face's attention interface once, cut around its attention.

Nothing is written for an architecture. Here a model is looked at: a few runs on some tokens record what its layers are
given and what their attention is, and prove that its halves compute what the model does. What serves it then is the
model's own code, in ``LayerHalves`` (before and behind the attention of a layer) and ``EmbeddingAndHead`` (before the
first layer and behind the last).

What a layer is given beside its input (rotary tables, positions) is recorded from one run of the model. It must follow
from the positions (``PositionTables``), or else from the token: then it is part of the token's row (``RowLayout``).
Tensor legend: T packed tokens, R rows that need logits, D columns of a row, W values of all tables.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from omniserve.core.errors import UnsupportedModelError
from omniserve.core.registry import Registry
from omniserve.core.spec import HEAD_SIZE_STEP, MAX_HEAD_SIZE, MAX_LATENT_SIZE, AttentionSpec, ModelSpec, eos_token_ids
from omniserve.layers.compiled import structure
from omniserve.layers.tracing.attention_free import AttentionFreeLayer, number_states
from omniserve.layers.tracing.attention_interface import attention_replaced, described_masks, no_attention
from omniserve.layers.tracing.batch_layout import PositionTables, WatchedPlace, places_in, write_left
from omniserve.layers.tracing.forward_parts import EmbeddingAndHead, LayerHalves
from omniserve.layers.tracing.inspection import DataDependent, LinearWatch, OperatorLog
from omniserve.layers.tracing.layer_inputs import (
    LayerArguments,
    check_between_layers,
    find_first_position,
    row_layout,
    same_tensors,
)
from omniserve.layers.tracing.layer_states import state_bytes
from omniserve.layers.tracing.model_config import (
    USUAL_LENGTH,
    max_positions,
    refuse_dynamic_rope,
    rope_parameters,
    why_grouped_mm_waits,
)
from omniserve.layers.tracing.model_tracer import ModelTracer, TracedRun, stand_in, unsupported
from omniserve.layers.tracing.overrides import Overridden, unused_arguments
from omniserve.layers.tracing.placeholders import TableForm


class TracedFamily:
    """Any Hugging Face decoder, by its own code, without state apart from its model.

    Every tensor is token-packed: the rows of all requests in one ``[T, D]``, no batch dimension and no padding. One
    compiled function serves all layers of the same structure (``compiled.structure``).

    Raises:
        UnsupportedModelError: The model does something that the halves or the attention kernels do not have.
    """

    def __init__(self, model: PreTrainedModel, *, latent_kv: bool = False) -> None:
        self.model = model
        self.latent_kv = latent_kv
        """K and V are latents (``latent.LatentAttention``)."""
        self.config = model.config.get_text_config(decoder=True)
        if model.get_output_embeddings() is None:
            raise self._unsupported("has no language modelling head; load it with AutoModelForCausalLM")
        refuse_dynamic_rope(model)
        self._picks_keys = getattr(self.config, "index_topk", None) is not None
        """An indexer in a layer picks the keys that it attends to: all, if there are no more than ``index_topk``."""
        with torch.inference_mode():
            self._tracer = ModelTracer(model, latent_kv=latent_kv)
            self.layers: list[Any] = self._tracer.layers
            self._tracer.first_position = find_first_position(model, self._tracer)
            # What depends on a position may do so only for late ones.
            self._positions = [1, 2, min(self.limits().values()) - 1]
            self._record_arguments()
            self._record_layers()
            self.embedding_and_head.find_shortcuts(self._positions)

    def _unsupported(self, what: str) -> UnsupportedModelError:
        return unsupported(self.model, what)

    # --- what the model is made of ----------------------------------------------------------------------------------

    def _record_arguments(self) -> None:
        """Find out which arguments of the layers follow from the positions, and which are always the same."""
        with described_masks():
            first, same = self._tracer.run([1, 2, 3], [0, 1, 2]), self._tracer.run([4, 2, 5], [0, 1, 2])
            other = self._tracer.run([1, 2, 3, 4, 5], [3, 4, 5, 6, self._positions[-1]])
        self._rows = row_layout(self.model, self._tracer, first, other)
        self._record_between(first)
        self._hands_over = check_between_layers(self.model, self._tracer, first)
        """Layers are given what others return behind their output."""
        unused = unused_arguments(self._tracer.overridden)
        self._arguments = LayerArguments(self.model, unused, picks_keys=self._picks_keys)
        for index, layer in enumerate(self.layers):
            layer.arguments = self._arguments.template(index, *(run.arguments[index] for run in (first, same, other)))
        self._tables = PositionTables(self._arguments.forms)
        self.halves = LayerHalves(self._tracer, self._rows, self._tables)
        self.embedding_and_head = EmbeddingAndHead(self.model, self._tracer, self._rows, self._tables)
        self._rows.place_arguments([layer.arguments for layer in self.layers])
        self._place_mixers()
        for layer in self.layers:
            layer.turn = self._rows.turn(layer.layer_idx)

    def _find_left(self) -> None:
        """Find what layers leave for later ones, and give it columns in the rows."""
        cos, sin = self.embedding_and_head.rotary(self._tracer.int64(self._positions)) or (None, None)
        rows_TD = self.embedding_and_head.embed(self._tracer.int64([1, 2, 3]), self._tracer.int64(self._positions))
        left: dict[int, dict[Any, Any]] = {}
        of_layers: list[dict[int, WatchedPlace]] = []

        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, keywords: Any) -> Tensor:
            return stand_in(query, value)

        for layer in self.layers:
            places = {each.number: WatchedPlace(left.get(each.number, {})) for each in places_in(layer.arguments)}
            rows_TD = self.halves.call(layer, rows_TD, cos, sin, attend, places)
            of_layers.append(places)
            left.update({number: dict(place) for number, place in places.items()})
        self._rows.place_left([layer.arguments for layer in self.layers], of_layers)

    def _record_layers(self) -> None:
        """Run each layer: its attention, its linears that read the same rows, and what it computes."""
        cos, sin = self.embedding_and_head.rotary(self._tracer.int64(self._positions)) or (None, None)
        if self._arguments.mappings:
            self._find_left()
        hidden_TD = self.embedding_and_head.embed(self._tracer.int64([1, 2, 3]), self._tracer.int64(self._positions))
        inputs: list[Tensor] = []
        self._specs: list[AttentionSpec] = []
        self._groups: list[list[tuple[nn.Module, ...]]] = []
        self.row_linears: list[nn.Linear] = []
        """The linears of layers that are called on the rows of a step as they are, each once."""
        self._operators: set[str] = set()
        sizes: set[tuple[int, ...]] = set()
        for layer in self.layers:

            def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, keywords: Any) -> Tensor:
                heads = (query, key, value)
                sizes.add((*(each.shape[1] for each in heads), *(each.shape[3] for each in heads)))
                index = len(self._specs)
                described = self._tracer.masks[index]
                self._specs.append(self._arguments.spec_of(index, query, mask, keywords, described))
                return stand_in(query, value)

            inputs.append(hidden_TD)
            places: dict[int, Any] = {}
            try:
                with LinearWatch(layer) as linears, OperatorLog() as operators:
                    output = self.halves.forward(layer, hidden_TD, cos, sin, attend, places)
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
            self.row_linears += linears.called_on(len(hidden_TD))
            layer.computes = operators.digest(repr(layer.arguments))
            self._operators |= operators.names
        query_heads, kv_heads, _, query_sizes, _, value_sizes = map(set, zip(*sizes, strict=True))
        halves = self.halves
        halves.num_heads, halves.num_kv_heads = max(query_heads), max(kv_heads)
        halves.head_size = -(-max(*query_sizes, *value_sizes) // HEAD_SIZE_STEP) * HEAD_SIZE_STEP
        most = MAX_LATENT_SIZE if self.latent_kv else MAX_HEAD_SIZE
        if halves.head_size > most:
            what = "latents" if self.latent_kv else "heads"
            raise self._unsupported(f"has {what} of {halves.head_size} elements; the kernels take up to {most}")
        if self.latent_kv and kv_heads != {1}:
            raise self._unsupported("has layers without latents: leave out latent_kv and attention='latent'")
        if len(query_heads) > 1 or any(halves.num_kv_heads % number for number in kv_heads):
            raise self._unsupported(f"has layers whose numbers of heads do not fit one KV cache: {sorted(sizes)}")
        if any(size[1] != size[2] or size[3] != size[4] for size in sizes):
            raise self._unsupported(f"has queries, keys and values that do not match: {sorted(sizes)}")
        self._check_halves(inputs, (cos, sin))

    def _check_halves(self, inputs: list[Tensor], tables: tuple[Tensor | None, Tensor | None]) -> None:
        """See that rows do not depend on each other, that outputs need no table, and which tables matter.

        Of layers that differ in nothing but their weights, the first and the last are tried.
        """
        used: set[int] = set()
        sequence = self._tracer.run([1, 2, 3], self._positions, as_sequence=True)
        kinds = [structure(layer) for layer in self.layers]
        last = {kind: index for index, kind in enumerate(kinds)}
        tried = {kinds.index(kind) for kind in last} | set(last.values())
        for layer, hidden_TD, (args, kwargs) in zip(self.layers, inputs, sequence.arguments, strict=True):
            if layer.layer_idx not in tried:
                continue
            for mixer in self.mixers[layer.layer_idx]:  # its output, which zeros would not tell from any other
                columns = hidden_TD[:, mixer.columns]
                columns.copy_(torch.linspace(-1, 1, columns.numel()).view_as(columns))
            heads = self.pre_attention(layer, hidden_TD, *tables)
            attn = heads[0].flatten(1).contiguous()
            output_TD = self.post_attention(layer, attn, hidden_TD)
            together: list[Tensor] = []

            def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, keywords: Any) -> Tensor:
                is_sequence = query.shape[0] == 1
                if is_sequence:
                    together.extend(self.halves.heads(*(each.transpose(0, 2) for each in (query, key, value))))  # noqa: B023
                rows = attn.reshape(attn.shape[0], 1, -1, self.halves.head_size)[..., : value.shape[3]]  # noqa: B023
                return rows.transpose(0, 1) if is_sequence else rows

            def mix(module: Any, args: Any, kwargs: Any) -> Tensor:
                return self._rows.mixed(hidden_TD).transpose(0, 1)  # noqa: B023

            with attention_replaced(attend, self._tracer.configs, self._tracer.overridden, mix):
                output = layer.layer(self._rows.transposed(self._rows.hidden(hidden_TD)), *args, **kwargs)
            output = self._rows.transposed(output if isinstance(output, Tensor) else output[0])
            together.append(self._rows.next(layer.turn, output, hidden_TD))
            for one, other in zip((*heads, output_TD), together, strict=True):
                if not torch.allclose(one.float(), other.float(), rtol=1e-2, atol=1e-3 * float(one.abs().max())):
                    raise self._unsupported(f"mixes the rows of layer {layer.layer_idx} outside of its attention")
            if not torch.equal(output_TD, self.halves.call(layer, hidden_TD, *tables, attend)):
                raise self._unsupported(f"uses positions in layer {layer.layer_idx} after its attention")
            kept, rows_TW = self._tables.kept, tables[0]
            for number in set(kept) - used:
                assert rows_TW is not None
                left_TW, rows_TD = self._tables.without(rows_TW, number), hidden_TD.clone()
                self._tables.keep(other for other in kept if other != number)
                without = self.pre_attention(layer, rows_TD, left_TW, left_TW)
                self._tables.keep(kept)
                if not all(map(torch.equal, (*heads, hidden_TD), (*without, rows_TD))):
                    used.add(number)
        self._tables.keep(sorted(used))

    def _record_between(self, first: TracedRun) -> None:
        """Find out what the layers without attention and the modules beside an attention keep of a request."""
        self.between: list[list[AttentionFreeLayer]] = self._tracer.between
        """Layers that do not attend: those before the first that does, before the second, ..., behind the last.

        A mixer of a layer that attends is the last one before it.
        """
        layers = [*zip((layer for each in self.between for layer in each), first.between, strict=True)]
        mixers = [
            (mixer, given) for each, given in zip(self._tracer.mixers, first.arguments, strict=True) for mixer in each
        ]
        if layers or mixers:
            ids_T = self._tracer.int64(range(1, 15))
            hidden = self._tracer.first_input(ids_T, torch.arange(14, device=ids_T.device))
            if hidden.shape != (14, 1, self._rows.width):
                raise self._unsupported("gives its layers, of which some have state, several hidden states of a token")
            for part, given in (*layers, *mixers):
                part.prepare(given, hidden.flatten(0, 1).unflatten(0, (-1, 7)))
        self.mixers = [[mixer for mixer in each if mixer.forms] for each in self._tracer.mixers]
        """The modules with state beside each attending layer's attention: at most one a layer."""
        for index, each in enumerate(self.mixers):
            if len(each) > 1:
                raise self._unsupported(f"has {len(each)} modules with state in layer {index}")
            self.between[index] += each
            self._tracer.overridden += [mixer.overridden for mixer in each]
        self.state_forms = [*number_states(self.between)]
        """States of each layer and mixer that has state, in the order of the model."""

    def _place_mixers(self) -> None:
        """Give columns of the rows to the mixers' output."""
        mixers = [mixer for each in self.mixers for mixer in each]
        widths = {mixer.columns.stop for mixer in mixers}
        if len(widths) > 1:
            raise self._unsupported(f"has modules with state whose outputs differ in size: {sorted(widths)}")
        if mixers:
            columns = self._rows.place_mixed(TableForm(0, (1, *widths), self.model.dtype))
            for mixer in mixers:
                mixer.columns = columns

    # --- what serves it ---------------------------------------------------------------------------------------------

    def pre_attention(
        self, layer: Any, hidden_TD: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run a layer up to its attention; see ``LayerHalves``."""
        return self.halves.pre_attention(layer, hidden_TD, cos, sin)

    def post_attention(self, layer: Any, attn: Tensor, hidden_TD: Tensor) -> Tensor:
        """Run a layer from its attention on; see ``LayerHalves``."""
        return self.halves.post_attention(layer, attn, hidden_TD)

    @property
    def overridden(self) -> list[Overridden]:
        """The modules that are of another class while a half runs."""
        return self._tracer.overridden

    # --- for the engine ---------------------------------------------------------------------------------------------

    def compiling(self) -> AbstractContextManager[None]:
        """Enter this while halves are traced: the compiler cannot change a model's config."""
        return attention_replaced(no_attention, self._tracer.configs, self._tracer.overridden)

    def why_not_captured(self) -> str:
        """Return why a CUDA graph cannot hold the halves, and what to do about it; empty if it can."""
        if not any("grouped_mm" in name for name in self._operators):
            return ""
        return why_grouped_mm_waits(self.embedding_and_head.probe.device, self.embedding_and_head.probe.dtype)

    def linear_groups(self, layer: Any) -> list[tuple[nn.Module, ...]]:
        """Return the linears of a layer that read the same rows: disjoint groups, in the order called."""
        return self._groups[layer.layer_idx]

    def limits(self) -> dict[str, int]:
        """Return how many tokens a sequence may have, by each reason that limits them."""
        limits = {"its number of positions": (max_positions(self.config) or USUAL_LENGTH) - self._tracer.first_position}
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
        return ModelSpec(
            num_layers=len(self.layers),
            hidden_size=self._rows.width,
            num_heads=self.halves.num_heads,
            num_kv_heads=self.halves.num_kv_heads,
            head_size=self.halves.head_size,
            vocab_size=self.embedding_and_head.vocab_size,
            max_model_len=max_model_len or limit,
            eos_token_ids=eos_token_ids(
                self.embedding_and_head.vocab_size, self.model.generation_config, self.model.config, self.config
            ),
            dtype_bytes=self.model.dtype.itemsize,
            attention=tuple(self._specs),
            value_is_key=self.latent_kv,
            state_bytes=state_bytes(self.state_forms),
        )


LAYER_FAMILIES: Registry[type[TracedFamily]] = Registry("layer family", package="omniserve.layers")
"""HF ``config.model_type`` -> its family, for a type that differs from all others."""


def family_of(model: PreTrainedModel, *, latent_kv: bool = False) -> TracedFamily:
    """Return the layers of a Hugging Face model, cut around their attention; ``latent_kv`` is as for ``patch``.

    Raises:
        UnsupportedModelError: The model does something that the halves or the attention kernels do not have.
    """
    model_type = model.config.model_type
    family = LAYER_FAMILIES.get(model_type) if model_type in LAYER_FAMILIES.names() else TracedFamily
    return family(model, latent_kv=latent_kv)

"""Attention-free parts of a model: decoder layers without attention, and modules with state beside an attention.

Both run between the halves of two layers that attend. An AttentionFreeLayer either has recurrent state instead of KV or
computes each row by itself. The layer's own forward runs; its cache is a ``StateCache``. That its states carry a
request from chunk to chunk is proved when a model is patched.

Layers are counted by attentions, so a layer without one runs before the attention layer behind it. The states of a
token that is away on the host tier wait with it. A preempted request begins again at its first token. Safepoints and
captured steps are off.

A Mixer stands in a decoder layer beside the attention, as in Falcon-H1, and runs before the halves of its layer: the
layer's own forward runs up to the mixer's output, which becomes columns of the rows (``RowLayout.place_mixed``). While
a half runs, these columns are the mixer's output.

Legend: n sequences of a call, L tokens of each, T rows of a step, D hidden, W columns of a row.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from omniserve.core.errors import UnsupportedModelError
from omniserve.layers.tracing.attention_interface import Mixed, StopForward, attention_replaced, no_attention
from omniserve.layers.tracing.inspection import LinearWatch
from omniserve.layers.tracing.layer_states import RowGroup, StateCache, StateForm, StateKey, StatePool
from omniserve.layers.tracing.overrides import Overridden

CACHE_NAMES = frozenset({"cache", "past_key_values", "cache_params", "past_key_value"})
"""The names by which layers and their modules take the model's cache as an argument."""
_CHUNKS = (3, 2, 1, 1)
"""Lengths of the chunks by which a layer's states are tried."""


class AttentionFreeLayer:
    """A layer without attention; ``name`` is what errors call it, ``behind`` as in ``TracedLayer``."""

    def __init__(self, layer: nn.Module, name: str, *, behind: tuple[None, ...] | None) -> None:
        self.layer, self.behind = layer, behind
        self.part = layer
        """The module that has the states and the linears: the layer, or a ``Mixer``'s module."""
        self.width = 0
        """D: the first columns of a row are its input."""
        self.columns = slice(0)
        """The columns of a row that receive the output."""
        self._name = name
        self.number = -1
        """The layer's index among the layers with state; -1 for a layer without."""
        self.forms: dict[StateKey, StateForm] = {}
        """The states of one request."""
        self._by_token = False
        """The layer is called once for each token of a chunk that goes on with a state."""
        self.linears: list[nn.Linear] = []
        """The linears that the layer calls. A linear that it does not call must stay as it is: its weights may be used
        alone."""
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] = {}

    def run(self, rows_TW: Tensor, groups: Sequence[RowGroup], pool: StatePool) -> Tensor:
        """Return the rows of a step with the layer's output; a layer with state leaves rows of no group as they are."""
        hidden_TD, output_TW = rows_TW[:, : self.width], rows_TW.clone()
        output_TD = output_TW[:, self.columns]
        if self.number < 0:
            output_TD.copy_(self._call(hidden_TD[:, None], StateCache())[:, 0])
            return output_TW
        for group in groups:
            cache = pool.read(self.number, group)
            output_TD[group.rows_nL] = self._call(hidden_TD[group.rows_nL], cache)
            pool.write(self.number, group, cache)
        return output_TW

    def prepare(self, arguments: tuple[Any, Any], hidden_nLD: Tensor) -> None:
        """Find out what the layer keeps, and prove that it can be run in chunks.

        Args:
            arguments: What the model gave the layer beside its input, positional ones and those with a name.
            hidden_nLD: Some input, of two sequences of seven tokens.

        Raises:
            UnsupportedModelError: It cannot.
        """
        self._args, self._kwargs = arguments
        self.width = hidden_nLD.shape[2]
        output_nLD = self._try(hidden_nLD, StateCache())
        if output_nLD.dtype is not hidden_nLD.dtype:
            raise self._unsupported(f"returns {output_nLD.dtype}; a row has {hidden_nLD.dtype}")
        self.columns = slice(0, output_nLD.shape[2])
        self._args, self._kwargs = _blank(self._args), _blank(self._kwargs)
        cache = StateCache()
        with LinearWatch(self.part) as linears:
            again_nLD = self._try(hidden_nLD, cache)
        self.linears = linears.called()
        if not torch.equal(output_nLD, again_nLD):
            raise self._unsupported("is given more than its input and a cache, and uses it")
        if not cache.states:
            rows = self._try(hidden_nLD.flatten(0, 1)[:, None], StateCache())[:, 0]
            if not _agree(output_nLD.flatten(0, 1), rows):
                raise self._unsupported("neither attends nor has state in the model's cache, but mixes its tokens")
            return
        if len(cache.layer_indices) != 1:
            raise self._unsupported(f"uses the states of layers {sorted(cache.layer_indices)}")
        forms = {key: StateForm(tuple(state.shape[1:]), state.dtype) for key, state in cache.states.items()}
        if not self._carries(hidden_nLD, output_nLD, forms):
            self._by_token = True  # Jamba's chunks begin without a state, whatever the cache has
            if not self._carries(hidden_nLD, output_nLD, forms):
                raise self._unsupported("computes something else if its tokens come in chunks")
        if not self._carries(hidden_nLD[1:], output_nLD[1:], forms):
            raise self._unsupported("computes something else if there are more sequences")
        self.forms = forms

    def _carries(self, hidden_nLD: Tensor, output_nLD: Tensor, forms: dict[StateKey, StateForm]) -> bool:
        """Tell whether chunks, each with the states that the last one left, give what the whole gives."""
        states: dict[StateKey, Tensor] | None = None
        outputs = []
        for chunk_nLD in hidden_nLD.split(_CHUNKS, dim=1):
            cache = StateCache(states)
            outputs.append(self._try(chunk_nLD, cache))
            states = cache.states
            if {key: StateForm(tuple(state.shape[1:]), state.dtype) for key, state in states.items()} != forms:
                raise self._unsupported("has states whose shape depends on how many tokens there are")
        return _agree(output_nLD, torch.cat(outputs, dim=1))

    def _call(self, hidden_nLD: Tensor, cache: StateCache) -> Tensor:
        parts = hidden_nLD.split(1, dim=1) if self._by_token and cache.states else (hidden_nLD,)
        return torch.cat([self._forward(part, cache) for part in parts], dim=1)

    def _forward(self, hidden_nLD: Tensor, cache: StateCache) -> Tensor:
        kwargs = {
            name: cache if name in CACHE_NAMES else True if name == "use_cache" else value
            for name, value in self._kwargs.items()
        }
        output = self.layer(hidden_nLD, *self._args, **kwargs)
        return output if isinstance(output, Tensor) else output[0]

    def _try(self, hidden_nLD: Tensor, cache: StateCache) -> Tensor:
        try:
            return self._call(hidden_nLD, cache)
        except UnsupportedModelError:
            raise
        except Exception as error:  # of the layer's own code, which may want another cache
            raise self._unsupported(f"does not run with its states alone ({type(error).__name__}: {error})") from error

    def _unsupported(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._name} {what}")


def number_states(between: Sequence[Sequence[AttentionFreeLayer]]) -> Iterator[dict[StateKey, StateForm]]:
    """Number the layers with state in the order of the model; yield the states of each."""
    number = 0
    for layer in (layer for layers in between for layer in layers):
        if layer.forms:
            layer.number = number
            number += 1
            yield layer.forms


def _agree(one: Tensor, other: Tensor) -> bool:
    """Tell whether results are the same but for rounding, and for what some models do in prefill only.

    Nemotron-H keeps time steps above a minimum only where it computes several tokens.
    """
    tolerance = 1e-3 if one.dtype is torch.float32 else 5e-2
    return torch.allclose(one.float(), other.float(), rtol=1e-2, atol=tolerance * float(one.float().abs().max()))


def _blank(arguments: Any) -> Any:
    """Replace the tensors in a layer's arguments, so that whatever is computed from one shows it."""
    if isinstance(arguments, Tensor):
        return torch.full_like(arguments, torch.nan if arguments.is_floating_point() else 0)
    if isinstance(arguments, dict):
        return {key: _blank(value) for key, value in arguments.items()}
    if isinstance(arguments, (tuple, list)):
        return type(arguments)([_blank(value) for value in arguments])
    return arguments


class Mixer(AttentionFreeLayer):
    """A module of a layer that has ``attention`` as well; ``name`` is what errors call it."""

    def __init__(
        self, layer: nn.Module, module: nn.Module, attention: nn.Module, name: str, *, configs: Sequence[Any]
    ) -> None:
        super().__init__(layer, name, behind=None)
        self.part = module
        self._own = type(module)
        self.overridden = Overridden(module, _mixed(self._own))
        """The module with the class that replaces its own while a half runs."""
        self._configs, self._replaced = configs, [self.overridden, Overridden(attention, _mixed(type(attention)))]

    def _forward(self, hidden_nLD: Tensor, cache: StateCache) -> Tensor:
        found: list[Tensor] = []

        def mix(module: Any, args: Any, kwargs: Any) -> Tensor:
            if module is not self.part:
                raise self._unsupported("has state and runs behind its layer's attention")
            output = self._own.forward(module, *args, **kwargs)
            if not isinstance(output, Tensor):
                raise self._unsupported("has state and returns more than one tensor")
            found.append(output)
            raise StopForward

        with attention_replaced(no_attention, self._configs, self._replaced, mix):
            try:
                super()._forward(hidden_nLD, cache)
            except StopForward:
                pass
        return found[0]


def _mixed(own: type[nn.Module]) -> type[nn.Module]:
    return type(own.__name__, (Mixed, own), {"__module__": __name__})


def modules_beside(layer: nn.Module, attention: nn.Module, ran: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules of a layer, of those that ran, that take the model's cache and have no part in the attention.

    A module that calls ``attention``, and one that it calls, has a part in it.
    """
    seen = {module for module in layer.modules() if attention in set(module.modules())} | {*attention.modules()}
    for module in layer.modules():
        takes_cache = CACHE_NAMES & inspect.signature(type(module).forward).parameters.keys()
        if module in ran and module not in seen and takes_cache:
            seen |= {*module.modules()}
            yield module

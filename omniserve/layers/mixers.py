"""Mixer: a module with recurrent state that stands in a decoder layer beside the attention, as in Falcon-H1.

It runs before the halves of its layer, as a layer without attention would: the layer's own forward runs up to the
mixer's output, which becomes columns of the rows (``RowLayout.place_mixed``). While a half runs, these columns are the
mixer's output. Legend: n sequences of a call, L tokens of each, D hidden.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from omniserve.layers.between import CACHE_NAMES, BetweenLayer
from omniserve.layers.cut import Cut, Mixed, calling, no_attention
from omniserve.layers.overrides import Overridden
from omniserve.layers.states import StateCache


class Mixer(BetweenLayer):
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
            raise Cut

        with calling(no_attention, self._configs, self._replaced, mix):
            try:
                super()._forward(hidden_nLD, cache)
            except Cut:
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

"""BoundHalf: a half bound to certain layers, so that a call goes straight to the compiled graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch._inductor.output_code import CompiledFxGraph

from omniserve.layers.compile_cache import Argument, CachedHalf, tensors_of
from omniserve.layers.noted_half import Noter, NotNoted

Half = Callable[..., Any]


class Compilable(Protocol):
    """A half of all layers of a structure, as ``compiled.CompiledHalf`` is."""

    uncompiled: Half

    @property
    def is_deferred(self) -> bool: ...
    def __call__(self, *arguments: nn.Module | Tensor | None) -> Any: ...
    def find(self, layers: Sequence[nn.Module], tensors: Sequence[Tensor | None]) -> tuple[CachedHalf, Half] | None: ...
    def store(
        self,
        layers: Sequence[nn.Module],
        tensors: Sequence[Tensor | None],
        source: str,
        call: Half,
        arguments: Sequence[Argument],
        *,
        is_single: bool,
    ) -> None: ...


class _GraphCall(NamedTuple):
    """A call of a compiled graph."""

    graph: CompiledFxGraph
    arguments: list[Any]
    """Parameters, inputs and numbers of tokens, in the graph's order."""
    outputs: tuple[Any, ...]


@contextmanager
def _graph_calls() -> Iterator[list[_GraphCall]]:
    """Note the graphs that this thread calls."""
    calls: list[_GraphCall] = []
    thread, before = threading.get_ident(), CompiledFxGraph.__call__

    def noted(graph: CompiledFxGraph, inputs: Sequence[Any]) -> Any:
        arguments = list(inputs)  # the graph empties them
        outputs = before(graph, inputs)
        if threading.get_ident() == thread:
            calls.append(_GraphCall(graph, arguments, tuple(outputs)))
        return outputs

    CompiledFxGraph.__call__ = noted  # type: ignore[assignment,method-assign]
    try:
        yield calls
    finally:
        CompiledFxGraph.__call__ = before  # type: ignore[method-assign]


class BoundHalf:
    """A compiled half of certain layers, called with its tensors alone."""

    def __init__(self, half: Compilable, layers: Sequence[nn.Module]) -> None:
        self._half, self._layers = half, layers
        self._call: Half | None = None
        """Takes a list: parameters, inputs and numbers of tokens, in the graph's order."""
        self._arguments: list[Any] = []
        """The list for ``_call`` with its parameters filled in, inputs and counts still open."""
        self._inputs: list[tuple[int, int]] = []
        """(place in the list, number of the tensor)."""
        self._counts: list[int] = []
        """Places of numbers of tokens."""
        self._is_single = False
        """The half returns one tensor."""
        self.is_direct: bool | None = None
        """Calls go to the graph itself; None before the first."""

    def __call__(self, *tensors: Tensor | None) -> Any:
        if self._call is None:
            return self._bind(tensors)
        outputs = self._call(self._filled(tensors))
        return outputs[0] if self._is_single else outputs

    def note(self, noter: Noter, *tensors: Tensor | None) -> Any:
        """Note the half's calls on these tensors, instead of making them; return the tensors of its results.

        Raises:
            NotNoted: Its calls cannot be noted, or it was never called.
        """
        if self._call is None:
            raise NotNoted("it is not compiled, or torch's own code is needed around it")
        outputs = noter.note(self._call, self._filled(tensors))
        return outputs[0] if self._is_single else outputs

    def _filled(self, tensors: Sequence[Tensor | None]) -> list[Any]:
        """Return the graph's arguments for a call with these tensors."""
        arguments = self._arguments.copy()
        num_tokens = tensors[0].shape[0]  # type: ignore[union-attr]
        for place in self._counts:
            arguments[place] = num_tokens
        for place, number in self._inputs:
            arguments[place] = tensors[number]
        return arguments

    def _bind(self, tensors: Sequence[Tensor | None]) -> Any:
        """Make a call through torch's own wrapper, and find out what it hands to the graph."""
        if self.is_direct is False:
            return self._half(*self._layers, *tensors)
        if (found := self._half.find(self._layers, tensors)) is not None:
            self._take(*found)
            return self(*tensors)
        if self._half.is_deferred:
            return self._half.uncompiled(*self._layers, *tensors)
        views = [tensor if tensor is None else tensor.view_as(tensor) for tensor in tensors]  # none is there twice
        with _graph_calls() as calls:
            result = self._half(*self._layers, *views)
        outputs = (result,) if isinstance(result, Tensor) else tuple(result)
        # Otherwise the wrapper does something to the outputs (one of them is an input, for instance), or there are
        # numbers beside that of the tokens.
        self.is_direct = len(calls) == 1 and list(map(id, calls[0].outputs)) == list(map(id, outputs))
        num_tokens = next(tensor.shape[0] for tensor in tensors if tensor is not None)
        self.is_direct &= all(each == num_tokens for call in calls for each in call.arguments if isinstance(each, int))
        if not self.is_direct:
            return result
        numbers = {id(view): number for number, view in enumerate(views) if view is not None}
        for place, argument in enumerate(calls[0].arguments):
            if isinstance(argument, int):
                self._counts.append(place)
            elif id(argument) in numbers:
                self._inputs.append((place, numbers[id(argument)]))
            self._arguments.append(argument if isinstance(argument, Tensor) and id(argument) not in numbers else None)
        self._is_single = isinstance(result, Tensor)
        self._call = call = calls[0].graph.current_callable
        assert call is not None
        self._store(calls[0].graph, call, tensors)
        return result

    def _store(self, graph: CompiledFxGraph, call: Half, tensors: Sequence[Tensor | None]) -> None:
        """Store the half for other processes, if the graph is given its inputs and tensors of the layers alone."""
        if graph.constants:
            return
        names = {id(each): (i, name) for i, layer in enumerate(self._layers) for name, each in tensors_of(layer)}
        inputs, arguments = dict(self._inputs), list[Argument]()
        for place, argument in enumerate(self._arguments):
            if argument is not None:
                if id(argument) not in names:
                    return
                arguments.append(("tensor", *names[id(argument)]))
            else:
                arguments.append(("input", inputs[place], "") if place in inputs else ("count", 0, ""))
        self._half.store(self._layers, tensors, graph.source_code, call, arguments, is_single=self._is_single)

    def _take(self, cached: CachedHalf, call: Half) -> None:
        """Use the half of an earlier process."""
        named = [dict(tensors_of(layer)) for layer in self._layers]
        for place, (kind, number, name) in enumerate(cached.arguments):
            if kind == "count":
                self._counts.append(place)
            elif kind == "input":
                self._inputs.append((place, number))
            self._arguments.append(named[number][name] if kind == "tensor" else None)
        self._call, self._is_single, self.is_direct = call, cached.is_single, True

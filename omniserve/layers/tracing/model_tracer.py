"""ModelTracer: a Hugging Face model around its decoder layers, which are found and can be replaced for a run.

So the embedding, the arguments of the layers and the logits come from the model's own forward. Tensor legend: T packed
tokens, R rows that need logits, D hidden.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from omniserve.core.errors import UnsupportedModelError
from omniserve.layers.tracing.attention_free import AttentionFreeLayer, Mixer, modules_beside
from omniserve.layers.tracing.attention_interface import StopForward, attention_replaced, described_masks, no_attention
from omniserve.layers.tracing.latent import with_latents
from omniserve.layers.tracing.overrides import check_overrides, overridden_in


class TracedLayer(nn.Module):
    """A decoder layer with the arguments that the model gives it.

    Its strings and those of its modules are part of what ``compiled.structure`` compares.
    """

    def __init__(self, layer: nn.Module, index: int, *, behind: tuple[Any, ...] | None) -> None:
        super().__init__()
        self.eval()
        self.layer = layer
        self.layer_idx = index
        self.behind = behind
        """Values that the layer returns behind its output, tensors as zeros of one row; None: the layer returns no
        tuple."""
        self.arguments: tuple[Any, ...] = ()
        """Positional and keyword arguments behind the layer's input, with what stands for tensors in their place."""
        self.turn = 0
        """The number of columns that the layer uses of a row's queue (``RowLayout``)."""
        self.computes = ""
        """A digest of the arguments, and of the operators that the layer calls with all their constants and shapes."""

    def returned_behind(self, num_rows: int, value: float) -> list[Any]:
        """Return what the layer returns behind its output, with tensors of one value."""
        return [
            torch.full((num_rows, *each.shape[1:]), value, dtype=each.dtype, device=each.device)
            if isinstance(each, Tensor)
            else each
            for each in self.behind or ()
        ]


Member = TracedLayer | AttentionFreeLayer
"""A decoder layer, with attention or without."""


class TracedRun(NamedTuple):
    """The layers' arguments in one run of the model; in a run on one sequence their dimensions are ``[1, T, ...]``."""

    inputs: list[Tensor]
    """The input of each layer, mostly ``[T, 1, D]``."""
    arguments: list[tuple[Any, ...]]
    """The other arguments of each layer: positional ones, and those with a name."""
    between: Sequence[tuple[Any, ...]] = ()
    """Arguments of each layer that does not attend."""


class _Watched(NamedTuple):
    """The modules that a run of a model called."""

    attentions: list[nn.Module]
    """The modules that attended, in order."""
    ended: list[nn.Module]
    """Members of module lists, in the order in which they ended."""
    began: set[nn.Module]
    """Modules that ran."""
    behind: dict[nn.Module, tuple[Any, ...]]
    """Values that the members returned behind their output, tensors as zeros of one row."""


class ModelTracer:
    """A model whose layers are found by a run.

    Raises:
        UnsupportedModelError: A layer attends more than once, or none does through the attention interface.
    """

    def __init__(self, model: PreTrainedModel, *, latent_kv: bool = False) -> None:
        self._model = model
        configs = [getattr(module, "config", None) for module in model.modules()]
        self.configs = list({id(config): config for config in configs if config is not None}.values())
        """Configs of the model and its parts, each of which may name the attention function."""
        self.overridden = with_latents(model, overridden_in(model)) if latent_kv else overridden_in(model)
        self._takes_positions = _takes_positions(model)
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        self._embed_positions = [module for module in embeddings if _takes_positions(module)]
        """Get the positions if the model itself takes none."""
        self.first_position = 0
        """The number that the model gives to the first position of a sequence; positions here count from 0."""
        self._sort_layers(self._watch_run())
        if self.overridden:
            check_overrides(model, self.overridden, self.configs)

    def _watch_run(self) -> _Watched:
        """Run the model on two tokens, with an attention function that computes nothing, and note what runs."""
        watched = _Watched([], [], set(), {})
        self.masks: list[Any] = []
        """The mask that each layer gives its attention; one of the model's own describes itself."""

        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, keywords: Any) -> Tensor:
            watched.attentions.append(module)
            self.masks.append(mask)
            return stand_in(query, value)

        def note_start(module: nn.Module, args: Any) -> None:
            watched.began.add(module)

        def note_end(module: nn.Module, args: Any, output: Any) -> None:
            watched.ended.append(module)
            if isinstance(output, (tuple, list)):
                watched.behind[module] = tuple(map(_zero_row, output[1:]))

        members = [layer for each in self._model.modules() if isinstance(each, nn.ModuleList) for layer in each]
        hooks = [layer.register_forward_hook(note_end) for layer in members]
        hooks += [module.register_forward_pre_hook(note_start) for module in self._model.modules()]
        try:
            with described_masks(), attention_replaced(attend, self.configs, self.overridden):
                self._call_model(self.int64([1, 1]), self.int64([0, 1]))
        except UnsupportedModelError:
            raise
        except Exception as error:  # of the model's own code, which may do without the interface
            what = f"{type(error).__name__}: {error}"
            raise unsupported(self._model, f"does not run with another attention function ({what})") from error
        finally:
            for hook in hooks:
                hook.remove()
        return watched

    def _sort_layers(self, watched: _Watched) -> None:
        """Find the members of one ModuleList that ran: in order, and they attended once each or not at all.

        Layers that attend to an image do not run without one.
        """
        names = {module: name for name, module in self._model.named_modules()}
        called = [names[module] for module in watched.attentions]
        if not called:
            raise unsupported(
                self._model,
                "does not use Hugging Face's attention interface, where layers are cut, and has no override",
            )
        lists = [name for name, module in self._model.named_modules() if isinstance(module, nn.ModuleList)]
        list_name = next((name for name in lists if called[0].startswith(f"{name}.")), None)
        if list_name is None:
            raise unsupported(self._model, f"attends in {called[0]}, which is in no list of layers")
        layers = self._model.get_submodule(list_name)
        assert isinstance(layers, nn.ModuleList)
        of_layer = [re.match(rf"{re.escape(list_name)}\.(\d+)(\.|$)", name) for name in called]
        indices = [int(match[1]) if match else -1 for match in of_layer]
        if indices != sorted(set(indices) - {-1}):
            wrong = next((i for i in range(len(layers)) if indices.count(i) > 1), -1)
            where = f"{list_name}.{wrong}" if wrong >= 0 else f"modules outside of {list_name}"
            raise unsupported(
                self._model,
                f"attends {indices.count(wrong)} times in {where}; a layer must attend once or not at all, and nothing "
                "else",
            )
        of_list = set(layers)
        members = [layer for layer in watched.ended if layer in of_list]
        ran = set(members)
        if members != [layer for layer in layers if layer in ran]:
            raise unsupported(self._model, f"does not run each member of {list_name} once, in order")
        self.layers: list[TracedLayer] = []
        """The decoder layers that attend, in order."""
        self.between: list[list[AttentionFreeLayer]] = [[]]
        """Layers that do not attend: those before the first that attends, before the second, ..., behind the last."""
        self.mixers: list[list[Mixer]] = []
        """The modules of each attending layer that may have state beside its attention."""
        self._members: list[Member] = []
        attention_of = {layers[index]: module for index, module in zip(indices, watched.attentions, strict=True)}
        named = {module: f"{type(self._model).__name__}: {name}" for module, name in names.items()}
        for layer in members:
            behind = watched.behind.get(layer)
            if layer in attention_of:
                attention = attention_of[layer]
                beside = modules_beside(layer, attention, watched.began)
                self.mixers.append(
                    [Mixer(layer, each, attention, named[each], configs=self.configs) for each in beside]
                )
                self.layers.append(TracedLayer(layer, len(self.layers), behind=behind))
                self.between.append([])
                self._members.append(self.layers[-1])
                continue
            if any(isinstance(each, Tensor) for each in behind or ()):
                raise UnsupportedModelError(
                    f"{named[layer]} does not attend, and hands more than its output to the next layer"
                )
            self.between[-1].append(AttentionFreeLayer(layer, named[layer], behind=behind))
            self._members.append(self.between[-1][-1])
        self.backbone = self._model.get_submodule(list_name.rpartition(".")[0])
        """The module that owns the layers."""

    def logits(self, output: Tensor, num_rows: int) -> Tensor:
        """Run the model's forward with another output of the last layer, of a number of rows."""
        ids_R = torch.ones(num_rows, dtype=torch.int64, device=output.device)

        def replace(layer: Member, hidden: Tensor, args: Any, kwargs: Any) -> Tensor:
            return output

        with self._layers_replaced(replace):
            return self._call_model(ids_R, torch.zeros_like(ids_R)).logits[:, 0]

    def last_hidden(self, output: Tensor, num_rows: int) -> Tensor:
        """Run what is between the layers and the head with another output of the last layer, of a number of rows."""
        ids_R = torch.ones(num_rows, dtype=torch.int64, device=output.device)
        found: list[Tensor] = []

        def replace(layer: Member, hidden: Tensor, args: Any, kwargs: Any) -> Tensor:
            return output

        def note(module: nn.Module, args: Any, made: Any = None) -> None:
            found.append((args if made is None else made)[0])
            raise StopForward

        if self.backbone is self._model:  # it has the head, too, whose input this is
            hook = self._model.get_output_embeddings().register_forward_pre_hook(note)
        else:
            hook = self.backbone.register_forward_hook(note)
        try:
            with self._layers_replaced(replace):
                self._call_model(ids_R, torch.zeros_like(ids_R))
        except StopForward:
            pass
        finally:
            hook.remove()
        return found[0][:, 0]

    def run(
        self,
        token_ids: Any,
        positions: Any,
        *,
        as_sequence: bool = False,
        output_of: Callable[[Tensor], Tensor] = lambda hidden: hidden,
        behind: float = 0,
    ) -> TracedRun:
        """Run the model up to its last layer, each replaced by a function; None leaves the positions to the model.

        Tensors that layers return behind their output are filled with ``behind``.
        """
        between: list[tuple[Any, ...]] = []
        run = TracedRun([], [], between)

        def replace(layer: Member, hidden: Tensor, args: Any, kwargs: Any) -> Tensor:
            if isinstance(layer, AttentionFreeLayer):
                between.append((args, kwargs))
            else:
                run.inputs.append(hidden)
                run.arguments.append((args, kwargs))
            if layer is self._members[-1]:
                raise StopForward  # the head takes longer than all the rest
            return hidden if isinstance(layer, AttentionFreeLayer) else output_of(hidden)

        with self._layers_replaced(replace, behind=behind):
            positions_T = None if positions is None else self.int64(positions)
            try:
                self._call_model(self.int64(token_ids), positions_T, as_sequence=as_sequence)
            except StopForward:
                pass
        return run

    def first_input(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Run the model up to its first layer; return that layer's input."""
        inputs: list[Tensor] = []

        def replace(layer: Member, hidden: Tensor, args: Any, kwargs: Any) -> Tensor:
            inputs.append(hidden)
            raise StopForward

        with self._layers_replaced(replace):
            try:
                self._call_model(token_ids_T, positions_T)
            except StopForward:
                pass
        return inputs[0]

    def _call_model(self, token_ids_T: Tensor, positions_T: Tensor | None, *, as_sequence: bool = False) -> Any:
        """Run the model on a batch of sequences of one token each, or on one sequence."""
        dim = 0 if as_sequence else 1
        token_ids = token_ids_T.unsqueeze(dim)
        if positions_T is None:
            return self._model(input_ids=token_ids, use_cache=False)
        positions_T = positions_T + self.first_position
        if self._takes_positions:
            return self._model(input_ids=token_ids, position_ids=positions_T.unsqueeze(dim), use_cache=False)

        def forward_of(module: nn.Module) -> Callable[..., Tensor]:
            def forward(*args: Any, **kwargs: Any) -> Tensor:
                rows = type(module).forward(module, *args, **{**kwargs, "position_ids": positions_T})
                return rows.reshape(*token_ids.shape, -1)

            return forward

        with _forwards_replaced(self._embed_positions, forward_of):
            return self._model(input_ids=token_ids, use_cache=False)

    @contextmanager
    def _layers_replaced(
        self, replace: Callable[[Member, Tensor, Any, Any], Tensor], *, behind: float = 0
    ) -> Iterator[None]:
        """Call a function in the place of each layer's forward."""

        def forward_of(layer: Member) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                hidden = args[0] if args else kwargs.pop("hidden_states")
                output = replace(layer, hidden, args[1:], kwargs)
                if layer.behind is None:
                    return output
                if isinstance(layer, AttentionFreeLayer):
                    return output, *layer.behind
                return output, *layer.returned_behind(hidden.shape[0], behind)

            return forward

        layers = {id(layer.layer): layer for layer in self._members}
        with (
            _forwards_replaced([layer.layer for layer in self._members], lambda module: forward_of(layers[id(module)])),
            attention_replaced(no_attention, self.configs, self.overridden),
        ):
            yield

    def int64(self, values: Any) -> Tensor:
        """Return numbers on the model's device."""
        return torch.as_tensor(values, dtype=torch.int64, device=self._model.device)


@contextmanager
def _forwards_replaced(
    modules: Sequence[nn.Module], forward_of: Callable[[nn.Module], Callable[..., Any]]
) -> Iterator[None]:
    """Give modules another forward."""
    before = [module.__dict__.get("forward") for module in modules]
    for module in modules:
        module.__dict__["forward"] = forward_of(module)
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            del module.__dict__["forward"]
            if forward is not None:
                module.__dict__["forward"] = forward


def _takes_positions(module: nn.Module) -> bool:
    return "position_ids" in inspect.signature(type(module).forward).parameters


def _zero_row(value: Any) -> Any:
    return value.new_zeros((1, *value.shape[1:])) if isinstance(value, Tensor) else value


def unsupported(model: PreTrainedModel, what: str) -> UnsupportedModelError:
    """Return the error for a model that cannot be served; ``what`` follows its name."""
    return UnsupportedModelError(f"{type(model).__name__} {what}")


def stand_in(query: Tensor, value: Tensor) -> Tensor:
    """Return rows of the shape of attention's result, not zeros, where their values do not matter."""
    rows, wider = query.transpose(1, 2), value.shape[3] - query.shape[3]
    return functional.pad(rows, (0, wider)) if wider else rows


def at_least_one(numbers_T: Tensor) -> Tensor:
    """Return numbers, or a zero if there are none: a model's own forward may not bear an empty batch."""
    return numbers_T if len(numbers_T) else numbers_T.new_zeros(1)

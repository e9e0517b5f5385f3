"""A rank's part of a checkpoint: of a model whose weights are unread, those that the rank has are read.

``unread_weights`` lets transformers load a model of ``UnreadTensor``. After ``sharding.shard`` has cut it,
``read_weights`` reads what is left. Which layers a stage of a pipeline has is known when the model has been traced, and
tracing runs all layers. Until then each weight of a layer has the values of the first layer that has one of its form;
``read_rest`` then reads the weights of the layers that stay.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from omniserve.layers.weights.checkpoint_files import CheckpointFiles, NotInParts
from omniserve.layers.weights.unread import UnreadTensor


@contextmanager
def unread_weights() -> Iterator[CheckpointFiles]:
    """Let ``from_pretrained`` make a model whose weights are ``UnreadTensor``; yields the files that they are in.

    Raises:
        NotInParts: From ``from_pretrained``: the checkpoint cannot be read in parts.
    """
    files, is_loaded = CheckpointFiles(), False
    original = PreTrainedModel._load_pretrained_model
    takes = list(inspect.signature(original).parameters)

    def load(
        model: PreTrainedModel, state_dict: Any, checkpoint_files: Sequence[str] | None, load_config: Any, **more: Any
    ) -> Any:
        nonlocal is_loaded
        if takes[:4] != ["model", "state_dict", "checkpoint_files", "load_config"]:
            raise NotInParts(f"transformers {transformers.__version__} loads weights in a way that is not known")
        if state_dict is not None or not checkpoint_files or is_loaded:
            raise NotInParts("there are weights beside those of the model, such as an adapter's")
        if load_config.hf_quantizer is not None:
            method = load_config.hf_quantizer.quantization_config.quant_method
            raise NotInParts(f"its weights are quantised ({getattr(method, 'value', method)})")
        if other := [file for file in checkpoint_files if not str(file).endswith(".safetensors")]:
            raise NotInParts(f"its weights are not in safetensors files, but in {other[0]}")
        is_loaded = True
        unread = {name: UnreadTensor(stored) for name, stored in files.open(checkpoint_files).items()}
        loaded = original(model, unread, list(checkpoint_files), load_config, **more)
        if errors := loaded[0].conversion_errors:
            raise NotInParts(f"it is converted in a way that needs the values: {next(iter(errors.values()))}")
        return loaded

    PreTrainedModel._load_pretrained_model = staticmethod(load)  # type: ignore[method-assign, assignment]
    try:
        yield files
    finally:
        PreTrainedModel._load_pretrained_model = staticmethod(original)  # type: ignore[method-assign]


@dataclass(slots=True)
class _Weight:
    """A parameter or buffer, wherever it is in a model."""

    tensor: UnreadTensor
    path: str
    """The first of its names."""
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    owners: set[int] = field(default_factory=set)
    """``id()`` of each module that has it."""
    held: Tensor | None = None
    """What is in the model now: the weight's own values, or those of another layer."""

    def put(self, values: Tensor) -> None:
        """Put values in the weight's place, wherever that is."""
        self.held = values
        if isinstance(self.tensor, nn.Parameter):
            self.held = nn.Parameter(values, requires_grad=self.tensor.requires_grad)
        for tensors, name in self.places:
            tensors[name] = self.held


def read_weights(model: PreTrainedModel, device: torch.device, *, traces_first: bool = False) -> None:
    """Give unread weights their values, on a device.

    With ``traces_first`` the matrices of layers may have the values of other layers, until ``read_rest``.
    """
    first: dict[Any, Tensor] = {}
    later: list[_Weight] = []
    with torch.inference_mode(False), torch.no_grad():
        for weight in _progress(_unread_in(model)):
            form = (_generic(weight.path), weight.tensor.shape, weight.tensor.dtype)
            # Vectors are read at once: some become constants of a layer's attention, such as sinks.
            if traces_first and weight.tensor.ndim > 1 and form in first:
                weight.put(first[form].detach())
                later.append(weight)
                continue
            first[form] = weight.tensor.read().to(device)
            weight.put(first[form])
    model.__dict__["_omniserve_later"] = later


def read_rest(model: PreTrainedModel, freed: Set[int]) -> None:
    """Give the weights that have another layer's values their own, but for those of modules that were freed."""
    later: list[_Weight] = model.__dict__.pop("_omniserve_later", [])
    with torch.inference_mode(False), torch.no_grad():
        for weight in _progress([weight for weight in later if weight.owners - freed]):
            assert weight.held is not None
            weight.held.data = weight.tensor.read().to(weight.held.device)


def _unread_in(model: nn.Module) -> list[_Weight]:
    found: dict[int, _Weight] = {}
    for module_path, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if isinstance(tensor, UnreadTensor):
                    weight = found.setdefault(id(tensor), _Weight(tensor, f"{module_path}.{name}"))
                    weight.places.append((tensors, name))
                    weight.owners.add(id(module))
    return list(found.values())


def _generic(path: str) -> str:
    """Return a weight's path with a star in the place of each number."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", path)


def _progress(weights: list[_Weight]) -> Iterable[_Weight]:
    shown: Iterable[_Weight] = tqdm(weights, desc="Reading weights") if weights else weights
    return shown

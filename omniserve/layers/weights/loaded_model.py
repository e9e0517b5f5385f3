"""Checks that a model can be given halves, and the wrappers that it may come in: PEFT's and accelerate's.

A PEFT adapter works inside the modules of its model, so the model alone is served. On a model that is on one device a
hook of accelerate moves tensors to where they are already; it is taken out while the model is patched, because the
compiler cannot trace it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook  # type: ignore[import-untyped]
from torch import Tensor, nn
from transformers import PreTrainedModel

from omniserve.core.errors import UnsupportedModelError

# These have no dropout, so their mode says nothing; a resized embedding, for instance, is a new one in training mode.
_WITHOUT_MODE = (nn.Linear, nn.Embedding)
_OWN_CODE = ("torch.", "transformers.", "transformers_modules.", "omniserve.")
"""Prefixes of the modules whose code a model's config describes; other code is not covered by it."""


def language_model(model: Any) -> PreTrainedModel:
    """Return a Hugging Face model itself, and of a PEFT model the one that it wraps.

    Raises:
        TypeError: It is neither.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(f"patch needs a transformers PreTrainedModel or a PEFT model, got {type(model).__name__}")
    return inner


def check_loaded(model: nn.Module) -> None:
    """See that a model, or a PEFT model, is in eval mode, whole, on one device, and that its adapters are its modules'.

    Raises:
        UnsupportedModelError: It is not whole on one device, or an adapter does more than its modules do.
        ValueError: A part of it is in training mode.
    """
    for name, module in model.named_modules():
        if module.training and type(module) not in _WITHOUT_MODE:
            raise ValueError(f"{name or 'the model'} is in training mode; call model.eval() before patch")
    inner = language_model(model)
    _check_devices(inner)
    _check_adapters(model, inner)


def _check_devices(model: PreTrainedModel) -> None:
    for name, module in model.named_modules():
        if getattr(getattr(module, "_hf_hook", None), "offload", False):
            raise UnsupportedModelError(
                f"{type(model).__name__}: accelerate keeps the weights of {name or 'the model'} off their device; all "
                "must be on one device: load it with device_map={'': device}, in a smaller dtype or quantised if needed"
            )
    tensors: list[Tensor] = [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.dim())]
    devices = sorted({str(tensor.device) for tensor in tensors})
    if "meta" in devices:
        raise UnsupportedModelError(f"{type(model).__name__} has weights without values, on the device 'meta'; load it")
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} is spread over {devices}; load it on one device (device_map={{'': device}})"
        )


def _check_adapters(model: nn.Module, inner: PreTrainedModel) -> None:
    adapters = getattr(model, "peft_config", None)
    if not isinstance(adapters, Mapping):
        return
    kinds = ", ".join(sorted({config.peft_type.value for config in adapters.values()}))
    name = f"{type(inner).__name__} with an adapter of the type {kinds}"
    if any(getattr(config, "alora_invocation_tokens", None) for config in adapters.values()):
        raise UnsupportedModelError(f"{name}: it applies from certain tokens on, where layers see no tokens")
    if model is inner or inner.get_output_embeddings() is None:
        return
    ids = torch.zeros(1, 2, dtype=torch.int64, device=inner.device)
    with torch.inference_mode():
        try:
            alone = inner(input_ids=ids, use_cache=False).logits
            wrapped = model(input_ids=ids, use_cache=False).logits
        except Exception as error:  # of the adapter's own code, which wants more than tokens
            raise UnsupportedModelError(f"{name} does not run on tokens alone: {error}") from error
    if wrapped.shape != alone.shape or not torch.equal(wrapped, alone):
        raise UnsupportedModelError(
            f"{name} does more than the modules of the model, such as putting virtual tokens before the prompt"
        )


def free_weights(model: nn.Module, modules: Set[int]) -> None:
    """Free the weights of these modules, by their ids, in whatever form; those that others share stay."""
    kept = {
        id(tensor)
        for module in model.modules()
        if id(module) not in modules
        for tensor in (*module._parameters.values(), *module._buffers.values(), *held_tensors(module).values())
    }
    for module in model.modules():
        if id(module) not in modules:
            continue
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in kept:
                tensor.data = tensor.data.new_empty(0)
        for name, tensor in held_tensors(module).items():
            if id(tensor) not in kept:
                module.__dict__[name] = tensor.new_empty(0)


def held_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module that are neither parameters nor buffers, such as prepacked weights."""
    return {name: value for name, value in module.__dict__.items() if isinstance(value, Tensor)}


def in_adapters(model: nn.Module) -> set[int]:
    """Return the ids of all modules in adapters, which read the weights of the modules that they wrap."""
    adapters = [module for module in model.modules() if isinstance(getattr(module, "base_layer", None), nn.Module)]
    return {id(module) for adapter in adapters for module in adapter.modules()}


def forms_of_weights(model: nn.Module) -> list[str]:
    """Return the names of the classes of modules and weights of other libraries: adapters and quantised weights."""
    modules = {type(module) for module in model.modules() if not type(module).__module__.startswith(_OWN_CODE)}
    weights = {type(parameter) for parameter in model.parameters()} - {nn.Parameter}
    return sorted({f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in modules | weights})


class IdleHooks:
    """Takes accelerate's hooks out of a model that is whole on one device, except of the model as a whole.

    Raises:
        UnsupportedModelError: There is a hook that does more than to move tensors to this device.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._hooked: list[tuple[nn.Module, Any]] = []
        found = [(name, module) for name, module in model.named_modules() if name and "_hf_hook" in module.__dict__]
        for name, module in found:
            hook: Any = module._hf_hook
            if type(hook) is not AlignDevicesHook or not _is_at(hook.execution_device, model.device):
                raise UnsupportedModelError(
                    f"{type(model).__name__}: {name} has a {type(hook).__name__}, with which layers cannot be cut; "
                    "take it out with accelerate.hooks.remove_hook_from_module(model, recurse=True)"
                )
        for _, module in found:
            self._hooked.append((module, module.__dict__.pop("forward")))
            own: Any = module._old_forward
            if getattr(own, "__func__", None) is not type(module).forward:
                module.__dict__["forward"] = own

    def put_back(self) -> None:
        """Give each module its hook again."""
        for module, forward in self._hooked:
            module.__dict__["forward"] = forward


def _is_at(place: Any, device: torch.device) -> bool:
    """Tell whether a device, by its name or number, is a model's; None is wherever its tensors are."""
    if place is None:
        return True
    place = torch.device(place)
    return place.type == device.type and place.index in (None, device.index)

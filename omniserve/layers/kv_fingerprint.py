"""kv_fingerprint: what blocks of KV are valid for, on disk and in another engine."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from omniserve.core.config import EngineConfig
from omniserve.core.version import __version__
from omniserve.layers.patched_model import PatchedModel
from omniserve.layers.weights.loaded_model import language_model


def kv_fingerprint(model: PreTrainedModel, config: EngineConfig) -> str:
    """Return what KV blocks on disk are valid for, as 32 hexadecimal digits.

    That is every weight, the settings and the state of adapters, the code of a model that comes with its own, and how
    blocks are laid out. All weights are read once, by as many threads as torch has. Hooks on modules are not
    seen. Of a rank's part of a model it is what that part's KV is valid for.
    """
    model = language_model(model)
    patched = getattr(model, "omniserve", None)
    freed = patched.freed if isinstance(patched, PatchedModel) else frozenset()
    modules = [(name, module) for name, module in model.named_modules() if id(module) not in freed]
    versions = f"{__version__} {transformers.__version__} {_KV_LAYOUT}{' latent' * config.execution.latent_kv}"
    dtype = model.dtype if config.execution.kv_dtype == "auto" else f"{model.dtype} {config.execution.kv_dtype}"
    total = hashlib.sha256(description_of(model) + f"{dtype} {config.block_size} {versions}".encode())
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for digest in threads.map(_digest, *zip(*modules, strict=True)):
            total.update(digest)
    return total.hexdigest()[:32]


def description_of(model: PreTrainedModel) -> bytes:
    """Return a model's config, without what says where it comes from and how it was loaded."""
    description = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"):
        description.pop(name, None)
    return json.dumps(description, sort_keys=True, default=str).encode()


_KV_LAYOUT = 1
"""Raise this number when the layout of a host block changes, or when the same tokens get other KV."""


def _digest(name: str, module: nn.Module) -> bytes:
    """Return a digest of a module's own weights, of held ones (``weights/groups.py``) in their dense form."""
    weights: dict[str, Any] = {}
    module._save_to_state_dict(weights, "", False)
    weights |= module.named_buffers(recurse=False)  # those too that are not saved
    digest = hashlib.sha256(f"{name} {_code_of(module)} {_adapter_state(module)}".encode())
    for key, weight in sorted(weights.items()):
        digest.update(key.encode())
        for tensor in _plain_tensors(weight):
            digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _code_of(module: nn.Module) -> str:
    """Return the name of a module's class, and a digest of its file if it came with the model."""
    kind = next(each for each in type(module).__mro__ if not each.__module__.startswith("omniserve."))
    text = f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__.startswith("transformers_modules."):
        text += hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()
    return text


def _adapter_state(module: nn.Module) -> str:
    """Return the settings of a module of PEFT, which say what its weights do: scaling, which are active, and so on."""
    if not type(module).__module__.startswith("peft."):
        return ""
    return repr(sorted((name, value) for name, value in vars(module).items() if _is_plain(value)))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _plain_tensors(weight: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a weight consists of.

    A weight of a class of its own may have several, and its other settings come as one more.
    """
    if hasattr(weight, "__tensor_flatten__"):
        names, context = weight.__tensor_flatten__()
        yield torch.frombuffer(bytearray(repr(context).encode()), dtype=torch.uint8)
        for name in names:
            yield from _plain_tensors(getattr(weight, name))
    elif isinstance(weight, torch.Tensor):
        yield weight

"""The fingerprint of a model under a configuration on this machine."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

import omniserve
from omniserve.core.config import EngineConfig
from omniserve.engine.capacity import has_host_tier
from omniserve.host.cores import CoreSplit, available_cores, default_host_threads
from omniserve.latency.profile import Fingerprint
from omniserve.layers.loaded import forms_of_weights, language_model
from omniserve.layers.packed import holds_bfloat16


def fingerprint_of(model: PreTrainedModel, config: EngineConfig) -> Fingerprint:
    """Return what a profile of this model under this configuration on this machine is valid for.

    The host tier is part of it only as far as threads and dtype go: pool sizes and policies change no module's time.
    """
    model = language_model(model)
    device = model.device
    host_threads = (config.host_threads or default_host_threads(device)) if has_host_tier(config) else 0
    cores = CoreSplit(device=device, device_threads=config.device_threads, host_threads=host_threads)
    return Fingerprint(
        model=hashlib.sha256(_description(model)).hexdigest()[:16],
        dtype=str(model.dtype).removeprefix("torch."),
        weights=" ".join([*(["bfloat16"] if holds_bfloat16(model) else []), *forms_of_weights(model)]),
        device=_device_name(device),
        device_threads=cores.threads_alone,
        shared_threads=cores.threads_shared,
        host_threads=host_threads,
        host_kv_dtype=config.host_kv_dtype,
        block_size=config.block_size,
        attention=config.execution.attention,
        compile=config.execution.compile,
        torch=torch.__version__,
        extension=f"{omniserve.__version__} {_extension_hash()}",
        kernels=os.environ.get("OMNISERVE_ISA", ""),
        constant_steps=has_constant_steps(config, device),
        ranks=_ranks(config),
    )


def _ranks(config: EngineConfig) -> str:
    parallel = config.parallel
    if parallel.num_ranks == 1:
        return ""
    network = (
        "this machine" if parallel.rank_listen is None else f"network of {parallel.rank_listen.rpartition(':')[0]}"
    )
    stages = f", {parallel.pipeline_parallel_size} stages" if parallel.pipeline_parallel_size > 1 else ""
    return f"tensor parallel {parallel.tensor_parallel_size}{stages}, {network}"


def kv_fingerprint(model: PreTrainedModel, config: EngineConfig) -> str:
    """Return what KV blocks on disk are valid for, as 32 hexadecimal digits.

    That is every weight, the settings and the state of adapters, the code of a model that comes with its own, and how
    blocks are laid out. All weights are read once, by all cores that this process may use. Hooks on modules are not
    seen.
    """
    model = language_model(model)
    versions = f"{omniserve.__version__} {transformers.__version__} {_KV_LAYOUT}"
    total = hashlib.sha256(_description(model) + f"{model.dtype} {config.block_size} {versions}".encode())
    with ThreadPoolExecutor(available_cores()) as threads:
        for digest in threads.map(_digest, *zip(*model.named_modules(), strict=True)):
            total.update(digest)
    return total.hexdigest()[:32]


def _description(model: PreTrainedModel) -> bytes:
    """Return a model's config, without what says where it comes from and how it was loaded."""
    description = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"):
        description.pop(name, None)
    return json.dumps(description, sort_keys=True, default=str).encode()


_KV_LAYOUT = 1
"""Raise this number when the layout of a host block changes, or when the same tokens get other KV."""


def _digest(name: str, module: nn.Module) -> bytes:
    """Return a digest of a module's own weights, of held ones (``layers.groups``) in their dense form."""
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


def has_constant_steps(config: EngineConfig, device: torch.device) -> bool:
    """Tell whether an engine with these settings runs steps in constant shapes, if its device attention can.

    How many of them its budget has room for is known only when they are captured.
    """
    if not (config.execution.step_graphs_limit_s and config.execution.step_graphs_gib):
        return False
    return config.execution.step_graphs == "on" or (config.execution.step_graphs == "auto" and device.type == "cuda")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return f"{name or platform.processor() or platform.machine()}, {available_cores()} cores"


def _extension_hash() -> str:
    library = next(Path(omniserve.__file__).parent.glob("_C*.so"))
    return hashlib.sha256(library.read_bytes()).hexdigest()[:12]

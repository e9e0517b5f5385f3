"""The fingerprint of a model under a configuration on this machine."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import torch
from transformers import PreTrainedModel

from omniserve.core.config import EngineConfig
from omniserve.core.version import __version__
from omniserve.engine.capacity import has_host_tier
from omniserve.host.cores import CoreSplit, available_cores, default_host_threads
from omniserve.latency.profile import Fingerprint
from omniserve.layers.kv_fingerprint import description_of
from omniserve.layers.weights import int8_modules
from omniserve.layers.weights.loaded_model import forms_of_weights, language_model
from omniserve.layers.weights.packed import holds_bfloat16
from omniserve.layers.weights.quantized_modules import forms_of


def fingerprint_of(model: PreTrainedModel, config: EngineConfig) -> Fingerprint:
    """Return what a profile of this model under this configuration on this machine is valid for.

    The host tier is part of it only as far as threads and dtype go: pool sizes and policies change no module's time.
    """
    model = language_model(model)
    device = model.device
    host_threads = (config.host_threads or default_host_threads(device)) if has_host_tier(config) else 0
    cores = CoreSplit(device=device, device_threads=config.device_threads, host_threads=host_threads)
    return Fingerprint(
        model=hashlib.sha256(description_of(model)).hexdigest()[:16],
        dtype=str(model.dtype).removeprefix("torch."),
        weights=" ".join(
            [
                *(["bfloat16"] if holds_bfloat16(model) else []),
                *forms_of_weights(model),
                *forms_of(model),
                *int8_modules.forms_of(model),
                *([f"lora.rank{config.lora.max_lora_rank}"] if config.lora.max_loras else []),
            ]
        ),
        device=_device_name(device),
        device_threads=cores.threads_alone,
        shared_threads=cores.threads_shared,
        host_threads=host_threads,
        host_kv_dtype=config.host_pool_dtype,
        kv_dtype=config.execution.kv_dtype,
        block_size=config.block_size,
        attention=config.execution.attention,
        compile=config.execution.compile,
        torch=torch.__version__,
        extension=f"{__version__} {_extension_hash()}",
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
    library = next(Path(__file__).parents[1].glob("_C*.so"))
    return hashlib.sha256(library.read_bytes()).hexdigest()[:12]

"""Resolves the dtype ``auto``: the model's, or fp32 on a CPU that has no products of it but the memory for fp32.

torch converts half precision at every product where the CPU has no instructions for it: at 128 rows bf16 takes seven
times as long as fp32 with AVX2, fp16 five times (2 cores of a Zen 3 EPYC, by hand).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from omniserve.core.config import GIB, EngineConfig
from omniserve.engine.capacity import has_host_tier
from omniserve.launch.loading import from_pretrained
from omniserve.launch.memory import available_bytes
from omniserve.ops.isa import has_products


def served_dtype(own: torch.dtype) -> torch.dtype:
    """Return the dtype in which a CPU serves a model of dtype ``own`` best, memory aside."""
    return own if has_products(own) else torch.float32


def auto_dtype(model: str | Path, device: str, config: EngineConfig) -> tuple[torch.dtype | None, str]:
    """Decide what ``auto`` is, before the weights are loaded, on the device ``cpu`` or ``cuda``.

    Returns:
        The dtype, or None for the checkpoint's own; and a line to tell, empty where nothing is out of the ordinary.

    Raises:
        OSError, ValueError: There is no such model, or it comes with code that is not trusted.
    """
    if device != "cpu":
        return None, ""
    trusts_code = config.execution.trust_remote_code
    description = from_pretrained(AutoConfig, model, trusts_code)
    own = getattr(description, "dtype", None)
    if not isinstance(own, torch.dtype) or getattr(description, "quantization_config", None):
        return None, ""
    dtype = served_dtype(own)
    if dtype is own:
        return own, ""
    name, other = _name(own), _name(dtype)
    pools = config.device_kv_bytes + (config.host_kv_bytes if has_host_tier(config) else 0)
    needed, available = _num_parameters(description, trusts_code) * dtype.itemsize + pools, available_bytes()
    if needed > available:
        return own, (
            f"warning: {name}, slowly: this CPU has no {name} products, and {other} weights with the KV pools need "
            f"{needed / GIB:.1f} GiB where {available / GIB:.1f} are available; a smaller --device-kv-gib or "
            f"--host-kv-gib may make room, --dtype {other} insists"
        )
    return dtype, f"{other} instead of the model's {name}, of which this CPU has no products; --dtype {name} keeps it"


def _num_parameters(description: Any, trusts_code: bool) -> int:
    """Count a model's parameters from its configuration; shared ones once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(description, trust_remote_code=trusts_code)
    return int(model.num_parameters())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

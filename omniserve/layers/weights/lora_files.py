"""Reads LoRA adapters from folders, as PEFT's ``save_pretrained`` writes them.

What changes more than a product of linears, or changes the base model, is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from omniserve.core.lora import LoRAError

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_REFUSED = {
    "use_dora": "it scales the columns of the base weight (DoRA)",
    "use_qalora": "it pools its inputs (QALoRA)",
    "use_bdlora": "its weights are block-diagonal (BD-LoRA)",
    "lora_bias": "its B has a bias",
    "modules_to_save": "it brings whole modules of its own (modules_to_save)",
    "trainable_token_indices": "it changes rows of the embedding",
    "target_parameters": "it changes parameters that are not linears' (target_parameters), such as experts",
    "alora_invocation_tokens": "it applies from certain tokens on (aLoRA)",
    "layer_replication": "it repeats layers of the base model",
    "arrow_config": "it routes among adapters (Arrow)",
    "kasa_config": "it is of KaSA",
    "monteclora_config": "it is of MonteCLoRA",
    "velora_config": "it is of VeLoRA",
}  # fmt: skip
"""Settings of PEFT's LoraConfig that ask for more than ``y + scale * (x @ A.T) @ B.T``, and what to call them."""
_CHANGES_BASE = ("pissa", "olora", "corda", "eva", "lora_ga", "orthogonal")
"""Beginnings of ``init_lora_weights`` with which training began from a changed base weight, or may have."""


@dataclass(frozen=True, slots=True)
class LoRAWeight:
    """The adapter of one linear: ``y + scale * (x @ A.T) @ B.T``."""

    a: Tensor
    """``[R, I]``."""
    b: Tensor
    """``[O, R]``."""
    scale: float


@dataclass(frozen=True, slots=True)
class LoRAFiles:
    """An adapter that has been read."""

    folder: Path
    digest: str
    weights: Mapping[str, LoRAWeight]
    """The weights, by the path of the linear in the base model."""


def read_lora(folder: str | Path) -> LoRAFiles:
    """Read an adapter.

    Raises:
        LoRAError: The folder has no adapter that can be read, or it does more than LoRA does.
    """
    folder = Path(folder)
    if not (folder / _CONFIG).is_file():
        raise LoRAError(f"{folder} has no {_CONFIG}: give the folder that save_pretrained of a PEFT model wrote")
    if not (folder / _WEIGHTS).is_file():
        raise LoRAError(
            f"{folder} has no {_WEIGHTS}: only safetensors files are read; save the adapter with "
            "save_pretrained(..., safe_serialization=True)"
        )
    try:
        config_text = (folder / _CONFIG).read_bytes()
        config = json.loads(config_text)
        content = (folder / _WEIGHTS).read_bytes()
        tensors = load(content)
    except (OSError, ValueError, SafetensorError) as error:
        raise LoRAError(f"{folder} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise LoRAError(f"{folder}/{_CONFIG} holds no settings")
    _check_config(folder, config)
    digest = hashlib.sha256(config_text + content).hexdigest()[:32]
    return LoRAFiles(folder, digest, _weights(folder, config, tensors))


def _check_config(folder: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise LoRAError(f"{folder} is an adapter of the type {kind}; adapters of the type LORA can be served by name")
    for name, what in _REFUSED.items():
        if config.get(name):
            raise LoRAError(f"{folder} cannot be served by name: {what}")
    if config.get("bias", "none") != "none":
        raise LoRAError(f"{folder} cannot be served by name: it brings biases (bias={config['bias']!r})")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
        raise LoRAError(
            f"{folder} cannot be served by name: it was trained beside a changed base weight "
            f"(init_lora_weights={begun!r}); convert it: save_pretrained(path_initial_model_for_weight_conversion=...)"
        )


def _weights(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, LoRAWeight]:
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        found = re.fullmatch(r"(.+)\.lora_(A|B)(?:\.default)?\.weight", key.removeprefix(_PREFIX))
        if found is None:
            raise LoRAError(f"{folder} has a tensor {key!r} that is no A or B of a linear")
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise LoRAError(f"{folder}: {key} must be a matrix of floats, got {tensor.dtype} {list(tensor.shape)}")
        if not bool(torch.isfinite(tensor).all()):
            raise LoRAError(f"{folder}: {key} has values that are not finite")
        pairs.setdefault(found[1], {})[found[2]] = tensor
    if not pairs:
        raise LoRAError(f"{folder} has no weights")
    weights: dict[str, LoRAWeight] = {}
    for path, pair in pairs.items():
        if pair.keys() != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1]:
            shapes = {key: list(tensor.shape) for key, tensor in pair.items()}
            raise LoRAError(f"{folder}: {path} needs an A [R, I] and a B [O, R], got {shapes}")
        weights[path] = LoRAWeight(pair["A"], pair["B"], _scale(folder, config, path, pair["A"].shape[0]))
    return weights


def _scale(folder: Path, config: Mapping[str, Any], path: str, rank: int) -> float:
    alpha = config.get("lora_alpha", 8)
    for pattern, own in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            alpha = own
            break
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise LoRAError(f"{folder}: lora_alpha must be a number, got {alpha!r}")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)

"""Random-weight models in the shape of known ones, made where they are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.script import Script
from omniserve.layers.patching import patch

_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's architecture."""

    name: str
    model_type: str
    """transformers' name of it."""
    fields: dict[str, Any]
    """Of its configuration."""


LLAMA_8B = Shape(
    name="Llama-3.1-8B",
    model_type="llama",
    fields={
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
)  # fmt: skip
QWEN_32B = Shape(
    name="Qwen2.5-32B",
    model_type="qwen2",
    fields={
        "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
        "num_key_value_heads": 8, "vocab_size": 152064, "max_position_embeddings": 32768, "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    },
)  # fmt: skip
TINY = Shape(
    name="tiny",
    model_type="llama",
    fields={
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    },
)  # fmt: skip


def random_model(shape: Shape, device: torch.device, *, seed: int = 0) -> Any:
    """Return a bf16 model in eval mode; its weights are drawn on the device and were nowhere else."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(shape.model_type, **shape.fields, **_NO_TOKENS)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.pad_token_id = 0
    return model


def patched_model(shape: Shape, script: Script) -> Any:
    """Return a random model, patched; in a dry run the tiny one, not compiled."""
    return patch(random_model(TINY if script.dry else shape, script.device), compile=not script.dry)

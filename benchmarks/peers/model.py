"""The model that all engines serve: random weights in a known shape, as a checkpoint of Hugging Face."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.models import SMOLLM_135M, TINYLLAMA_1B, saved_llama

SHAPES: dict[str, dict[str, Any]] = {
    "smollm-135m-shape": SMOLLM_135M,
    "tinyllama-1b-shape": TINYLLAMA_1B,
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 1024, "max_position_embeddings": 2048, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    },
}  # fmt: skip
"""``tiny`` is for trying the command itself."""


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """A checkpoint with bf16 weights and a tokenizer whose words are ``w0``, ``w1``, ..."""

    name: str
    folder: Path
    config: dict[str, Any]

    @classmethod
    def made(cls, name: str) -> SavedModel:
        """Return a model of SHAPES, which is written if it is not there yet."""
        folder = saved_llama(name, SHAPES[name])
        return cls(name=name, folder=folder, config=json.loads((folder / "config.json").read_text()))

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    def memory_bytes(self, dtype: str) -> int:
        """Return the bytes of the weights in a dtype of that name."""
        stored = (self.folder / "model.safetensors").stat().st_size
        return stored * self.dtype_named(dtype).itemsize // torch.bfloat16.itemsize

    @staticmethod
    def dtype_named(name: str) -> torch.dtype:
        """Return the dtype, bfloat16 or float32."""
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]

"""The model that all engines serve: random weights in a known shape, and the least time that its tokens take.

A floor counts the linear layers (a matrix product each, weights in the bytes that hold them, read once a step), and in
attention the KV of earlier tokens in bf16. Norms, rotary embeddings, softmax and sampling are left out, so no engine
can reach it. Only one that multiplies in 8 bits may where products count, which are of bf16 or fp32 values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.machine_speed import MachineSpeed
from benchmarks.common.models import SMOLLM_135M, saved_llama

_VALUE_BYTES = 2  # of a dense weight, and of K or V, whose values are bf16 ones in every dtype that is served
SHAPES: dict[str, dict[str, Any]] = {
    "smollm-135m-shape": SMOLLM_135M,
    "tinyllama-1.1b-shape": {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
        "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    },
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


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """The cost of a Llama's tokens, by its config."""

    layer_weights: int
    """Number of values in the linear layers but for the language modelling head."""
    head_weights: int
    kv_values: int
    """Number of values that a token leaves in the KV cache."""
    attention_width: int
    """Query heads times head size times layers."""
    layer_weight_bytes: float = _VALUE_BYTES
    head_weight_bytes: float = _VALUE_BYTES

    @classmethod
    def of(
        cls, config: Mapping[str, Any], layer_weight_bytes: float = _VALUE_BYTES,
        head_weight_bytes: float = _VALUE_BYTES,
    ) -> ModelCost:  # fmt: skip
        """Return the cost of a model with this config of a ``LlamaForCausalLM`` and weights of so many bytes each."""
        hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
        head_size = config.get("head_dim") or hidden // heads
        kv_width = config["num_key_value_heads"] * head_size
        layer = 2 * hidden * heads * head_size + 2 * hidden * kv_width + 3 * hidden * config["intermediate_size"]
        return cls(
            layer_weights=layers * layer, head_weights=hidden * config["vocab_size"], kv_values=2 * layers * kv_width,
            attention_width=layers * heads * head_size, layer_weight_bytes=layer_weight_bytes,
            head_weight_bytes=head_weight_bytes,
        )  # fmt: skip

    @property
    def weight_bytes(self) -> float:
        """The bytes of all weights that a step reads."""
        return self.layer_weights * self.layer_weight_bytes + self.head_weights * self.head_weight_bytes

    def decode_flop(self, context: float) -> float:
        """Return the floating-point operations of one token whose attention sees ``context`` tokens."""
        return 2 * (self.layer_weights + self.head_weights) + 4 * self.attention_width * context

    def prefill_flop(self, tokens: int) -> float:
        """Return those of a prompt; only its last token needs logits."""
        return 2 * self.layer_weights * tokens + 2 * self.head_weights + 2 * self.attention_width * tokens**2

    def decode_step_s(self, speed: MachineSpeed, batch: int, context: float) -> float:
        """Return the least seconds of a step that decodes ``batch`` requests of ``context`` tokens each."""
        num_bytes = self.weight_bytes + _VALUE_BYTES * batch * context * self.kv_values
        flop = batch * self.decode_flop(context)
        return max(num_bytes / speed.bytes_per_s, flop / speed.flop_per_s)

    def prefill_s(self, speed: MachineSpeed, tokens: int) -> float:
        """Return the least seconds to the first token of a prompt that is served alone."""
        return max(self.weight_bytes / speed.bytes_per_s, self.prefill_flop(tokens) / speed.flop_per_s)

    def batch_s(self, speed: MachineSpeed, *, count: int, prompt: int, output: int) -> float:
        """Return the least seconds of ``count`` requests, as if arithmetic alone took time."""
        decodes = (output - 1) * self.decode_flop(prompt + output / 2)
        return count * (self.prefill_flop(prompt) + decodes) / speed.flop_per_s

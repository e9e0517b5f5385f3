"""Lower bounds of a decode step's and a prompt's time, by the machine's memory and arithmetic.

A floor counts the linear layers (a matrix product each, weights as bf16 values, read once a step), and in attention the
KV of earlier tokens in bf16. Norms, rotary embeddings, softmax and sampling are left out, so no engine can reach it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.common.machine_speed import MachineSpeed

_VALUE_BYTES = 2  # of a weight, and of K or V, whose values are bf16 ones in every dtype that is served


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

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelCost:
        """Return the cost of a model with this config of a ``LlamaForCausalLM``."""
        hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
        head_size = config.get("head_dim") or hidden // heads
        kv_width = config["num_key_value_heads"] * head_size
        layer = 2 * hidden * heads * head_size + 2 * hidden * kv_width + 3 * hidden * config["intermediate_size"]
        return cls(
            layer_weights=layers * layer, head_weights=hidden * config["vocab_size"], kv_values=2 * layers * kv_width,
            attention_width=layers * heads * head_size,
        )  # fmt: skip

    def decode_flop(self, context: float) -> float:
        """Return the floating-point operations of one token whose attention sees ``context`` tokens."""
        return 2 * (self.layer_weights + self.head_weights) + 4 * self.attention_width * context

    def prefill_flop(self, tokens: int) -> float:
        """Return those of a prompt; only its last token needs logits."""
        return 2 * self.layer_weights * tokens + 2 * self.head_weights + 2 * self.attention_width * tokens**2

    def decode_step_s(self, speed: MachineSpeed, batch: int, context: float) -> float:
        """Return the least seconds of a step that decodes ``batch`` requests of ``context`` tokens each."""
        values = self.layer_weights + self.head_weights + batch * context * self.kv_values
        flop = batch * self.decode_flop(context)
        return max(_VALUE_BYTES * values / speed.bytes_per_s, flop / speed.flop_per_s)

    def prefill_s(self, speed: MachineSpeed, tokens: int) -> float:
        """Return the least seconds to the first token of a prompt that is served alone."""
        weights = self.layer_weights + self.head_weights
        return max(_VALUE_BYTES * weights / speed.bytes_per_s, self.prefill_flop(tokens) / speed.flop_per_s)

    def batch_s(self, speed: MachineSpeed, *, count: int, prompt: int, output: int) -> float:
        """Return the least seconds of ``count`` requests, as if arithmetic alone took time."""
        decodes = (output - 1) * self.decode_flop(prompt + output / 2)
        return count * (self.prefill_flop(prompt) + decodes) / speed.flop_per_s

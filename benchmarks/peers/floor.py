"""What the machine's memory and arithmetic allow: how long a decode step or a prompt takes at least.

A floor counts the linear layers (a matrix product each, weights as bf16 values, read once a step), and in attention the
KV of earlier tokens in bf16. Norms, rotary embeddings, softmax and sampling are left out, so no engine can reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.attention.bandwidth import ReadLimit
from benchmarks.common.timing import seconds

_VALUE_BYTES = 2  # of a weight, and of K or V, whose values are bf16 ones in every dtype that is served
_ROWS, _WIDTH = 512, 2048


@dataclass(frozen=True, kw_only=True)
class MachineSpeed:
    """How fast this machine was at one moment."""

    bytes_per_s: float
    """Memory read by all threads at once."""
    flop_per_s: float
    """Dense matrix product, in the arithmetic that is fastest here."""


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """What a Llama's tokens cost, by its config."""

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


class SpeedMeter:
    """Measures MachineSpeed again and again; what is fastest here is found at the first time.

    Args:
        cpus: The CPUs that servers get; one thread on each.
        arena_bytes: Memory to read; more than all caches hold.
        seed: Of its content.
        repeats: Timings a sample, of which the best is taken: a floor is what the machine can do.
    """

    def __init__(self, cpus: Sequence[int], *, arena_bytes: int = 1 << 30, seed: int = 0, repeats: int = 5) -> None:
        self._cpus, self._repeats = tuple(cpus), repeats
        torch.set_num_threads(len(self._cpus))
        self._read = ReadLimit(arena_bytes, self._cpus, repeats=3, seed=seed)
        self._read.everywhere()
        self._products = {name: make() for name, make in PRODUCTS.items() if name in available_products()}
        self.flop_per_s_by_product: dict[str, float] = {}
        """At the first sample, of every arithmetic."""

    def sample(self) -> MachineSpeed:
        """Return the speeds of this moment; takes about a second, and all CPUs."""
        reads = [self._read.gb_per_s(len(self._cpus)) for _ in range(self._repeats)]
        if not self.flop_per_s_by_product:
            self.flop_per_s_by_product = {name: self._flop_per_s(run) for name, run in self._products.items()}
        best = max(self.flop_per_s_by_product, key=lambda name: self.flop_per_s_by_product[name])
        flop_per_s = self._flop_per_s(self._products[best])
        self._read.everywhere()
        return MachineSpeed(bytes_per_s=max(reads) * 1e9, flop_per_s=flop_per_s)

    def _flop_per_s(self, run: Callable[[], object]) -> float:
        run()
        return 2 * _ROWS * _WIDTH**2 / min(seconds(run) for _ in range(self._repeats))


def available_products() -> list[str]:
    """Return the names of PRODUCTS that this torch can run on this CPU."""
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return [name for name in PRODUCTS if bf16 or name != "bf16 packed"]


def _plain(dtype: torch.dtype) -> Callable[[], object]:
    left, right = torch.randn(_ROWS, _WIDTH).to(dtype), torch.randn(_WIDTH, _WIDTH).to(dtype)
    return lambda: torch.mm(left, right)


def _packed(dtype: torch.dtype) -> Callable[[], object]:
    rows, weight = torch.randn(_ROWS, _WIDTH).to(dtype), torch.randn(_WIDTH, _WIDTH).to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda: torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")


PRODUCTS: dict[str, Callable[[], Callable[[], object]]] = {
    "bf16": lambda: _plain(torch.bfloat16),
    "fp32": lambda: _plain(torch.float32),
    "bf16 packed": lambda: _packed(torch.bfloat16),
    "fp32 packed": lambda: _packed(torch.float32),
}
"""Matrix products of ``[512, 2048]`` and ``[2048, 2048]``: torch's, and oneDNN's with a weight in blocks."""

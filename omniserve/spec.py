"""The shape of a model, as schedulers, KV managers and the host tier need it. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """How one layer attends."""

    scale: float
    """Multiplies q.k."""
    window: int = 0
    """Sliding window: the query at position p sees keys at positions (p - window, p]; 0 sees all of [0, p]."""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0 leaves them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Sizes of a patched model."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype_bytes: int
    attention: tuple[AttentionSpec, ...]
    """One per layer."""

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one KV block over all layers, K and V."""
        return 2 * self.num_layers * self.num_kv_heads * block_size * self.head_size * self.dtype_bytes

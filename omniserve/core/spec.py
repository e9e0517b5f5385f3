"""The shape of a model, as schedulers, KV managers and the host tier need it. Plain data, no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

KV_DTYPES = ("auto", "int8")
"""The dtypes of a tier's KV: the model's, or int8 with a scale per token, KV head and K or V."""

HEAD_SIZE_STEP, MAX_HEAD_SIZE = 8, 512
"""The attention kernels of both tiers take heads whose size is a multiple of the one and at most the other. Heads of
another size are padded with zeros, up to the largest of the model's layers."""

MAX_LATENT_SIZE = 576
"""The kernels for CPUs take latents up to this size."""

SCALE_BYTES = 4
"""Bytes of the scale of a row of int8, a float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """The kind of attention of a layer."""

    scale: float
    """Multiplies q.k."""
    window: int = 0
    """Sliding window: the query at position p sees keys at positions (p - window, p]; 0 sees all of [0, p]."""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0 leaves them."""
    chunk: int = 0
    """The query at position p sees keys at positions [p - p % chunk, p] (Llama 4); 0 sees all of [0, p]."""
    sinks: tuple[float, ...] | None = None
    """Logits, one for each query head, that join the softmax's denominator and have no value (gpt-oss)."""
    alibi_slopes: tuple[float, ...] | None = None
    """Slopes, one for each query head: slope * (key position - query position) is added to the scaled score (ALiBi)."""

    def first_key(self, position: int) -> int:
        """Return the lowest position that the query at ``position`` sees; it never falls from one to the next."""
        in_window = position + 1 - self.window if self.window else 0
        return max(0, in_window, position - position % self.chunk if self.chunk else 0)


def eos_token_ids(vocab_size: int, *sources: object) -> tuple[int, ...]:
    """Return the ids that end a sequence by any of these: configs and tokenizers with an ``eos_token_id``.

    They are one set, for checkpoints differ in which of them names the token that ends a turn and which the one that
    ends a text. Ids beyond the vocabulary are left out.
    """
    found = (getattr(source, "eos_token_id", None) for source in sources)
    ids = {token_id for each in found if each is not None for token_id in ([each] if isinstance(each, int) else each)}
    return tuple(sorted(token_id for token_id in ids if 0 <= token_id < vocab_size))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Sizes of a patched model."""

    num_layers: int
    """Layers that attend; those with recurrent state instead of KV are not counted."""
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    """Elements of a head in the KV cache, where all layers have the same; a multiple of HEAD_SIZE_STEP."""
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    """Ids of the tokens that end a sequence; see the function ``eos_token_ids``."""
    dtype_bytes: int
    attention: tuple[AttentionSpec, ...]
    """The attention of each layer."""
    value_is_key: bool = False
    """A token's value is its key, as of latents (``attention="latent"``): the device tier stores them once."""
    state_bytes: int = 0
    """Bytes of one request's recurrent states over all layers without KV; 0 for a model that has none."""

    def part(self, layers: range) -> ModelSpec:
        """Return the spec of a model of these layers alone."""
        return dataclasses.replace(self, num_layers=len(layers), attention=self.attention[layers.start : layers.stop])

    def kv_block_bytes(self, block_size: int, kv_dtype: str = "auto") -> int:
        """Return the bytes of one KV block of the device tier over all layers: K, V and scales.

        Raises:
            ValueError: The dtype is not one of KV_DTYPES.
        """
        return self._planes_bytes(2 - self.value_is_key, block_size, kv_dtype)

    def host_block_bytes(self, block_size: int, kv_dtype: str = "auto") -> int:
        """Return the bytes of one block of the host pool over all layers; see ``kv_block_bytes``."""
        return self._planes_bytes(2, block_size, kv_dtype)

    def _planes_bytes(self, num_planes: int, block_size: int, kv_dtype: str) -> int:
        if kv_dtype not in KV_DTYPES:
            raise ValueError(f"the dtype of KV must be one of {', '.join(KV_DTYPES)}, got {kv_dtype!r}")
        rows = num_planes * self.num_layers * self.num_kv_heads * block_size
        if kv_dtype == "auto":
            return rows * self.head_size * self.dtype_bytes
        return rows * (self.head_size + SCALE_BYTES)

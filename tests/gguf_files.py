"""Tiny GGUF files: random blocks of each type, and Llama models of them with a tokenizer of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy
from transformers.convert_slow_tokenizer import bytes_to_unicode

HIDDEN, LAYERS, HEADS, KV_HEADS = 256, 2, 8, 2
MERGES = ("h e", "l l", "he ll", "Ġ t")
END, END_OF_TURN = "<|endoftext|>", "<|eot|>"
TOKENS = (*bytes_to_unicode().values(), *("".join(merge.split()) for merge in MERGES), END, END_OF_TURN)

MIXED = {
    "token_embd": "Q8_0", "attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q5_K",
    "ffn_gate": "Q4_0", "ffn_up": "Q4_1", "ffn_down": "Q5_0", "blk.1.ffn_down": "Q5_1", "output": "Q6_K",
}  # fmt: skip
"""Types by tensor, of which one layer's go before those of all: each type that is served, some of them in one group."""

# Of types without a quantiser: where a block has its fp16 scales, by how much each is larger than the first, and the
# standard deviation of a random block's values if that is 1.
_SCALES: Mapping[str, tuple[tuple[int, ...], tuple[float, ...], float]] = {
    "Q2_K": ((80, 82), (1.0, 1.5), 17.0),
    "Q3_K": ((108,), (1.0,), 42.0),
    "Q4_K": ((0, 2), (1.0, 7.5), 250.0),
    "Q5_K": ((0, 2), (1.0, 15.5), 500.0),
    "Q6_K": ((208,), (1.0,), 1370.0),
    "IQ4_NL": ((0,), (1.0,), 70.0),
    "IQ4_XS": ((0,), (1.0,), 1400.0),
}


def type_of(kind: str) -> gguf.GGMLQuantizationType:
    """Return the type of a name."""
    return gguf.GGMLQuantizationType[kind]


def blocks(kind: str, num_out: int, num_in: int, *, std: float = 1.0, seed: int = 0) -> numpy.ndarray:
    """Return a random tensor of a type as a file has it, uint8 ``[O, bytes of a row]``; of F32 and F16 its values.

    Args:
        kind: The type.
        num_out: Output features.
        num_in: Input features.
        std: Standard deviation of the values, about.
        seed: Same seed, same values.
    """
    rng = numpy.random.default_rng(seed)
    if kind not in _SCALES:
        values = (rng.standard_normal((num_out, num_in)) * std).astype(numpy.float32)
        return gguf.quants.quantize(values, type_of(kind))
    inputs, width = gguf.GGML_QUANT_SIZES[type_of(kind)]
    raw = rng.integers(0, 256, (num_out, num_in // inputs, width), dtype=numpy.uint8)
    places, factors, of_one = _SCALES[kind]
    for place, factor in zip(places, factors, strict=True):
        scale = factor * std / of_one * rng.uniform(0.5, 1.5, raw.shape[:2])
        raw[..., place : place + 2] = scale.astype(numpy.float16)[..., None].view(numpy.uint8)
    return raw.reshape(num_out, -1)


def write_llama(
    path: Path, kinds: Mapping[str, str] = MIXED, *, is_tied: bool = False, settings: Mapping[str, str] | None = None
) -> Path:
    """Write a Llama of random weights, whose greedy outputs are varied, and a tokenizer of bytes.

    Args:
        path: The file.
        kinds: The type of each matrix, as in ``MIXED``.
        is_tied: There is no head, so the embedding serves as one.
        settings: More strings of the file's metadata.

    Returns:
        ``path``.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in (END, END_OF_TURN) else 1 for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(TOKENS.index(END))
    writer.add_eos_token_id(TOKENS.index(END))
    writer.add_eot_token_id(TOKENS.index(END_OF_TURN))
    for name, text in (settings or {}).items():
        writer.add_string(name, text)
    for seed, (name, num_out) in enumerate(_matrices(is_tied)):
        kind = kinds.get(name, kinds.get(name.split(".")[-1], "F32"))
        std = (0.08 if is_tied else 1.0) if name == "token_embd" else 1.6 * HIDDEN**-0.5
        raw = blocks(kind, num_out, HIDDEN, std=std, seed=seed)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=type_of(kind))
    rng = numpy.random.default_rng(1)
    for name in _norms():
        gains = 1 + 0.2 * rng.standard_normal(HIDDEN)
        writer.add_tensor(f"{name}.weight", gains.astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _matrices(is_tied: bool) -> list[tuple[str, int]]:
    """The names of the matrices, and their output features."""
    heights = {"attn_k": HIDDEN // HEADS * KV_HEADS, "attn_v": HIDDEN // HEADS * KV_HEADS}
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    of_layers = [(f"blk.{layer}.{part}", heights.get(part, HIDDEN)) for layer in range(LAYERS) for part in parts]
    ends = ["token_embd"] if is_tied else ["token_embd", "output"]
    return [(name, len(TOKENS)) for name in ends] + of_layers


def _norms() -> list[str]:
    return ["output_norm", *(f"blk.{layer}.{part}" for layer in range(LAYERS) for part in ("attn_norm", "ffn_norm"))]

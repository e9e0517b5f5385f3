"""A Llama checkpoint of Hugging Face as a GGUF file, the format of llama.cpp: with the same values, or quantised.

llama.cpp's own converter knows only the tokenizers of published models, not the one of a model with random weights.
Here token ``i`` is the word ``wi``; prompts are sent as token ids, so that nothing is ever tokenised.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import load_file
from torch import Tensor

from omniserve.launch.gguf_folder import import_gguf

_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_TENSOR_TYPES = {"float32": 0, "bfloat16": 30, "Q4_0": 2, "Q8_0": 8}
_FILE_TYPES = {"float32": 0, "bfloat16": 32, "Q4_0": 2, "Q8_0": 7}
_ALIGNMENT = 32
_NORMAL_TOKEN, _UNKNOWN_TOKEN = 1, 2
_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_gguf(checkpoint: Path, config: Mapping[str, Any], path: Path, kind: str) -> None:
    """Write the weights of a checkpoint as GGUF.

    Args:
        checkpoint: Folder with ``model.safetensors`` of a ``LlamaForCausalLM`` without biases.
        config: Fields of its config.
        path: File to write.
        kind: Type of all matrices, embedding and head too: ``float32``, ``bfloat16``, or quantised by the package
            ``gguf``, as llama.cpp does it: ``Q4_0``, ``Q8_0``. Vectors are float32, as llama.cpp asks for.

    Raises:
        ValueError: The checkpoint has a tensor that no Llama has, or the type is another one.
    """
    if kind not in _TENSOR_TYPES:
        raise ValueError(f"matrices are written in one of {', '.join(_TENSOR_TYPES)}; got {kind}")
    tensors = dict(_renamed(load_file(checkpoint / "model.safetensors"), config))
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    stored = {name: _stored(tensor, kind) for name, tensor in tensors.items()}
    metadata = _metadata(config, kind)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(stored), len(metadata)))
        for key, (value_kind, value) in metadata.items():
            file.write(_string(key) + struct.pack("<I", value_kind) + _value(value_kind, value))
        offset = 0
        for name, tensor in stored.items():
            sizes = tuple(reversed(shapes[name]))  # the fastest dimension comes first
            file.write(_string(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
            file.write(struct.pack("<IQ", _TENSOR_TYPES[kind if len(sizes) > 1 else "float32"], offset))
            offset += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        for tensor in stored.values():
            _align(file)
            file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        _align(file)
    unfinished.replace(path)


def _stored(tensor: Tensor, kind: str) -> Tensor:
    """Return a tensor as it is in the file; of a quantised one the bytes."""
    if tensor.dim() == 1:
        return tensor.float()
    if kind in ("float32", "bfloat16"):
        return tensor.to(getattr(torch, kind))
    gguf = import_gguf()
    return torch.from_numpy(gguf.quants.quantize(tensor.float().numpy(), gguf.GGMLQuantizationType[kind]))


def _renamed(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module in ends:
            yield f"{ends[module]}.weight", tensor
            continue
        _, _, layer, part = [*module.split(".", 3), "", "", ""][:4]
        if part not in _NAMES or not name.endswith(".weight"):
            raise ValueError(f"the checkpoint has a tensor {name}, which is none of a Llama without biases")
        if part == "self_attn.q_proj":
            tensor = _interleaved(tensor, config["num_attention_heads"])
        elif part == "self_attn.k_proj":
            tensor = _interleaved(tensor, config["num_key_value_heads"])
        yield f"blk.{layer}.{_NAMES[part]}.weight", tensor


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of a projection in the order of llama.cpp's rotary embedding, which rotates neighbours: Hugging
    Face's rotates row ``i`` of a head with row ``i + head_size / 2``."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _metadata(config: Mapping[str, Any], kind: str) -> dict[str, tuple[int, Any]]:
    words = config["vocab_size"]
    rope = config.get("rope_parameters") or {}
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {
        "general.architecture": (_STRING, "llama"),
        "general.name": (_STRING, "random weights"),
        "general.file_type": (_UINT32, _FILE_TYPES[kind]),
        "llama.context_length": (_UINT32, config["max_position_embeddings"]),
        "llama.embedding_length": (_UINT32, config["hidden_size"]),
        "llama.block_count": (_UINT32, config["num_hidden_layers"]),
        "llama.feed_forward_length": (_UINT32, config["intermediate_size"]),
        "llama.attention.head_count": (_UINT32, config["num_attention_heads"]),
        "llama.attention.head_count_kv": (_UINT32, config["num_key_value_heads"]),
        "llama.attention.layer_norm_rms_epsilon": (_FLOAT32, config["rms_norm_eps"]),
        "llama.rope.dimension_count": (_UINT32, head_size),
        "llama.rope.freq_base": (_FLOAT32, rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        "llama.vocab_size": (_UINT32, words),
        "tokenizer.ggml.model": (_STRING, "llama"),
        "tokenizer.ggml.tokens": (_ARRAY, (_STRING, [f"\N{LOWER ONE EIGHTH BLOCK}w{i}" for i in range(words)])),
        "tokenizer.ggml.scores": (_ARRAY, (_FLOAT32, [0.0] * words)),
        "tokenizer.ggml.token_type": (_ARRAY, (_INT32, [_UNKNOWN_TOKEN] + [_NORMAL_TOKEN] * (words - 1))),
        "tokenizer.ggml.unknown_token_id": (_UINT32, 0),
        "tokenizer.ggml.add_bos_token": (_BOOL, False),
        "tokenizer.ggml.add_eos_token": (_BOOL, False),
    }


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return _string(value)
    if kind == _ARRAY:
        item_kind, items = value
        return struct.pack("<IQ", item_kind, len(items)) + b"".join(_value(item_kind, item) for item in items)
    return struct.pack({_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f", _BOOL: "<?"}[kind], value)


def _align(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))

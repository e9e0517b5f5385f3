"""Shapes of known models, and of those in a local folder: what a simulated device needs to know of a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omniserve.core.spec import AttentionSpec, ModelSpec

_DTYPE_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDims:
    """Sizes of a decoder, in elements. Weights and KV are 16-bit."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    head_size: int = 128
    is_gated: bool = True
    """The MLP has a gate: three matrices instead of two."""
    ties_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "intermediate_size",
            "vocab_size",
            "max_model_len",
            "head_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of model {self.name} must be >= 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model {self.name} has {self.num_heads} heads: no multiple of its {self.num_kv_heads} KV heads"
            )

    @property
    def up_size(self) -> int:
        """Columns of the MLP's first projection, the gate included."""
        return self.intermediate_size * (2 if self.is_gated else 1)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights (norms, which are small, left out)."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_size  # q, k, v and the output projection
        layer = self.hidden_size * (attention + self.up_size + self.intermediate_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.ties_embeddings else 2)
        return _DTYPE_BYTES * (self.num_layers * layer + embeddings)

    @property
    def spec(self) -> ModelSpec:
        """Return the sizes as the engine knows them."""
        layer = AttentionSpec(scale=self.head_size**-0.5)
        return ModelSpec(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=(),
            dtype_bytes=_DTYPE_BYTES,
            attention=(layer,) * self.num_layers,
        )


def _dims(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int, length: int, **more: Any
) -> ModelDims:
    return ModelDims(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=mlp,
        vocab_size=vocab,
        max_model_len=length,
        **more,
    )


MODELS = {
    dims.name: dims
    for dims in (
        _dims("llama-2-7b", 32, 4096, 32, 32, 11008, 32000, 4096),
        _dims("llama-2-13b", 40, 5120, 40, 40, 13824, 32000, 4096),
        _dims("llama-2-70b", 80, 8192, 64, 8, 28672, 32000, 4096),
        _dims("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, 8192),
        _dims("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, 8192),
        _dims("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256, 131072),
        _dims("codellama-34b", 48, 8192, 64, 8, 22016, 32000, 16384),
        _dims("yi-34b", 60, 7168, 56, 8, 20480, 64000, 4096),
        _dims("yi-34b-200k", 60, 7168, 56, 8, 20480, 64000, 200000),
        _dims("opt-13b", 40, 5120, 40, 40, 20480, 50272, 2048, is_gated=False, ties_embeddings=True),
        _dims("opt-30b", 48, 7168, 56, 56, 28672, 50272, 2048, is_gated=False, ties_embeddings=True),
        _dims("qwen-2.5-14b", 48, 5120, 40, 8, 13824, 152064, 32768),
        _dims("smollm-135m", 30, 576, 9, 3, 1536, 49152, 2048, head_size=64, ties_embeddings=True),
    )
}
"""Models by their names in lower case."""


def find_model(name: str) -> ModelDims:
    """Return a known model, or that of a ``config.json`` (Hugging Face), given as a file or its folder.

    Raises:
        ValueError: There is no such model, or the file is not JSON or lacks a size; the message names it.
        OSError: The file cannot be read.
    """
    if (known := MODELS.get(name.lower())) is not None:
        return known
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        raise ValueError(
            f"unknown model {name!r}; known: {', '.join(MODELS)}; or give a folder with a config.json, or such a file"
        )
    return _read_config(path)


def _read_config(path: Path) -> ModelDims:
    """Read the sizes of a decoder with the usual names (Llama, Mistral, Qwen, OPT ...)."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object, found a {type(config).__name__}")

    def size(*names: str, default: int | None = None) -> int:
        for name in names:
            if config.get(name) is not None:
                if isinstance(config[name], bool) or not isinstance(config[name], int):
                    raise ValueError(f"{path}: {name} must be a whole number, got {config[name]!r}")
                return int(config[name])
        if default is None:
            raise ValueError(f"{path} does not say {' or '.join(names)}")
        return default

    if "num_local_experts" in config or "num_experts" in config:
        raise ValueError(f"{path} is a mixture of experts, whose dense time is not simulated; give a dense model")
    heads = size("num_attention_heads")
    hidden = size("hidden_size")
    return ModelDims(
        name=str(config.get("_name_or_path") or path.parent.name or path),
        num_layers=size("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads", default=heads),
        intermediate_size=size("intermediate_size", "ffn_dim"),
        vocab_size=size("vocab_size"),
        max_model_len=size("max_position_embeddings"),
        head_size=size("head_dim", default=hidden // heads),
        is_gated=config.get("model_type") not in ("opt", "gpt_neox", "gpt2", "phi"),
        ties_embeddings=bool(config.get("tie_word_embeddings", False)),
    )

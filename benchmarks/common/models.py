"""Random-weight models in the shape of known ones: nothing is downloaded, and speed does not depend on weights."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.common.record import ROOT
from omniserve import EngineConfig
from omniserve.launch.loading import EngineLoader
from omniserve.launch.models import builtin_model_path

SMOLLM_135M: dict[str, Any] = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def random_llama(seed: int = 0, dtype: torch.dtype | None = None, **shape: Any) -> Any:
    """Return a Llama with random weights; ``shape`` holds its config's fields.

    Without a dtype it has random bf16 weights, in the dtype in which ``auto`` serves them on this CPU.
    """
    torch.manual_seed(seed)
    config = AutoConfig.for_model("llama", **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.bfloat16).eval()
    model.generation_config.pad_token_id = 0
    return model.to(dtype or torch.bfloat16)


def builtin_model() -> Any:
    """Return the model that comes with OmniServe, in the dtype in which ``auto`` serves it on this CPU."""
    loader = EngineLoader(model=builtin_model_path(), dtype="auto", device="cpu", config=EngineConfig())
    return loader.load_model(lambda message: print(message, file=sys.stderr))


MODELS = {"built-in": builtin_model, "SmolLM-135M": lambda: random_llama(**SMOLLM_135M)}


def token_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of a token's KV in all layers."""
    shape = model.config
    head_size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return int(2 * shape.num_hidden_layers * shape.num_key_value_heads * head_size * model.dtype.itemsize)


def saved_smollm() -> Path:
    """Return a folder with a random bf16 model in SmolLM-135M's shape; made once."""
    return saved_llama("smollm-135m-shape", SMOLLM_135M)


def saved_llama(name: str, shape: Mapping[str, Any]) -> Path:
    """Return a folder with a random bf16 Llama of this shape, and a tokenizer with a word for each token; made once.

    Args:
        name: Name of the folder; a name stands for one shape.
        shape: Fields of the config.
    """
    folder = ROOT / ".cache" / "models" / name
    if not (folder / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        words = Tokenizer(WordLevel({f"w{i}": i for i in range(shape["vocab_size"])}, unk_token="w0"))
        words.pre_tokenizer = WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
        random_llama(dtype=torch.bfloat16, **shape).save_pretrained(folder)
    return folder

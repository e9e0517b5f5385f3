"""All causal language models of transformers, tiny and random, against their own ``generate()``.

    python -m tests.parity.zoo [MODEL_TYPE ...]      --write also writes docs/models.md
    python -m tests.parity.zoo --image-text [MODEL_TYPE ...]
    python -m tests.parity.zoo --own-sizes [MODEL_TYPE ...]

With ``--image-text`` it is the whole of models with an encoder of images, of which no prompt here has any. With
``--own-sizes`` what kernels and caches depend on is as the type has it by default: head sizes, windows, query heads to
a KV head, vocabulary. Each type gets random histories on the real engine: mixed, chunked, preempted, offloaded and
piggybacked requests, whose fp32 greedy tokens must be those of ``generate()``. A type that is refused is listed with
the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from omniserve import UnsupportedModelError
from omniserve.layers.patching import patched_model
from tests.parity.engine_histories import Reference, Tally, run_history
from tests.parity.image_text import IMAGE_TEXT_FIELDS
from tests.parity.models import VOCAB_SIZE

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

_NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
# Lists with the kind of each layer: three layers, of every kind that the list has by default.
_PATTERNS = ("layer_types", "mlp_layer_types", "no_rope_layers")
# Fields of configs by their names, for every type that has them.
_SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(_NUM_LAYERS, 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_local_experts", "num_experts", "n_routed_experts"), 2),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"), 512),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "first_k_dense_replace"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim"), 16),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "sliding_window": 9,
    "tie_word_embeddings": False,  # tied random weights make each token follow itself
    "vocab_size": VOCAB_SIZE,
}
_MLA = {"num_key_value_heads": 4, "v_head_dim": 16, "qk_nope_head_dim": 16, "head_dim": 8, "q_lora_rank": 16}
# Prompts have several chunks; every second layer has none, and scales queries from an early position on.
_LLAMA4 = {"attention_chunk_size": 7, "no_rope_layer_interval": 2, "floor_scale": 5}
# Experts in two groups, of which each token uses one.
_GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
# Sparse attention of DeepSeek: all keys, up to a length that the histories do not reach.
_PICKS_KEYS = _MLA | {"index_topk": 96, "index_n_heads": 2, "index_head_dim": 16}
# Its sliding layers have sizes of their own.
_DOTS3 = _PICKS_KEYS | {
    "head_dim": 32,
    "shared_experts_intermediate_size": 32,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 8,
    "swa_kv_lora_rank": 8,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 96,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_WINDOW_BETWEEN = {"layer_types": [_FULL, _SLIDING, _FULL], "use_sliding_window": True, "max_window_layers": 1}
_MULTIPLIERS = {
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
_TEXT_DECODER = {"is_decoder": True}
# Two layers at the end take K and V from earlier ones; each layer has an embedding of the token.
_SHARES_KV = {
    "num_hidden_layers": 6,
    "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _FULL],
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
}
_GEMMA3N = _SHARES_KV | {"laurel_rank": 8, "altup_num_inputs": 3, "activation_sparsity_pattern": [0.95, *[0.0] * 5]}
_GEMMA4 = _SHARES_KV | {"global_head_dim": 32, "use_double_wide_mlp": True}
# As the larger models of the type: values of full layers are their keys; experts.
_GEMMA4_LARGE = {
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 0,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "final_logit_softcapping": 8.0,
}
# Layers with recurrent state and layers with attention, in orders that differ between types. The states are small
# beside the KV, or there were memory for all requests.
_LINEAR = "linear_attention"
_DELTA_RULE = {
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "num_hidden_layers": 5, "layer_types": [_LINEAR, _FULL, _LINEAR, _LINEAR, _FULL],
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 2, "mamba_expand": 1, "mamba_d_conv": 2,
    "mamba_chunk_size": 4,
}  # fmt: skip
# What a type needs beside these sizes. None leaves a field as it is by default.
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "axk1": _MLA, "axk2": _PICKS_KEYS,
    "deepseek_v2": _MLA | _GROUPS | {"topk_method": "group_limited_greedy", "n_shared_experts": 1},
    "deepseek_v3": _MLA | _GROUPS | {"rope_parameters": _YARN},
    "sarvam_mla": _MLA,
    "deepseek_v32": _PICKS_KEYS, "glm4_moe_lite": _MLA, "longcat_flash": _MLA, "hy_v4": _PICKS_KEYS,
    "glm_moe_dsa": _PICKS_KEYS | {"indexer_types": ["full", "shared", "full"]},
    "minicpm3": _MLA, "mistral4": _MLA, "youtu": _MLA,
    "bert": _TEXT_DECODER,
    "bert-generation": _TEXT_DECODER,
    "big_bird": _TEXT_DECODER | {"attention_type": "original_full"},
    "kimi_linear": _MLA | {
        "num_hidden_layers": 4, "layer_types": [_LINEAR, _FULL, _LINEAR, _FULL], "linear_head_dim": 8,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "linear_num_heads": 4,
    },
    "bailing_hybrid": _MLA | {
        "num_hidden_layers": 4, "layer_types": [_LINEAR, _FULL, _LINEAR, _FULL],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "bamba": _MAMBA | {"num_hidden_layers": 5, "attn_layer_indices": [0, 3]},
    "biogpt": {"scale_embedding": True},
    "camembert": _TEXT_DECODER,
    "cohere": {"logit_scale": 0.5, "use_qk_norm": True},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": [_SLIDING, _FULL, _SLIDING], "rope_parameters": {_SLIDING: _ROPE, _FULL: _ROPE},
    },
    "data2vec-text": _TEXT_DECODER,
    "dbrx": {
        "attn_config": {"clip_qkv": 1.0, "kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        "rope_parameters": _ROPE,
    },
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "electra": _TEXT_DECODER,
    "ernie": _TEXT_DECODER,
    "falcon": {"head_dim": None, "alibi": False, "new_decoder_architecture": True},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64, "mamba_n_groups": 1},
    "gemma2": {"query_pre_attn_scalar": 12, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 8.0},
    "dots3_note": _DOTS3, "dots3_note_text": _DOTS3,
    "gemma3n": _GEMMA3N, "gemma3n_text": _GEMMA3N,
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gemma4": _GEMMA4, "gemma4_unified": _GEMMA4_LARGE, "gemma4_text": _GEMMA4_LARGE, "gemma4_unified_text": _GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]], "window_size": 9},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "granite": _MULTIPLIERS, "granitemoe": _MULTIPLIERS,
    "granitemoeshared": _MULTIPLIERS | {"shared_intermediate_size": 32},
    "gptj": {"rotary_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 16, "rope_parameters": _ROPE},
    "hunyuan_v1_moe": {"head_dim": 16, "rope_parameters": _ROPE, "moe_topk": 2},
    "llama4": _LLAMA4, "llama4_text": _LLAMA4,
    "megatron-bert": _TEXT_DECODER,
    "mllama": {"num_hidden_layers": 4, "cross_attention_layers": [1]},
    "moshi": {"sliding_window": 512},  # with a shorter one its generate() contradicts its own forward
    "ministral": {"head_dim": 16, "rope_parameters": _ROPE, "layer_types": [_SLIDING, _FULL, _SLIDING]},
    "nemotron": {
        "head_dim": 16, "num_key_value_heads": 2, "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5},
    },
    "olmoe": {"clip_qkv": 1.0},
    "phi": {"qk_layernorm": True},
    "phi3": {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 96},
    "phimoe": {
        "rope_parameters": _LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3},
        "original_max_position_embeddings": 96,
    },
    "qwen2": _WINDOW_BETWEEN,
    "qwen2_moe": _WINDOW_BETWEEN | {"mlp_only_layers": [1], "norm_topk_prob": True},
    "qwen3": _WINDOW_BETWEEN,
    "qwen3_moe": {"mlp_only_layers": [1], "norm_topk_prob": True},
    "rembert": _TEXT_DECODER,
    "roberta": _TEXT_DECODER,
    "roberta-prelayernorm": _TEXT_DECODER,
    "roc_bert": _TEXT_DECODER,
    "roformer": _TEXT_DECODER,
    "starcoder2": {"sliding_window": 9},
    "xlm-roberta": _TEXT_DECODER,
    "xlm-roberta-xl": _TEXT_DECODER,
    "zaya": {"num_experts_per_tok": 1},
    "granitemoehybrid": _MAMBA | {
        "num_hidden_layers": 5, "layer_types": ["mamba", "attention", "attention", "mamba", "mamba"],
    },
    "jamba": {
        "num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 2, "mamba_dt_rank": 4,
        "mamba_expand": 1, "mamba_d_conv": 2,
    },
    "lara_mini": _DELTA_RULE,
    "lfm2": {"num_hidden_layers": 5, "layer_types": ["conv", _FULL, "conv", "conv", _FULL], "block_multiple_of": 8},
    "lfm2_moe": {"num_hidden_layers": 5, "layer_types": [_FULL, "conv", "conv", _FULL, "conv"]},
    "minimax": {
        "num_hidden_layers": 5, "layer_types": [_LINEAR, _FULL, _LINEAR, _FULL, _LINEAR], "block_size": 4,
        "num_attention_heads": 2, "head_dim": 8,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "mlp", "attention", "mamba", "moe", "attention", "mlp"], "ssm_state_size": 4,
        "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 4,
        "moe_shared_expert_intermediate_size": 32,
        "time_step_min": 1e-9,  # its own prefill keeps to another one, its decode to none
    },
    "olmo_hybrid": _DELTA_RULE | {"layer_types": [_LINEAR, _FULL, _LINEAR, _FULL, _LINEAR]},
    "qwen3_5": _DELTA_RULE, "qwen3_5_moe": _DELTA_RULE, "qwen3_5_moe_text": _DELTA_RULE, "qwen3_5_text": _DELTA_RULE,
    "qwen3_next": _DELTA_RULE,
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
}  # fmt: skip
# What a run with a type's own sizes leaves as it is by default: sizes of heads, ranks of MLA, windows, vocabularies.
_OWN_SIZES = frozenset(
    {
        "attention_chunk_size", "global_head_dim", "head_dim", "index_head_dim", "kv_lora_rank",
        "num_global_key_value_heads", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
        "rotary_dim", "sliding_window", "swa_head_dim", "swa_kv_lora_rank", "swa_q_lora_rank", "swa_qk_nope_head_dim",
        "swa_v_head_dim", "v_head_dim", "vocab_size", "window_size",
    }
)  # fmt: skip
_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "swa_num_attention_heads",
)  # fmt: skip
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads")
_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "embedding_size")
_WIDEST, _WIDEST_OF_WHOLE_VOCABULARY = 2048, 256
"""Largest hidden size of types whose hidden size is that of all heads, and the largest with the type's own
vocabulary."""
# Models that number their positions from the padding token's number on.
_COUNT_FROM_PADDING = frozenset(
    {"camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"}
)
# Types whose text config is another type's.
_WHOLE_ALONE = frozenset({"gemma4_assistant", "gemma4_unified_assistant"})
# Of the whole config that a type's text config is taken from.
_WHOLE: Mapping[str, Mapping[str, Any]] = {
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}}
}

COMPILED = (
    "bloom", "deepseek_v3", "falcon", "gemma3_text", "gemma4_text", "glm4_moe", "gpt_oss", "llama4_text", "olmo3",
    "qwen3_moe",
)  # fmt: skip
"""Types that ``--write`` also runs compiled."""
_MOST_PARAMETERS, _MOST_OF_OWN_SIZES = 20_000_000, 100_000_000


def _known(config: PreTrainedConfig) -> set[str]:
    return set(inspect.signature(type(config).__init__).parameters) | set(vars(config)) | set(config.attribute_map)


def _own_sizes(usual: PreTrainedConfig, fields: Mapping[str, Any], *, is_wide: bool) -> dict[str, Any]:
    """Return fields for a run with a type's own sizes, of few heads, as many to a KV head as by default.

    ``is_wide``: the hidden size is that of all heads, as in types that have no other.
    """
    own = {name: value for name, value in fields.items() if name not in _OWN_SIZES or value is None}
    if own.get("rope_parameters", {}).get("rope_type") == "longrope":  # has a factor for each two elements of a head
        del own["rope_parameters"]
    heads, kv_heads, hidden = (
        next((n for each in names if isinstance(n := _value(usual, each), int)), 0)
        for names in (_HEADS, _KV_HEADS, _HIDDEN)
    )
    if not heads or not hidden:
        return own
    head_size = _value(usual, "head_dim") or hidden // heads
    group = heads // kv_heads if kv_heads and heads % kv_heads == 0 else 1
    if is_wide:
        group = max(1, min(group, _WIDEST // head_size))
    few = 1 if group > 1 else 2
    width = few * group * head_size if is_wide else 64
    sizes = dict.fromkeys(_HEADS, few * group) | dict.fromkeys(_KV_HEADS, few) | dict.fromkeys(_HIDDEN, width)
    if width > _WIDEST_OF_WHOLE_VOCABULARY or "vocab_size_per_layer_input" in fields:
        sizes["vocab_size"] = VOCAB_SIZE
    known = _known(usual)
    own |= {name: size for name, size in sizes.items() if name in known and _value(usual, name) is not None}
    if "head_dim" in known and (fields.get("head_dim") or _value(usual, "head_dim")):
        own["head_dim"] = head_size
    return own


def _smaller(
    usual: PreTrainedConfig, fields: Mapping[str, Any], kept: frozenset[str] = frozenset()
) -> PreTrainedConfig:
    """Return a config with the table's sizes, its layers of as many kinds as by default; so for each config in it.

    Fields that are ``kept`` are as by default, if ``fields`` does not say otherwise.
    """
    parameters = inspect.signature(type(usual).__init__).parameters
    known = _known(usual)
    sizes = {name: value for name, value in _SIZES.items() if name not in kept}
    small = {name: value for name, value in sizes.items() if name in known and _value(usual, name) is not None}
    kinds = {name: list(dict.fromkeys(_value(usual, name) or ())) for name in _PATTERNS if name in parameters}
    num_layers = max(3, *map(len, kinds.values())) if kinds else 3
    small |= {name: num_layers for name in _NUM_LAYERS if name in small}
    small |= {name: [*islice(cycle(each), num_layers)] for name, each in kinds.items() if each}
    small |= {
        name: _smaller(part, fields.get(name, {})).to_dict()
        for name in usual.sub_configs
        if isinstance(part := _value(usual, name), PreTrainedConfig)
    }
    small |= {name: value for name, value in fields.items() if name not in usual.sub_configs}
    return type(usual)(**{name: value for name, value in small.items() if value is not None})


def _value(config: PreTrainedConfig, name: str) -> Any:
    """Return a field, of a config whose layers differ that of most of them."""
    return config.__dict__.get(name) if config.is_heterogeneous else getattr(config, name, None)


class Outcome(NamedTuple):
    """The outcome of a type's histories."""

    model_type: str
    result: str
    """``exact``, ``refused``, ``wrong``, or ``no model`` where none could be made."""
    detail: str


def tiny(
    model_type: str, auto: Any = AutoModelForCausalLM, *, own_sizes: bool = False, is_wide: bool = False
) -> PreTrainedModel:
    """Build a small random model of a type whose greedy outputs are varied.

    ``AutoModelForImageTextToText`` builds the whole of a model with an encoder of images. With ``own_sizes`` its heads,
    windows and vocabulary are as by default, and with ``is_wide`` its hidden size is that of its heads.
    """
    whole = AutoConfig.for_model(model_type, **_WHOLE.get(model_type, {}))
    if auto is AutoModelForCausalLM:
        text = whole.get_text_config(decoder=True)
        usual = text if type(text) in auto._model_mapping and model_type not in _WHOLE_ALONE else whole
        fields = _FIELDS.get(model_type, {})
        if own_sizes:
            config = _smaller(usual, _own_sizes(usual, fields, is_wide=is_wide), _OWN_SIZES)
        else:
            config = _smaller(usual, fields)
    else:
        config = _smaller(whole, IMAGE_TEXT_FIELDS.get(model_type, {}))
    if getattr(config, "_experts_implementation", None) == "eager":
        config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        shell = auto.from_config(config)
    most = _MOST_OF_OWN_SIZES if own_sizes else _MOST_PARAMETERS
    if (num_parameters := sum(parameter.numel() for parameter in shell.parameters())) > most:
        raise ValueError(
            f"{num_parameters / 1e6:.0f} million parameters: the type has sizes that the table does not know"
        )
    torch.manual_seed(0)  # what is not filled below stays as it is drawn
    model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    is_tied = getattr(config.get_text_config(decoder=True), "tie_word_embeddings", False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.2 * noise)
            elif "embed" in name or "wte" in name:
                parameter.copy_(0.1 * noise if is_tied else noise)
            else:
                parameter.copy_(noise * 1.6 * parameter.shape[-1] ** -0.5)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None  # BART's generate() ends with it whatever the model says
    return model.eval()


def try_type(
    model_type: str, num_histories: int, auto: Any = AutoModelForCausalLM, *, compile: bool = False,
    own_sizes: bool = False,
) -> Outcome:  # fmt: skip
    """Run histories of a type, with the table's sizes or its own."""
    outcome = _try_one(model_type, num_histories, lambda: tiny(model_type, auto, own_sizes=own_sizes), compile=compile)
    if not own_sizes or outcome.result != "no model":
        return outcome
    return _try_one(model_type, num_histories, lambda: tiny(model_type, auto, own_sizes=True, is_wide=True))


def _try_one(
    model_type: str, num_histories: int, make: Callable[[], PreTrainedModel], *, compile: bool = False
) -> Outcome:
    try:
        model = make()
    except Exception as error:  # whatever its config or its module refuses; reported, not swallowed
        return Outcome(model_type, "no model", f"{type(error).__name__}: {_one_line(error)}")
    try:
        model(torch.arange(1, 6)[None], use_cache=False)
        first_position = model.config.pad_token_id + 1 if model_type in _COUNT_FROM_PADDING else 0
        reference = Reference(model, num_prompts=5, max_tokens=12, first_position=first_position)
    except Exception as error:
        return Outcome(model_type, "no model", f"its own code fails: {type(error).__name__}: {_one_line(error)}")
    try:
        head_size = patched_model(model, compile=compile).spec.head_size
    except UnsupportedModelError as error:
        return Outcome(model_type, "refused", _one_line(error).removeprefix(type(model).__name__).lstrip(": "))
    except Exception as error:
        return Outcome(model_type, "wrong", f"patch: {type(error).__name__}: {_one_line(error)}")
    tally = Tally()
    try:
        for seed in range(num_histories):
            run_history(model, reference, seed, faults=seed % 2 == 1, tally=tally)
    except Exception as error:  # AssertionError: other tokens; anything else is as wrong
        return Outcome(model_type, "wrong", f"{type(error).__name__}: {_one_line(error)}")
    distinct = len({token for tokens in reference.tokens for token in tokens})
    detail = f"{tally.finished} requests, {tally.host_tokens} tokens on the host tier, {distinct} distinct tokens"
    detail += f", heads of {head_size}"
    return Outcome(model_type, "exact", detail)


def page(
    outcomes: list[Outcome], image_text: list[Outcome], compiled: Sequence[Outcome] = (), own: Sequence[Outcome] = ()
) -> str:
    """Return the page that lists types of causal language models, and of models with an encoder of images.

    ``own`` are runs with the types' own sizes.
    """
    of_compiled = [each.model_type for each in compiled if each.result == "exact"]
    exact = [each for each in outcomes if each.result == "exact"]
    refused = [each for each in outcomes if each.result == "refused"]
    untried = [each for each in outcomes if each.result not in ("exact", "refused")]
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"
    lines = [
        "# Models", "",
        "Which checkpoint formats of few bits are read as they are, how exactly and how fast:",
        "[quantized.md](quantized.md). Models with latent attention can keep the latents as their KV:",
        "[latents.md](latents.md).",
        "",
        f"Written by `python -m tests.parity.zoo --write`, with {versions}: each causal language model of",
        "transformers, tiny and random, in fp32. *Exact*: over random histories of mixed, chunked, preempted,",
        "offloaded and piggybacked requests its tokens were those of its own `generate()`.", "",
        f"## Exact ({len(exact)})", "",
        ", ".join(f"`{each.model_type}`" for each in exact), "",
        f"These were run compiled, too: {', '.join(f'`{name}`' for name in of_compiled)}.", "",
        *_own_sizes_paragraph(own),
        f"## Refused, by name ({len(refused)})", "",
        "| type | reason |", "|---|---|", *(f"| `{each.model_type}` | {each.detail} |" for each in refused), "",
        f"## Not tried ({len(untried)})", "",
        "No tiny model of these was made, or what was found is not exact.", "",
        "| type | why |", "|---|---|",
        *(f"| `{each.model_type}` | {each.result}: {each.detail} |" for each in untried), "",
        "## Models with an encoder of images", "",
        "Their language model is served; a request with an image is refused. *Exact*:", "",
        ", ".join(f"`{each.model_type}`" for each in image_text if each.result == "exact"), "",
        "| not exact | why |", "|---|---|",
        *(f"| `{each.model_type}` | {each.result}: {each.detail} |" for each in image_text if each.result != "exact"),
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def _own_sizes_paragraph(own: Sequence[Outcome]) -> list[str]:
    if not own:
        return []
    exact = ", ".join(f"`{each.model_type}`" for each in own if each.result == "exact")
    others = "; ".join(f"`{each.model_type}` ({each.result}: {each.detail})" for each in own if each.result != "exact")
    text = f"With the head sizes, windows, query heads to a KV head and vocabulary of their defaults, too: {exact}."
    return [text + (f" These were not: {others}." if others else ""), ""]


def _one_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return " ".join(lines)[:200].replace("|", "/")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def main(write: Callable[[str], object] = PAGE.write_text) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="MODEL_TYPE", help="all, if none is named")
    parser.add_argument("--histories", type=int, default=3, help="of each type")
    parser.add_argument("--image-text", action="store_true", help="models with an encoder of images")
    parser.add_argument("--compile", action="store_true", help="compile the halves: minutes a type")
    parser.add_argument("--own-sizes", action="store_true", help="with the head sizes and more of each type's defaults")
    parser.add_argument("--write", action="store_true", help="write docs/models.md")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the layers are tiny; the cores are for the host tier
    if args.write and (args.types or args.image_text or args.compile or args.own_sizes):
        parser.error("--write tries all types of both lists; name none")
    lists = (
        (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    )
    chosen = lists if args.write else lists[args.image_text :][:1]
    found = [
        _try_types(args.types or [*names], args.histories, auto, compile=args.compile, own_sizes=args.own_sizes)
        for auto, names in chosen
    ]
    if args.write:
        found.append(_try_types(COMPILED, 2, AutoModelForCausalLM, compile=True))
        exact = [each.model_type for each in found[0] if each.result == "exact"]
        found.append(_try_types(exact, 2, AutoModelForCausalLM, own_sizes=True))
        write(page(*found))
    return int(any(each.result == "wrong" for outcomes in found for each in outcomes))


def _try_types(
    types: Sequence[str], num_histories: int, auto: Any, *, compile: bool = False, own_sizes: bool = False
) -> list[Outcome]:
    outcomes, started_s = [], time.monotonic()
    with _quiet(), tqdm(types, unit="type") as progress:
        for model_type in progress:
            outcome = try_type(model_type, num_histories, auto, compile=compile, own_sizes=own_sizes)
            outcomes.append(outcome)
            progress.write(f"{outcome.result:8} {outcome.model_type}: {outcome.detail}")
    counts = {result: sum(each.result == result for each in outcomes) for result in ("exact", "refused", "wrong")}
    print(f"{counts}, of {len(outcomes)} types in {time.monotonic() - started_s:.0f} s")
    return outcomes


if __name__ == "__main__":
    sys.exit(main())

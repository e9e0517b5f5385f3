"""Small random Hugging Face models, one per family and per structural variant, for tests without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 160

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,  # nothing stops early: tests ask for a fixed number of tokens
    "tie_word_embeddings": False,
}
_GQA: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2, "intermediate_size": 80}
_MOE: dict[str, Any] = {**_GQA, "num_experts_per_tok": 2}
_OPT: dict[str, Any] = {**_COMMON, "ffn_dim": 80, "tie_word_embeddings": True}
_NEOX: dict[str, Any] = {**_COMMON, "intermediate_size": 80, "hidden_size": 96}
_QUARTER_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

_MLA: dict[str, Any] = {
    **_MOE, "num_key_value_heads": 6, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "moe_intermediate_size": 40,
}  # fmt: skip
# Queries are scaled by their position, but only from the eighth on.
_SCALED_LATE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
}  # fmt: skip
_WINDOW_LAST = ["full_attention", "sliding_attention", "sliding_attention"]
_ALL_FULL = ["full_attention"] * 3

# Name -> (model_type, config). Windows are short enough that the tests' prompts outgrow them.
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GQA),
    "llama_tied": ("llama", {**_GQA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3_rope": (
        "llama",
        {
            **_GQA,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "mistral": ("mistral", {**_GQA, "sliding_window": 9, "head_dim": 16}),
    "qwen2": ("qwen2", {**_GQA, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {**_GQA, "head_dim": 16}),
    "phi3": ("phi3", {**_GQA, "sliding_window": 11, "rope_parameters": _QUARTER_ROPE}),
    "gemma2": (
        "gemma2",
        {
            **_GQA,
            "head_dim": 16,
            "query_pre_attn_scalar": 12,
            "sliding_window": 9,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "opt": ("opt", _OPT),
    "opt_post_norm": ("opt", {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "gpt_neox": ("gpt_neox", {**_NEOX, "rope_parameters": _QUARTER_ROPE}),
    "gpt_neox_serial": ("gpt_neox", {**_NEOX, "use_parallel_residual": False}),
    "mixtral": ("mixtral", {**_MOE, "num_local_experts": 4, "sliding_window": None}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            **_MOE,
            "num_experts": 6,
            "moe_intermediate_size": 40,
            "head_dim": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],  # one dense layer among the sparse ones
        },
    ),
    "mixtral_batched": (
        "mixtral",
        {**_MOE, "num_local_experts": 4, "sliding_window": None, "experts_implementation": "batched_mm"},
    ),
    # Types without a layer family of their own.
    "bart": (
        "bart",
        {
            "vocab_size": VOCAB_SIZE,
            "d_model": 48,
            "decoder_ffn_dim": 80,
            "decoder_attention_heads": 6,
            "max_position_embeddings": 512,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": None,
            "forced_eos_token_id": None,
            "scale_embedding": True,
            "tie_word_embeddings": False,
        },
    ),
    "bloom": ("bloom", _COMMON),
    "cohere2": (
        "cohere2",
        {**_GQA, "head_dim": 8, "sliding_window": 9, "layer_types": _WINDOW_LAST, "logit_scale": 0.5},
    ),
    "deepseek_v3": ("deepseek_v3", _MLA),
    # Its query heads of one group stand before their KV head; the eager attention of transformers repeats these.
    "falcon": (
        "falcon",
        {**_COMMON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 2, "bias": True},
    ),
    "gemma3": ("gemma3_text", {**_GQA, "head_dim": 16, "sliding_window": 9, "layer_types": _WINDOW_LAST}),
    # Each layer has an embedding of the token; the last one takes K and V from the one before it.
    "gemma4": (
        "gemma4_text",
        {
            **_GQA,
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": 9,
            "num_kv_shared_layers": 1,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "gpt2": ("gpt2", {**_COMMON, "n_inner": 80}),
    "gpt_oss": (
        "gpt_oss",
        {**_MOE, "head_dim": 16, "num_local_experts": 4, "sliding_window": 9, "layer_types": _WINDOW_LAST},
    ),
    "granitemoe": ("granitemoe", {**_MOE, "num_local_experts": 4, "attention_multiplier": 0.3, "logits_scaling": 2.0}),
    # Two layers in chunks, one that has none and scales queries by their position, from the fifth on.
    "llama4": (
        "llama4_text",
        {
            **_MOE,
            "head_dim": 16,
            "num_local_experts": 4,
            "intermediate_size_mlp": 40,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 7,
            "no_rope_layer_interval": 2,
            "floor_scale": 5,
        },
    ),
    "ministral3": ("ministral3", {**_GQA, "head_dim": 16, "rope_parameters": _SCALED_LATE}),
    "smollm3": ("smollm3", {**_GQA, "no_rope_layers": [1, 0, 1], "layer_types": _ALL_FULL}),
}


def tiny_model(
    family: str, dtype: torch.dtype = torch.float32, seed: int = 0, *, num_layers: int = 3, **overrides: Any
) -> PreTrainedModel:
    """Build a random model whose greedy outputs are varied.

    Args:
        family: A key of MODELS.
        dtype: Of all parameters.
        seed: Same seed, same weights.
        num_layers: Decoder layers.
        **overrides: Config fields that differ from the table's.
    """
    model = blank_model(family, torch.float32, num_layers=num_layers, **overrides)
    config, model_type = model.config, model.config.model_type
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                is_gain = name.endswith("weight") and model_type != "gemma2"  # Gemma's norms multiply by 1 + weight
                parameter.copy_(0.2 * noise + (1.0 if is_gain else 0.0))
            elif "embed" in name or "wte" in name:
                # Under tied weights a large embedding would make every token predict itself.
                tied = config.tie_word_embeddings and "position" not in name
                parameter.copy_(noise * (0.08 if tied else 1.0))
            elif "project_out" in name:
                parameter.copy_(noise)  # makes up for the small tied embedding
            else:
                parameter.copy_(noise * 1.6 * parameter.shape[-1] ** -0.5)
    return model.to(dtype)


def blank_model(family: str, dtype: torch.dtype, *, num_layers: int = 3, **overrides: Any) -> PreTrainedModel:
    """Build a model with whatever parameters Hugging Face gives it, on the default device; see ``tiny_model``."""
    model_type, settings = MODELS[family]
    count = "decoder_layers" if model_type == "bart" else "num_hidden_layers"
    fields = {**settings, count: num_layers, **overrides}
    for name in ("layer_types", "no_rope_layers"):  # patterns, repeated as often as is needed
        if name in fields:
            fields[name] = [fields[name][index % len(fields[name])] for index in range(num_layers)]
    experts = {name: fields.pop(name) for name in ("experts_implementation",) if name in fields}
    config = AutoConfig.for_model(model_type, **fields)
    # Older transformers give Gemma-2 SDPA by default, which leaves the soft-cap out.
    attention = {"attn_implementation": "eager"} if model_type == "gemma2" else {}
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, **attention, **experts)
    model.generation_config.pad_token_id = 0
    return model.eval()


def prepackable_model(family: str, **overrides: Any) -> PreTrainedModel:
    """Build ``tiny_model`` in bf16, whose linears are prepacked."""
    return tiny_model(family, torch.bfloat16, **overrides)

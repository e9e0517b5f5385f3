"""Fields that the zoo's configs of models with an encoder of images need beside their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.parity.models import VOCAB_SIZE

_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_MROPE = _ROPE | {"mrope_section": [2, 3, 3]}
_SECTIONS = {"text_config": {"rope_parameters": _MROPE}}
_HALF_SECTIONS = {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]}}}
_MLA = {"num_key_value_heads": 4, "v_head_dim": 16, "qk_nope_head_dim": 16, "head_dim": 8, "q_lora_rank": 16}
_GLM_VISION = {"vision_config": {"out_hidden_size": 64, "hidden_size": 64}}
_GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
    "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8,
    "global_head_dim": 32,
}  # fmt: skip
# As the larger ones: tokens of an image see each other, whatever their order.
_GEMMA4_LARGE = _GEMMA4 | {
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "use_bidirectional_attention": "vision",
}  # fmt: skip

IMAGE_TEXT_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_unified": {"text_config": _GEMMA4_LARGE},
    "glm46v": _SECTIONS | _GLM_VISION,
    "glm4v": _SECTIONS | _GLM_VISION,
    "glm4v_moe": _HALF_SECTIONS | _GLM_VISION,
    "glm_ocr": _HALF_SECTIONS | _GLM_VISION,
    "glmga": _SECTIONS | _GLM_VISION,
    "kimi_k25": {"text_config": _MLA},
    "lfm2_vl": {"text_config": {"layer_types": ["conv", "full_attention", "conv"]}},
    "mllama": {"text_config": {"num_hidden_layers": 4, "cross_attention_layers": [1]}},
    "mistral4": _MLA,
    "mistral_large4": {"text_config": _MLA},
    "paddleocr_vl": _SECTIONS,
    "qwen2_5_omni_thinker": _SECTIONS,
    "qwen2_5_vl": _SECTIONS | {"vision_config": {"out_hidden_size": 64}},
    "qwen2_vl": _SECTIONS | {"vision_config": {"embed_dim": 64, "hidden_size": 64}},
    "qwen3_vl": _SECTIONS | {"vision_config": {"out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]}},
    "qwen3_vl_moe": _SECTIONS | {"vision_config": {"out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]}},
}  # fmt: skip

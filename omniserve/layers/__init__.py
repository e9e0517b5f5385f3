"""Decoder layers split around their attention, one family per architecture."""

from omniserve.layers import gemma2, gpt_neox, llama, llama4, moe, opt, phi3, qwen3
from omniserve.layers.base import LAYER_FAMILIES, LayerFamily, family_of

__all__ = [
    "LAYER_FAMILIES",
    "LayerFamily",
    "family_of",
    "gemma2",
    "gpt_neox",
    "llama",
    "llama4",
    "moe",
    "opt",
    "phi3",
    "qwen3",
]

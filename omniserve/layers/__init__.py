"""Decoder layers split around their attention: any Hugging Face decoder, by its own code (``traced.py``)."""

from omniserve.layers import llama4
from omniserve.layers.traced import LAYER_FAMILIES, TracedFamily, family_of

__all__ = ["LAYER_FAMILIES", "TracedFamily", "family_of", "llama4"]

"""Looks at a Hugging Face model in a few runs on some tokens, and splits its layers around their attention.

A half of a layer is what it computes before its attention, or from its attention on. ``traced`` puts the parts
together, for all models but those with a family of their own (``llama4``).
"""

from omniserve.layers.tracing import llama4
from omniserve.layers.tracing.traced import LAYER_FAMILIES, TracedFamily, family_of

__all__ = ["LAYER_FAMILIES", "TracedFamily", "family_of", "llama4"]

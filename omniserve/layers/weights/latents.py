"""HeldLatents: the packed weights by which a model with latents as its KV multiplies queries and results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from omniserve.layers.tracing.latent import KEY_WEIGHT, VALUE_WEIGHT, LatentAttention, head_weights
from omniserve.layers.tracing.overrides import Overridden
from omniserve.layers.weights.packed import packed_heads


class HeldLatents:
    """Gives modules with latents as their KV packed weights, from now until ``release``.

    ``kv_b_proj`` itself is left as it is: ``generate()`` calls it.
    """

    def __init__(self, overridden: Iterable[Overridden], freed: frozenset[int]) -> None:
        self._modules: list[Any] = [
            module
            for module, stand_in in overridden
            if issubclass(stand_in, LatentAttention) and id(module) not in freed
        ]
        for module in self._modules:
            key_weight, value_weight = head_weights(module)
            with torch.inference_mode(False), torch.no_grad():
                held = {KEY_WEIGHT: packed_heads(key_weight.mT), VALUE_WEIGHT: packed_heads(value_weight)}
            module.__dict__.update(held)

    def release(self) -> None:
        """Take the weights away again."""
        for module in self._modules:
            for name in (KEY_WEIGHT, VALUE_WEIGHT):
                del module.__dict__[name]

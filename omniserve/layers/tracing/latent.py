"""LatentAttention: multi-head latent attention (MLA) over the latents themselves, which is called its absorbed form.

Such a module makes K and V of all heads from one latent c of a token and one rotated part r: head n has the key
``[U_n c, r]`` and the value ``W_n c``, where U and W are the parts of ``kv_b_proj``. The score of a query ``[a, b]`` is
``a . U_n c + b . r = (U_n^T a) . c + b . r``, and a weighted sum of values is W_n times that of the latents. So the
query is multiplied by U^T before attention and the result by W behind it, and ``[c, r]`` is the one KV head of all
query heads, and the value as well: what attention makes of r is left away.

Hugging Face's modules have the making of K and V in a method of their own, ``expand_kv``: while a half runs, the
module's class is a subclass with the methods below (``attention_replaced``), and everything else is the module's own
code. ``check_overrides`` compares both when a model is patched.

Legend: n sequences of a call, t tokens of each, T rows, N query heads, I and O inputs and outputs of a head, H size of
a latent with its rotated part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from omniserve import ops  # noqa: F401  registers torch.ops.omniserve
from omniserve.core.errors import UnsupportedModelError
from omniserve.layers.tracing.overrides import Overridden
from omniserve.layers.weights.groups import is_plain

KEY_WEIGHT, VALUE_WEIGHT = "latent_key_weight", "latent_value_weight"
"""Attributes of a module with packed weights: ``[N, panels, ...]`` of U^T and of W."""


class LatentAttention:
    """The methods in which a module with latents as its KV differs from its own class."""

    def expand_kv(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents, and behind them what is rotated, as the key and as the value: ``[n, 1, t, H]``."""
        latent = torch.cat([kv_nope, k_rot], dim=-1)
        return latent, latent

    def absorb_query(self: Any, query: Tensor) -> Tensor:
        """Return what takes the place of a query ``[n, N, t, nope + rotated]``: ``[n, N, t, H]``."""
        nope, rotated = query.tensor_split([self.qk_nope_head_dim], dim=-1)
        rows_TNI = nope.transpose(1, 2).flatten(0, 1)
        if (packed := self.__dict__.get(KEY_WEIGHT)) is not None:
            latent_NTO = torch.ops.omniserve.packed_heads(rows_TNI, packed, self.kv_lora_rank)
        else:
            latent_NTO = rows_TNI.transpose(0, 1) @ head_weights(self)[0]
        shape = (query.shape[1], query.shape[0], query.shape[2], self.kv_lora_rank)
        return torch.cat([latent_NTO.view(shape).transpose(0, 1), rotated], dim=-1)

    def expand_rows(self: Any, rows: Tensor) -> Tensor:
        """Return what attention over values would have given, ``[n, t, N, O]``, for rows ``[n, t, N, H]``."""
        rows_TNI = rows[..., : self.kv_lora_rank].flatten(0, 1)
        if (packed := self.__dict__.get(VALUE_WEIGHT)) is not None:
            values_NTO = torch.ops.omniserve.packed_heads(rows_TNI, packed, self.v_head_dim)
        else:
            values_NTO = rows_TNI.transpose(0, 1) @ head_weights(self)[1].transpose(1, 2)
        return values_NTO.transpose(0, 1).unflatten(0, rows.shape[:2])


def head_weights(module: Any) -> tuple[Tensor, Tensor]:
    """Return U and W of each head, ``[N, H, latent]``: views of the dense weight of ``kv_b_proj``."""
    sizes = [module.qk_nope_head_dim, module.v_head_dim]
    key_weight, value_weight = module.kv_b_proj.weight.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
    return key_weight, value_weight


def with_latents(model: PreTrainedModel, overridden: Sequence[Overridden]) -> list[Overridden]:
    """Return the overridden modules of a model, those with latents as their KV included.

    Raises:
        UnsupportedModelError: The model has none, is on no CPU, or a weight of one is not dense.
    """
    stand_ins = {id(module): stand_in for module, stand_in in overridden}
    latent = [module for module in model.modules() if _has_latents(module)]
    name = type(model).__name__
    if not latent:
        raise UnsupportedModelError(
            f"{name} has no multi-head latent attention whose K and V are made by expand_kv, as in transformers 5.24: "
            "leave out latent_kv and attention='latent'"
        )
    if model.device.type != "cpu":
        raise UnsupportedModelError(
            f"{name} is on {model.device.type}, where no kernel takes heads as long as latents: leave out latent_kv "
            "and attention='latent'"
        )
    names = {module: path for path, module in model.named_modules()}
    for module in latent:
        linear: Any = module.kv_b_proj
        if not is_plain(linear) or linear.bias is not None:
            raise UnsupportedModelError(
                f"{name}: {names[linear]} is a {type(linear).__name__}{' with a bias' if is_plain(linear) else ''}; "
                "latents need its dense weight alone: leave out latent_kv and attention='latent'"
            )
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    for module in latent:
        own = stand_ins.get(id(module), type(module))
        stand_ins[id(module)] = kinds.setdefault(
            own, type(own.__name__, (LatentAttention, own), {"__module__": __name__})
        )
    return [Overridden(module, stand_ins[id(module)]) for module in model.modules() if id(module) in stand_ins]


def _has_latents(module: nn.Module) -> bool:
    return callable(getattr(module, "expand_kv", None)) and isinstance(getattr(module, "kv_b_proj", None), nn.Module)

"""Overrides: attention modules that compute their attention by themselves, made to call the attention function.

An override is a class with the methods in which such a module would differ, registered for the module's class; its
``unused`` names those arguments of the decoder layer that it does without, such as a table of ALiBi's biases. While a
half runs (``attention_replaced``), each such module is an instance of a subclass with these methods; ``generate()``
runs the module's own. ``check_overrides`` compares both when a model is patched, so a release of transformers that
changes a module cannot go unnoticed.

Heads are ``[sequences, heads, tokens, head size]``, hidden states ``[sequences, tokens, D]``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from omniserve.core.errors import UnsupportedModelError
from omniserve.layers.tracing.attention_interface import attended, attention_replaced

_MODELS = "transformers.models."
_OVERRIDES: dict[str, type] = {}
"""Name of an attention class -> class with the methods that replace its own."""
_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Tolerance by dtype for an override's result, relative to the largest value; the module itself may round its scores to
the dtype."""


class Overridden(NamedTuple):
    """A module with an override."""

    module: nn.Module
    stand_in: type[nn.Module]
    """The subclass of its class with the override's methods."""


def overrides(*names: str) -> Callable[[type], type]:
    """Register a class whose methods replace those of attention classes.

    Args:
        *names: Of attention classes: ``package.Class`` for a package in ``transformers.models``, else the module and
            the class.
    """

    def register(override: type) -> type:
        _OVERRIDES.update(dict.fromkeys(names, override))
        return override

    return register


def overridden_in(model: PreTrainedModel) -> list[Overridden]:
    """Return the modules of a model that have an override."""
    kinds = {type(module) for module in model.modules()}
    stand_ins = {own: _stand_in(own) for own in kinds}
    pairs = [(module, stand_ins[type(module)]) for module in model.modules()]
    return [Overridden(module, stand_in) for module, stand_in in pairs if stand_in is not None]


def unused_arguments(overridden: Sequence[Overridden]) -> set[str]:
    """Return the names of arguments of decoder layers that only modules with an override would read."""
    return {name for _, stand_in in overridden for name in getattr(stand_in, "unused", ())}


def _stand_in(own: type[nn.Module]) -> type[nn.Module] | None:
    module = own.__module__
    if module.startswith(_MODELS):
        module = module.removeprefix(_MODELS).partition(".")[0]
    override = _OVERRIDES.get(f"{module}.{own.__name__}")
    return override and type(own.__name__, (override, own), {"__module__": __name__})


def check_overrides(model: PreTrainedModel, overridden: Sequence[Overridden], configs: Sequence[Any]) -> None:
    """See that each override computes, over a short sequence, what the module's own code does.

    Raises:
        UnsupportedModelError: One does not.
    """
    calls: list[tuple[nn.Module, Any, Any, Tensor]] = []

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append((module, args, kwargs, output[0]))

    hooks = [each.module.register_forward_hook(note, with_kwargs=True) for each in overridden]
    try:
        model(input_ids=torch.arange(1, 8, device=model.device)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    names = {module: name for name, module in model.named_modules()}
    for module, args, kwargs, output in calls:
        with attention_replaced(_attend_plainly, configs, overridden):
            other = module(*args, **kwargs)[0]
        tolerance = _TOLERANCES[output.dtype] * float(output.abs().max())
        if other.shape != output.shape or not float((other - output).abs().max()) <= tolerance:  # it may be NaN
            raise UnsupportedModelError(
                f"{type(model).__name__}: with attn_implementation={model.config._attn_implementation!r} its module "
                f"{names[module]}, a {type(module).__name__}, computes something else than "
                "omniserve.layers.tracing.overrides"
            )


def _attend_plainly(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, keywords: Any) -> Tensor:
    """Compute the causal attention of whole sequences that the keywords describe; returns ``[sequences, T, N, H]``."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    positions = torch.arange(query.shape[2], device=query.device)
    distance = positions[:, None] - positions
    scores = query.float() @ key.float().transpose(2, 3) * keywords["scaling"]
    if slopes := keywords.get("alibi_slopes"):
        scores = scores - torch.tensor(slopes, device=query.device)[:, None, None] * distance
    hidden = (distance < 0) | (distance >= (keywords.get("window") or len(positions)))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return (weights @ value.float()).to(value.dtype).transpose(1, 2)


def _heads(rows: Tensor, num_heads: int) -> Tensor:
    return rows.unflatten(-1, (num_heads, -1)).transpose(1, 2)


@overrides("mvp.MvpAttention", "trocr.TrOCRAttention", "xglm.XGLMAttention")
class _BartLike:
    def forward(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        projections = self.q_proj, self.k_proj, self.v_proj
        query, key, value = (_heads(linear(hidden_states), self.num_heads) for linear in projections)
        return self.out_proj(attended(self, query, key, value, scaling=self.scaling)), None


@overrides("big_bird.BigBirdSelfAttention", "megatron_bert.MegatronBertSelfAttention", "rembert.RemBertSelfAttention")
class _BertLike:
    def forward(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        projections = self.query, self.key, self.value
        query, key, value = (_heads(linear(hidden_states), self.num_attention_heads) for linear in projections)
        return attended(self, query, key, value, scaling=self.attention_head_size**-0.5), None


@overrides("roformer.RoFormerSelfAttention")
class _RoFormer:
    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Any = None, sinusoidal_pos: Any = None, *_: Any, **__: Any
    ) -> Any:
        projections = self.query, self.key, self.value
        heads = [_heads(linear(hidden_states), self.num_attention_heads) for linear in projections]
        # One table for all sequences, or a row for each sequence of one token.
        table = sinusoidal_pos.reshape(*hidden_states.shape[:2], 1, -1).transpose(1, 2)
        heads[: 2 + self.rotary_value] = self.apply_rotary_position_embeddings(table, *heads[: 2 + self.rotary_value])
        return attended(self, *heads, scaling=self.attention_head_size**-0.5), None


@overrides("gpt_neo.GPTNeoSelfAttention")
class _GPTNeo:
    def _attn(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
        window = self.config.window_size if self.attention_type == "local" else 0
        rows = attended(self, query, key, value, scaling=1.0, window=window)
        return _heads(rows, self.num_heads), None


@overrides("gpt_neox_japanese.GPTNeoXJapaneseAttention")
class _GPTNeoXJapanese:
    def _attn(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
        rows = attended(self, query, key, value, scaling=1.0 / self.norm_factor)
        return _heads(rows, self.num_attention_heads), None


@overrides("openai.Attention")
class _OpenAIGPT:
    def _attn(self: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Any:
        scaling = v.shape[-1] ** -0.5 if self.scale else 1.0
        return [_heads(attended(self, q, k.transpose(2, 3), v, scaling=scaling), self.n_head)]


@overrides("bloom.BloomAttention")
class _Bloom:
    unused = ("alibi",)

    def forward(self: Any, hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any) -> Any:
        heads = self._reshape(self.query_key_value(hidden_states))
        # The module rounds its biases, which grow with the key's position, to the model's dtype. Those of the kernels,
        # which grow with the distance, are fp32: in bf16 they are closer to those of the model in fp32.
        slopes = _bloom_slopes(self.num_heads)
        rows = attended(self, *heads, scaling=self.inv_norm_factor, alibi_slopes=slopes)
        return self.dense(rows) + residual, None


@overrides("mpt.MptAttention")
class _Mpt:
    unused = ("position_bias",)

    def forward(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        heads = (_heads(rows, self.n_heads) for rows in qkv.chunk(3, dim=2))
        rows = attended(self, *heads, scaling=self.softmax_scale, alibi_slopes=_mpt_slopes(self.n_heads))
        return self.out_proj(rows), None


@overrides("falcon.FalconAttention", "falcon.FalconFlashAttention2")
class _Falcon:
    unused = ("alibi",)

    def forward(self: Any, hidden_states: Tensor, *_: Any, position_embeddings: Any = None, **__: Any) -> Any:
        grouped = self.new_decoder_architecture or self.multi_query
        num_kv_heads = self.num_kv_heads if grouped else self.num_heads
        # Each KV head stands behind its query heads; the module itself would repeat it for each of them.
        groups = self.query_key_value(hidden_states).unflatten(-1, (num_kv_heads, -1, self.head_dim))
        query = groups[..., :-2, :].flatten(2, 3).transpose(1, 2)
        key, value = groups[..., -2, :].transpose(1, 2), groups[..., -1, :].transpose(1, 2)
        slopes = None
        if self.config.alibi:
            slopes = _falcon_slopes(self.num_heads, self.max_position_embeddings, self.inv_norm_factor)
        else:
            query, key = _rotated(query, key, *position_embeddings)
        rows = attended(self, query, key, value, scaling=self.inv_norm_factor, alibi_slopes=slopes)
        return self.dense(rows), None


def _rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    return apply_rotary_pos_emb(query, key, cos, sin)


Slopes = tuple[float, ...]


def _constant(slopes: Callable[..., Slopes]) -> Callable[..., Slopes]:
    """Have a function of numbers computed once, and be a constant of a compiled half."""
    cached = functools.cache(slopes)

    @torch.compiler.assume_constant_result
    def constant(*numbers: float) -> Slopes:
        return cached(*numbers)

    return constant


@_constant
def _bloom_slopes(num_heads: int) -> Slopes:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    biases = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), num_heads, torch.float32)
    return tuple(biases[:, 0, 1].tolist())


@_constant
def _mpt_slopes(num_heads: int) -> Slopes:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    return tuple((-build_mpt_alibi_tensor(num_heads, 2)[:, 0, 0]).tolist())


@_constant
def _falcon_slopes(num_heads: int, num_positions: int, scale: float) -> Slopes:
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    biases = build_alibi_tensor(torch.ones(1, num_positions, dtype=torch.int64), num_heads, torch.float32)[:, 0]
    slopes = biases[:, 1:2]
    if not torch.equal(biases, slopes * torch.arange(num_positions)):
        raise UnsupportedModelError(
            f"Falcon rounds the ALiBi biases of {num_heads} heads and {num_positions} positions to bfloat16, so that "
            "they do not grow by the same step from each position to the next, as every kernel here has them"
        )
    return tuple((slopes[:, 0] * scale).tolist())

"""Tern, a made-up decoder in the style of transformers' own, with layers of two kinds.

One has a window and rotary positions; the other has full attention, no positions and a gate. The embedding is scaled,
logits are capped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class TernConfig(PretrainedConfig):
    model_type = "tern"

    def __init__(
        self, vocab_size: int = 160, hidden_size: int = 48, num_hidden_layers: int = 4, num_attention_heads: int = 6,
        num_key_value_heads: int = 2, max_position_embeddings: int = 512, sliding_window: int = 9,
        uses_interface: bool = True, **kwargs: Any,
    ) -> None:  # fmt: skip
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.num_attention_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads
        self.max_position_embeddings, self.sliding_window = max_position_embeddings, sliding_window
        self.uses_interface = uses_interface
        self.layer_types = ["sliding_attention", "full_attention"] * (num_hidden_layers // 2)
        super().__init__(**{"tie_word_embeddings": False, **kwargs})


def eager_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if mask is not None:
        scores = scores + mask[..., : key.shape[2]]
    weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2), weights


class TernAttention(nn.Module):
    def __init__(self, config: TernConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.is_local = config.layer_types[layer_idx] == "sliding_attention"
        self.is_causal, self.num_key_value_groups = True, config.num_attention_heads // config.num_key_value_heads
        kv_size = self.head_dim * config.num_key_value_heads
        self.sizes = (config.hidden_size, kv_size, kv_size)
        self.qkv = nn.Linear(config.hidden_size, sum(self.sizes))
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.gate = None if self.is_local else nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        split = self.qkv(x).split(self.sizes, dim=-1)
        query, key, value = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in split)
        if self.is_local:
            query, key = (self.rotated(each, angles[:, None]) for each in (query, key))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        name = self.config._attn_implementation
        attend = eager_attention
        if self.config.uses_interface and name != "eager":
            attend = ALL_ATTENTION_FUNCTIONS[name]
        window = self.config.sliding_window if self.is_local else None
        rows, _ = attend(self, query, key, value, mask, scaling=self.head_dim**-0.5, sliding_window=window)
        rows = rows.flatten(2)
        return self.out(rows if self.gate is None else rows * self.gate(x).sigmoid())

    @staticmethod
    def rotated(heads: Tensor, angles: Tensor) -> Tensor:
        first, second = heads.chunk(2, dim=-1)
        cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class TernLayer(nn.Module):
    def __init__(self, config: TernConfig, layer_idx: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.attention = TernAttention(config, layer_idx)
        self.up = nn.Linear(config.hidden_size, 2 * config.hidden_size)
        self.down = nn.Linear(2 * config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        normed = self.norm(x)  # attention and feed-forward side by side
        return x + self.attention(normed, angles, mask, cache) + self.down(functional.gelu(self.up(normed)))


class TernForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TernConfig
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: TernConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(TernLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.unembed = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.unembed

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        cache: Any = None, use_cache: bool | None = None, **kwargs: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        x = 0.5 * self.embed(input_ids)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            start = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(start, start + x.shape[1], device=x.device)[None]
        arguments: dict[str, Any] = {
            "config": self.config, "inputs_embeds": x, "attention_mask": attention_mask,
            "cache": cache, "position_ids": position_ids,
        }  # fmt: skip
        masks = {
            "full_attention": create_causal_mask(**arguments),
            "sliding_attention": create_sliding_window_causal_mask(**arguments),
        }
        half = self.blocks[0].attention.head_dim // 2
        frequencies = 100.0 ** (-torch.arange(half, device=x.device) / half)
        angles = position_ids[..., None] * frequencies
        for block, kind in zip(self.blocks, self.config.layer_types, strict=True):
            x = block(x, angles, masks[kind], cache)
        logits = 9.0 * torch.tanh(self.unembed(self.norm(x)) / 9.0)
        return CausalLMOutputWithPast(logits=logits, cache=cache)

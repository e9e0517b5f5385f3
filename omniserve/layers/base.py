"""LayerFamily: how one architecture's decoder layer splits around its attention, built from its own HF submodules.

``head_product`` is the product with the modelling head, for the few rows that need logits.

Tensor legend: T packed tokens, R rows that need logits, D hidden, N query heads, K KV heads, H head size, L layers.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from omniserve import ops  # noqa: F401  registers torch.ops.omniserve
from omniserve.core.errors import UnsupportedModelError
from omniserve.core.registry import Registry
from omniserve.core.spec import AttentionSpec, ModelSpec

LAYER_FAMILIES: Registry[type[LayerFamily]] = Registry("layer family", package="omniserve.layers")
"""HF ``config.model_type`` -> family class."""

# The frequencies of these rope types are the same for every sequence, so one table serves a packed batch.
_STATIC_ROPE_TYPES = ("default", "linear", "llama3", "longrope", "proportional", "yarn")

USUAL_LENGTH = 2048
"""The longest prompt plus output for a model whose config names no number of positions, as those of Bloom."""

# Major compute capabilities on which torch's grouped product of bf16 does not make the host wait. On others, and in
# other dtypes, the host reads how many rows each expert has.
_GROUPED_ON_DEVICE = (9, 10)


class LayerFamily(ABC):
    """One architecture, without state apart from its model.

    Every tensor is token-packed: the rows of all requests in one ``[T, D]``, no batch dimension and no padding. One
    compiled function serves all layers of the same structure, so a half may read only those attributes of its layer
    that are the same in all layers, and its parameters; it may not read ``layer_idx``.

    Raises:
        UnsupportedModelError: The config uses a feature that the halves or the attention kernels do not have.
    """

    attention_name = "self_attn"
    """Attribute of a decoder layer that holds its attention module."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config
        self.lm_head = model.get_output_embeddings()
        if self.lm_head is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no language modelling head; load it with AutoModelForCausalLM"
            )
        self.layers: list[Any] = list(self.backbone.layers)
        # The layer's own modeling file: rotary and eager attention differ between architectures.
        self.modeling: ModuleType = sys.modules[type(self.layers[0]).__module__]
        self._probe = torch.empty(0, dtype=model.dtype, device=model.device)  # rotary_emb reads its dtype and device
        self.check()

    # --- methods that a family defines -----------------------------------------------------------------------------

    @abstractmethod
    def pre_attention(
        self, layer: nn.Module, hidden_TD: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm, QKV projection, q/k norm and rotary; returns ``(q_TNH, k_TKH, v_TKH)``, model dtype, perhaps views."""

    @abstractmethod
    def post_attention(self, layer: nn.Module, attn: Tensor, hidden_TD: Tensor) -> Tensor:
        """Output projection, residual, norms and feed-forward; returns the layer's output ``[T, D]``.

        ``attn`` is ``[T, N * H]``, contiguous, in the model's dtype; ``hidden_TD`` is the layer's input, the residual.
        """

    def linear_groups(self, layer: nn.Module) -> list[tuple[nn.Module, ...]]:
        """Return the modules that the halves call through ``groups.project``: disjoint groups, in the order called."""
        return []

    def why_not_captured(self) -> str:
        """Return why a CUDA graph cannot hold the halves, and what to do about it; empty if it can."""
        return ""

    def compiling(self) -> AbstractContextManager[None]:
        """Return a context in which the halves are traced."""
        return nullcontext()

    # --- methods that most families share --------------------------------------------------------------------------

    @property
    def backbone(self) -> Any:
        """The module that owns ``layers``, the final norm and ``rotary_emb``."""
        return self.model.model

    def embed(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Turn int64 token ids and positions ``[T]`` into the first layer's input ``[T, D]``."""
        return self.model.get_input_embeddings()(token_ids_T)

    def rotary(self, positions_T: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return ``(cos, sin)``, each ``[T, rotary size]``, or None for a model without rotary positions."""
        num_tokens = len(positions_T)
        if not num_tokens:  # longrope looks for the largest
            positions_T = positions_T.new_zeros(1)
        cos, sin = self.backbone.rotary_emb(self._probe, position_ids=positions_T[None])
        return cos[0, :num_tokens], sin[0, :num_tokens]

    def final_norm(self, hidden_RD: Tensor) -> Tensor:
        """Apply the modules between the last layer and the head."""
        return self.backbone.norm(hidden_RD)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Turn rows of the last layer's output into logits ``[R, vocabulary]``, model dtype."""
        return head_product(self.lm_head, self.final_norm(hidden_RD))

    def attention_module(self, layer: nn.Module) -> Any:
        """Return the layer's attention module, which HF's attention functions want as their first argument."""
        return getattr(layer, self.attention_name)

    def attention_spec(self, layer: nn.Module) -> AttentionSpec:
        """Return the scale, the window and the softcap of a layer's attention."""
        attention = self.attention_module(layer)
        window = getattr(attention, "sliding_window", getattr(self.config, "sliding_window", None))
        return AttentionSpec(scale=float(attention.scaling), window=window or 0)

    def head_size(self, layer: nn.Module) -> int:
        """Return a layer's head size."""
        return int(self.attention_module(layer).head_dim)

    def check(self) -> None:
        """Raise UnsupportedModelError for features of the config that are not supported."""
        name = type(self.model).__name__
        refuse_dynamic_rope(self.model)
        sizes = {self.head_size(layer) for layer in self.layers}
        if len(sizes) != 1:
            raise UnsupportedModelError(
                f"{name}: head sizes {sorted(sizes)} differ between layers; the KV cache has one size for all"
            )
        for index, layer in enumerate(self.layers):
            attention = self.attention_module(layer)
            if hasattr(attention, "sinks"):
                raise UnsupportedModelError(f"{name}: layer {index} uses attention sinks, which no kernel here has")
            if getattr(attention, "is_causal", True) is False:
                raise UnsupportedModelError(f"{name}: layer {index} attends to later tokens; only causal layers work")
        devices = set(getattr(self.model, "hf_device_map", {}).values())
        if len(devices) > 1:
            raise UnsupportedModelError(
                f"{name} is spread over {sorted(map(str, devices))}; load it on one device (device_map={{'': device}})"
            )

    def limits(self) -> dict[str, int]:
        """Return how many tokens a sequence may have, by each reason that limits them."""
        limits = {"its number of positions": max_positions(self.config) or USUAL_LENGTH}
        for rope in rope_parameters(self.model):
            if rope.get("rope_type") == "longrope":
                limits["longrope's other frequencies for longer ones"] = int(rope["original_max_position_embeddings"])
        return limits

    def sizes(self) -> dict[str, int]:
        """Return the width of a row, and the numbers of query and KV heads."""
        config = self.config
        num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return {
            "hidden_size": int(config.hidden_size),
            "num_heads": int(config.num_attention_heads),
            "num_kv_heads": int(num_kv_heads),
        }

    def spec(self, max_model_len: int | None = None) -> ModelSpec:
        """Return the model's sizes; ``max_model_len``, the longest prompt plus output, is by default the model's.

        Raises:
            ValueError: ``max_model_len`` is not in ``[1, the model's]``.
        """
        limit, why = min((length, reason) for reason, length in self.limits().items())
        if max_model_len is not None and not 1 <= max_model_len <= limit:
            raise ValueError(f"max_model_len must be in [1, {limit}] for this model ({why}), got {max_model_len}")
        sources = (self.model.generation_config, self.config)
        eos = next((e for source in sources if (e := getattr(source, "eos_token_id", None)) is not None), ())
        return ModelSpec(
            num_layers=len(self.layers),
            **self.sizes(),
            head_size=self.head_size(self.layers[0]),
            vocab_size=int(self.lm_head.out_features),
            max_model_len=max_model_len or limit,
            eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos),
            dtype_bytes=self.model.dtype.itemsize,
            attention=tuple(self.attention_spec(layer) for layer in self.layers),
        )


def max_positions(config: Any) -> int | None:
    """Return how many positions a model has by its config; None if it names no number."""
    names = ("max_position_embeddings", "max_target_positions", "max_seq_len", "seq_length", "n_positions")
    return next((int(value) for name in names if (value := getattr(config, name, None)) is not None), None)


def rope_parameters(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Return the parameters of a model's rotary positions: one for all layers, or one for each type of layer."""
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return [each for each in rope.values() if isinstance(each, dict)] or [rope]


def refuse_dynamic_rope(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if rotary frequencies depend on the length of the longest sequence of a batch.

    Those of longrope do, but not up to the length at which ``limits`` ends.
    """
    for rope_type in (kind.get("rope_type", "default") for kind in rope_parameters(model)):
        if rope_type not in _STATIC_ROPE_TYPES:
            raise UnsupportedModelError(
                f"{type(model).__name__}: rope type {rope_type!r} changes its frequencies with the length of the "
                "longest sequence in the batch, which has no meaning for packed requests; supported: "
                f"{', '.join(_STATIC_ROPE_TYPES)}"
            )


def why_grouped_mm_waits(device: torch.device, dtype: torch.dtype) -> str:
    """Return why torch's grouped product of experts makes the host wait for a device, and what to do; empty if not."""
    if device.type != "cuda":
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    if dtype is torch.bfloat16 and major in _GROUPED_ON_DEVICE:
        return ""
    capabilities = " or ".join(f"{one}.x" for one in _GROUPED_ON_DEVICE)
    return (
        f"experts implementation 'grouped_mm' waits for the device in {dtype} on compute capability {major}.{minor}; "
        f"load the model in bfloat16 on a GPU of capability {capabilities}, or set step_graphs='off' (for a small "
        "model, set_experts_implementation('batched_mm') does as well, which copies an expert's weights for every row)"
    )


def split_heads(rows: Tensor, head_size: int) -> Tensor:
    """View ``[T, heads * H]`` as ``[T, heads, H]``."""
    return rows.view(rows.shape[0], -1, head_size)


def family_of(model: PreTrainedModel) -> LayerFamily:
    """Return the layer family of a Hugging Face model.

    Raises:
        UnsupportedModelError: No family is registered for its ``config.model_type``, or the family refuses its config.
    """
    model_type = model.config.model_type
    if model_type in LAYER_FAMILIES.names():
        return LAYER_FAMILIES.get(model_type)(model)
    from omniserve.layers.traced import TracedFamily  # it imports this module

    return TracedFamily(model)


MAX_SKINNY_ROWS = 32
"""With more rows arithmetic is the limit: at 64 rows the gain in bf16 was a factor of 1.1."""

HAS_VECTOR_KERNEL = torch.backends.cpu.get_cpu_capability().startswith("AVX")
"""The portable kernel, for other CPUs, is slower than torch."""


def head_product(head: nn.Module, hidden_RD: Tensor) -> Tensor:
    """Return ``head(hidden_RD)``, ``[R, V]``, by ``skinny_linear`` if that is faster for this head and these rows.

    A head is the largest weight of a small model. If it is tied to the embedding it cannot be prepacked, because the
    embedding needs dense rows, and no weight is held twice. torch's ``F.linear`` is slow for it: in bf16 it reorders
    the whole weight at every call, in fp32 it is far from the memory's bandwidth. ``skinny_linear`` reads the weight in
    place, once for all rows (docs/performance.md has its times).
    """
    if hidden_RD.shape[0] <= MAX_SKINNY_ROWS and _is_plain(head, hidden_RD.dtype):
        return torch.ops.omniserve.skinny_linear(hidden_RD, head.weight)
    return head(hidden_RD)


def _is_plain(head: nn.Module, dtype: torch.dtype) -> bool:
    """Tell whether a call of the head is a product with a dense weight on the CPU, and nothing else."""
    return (
        HAS_VECTOR_KERNEL
        and type(head) is nn.Linear  # not packed, quantised or adapted
        and "forward" not in head.__dict__
        and not (head._forward_hooks or head._forward_pre_hooks)
        and head.bias is None
        and type(head.weight) is nn.Parameter
        and head.weight.device.type == "cpu"
        and head.weight.dtype is dtype
        and dtype in (torch.bfloat16, torch.float32)
        and head.weight.is_contiguous()
        and not torch.is_grad_enabled()  # the operator has no backward
    )

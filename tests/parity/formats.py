"""Models as users load and change them: adapted, quantised, with other embeddings and heads. Each function changes one.

What a form needs that is not installed skips the test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from omniserve.layers.weights.int8_modules import form_of_inputs, round_inputs
from omniserve.layers.weights.quantized import QuantForm, QuantizedWeight, Scales, dense_of, remember
from tests.parity.models import VOCAB_SIZE

Form = Callable[[PreTrainedModel], Any]


def adapted(model: PreTrainedModel, kind: str = "LoraConfig", *, is_merged: bool = False, **options: Any) -> Any:
    """Wrap a model by PEFT, with random adapters."""
    peft = pytest.importorskip("peft")
    if kind == "LoraConfig":
        options = {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 4, "lora_alpha": 8} | options
    wrapped = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name or "ia3_" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    if is_merged:
        wrapped.merge_adapter()
    return wrapped.eval()


def quantised(model: PreTrainedModel, config: str, *, is_headless: bool = False, **options: Any) -> PreTrainedModel:
    """Quantise all linears by torchao, whose weights are tensors of classes of its own."""
    quantization = pytest.importorskip("torchao.quantization")

    def is_wanted(module: nn.Module, name: str) -> bool:
        return type(module) is nn.Linear and not (is_headless and name == "lm_head")

    quantization.quantize_(model, getattr(quantization, config)(**options), filter_fn=is_wanted)
    return model


CODES: Mapping[str, QuantForm] = {
    "Q4_0": QuantForm(4, Scales.F16, 32),
    "Q4_1": QuantForm(4, Scales.AFFINE16, 32),
    "Q5_0": QuantForm(5, Scales.F16, 32),
    "Q5_1": QuantForm(5, Scales.AFFINE16, 32),
    "Q8_0": QuantForm(8, Scales.F16, 32),
    "Q4_K": QuantForm(4, Scales.K, 32),
    "Q5_K": QuantForm(5, Scales.K, 32),
    "Q6_K": QuantForm(6, Scales.K_SIGNED, 16),
    "4 bits": QuantForm(4, Scales.F32, 16),
    "4 bits affine": QuantForm(4, Scales.AFFINE32, 24),
    "8 bits": QuantForm(8, Scales.F32, 1024),
    "8 bits affine": QuantForm(8, Scales.AFFINE32, 128),
}


def random_codes(form: QuantForm, num_out: int, num_in: int, *, std: float = 0.2, seed: int = 0) -> QuantizedWeight:
    """Draw a weight of codes whose values have some standard deviation, about."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(count: int, size: float) -> Tensor:
        return size * (0.5 + torch.rand(num_out, count, generator=generator))

    def integers(count: int, first: int, end: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(first, end, (num_out, count), dtype=dtype, generator=generator)

    codes = integers(num_in, 0, 2**form.bits, torch.uint8)
    step, middle = std * 12**0.5 / 2**form.bits, (2**form.bits - 1) / 2
    blocks = -(-num_in // form.block)
    groups = blocks * (form.block // form.group)
    scales: tuple[Tensor, ...]
    if form.scales is Scales.K:
        minima, factors = integers(groups, 0, 64, torch.uint8), integers(groups, 0, 64, torch.uint8)
        scales = drawn(blocks, step / 36).half(), drawn(blocks, step * middle / 36).half(), factors, minima
    elif form.scales is Scales.K_SIGNED:
        scales = drawn(blocks, step / 74).half(), integers(groups, -128, 128, torch.int8)
    else:
        is_half = form.scales in (Scales.F16, Scales.AFFINE16)
        scales = (drawn(groups, step),)
        if form.scales in (Scales.AFFINE16, Scales.AFFINE32):
            scales += (-middle * scales[0],)
        scales = tuple(each.half() if is_half else each for each in scales)
    return QuantizedWeight(form, codes, scales)


def give_codes(
    module: nn.Linear | nn.Embedding, form: QuantForm, *, std: float = 0.2, seed: int = 0, order: Tensor | None = None
) -> None:
    """Replace a weight by one of random codes, as if a loader had made it of them."""
    codes = replace(random_codes(form, *module.weight.shape, std=std, seed=seed), order=order)
    with torch.no_grad():
        module.weight.copy_(dense_of(codes))
    remember(module.weight, form, lambda: codes, order=order)


def of_codes(model: PreTrainedModel, *, in_order: bool = True) -> PreTrainedModel:
    """Replace the weights of linears and embeddings by codes of every form in turn, so that some groups are mixed.

    Args:
        in_order: Or those of linears are of codes in another order of the inputs.
    """
    done: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and id(module.weight) not in done:
            form = list(CODES.values())[(5 * len(done)) % len(CODES)]
            order = None
            if not in_order and isinstance(module, nn.Linear):
                generator = torch.Generator().manual_seed(module.in_features)
                order = torch.randperm(module.in_features, generator=generator).int()
            give_codes(module, form, std=float(module.weight.detach().std()), seed=len(done), order=order)
            done.add(id(module.weight))
    return model


def in_int8(model: PreTrainedModel, *, is_static: bool = False) -> PreTrainedModel:
    """Make all linears ones that round their rows beside codes of 8 bits, as a loader of W8A8 does."""
    for index, module in enumerate(list(model.modules())):
        if type(module) is nn.Linear:
            std = float(module.weight.detach().std())
            give_codes(module, form_of_inputs(module.in_features), std=std, seed=index)
            round_inputs(module, torch.tensor([0.03]) if is_static else None)
    return model


class PackedIntLinear(nn.Module):
    """A linear like GPTQ's: four bits a weight, eight of them in an int32, and a scale for each output."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        scales = weight.abs().amax(1, keepdim=True) / 7
        codes = (torch.round(weight / scales) + 8).to(torch.int32).unflatten(1, (-1, 8))
        packed = sum(codes[..., index] << 4 * index for index in range(8))
        self.register_buffer("qweight", packed)
        self.register_buffer("scales", scales)
        self.bias = linear.bias
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        codes = (self.qweight[..., None] >> torch.arange(0, 32, 4, device=x.device)) & 15
        return nn.functional.linear(x, (codes.flatten(1) - 8).to(x.dtype) * self.scales, self.bias)


def packed_into_ints(model: PreTrainedModel) -> PreTrainedModel:
    """Replace all linears, the head included."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedIntLinear(child))
    return model


def parametrised(model: PreTrainedModel, parametrization: Callable[..., Any]) -> PreTrainedModel:
    """Have torch compute weights of each layer, and of the head, from other parameters."""
    for layer in model.model.layers:
        parametrization(layer.self_attn.q_proj)
        parametrization(layer.mlp.down_proj)
    parametrization(model.lm_head)
    return model.eval()


def resized(model: PreTrainedModel) -> PreTrainedModel:
    """Add 13 tokens to the vocabulary."""
    model.resize_token_embeddings(model.config.vocab_size + 13)
    return model


def with_bias(model: PreTrainedModel) -> PreTrainedModel:
    """Give the head a bias."""
    model.lm_head.bias = nn.Parameter(
        torch.randn(model.lm_head.out_features, generator=torch.Generator().manual_seed(1))
    )
    return model


def checkpointing(model: PreTrainedModel) -> PreTrainedModel:
    """Ask for gradient checkpointing, which only training heeds."""
    model.gradient_checkpointing_enable()
    return model


class OpaqueHead(nn.Module):
    """A head that tells nothing of itself, as those of some remote code."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.matrix = linear.weight
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix.T


_TEXT: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_IMAGES: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
# Type -> (fields of its text model, fields of the part for images, fields beside these).
MULTIMODAL: Mapping[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        {"head_dim": 16, "sliding_window": 9},
        {**_IMAGES},
        {"mm_tokens_per_image": 4, "image_token_index": 157, "boi_token_index": 158, "eoi_token_index": 159},
    ),
    "llava": (
        {"model_type": "llama"},
        {**_IMAGES, "model_type": "clip_vision_model", "projection_dim": 32},
        {"image_token_id": 157},
    ),
    "qwen2_vl": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        {"depth": 1, "embed_dim": 32, "hidden_size": 48, "num_heads": 2, "patch_size": 14},
        {"image_token_id": 157, "video_token_id": 158, "vision_start_token_id": 156, "vision_end_token_id": 159},
    ),
}


def multimodal(model_type: str) -> PreTrainedModel:
    """Build a small random model of texts and images."""
    text, images, fields = MULTIMODAL[model_type]
    config = AutoConfig.for_model(model_type, text_config={**_TEXT, **text}, vision_config=images, **fields)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_().mul_(1.0 if "embed" in name else 1.6 * parameter.shape[-1] ** -0.5)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model.eval()


FORMS: Mapping[str, Form] = {
    "lora": adapted,
    "lora merged": lambda model: adapted(model, is_merged=True),
    "lora head": lambda model: adapted(model, target_modules=["q_proj", "lm_head", "embed_tokens"]),
    "lora scalings": lambda model: adapted(model, alpha_pattern={r"layers\.1\.self_attn\.q_proj": 60}),
    "dora": lambda model: adapted(model, use_dora=True),
    "trained head": lambda model: adapted(model, modules_to_save=["lm_head", "embed_tokens"]),
    "ia3": lambda model: adapted(
        model, "IA3Config", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "int8": lambda model: quantised(model, "Int8WeightOnlyConfig"),
    "packed ints": packed_into_ints,
    "hooks": lambda model: dispatch_model(model, {"": "cpu"}, force_hooks=True),
    "weight norm": lambda model: parametrised(model, parametrizations.weight_norm),
    "spectral norm": lambda model: parametrised(model, parametrizations.spectral_norm),
    "resized": resized,
    "biased head": with_bias,
    "gradient checkpointing": checkpointing,
}

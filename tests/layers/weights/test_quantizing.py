"""Weights that are quantised when a model is loaded: their codes, what stays dense, and what cannot be."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import omniserve
from omniserve.core.config import EngineConfig, ParallelConfig
from omniserve.launch.loading import EngineLoader
from omniserve.layers.weights.quantized import Scales, dense_of, remembered, still_quantized
from omniserve.layers.weights.quantized_modules import QuantizedLinear
from omniserve.layers.weights.quantizing import quantize_weights
from omniserve.parallel.place import Place
from tests.parity.models import tiny_model

pytest.importorskip("torchao")


@pytest.mark.parametrize("how", ["int8", "int4"])
def test_a_model_computes_with_its_codes_before_and_after_it_is_patched(how: str) -> None:
    model = tiny_model("llama")
    original = copy.deepcopy(model)
    ids = torch.randint(model.config.vocab_size, (2, 9))
    done = quantize_weights(model, how)  # type: ignore[arg-type]
    assert done.num_weights and not done.left
    with torch.inference_mode():
        widened, unquantised = model(ids).logits, original(ids).logits
        omniserve.patch(model, compile=False)
        held = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
        assert len(held) == sum(isinstance(module, nn.Linear) for module in original.modules())
        torch.testing.assert_close(model(ids).logits, widened, rtol=1e-4, atol=1e-4)
    assert not torch.equal(widened, unquantised)


def test_int8_is_within_half_a_code_of_the_weight() -> None:
    model = nn.Sequential(nn.Linear(64, 33, bias=False))
    before = model[0].weight.detach().clone()
    quantize_weights(model, "int8")
    weight = model[0].weight.detach()
    step = before.abs().amax(1, keepdim=True) / 127
    assert ((weight - before).abs() <= 0.501 * step).all() and not torch.equal(weight, before)


def test_int4_has_a_scale_for_a_group_and_the_head_has_8_bits() -> None:
    model = tiny_model("llama")
    quantize_weights(model, "int4")
    noted = {name: remembered(weight) for name, weight in model.named_parameters() if remembered(weight) is not None}
    forms = {name: each.form for name, each in noted.items() if each is not None}
    assert forms.pop("lm_head.weight").bits == forms.pop("model.embed_tokens.weight").bits == 8
    assert forms and all(form.bits == 4 and form.scales is Scales.AFFINE32 for form in forms.values())
    read = still_quantized(model.model.layers[0].mlp.up_proj.weight)
    assert read is not None and torch.equal(dense_of(read), model.model.layers[0].mlp.up_proj.weight)


def test_inputs_that_no_group_divides_are_left_and_named() -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(12, 8))
    before = model[1].weight.detach().clone()
    assert quantize_weights(model, "int8").left == ["1.weight"]
    assert torch.equal(model[1].weight, before)


def test_adapters_and_what_they_wrap_are_left() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["lm_head", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("llama"), config).eval()
    left = quantize_weights(model, "int8").left
    assert left and all("lm_head" in name or "up_proj" in name or "embed_tokens" in name for name in left)


@pytest.mark.parametrize("vectors", [True, False])
def test_a_tied_head_in_an_adapter_or_without_a_kernel_keeps_its_values(
    vectors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model("llama", tie_word_embeddings=True)
    quantize_weights(model, "int8")
    if vectors:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["lm_head"])).eval()
    else:
        monkeypatch.setattr("omniserve.layers.weights.packed.HAS_VECTOR_KERNEL", False)
    ids = torch.randint(1, 20, (1, 7))
    with torch.inference_mode():
        before = model(input_ids=ids).logits
        omniserve.patch(model, compile=False)
        torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-4, atol=1e-4)


def test_the_codes_of_a_patched_model_are_there_once() -> None:
    model = tiny_model("llama")
    quantize_weights(model, "int4")
    omniserve.patch(model, compile=False)
    assert not [name for name, weight in model.named_parameters() if remembered(weight) is not None]
    held = next(module for module in model.modules() if isinstance(module, QuantizedLinear))
    before = held.weight.clone()
    omniserve.unpatch(model)
    assert torch.equal(held.weight, before) and remembered(held.weight) is None


@pytest.mark.parametrize("how", ["int8", "int4"])
def test_a_rank_keeps_the_codes_of_its_part(how: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    config = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2))
    loader = EngineLoader(model=str(tmp_path), dtype="auto", device="cpu", config=config, quantize=how)  # type: ignore[arg-type]
    whole = quantize_weights(reference := tiny_model("llama"), how)  # type: ignore[arg-type]
    assert not whole.left
    for rank in range(2):
        part = loader.load_rank(Place(rank, 2, 1))
        down = part.model.layers[1].mlp.down_proj.inner.weight
        read = still_quantized(down)
        expected = reference.model.layers[1].mlp.down_proj.weight.chunk(2, 1)[rank]
        assert read is not None and torch.equal(down, expected) and read.form.bits == (8 if how == "int8" else 4)
        omniserve.patch(part, compile=False)
        assert all(isinstance(each, QuantizedLinear) for each in part.modules() if isinstance(each, nn.Linear))


def test_a_model_without_linears_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing of the model can be quantised"):
        quantize_weights(nn.Sequential(nn.LayerNorm(8)), "int8")

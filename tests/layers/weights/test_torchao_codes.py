"""torchao's tensors: which of them have codes that are served, and what stays with torchao."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, TorchAoConfig

from omniserve.core.config import EngineConfig
from omniserve.launch.loading import EngineLoader
from omniserve.layers.patching import patch
from omniserve.layers.weights.quantized import QuantForm, Scales, dense_of, remembered, still_quantized
from omniserve.layers.weights.quantized_modules import QuantizedLinear
from omniserve.layers.weights.torchao_codes import take_codes
from tests.parity.models import tiny_model

quantization = pytest.importorskip("torchao.quantization")


def intx(bits: int, **options: Any) -> Any:
    return quantization.IntxWeightOnlyConfig(weight_dtype=getattr(torch, f"int{bits}"), **options)


GROUPED = {"granularity": quantization.PerGroup(16)}
AFFINE = {"mapping_type": quantization.MappingType.ASYMMETRIC}
TAKEN = {
    "int8": (quantization.Int8WeightOnlyConfig(), QuantForm(8, Scales.F32, 64)),
    "int8, one scale": (
        quantization.Int8WeightOnlyConfig(granularity=quantization.PerTensor()),
        QuantForm(8, Scales.F32, 64),
    ),
    "int4, groups": (intx(4, **GROUPED), QuantForm(4, Scales.F32, 16)),
    "int4, zero points": (intx(4, **GROUPED, **AFFINE), QuantForm(4, Scales.AFFINE32, 16)),
    "int3": (intx(3, **GROUPED), QuantForm(4, Scales.F32, 16)),
    "int6": (intx(6), QuantForm(8, Scales.F32, 64)),
    "int8 of intx": (intx(8), QuantForm(8, Scales.F32, 64)),
}
"""name: (torchao's config, the form of its codes)."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", TAKEN)
def test_codes_have_the_values_that_torchao_gives_them(kind: str, dtype: torch.dtype) -> None:
    config, form = TAKEN[kind]
    model = nn.Sequential(nn.Linear(64, 33, dtype=dtype))
    quantization.quantize_(model, config)
    values = model[0].weight.dequantize()
    assert take_codes(model) == (1, {})
    weight = model[0].weight
    assert type(weight) is nn.Parameter and weight.dtype is dtype
    noted, codes = remembered(weight), still_quantized(weight)
    assert noted is not None and noted.form == form and codes is not None
    if form.scales is Scales.AFFINE32:  # a zero point becomes an offset, which is rounded
        torch.testing.assert_close(weight, values, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-6)
    else:
        assert torch.equal(weight, values.to(dtype)) and torch.equal(weight, dense_of(codes).to(dtype))


@pytest.mark.parametrize(
    ("config", "num_in"),
    [
        (quantization.Int8DynamicActivationInt8WeightConfig(), 64),
        (quantization.Int8DynamicActivationIntxWeightConfig(weight_granularity=quantization.PerGroup(32)), 64),
        (quantization.Int8WeightOnlyConfig(), 60),
    ],
    ids=["rows in int8", "rows in int8, groups", "no multiple of 8"],
)
def test_what_torchao_has_to_compute_is_left_to_it(config: Any, num_in: int) -> None:
    model = nn.Sequential(nn.Linear(num_in, 33))
    quantization.quantize_(model, config)
    weight, x = model[0].weight, torch.randn(3, num_in)
    before = model(x)
    assert take_codes(model) == (0, {type(weight).__name__: 1})
    assert model[0].weight is weight and torch.equal(model(x), before)


def test_a_shared_weight_stays_shared() -> None:
    model = nn.ModuleList([nn.Linear(64, 33), nn.Linear(64, 33)])
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    model[1].weight = model[0].weight
    assert take_codes(model) == (1, {}) and model[1].weight is model[0].weight


@pytest.mark.parametrize("kind", ["int8", "int4, groups"])
def test_a_checkpoint_of_torchaos_is_served_as_its_codes(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, folder = tmp_path / "plain", tmp_path / "quantised"
    tiny_model("llama").save_pretrained(plain)
    config = TorchAoConfig(TAKEN[kind][0])
    theirs = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, device_map="cpu")
    theirs.save_pretrained(folder)
    loader = EngineLoader(model=str(folder), dtype="auto", device="cpu", config=EngineConfig())
    model = loader.load_model(lambda what: None)
    assert not hasattr(model.config, "quantization_config")
    ids = torch.randint(model.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = theirs(ids).logits
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        patch(model, compile=False)
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 7 * len(model.model.layers)
    assert "torchao" not in caplog.text


def test_a_checkpoint_that_torchao_computes_is_said_to_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, folder = tmp_path / "plain", tmp_path / "quantised"
    tiny_model("llama").save_pretrained(plain)
    config = TorchAoConfig(quantization.Int8DynamicActivationInt8WeightConfig())
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, device_map="cpu").save_pretrained(folder)
    loader = EngineLoader(model=str(folder), dtype="auto", device="cpu", config=EngineConfig())
    model = loader.load_model(lambda what: None)
    assert (
        f"weights with which torchao's own kernels compute: {7 * len(model.model.layers)} of Int8Tensor" in caplog.text
    )

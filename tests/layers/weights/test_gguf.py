"""Weights of GGUF files: each type against the package ``gguf``, and whole files as transformers loads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from omniserve.layers.patching import patch, unpatch
from omniserve.layers.weights.gguf import TYPES, remember_file, weight_of_blocks
from omniserve.layers.weights.packed import PackedEmbedding, PackedLinear
from omniserve.layers.weights.quantized import dense_of, remembered, still_quantized
from omniserve.layers.weights.quantized_modules import QuantizedEmbedding, QuantizedLinear
from tests.gguf_files import MIXED, blocks, type_of, write_llama

has_vectors = pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="this CPU has no vector kernel")

# Two layers of random weights sum up to 256 products in another order, or in two parts: some 1e-6 of logits of order 1.
FP32_TOLERANCE = 1e-4


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


def _load(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    return model.requires_grad_(False).eval()


def _logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(40)[None]).logits


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", TYPES)
def test_blocks_are_read_as_gguf_reads_them(kind: str, seed: int) -> None:
    """Random blocks have every code, scale and sign somewhere."""
    raw = blocks(kind, 37, 1024, seed=seed)
    assert raw.shape[1] == 1024 // TYPES[kind].inputs * TYPES[kind].bytes
    weight = weight_of_blocks(kind, torch.from_numpy(raw))
    expected = torch.from_numpy(gguf.quants.dequantize(raw, type_of(kind)))
    assert weight.shape == expected.shape == (37, 1024)
    assert torch.equal(_bits(dense_of(weight)), _bits(expected))
    assert len(weight.codes.unique()) == 2**weight.form.bits or kind == "Q8_0"


@pytest.mark.parametrize("kind", TYPES)
def test_any_bytes_are_read_as_gguf_reads_them(kind: str) -> None:
    """Scales may be negative, subnormal, infinite or NaN: what a file may have is not what a quantiser writes."""
    generator = torch.Generator().manual_seed(5)
    shape = (64, 4 * TYPES[kind].bytes)
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    with numpy.errstate(invalid="ignore"):
        expected = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), type_of(kind)))
    value = dense_of(weight_of_blocks(kind, raw))
    assert torch.equal(value.isnan(), expected.isnan())
    is_number = ~expected.isnan()
    assert torch.equal(_bits(value[is_number]), _bits(expected[is_number]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_tied", [False, True])
def test_every_weight_of_a_file_has_its_codes(is_tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", is_tied=is_tied)
    model = _load(path, dtype)
    num_weights = 2 * 7 + (1 if is_tied else 2)
    assert remember_file(model, path) == (num_weights, {})
    forms = set()
    for name, module in model.named_modules():
        if isinstance(weight := getattr(module, "weight", None), torch.nn.Parameter) and weight.dim() == 2:
            codes = still_quantized(weight)
            assert codes is not None, name
            assert torch.equal(_bits(dense_of(codes).to(dtype)), _bits(weight)), name
            forms.add(codes.form)
    assert len(forms) == len(set(MIXED.values()))
    # transformers moves rows of q and k, and of no other: else this tests no order.
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for part, moves in (("q_proj", True), ("k_proj", True), ("v_proj", False)):
        tensor = read[f"blk.1.attn_{part[0]}.weight"]
        in_file = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).to(dtype)
        weight = model.model.layers[1].self_attn.get_submodule(part).weight
        assert torch.equal(in_file, weight) is not moves


@has_vectors
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_patched_file_computes_what_the_widened_model_does(is_tied: bool, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", is_tied=is_tied)
    model = _load(path)
    remember_file(model, path)
    expected, state = _logits(model), {name: value.clone() for name, value in model.state_dict().items()}
    patch(model, compile=False)
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert all(isinstance(linear, QuantizedLinear) for linear in linears)
    assert isinstance(model.model.embed_tokens, QuantizedEmbedding)
    attention = model.model.layers[0].self_attn  # Q4_K, Q4_K and Q6_K
    assert attention.q_proj.group_weight is attention.k_proj.group_weight is not attention.v_proj.group_weight
    assert len({linear.group_form for linear in linears} | {model.model.embed_tokens.group_form}) == 8
    got = _logits(model)
    torch.testing.assert_close(got, expected, atol=FP32_TOLERANCE, rtol=0)
    attention.q_proj.group_weight[:, -1] ^= 0x10
    assert not torch.allclose(_logits(model), got, atol=FP32_TOLERANCE), "the codes are not read"
    attention.q_proj.group_weight[:, -1] ^= 0x10
    unpatch(model)
    assert torch.equal(_logits(model), expected)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


DENSE: Mapping[str, str] = {
    "token_embd": "F16", "attn_q": "Q2_K", "attn_k": "IQ4_XS", "attn_v": "Q3_K", "attn_output": "F32",
    "ffn_gate": "BF16", "ffn_up": "Q4_0", "ffn_down": "Q4_0", "blk.1.ffn_down": "IQ4_NL", "output": "Q8_0",
}  # fmt: skip


@has_vectors
def test_other_types_are_counted_and_served_dense(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", DENSE)
    model = _load(path)
    found = remember_file(model, path)
    assert found.num_weights == 2 + 1 + 1
    assert found.dense == {"F16": 1, "Q2_K": 2, "IQ4_XS": 2, "Q3_K": 2, "F32": 2, "BF16": 2, "IQ4_NL": 1}
    expected = _logits(model)
    patch(model, compile=False)
    first, second = model.model.layers
    assert isinstance(first.mlp.up_proj, QuantizedLinear) and isinstance(first.mlp.gate_proj, PackedLinear)
    assert isinstance(first.mlp.down_proj, QuantizedLinear) and isinstance(second.mlp.down_proj, PackedLinear)
    assert isinstance(model.lm_head, QuantizedLinear) and type(model.model.embed_tokens) is torch.nn.Embedding
    assert not isinstance(model.model.embed_tokens, PackedEmbedding)
    torch.testing.assert_close(_logits(model), expected, atol=FP32_TOLERANCE, rtol=0)
    unpatch(model)
    assert torch.equal(_logits(model), expected)


def test_weights_that_are_not_the_files_have_no_codes(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf")
    model = _load(path)
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.self_attn.q_proj.weight[5, 7] += 1e-3
        layer.mlp.up_proj.weight[[2, 3]] = layer.mlp.up_proj.weight[[3, 2]]  # another order, which is found
        layer.mlp.down_proj.weight[2] = layer.mlp.down_proj.weight[3]
    found = remember_file(model, path)
    assert found == (14, {"Q4_K": 1, "Q5_0": 1})
    assert remembered(layer.self_attn.q_proj.weight) is None is remembered(layer.mlp.down_proj.weight)
    assert still_quantized(layer.mlp.up_proj.weight) is not None


def test_equal_tensors_of_a_file_are_each_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gguf_files.blocks", lambda kind, rows, width, **_: blocks(kind, rows, width, std=0.1))
    path = write_llama(tmp_path / "tiny.gguf")
    model = _load(path)
    assert remember_file(model, path) == (16, {})

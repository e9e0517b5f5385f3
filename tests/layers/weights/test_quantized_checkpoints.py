"""Quantised checkpoints of the hub: written here by their published layouts, code by code, and read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from omniserve.core.config import EngineConfig
from omniserve.launch.loading import EngineLoader
from omniserve.launch.models import quantization_of
from omniserve.layers.patching import patch, unpatch
from omniserve.layers.weights.groups import is_group
from omniserve.layers.weights.int8_modules import Int8Linear, RoundedLinear, codes_of_rows, rounded
from omniserve.layers.weights.quantized import remembered
from omniserve.layers.weights.quantized_checkpoints import NotRead, method_of
from omniserve.layers.weights.quantized_modules import QuantizedLinear
from omniserve.layers.weights.sharding import shard
from tests.parity.models import tiny_model

GROUP = 16


def packed_along(codes: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Write codes into words of 32 bits, one after the other in ``order``, by loops."""
    at_once = 32 // bits
    order = order or tuple(range(at_once))
    codes = codes.long() if dim == 1 else codes.long().T
    words = torch.zeros(codes.shape[0], -(-codes.shape[1] // at_once), dtype=torch.int64)
    for word in range(words.shape[1]):
        for place in range(at_once):
            if (at := word * at_once + order[place]) < codes.shape[1]:
                words[:, word] |= codes[:, at] << (bits * place)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return words if dim == 1 else words.T.contiguous()


Write = Callable[[str, Tensor, Tensor, Tensor, Tensor], dict[str, Tensor]]
"""(module, codes ``[O, I]``, scales and zeros ``[O, groups]``, group of each input) -> the tensors of a checkpoint."""


def gptq(bits: int, first: int) -> Write:
    def write(name: str, codes: Tensor, scale: Tensor, zeros: Tensor, groups: Tensor) -> dict[str, Tensor]:
        return {
            f"{name}.qweight": packed_along(codes.T, bits, 0),
            f"{name}.qzeros": packed_along(zeros.T - first, bits, 1),
            f"{name}.scales": scale.T.contiguous(),
            f"{name}.g_idx": groups,
        }

    return write


def awq(name: str, codes: Tensor, scale: Tensor, zeros: Tensor, groups: Tensor) -> dict[str, Tensor]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        f"{name}.qweight": packed_along(codes.T, 4, 1, order),
        f"{name}.qzeros": packed_along(zeros.T, 4, 1, order),
        f"{name}.scales": scale.T.contiguous(),
    }


def compressed(bits: int, *, has_zeros: bool) -> Write:
    def write(name: str, codes: Tensor, scale: Tensor, zeros: Tensor, groups: Tensor) -> dict[str, Tensor]:
        tensors = {
            f"{name}.weight_packed": packed_along(codes, bits, 1),
            f"{name}.weight_scale": scale,
            f"{name}.weight_shape": torch.tensor(codes.shape),
        }
        if not torch.equal(groups, groups.sort().values):
            tensors[f"{name}.weight_g_idx"] = groups
        if has_zeros:
            tensors[f"{name}.weight_zero_point"] = packed_along(zeros, bits, 0)
        return tensors

    return write


def _groups(bits: int, actorder: str | None = None, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "actorder": actorder}
    groups = {"group_0": {"weights": weights, "input_activations": None, **more}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


_ORDERED = {"quant_method": "gptq", "desc_act": True}
KINDS: dict[str, tuple[dict[str, Any], Write, int, bool]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, gptq(4, 1), 4, True),
    "gptq, version 2": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, gptq(4, 0), 4, True),
    "gptq, 8 bits": ({"quant_method": "gptq", "bits": 8}, gptq(8, 1), 8, True),
    "gptq, desc_act": ({**_ORDERED, "bits": 4}, gptq(4, 1), 4, True),
    "gptq, 8 bits, desc_act": ({**_ORDERED, "bits": 8}, gptq(8, 1), 8, True),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq, 4, True),
    "W4A16": (_groups(4), compressed(4, has_zeros=False), 4, False),
    "W4A16, zero points": (_groups(4), compressed(4, has_zeros=True), 4, True),
    "W8A16": (_groups(8), compressed(8, has_zeros=False), 8, False),
    "W4A16, actorder": (_groups(4, "group"), compressed(4, has_zeros=False), 4, False),
}
"""name: (quantization_config, how tensors are written, bits, whether zero points differ)."""


def quantised_folder(folder: Path, kind: str, dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """Write a tiny Llama with random codes; return its dense weights."""
    config, write, bits, has_zeros = KINDS[kind]
    generator = torch.Generator().manual_seed(0)
    model = tiny_model("llama")
    tensors, dense = {}, {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        shape, groups = module.weight.shape, module.in_features // GROUP
        codes = torch.randint(2**bits, shape, generator=generator)
        scale = (torch.rand(shape[0], groups, generator=generator) * 2**-bits).to(dtype)
        zeros = torch.full((shape[0], groups), 2 ** (bits - 1))
        if has_zeros:
            zeros = torch.randint(1, 2**bits, zeros.shape, generator=generator)
        groups_of_inputs = torch.arange(shape[1], dtype=torch.int32) // GROUP
        if "desc_act" in config or "actorder" in kind:  # linears of one input have one order
            order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(shape[1]))
            groups_of_inputs = groups_of_inputs[order]
        tensors |= write(name, codes, scale, zeros, groups_of_inputs)
        by_input = [each[:, groups_of_inputs.long()] for each in (scale.float(), zeros)]
        dense[f"{name}.weight"] = (codes - by_input[1]) * by_input[0]
    own = {name: weight.detach().clone() for name, weight in model.state_dict().items() if name not in dense}
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config, "dtype": "float32"}))
    save_file({name: each.contiguous() for name, each in (tensors | own).items()}, folder / "model.safetensors")
    return dense | own


_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}


def in_int8(is_static: bool = False, **inputs: Any) -> dict[str, Any]:
    """Return the config of W8A8."""
    how = {"dynamic": False, "strategy": "tensor"} if is_static else {"dynamic": True, "strategy": "token"}
    weights = {**_INT8, "strategy": "channel", "dynamic": False}
    groups = {"group_0": {"weights": weights, "input_activations": {**_INT8, **how, **inputs}, "targets": ["Linear"]}}
    how = {"quantization_status": "compressed", "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups, **how}


def int8_folder(folder: Path, *, is_static: bool = False, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Write a tiny Llama as compressed-tensors' W8A8; return its dense weights."""
    model = tiny_model("llama")
    tensors = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    dense = dict(tensors)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        weight = tensors.pop(f"{name}.weight")
        scale = (weight.abs().amax(1, keepdim=True) / 127.5).to(dtype)
        codes = (weight / scale.float()).round().clamp(-128, 127)
        tensors |= {f"{name}.weight": codes.to(torch.int8), f"{name}.weight_scale": scale}
        if is_static:
            about = 0.02 + 0.01 * torch.rand(1, generator=torch.Generator().manual_seed(module.in_features))
            tensors[f"{name}.input_scale"] = about.to(dtype)
        dense[f"{name}.weight"] = codes * scale.float()
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    how = {"quantization_config": in_int8(is_static), "dtype": "float32"}
    path.write_text(json.dumps(json.loads(path.read_text()) | how))
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    return dense


def loaded(folder: Path) -> Any:
    return EngineLoader(model=str(folder), dtype="auto", device="cpu", config=EngineConfig()).load_model(
        lambda what: None
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_codes_of_a_checkpoint_are_read_and_served(kind: str, tmp_path: Path) -> None:
    dense = quantised_folder(tmp_path, kind)
    model = loaded(tmp_path)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, dense[name]), name
    ids = torch.randint(model.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        before = model(ids).logits
        patch(model, compile=False)
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-4)
    held = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert len(held) == sum(name.endswith("proj.weight") for name in dense)
    assert {module.group_form.bits for module in held} == {KINDS[kind][2]}


@pytest.mark.parametrize("is_static", [False, True])
def test_linears_in_int8_round_their_rows_before_and_after_patch(is_static: bool, tmp_path: Path) -> None:
    dense = int8_folder(tmp_path, is_static=is_static)
    model = loaded(tmp_path)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, dense[name]), name
    rounding = [module for module in model.modules() if isinstance(module, RoundedLinear)]
    assert len(rounding) == sum(name.endswith("proj.weight") for name in dense)
    x = torch.randn(3, rounding[0].in_features, generator=torch.Generator().manual_seed(0))
    stored = load_file(tmp_path / "model.safetensors")
    scale = stored["model.layers.0.self_attn.q_proj.input_scale"].float() if is_static else None
    torch.testing.assert_close(rounding[0](x), rounded(x, scale) @ rounding[0].weight.T)
    ids = torch.randint(model.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    parameters = {name: (weight, weight.detach().clone()) for name, weight in model.named_parameters()}
    with torch.inference_mode():
        before = model(ids).logits
        patch(model, compile=False)
        difference = (model(ids).logits - before).abs()
    # Where a row's last bits differ, a value now and then is rounded to the next code.
    assert difference.median() < 1e-5 and difference.max() < 0.3
    held = [module for module in model.modules() if isinstance(module, Int8Linear)]
    assert len(held) == len(rounding)
    layer = model.model.layers[0]
    assert is_group([layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj])
    assert is_group([layer.mlp.gate_proj, layer.mlp.up_proj])
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, dense[name]), name
    unpatch(model)
    assert [module for module in model.modules() if isinstance(module, RoundedLinear)] == rounding
    for name, weight in model.named_parameters():
        assert weight is parameters[name][0] and torch.equal(weight, parameters[name][1]), name
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("is_static", [False, True])
def test_linears_in_int8_compute_what_the_packages_modules_do(is_static: bool, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    int8_folder(tmp_path, is_static=is_static)
    ids = torch.randint(160, (2, 9), generator=torch.Generator().manual_seed(1))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        torch.testing.assert_close(loaded(tmp_path)(ids).logits, theirs(ids).logits, rtol=1e-6, atol=1e-6)


def test_a_linear_in_int8_computes_with_the_integer_sums(tmp_path: Path) -> None:
    int8_folder(tmp_path)
    model = loaded(tmp_path)
    linear = model.model.layers[0].mlp.down_proj
    stored = load_file(tmp_path / "model.safetensors")
    codes, scale = (stored[f"model.layers.0.mlp.down_proj.{name}"] for name in ("weight", "weight_scale"))
    patch(model, compile=False)
    x = torch.randn(5, linear.in_features, generator=torch.Generator().manual_seed(0))
    rows, of_rows = codes_of_rows(x)
    sums = (rows.double() @ codes.double().T).float()
    assert torch.equal(linear(x), sums * of_rows * scale.float()[:, 0])


def test_a_weight_in_int8_that_was_changed_stays_dense_and_its_rows_are_rounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    int8_folder(tmp_path)
    model = loaded(tmp_path)
    linear = model.model.layers[1].mlp.down_proj
    with torch.no_grad():
        linear.weight[0, 0] += 1
    patch(model, compile=False)
    assert type(linear) is RoundedLinear and type(model.model.layers[0].mlp.down_proj) is Int8Linear
    assert "weights were changed since they were loaded, and are not held in int8" in caplog.text


def test_ranks_keep_their_parts_of_linears_that_round_their_rows(tmp_path: Path) -> None:
    int8_folder(tmp_path)
    attention = shard(loaded(tmp_path), 1, 2).model.layers[0].self_attn
    whole = loaded(tmp_path).model.layers[0].self_attn
    for part, of, ranks in ((attention.q_proj, whole.q_proj, 1), (attention.o_proj.inner, whole.o_proj, 2)):
        assert isinstance(part, RoundedLinear) and part.row_ranks == ranks
        half = of.weight.shape[ranks - 1] // 2
        assert torch.equal(part.weight, of.weight.narrow(ranks - 1, half, half))
        assert remembered(part.weight) is not None, "it is held as codes"


@pytest.mark.parametrize("name", ["weight_zero_point", "input_zero_point"])
def test_zero_points_of_int8_are_refused(name: str, tmp_path: Path) -> None:
    int8_folder(tmp_path, is_static=True)
    path, stem = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj."
    tensors = load_file(path)
    save_file(tensors | {stem + name: torch.zeros(1, dtype=torch.int8)}, path)
    loaded(tmp_path)
    save_file(tensors | {stem + name: torch.ones(1, dtype=torch.int8)}, path)
    with pytest.raises(NotRead, match=f"{stem}{name}: it is not zero"):
        loaded(tmp_path)


def test_the_tokens_that_end_an_answer_come_from_the_generation_config(tmp_path: Path) -> None:
    quantised_folder(tmp_path, "awq")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert loaded(tmp_path).generation_config.eos_token_id == [3, 5]


def test_groups_of_two_sizes_are_refused(tmp_path: Path) -> None:
    quantised_folder(tmp_path, "W4A16")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = next(each for each in tensors if each.endswith("down_proj.weight_scale"))
    tensors[name] = tensors[name][:, :3].contiguous()
    save_file(tensors, path)
    with pytest.raises(NotRead, match=r"down_proj.*groups; groups of one size, a multiple of 8, are read"):
        loaded(tmp_path)


def test_a_folder_with_adapters_is_left_to_transformers(tmp_path: Path) -> None:
    quantised_folder(tmp_path, "gptq")
    assert quantization_of(str(tmp_path)) is not None
    (tmp_path / "adapter_config.json").write_text("{}")
    assert quantization_of(str(tmp_path)) is None


def test_scales_in_bf16_are_kept_exactly(tmp_path: Path) -> None:
    dense = quantised_folder(tmp_path, "W4A16", torch.bfloat16)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(loaded(tmp_path).state_dict()[name], dense[name])


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"quant_method": "gptq", "bits": 3}, "GPTQ with 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "marlin"}, "version marlin"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "float-quantized"),
        (
            {**_groups(4), "config_groups": {"group_0": {"weights": {"num_bits": 4, "strategy": "tensor"}}}},
            "scales by tensor",
        ),
        (_groups(4, input_activations={"num_bits": 8}), "quantised activations"),
        (in_int8(symmetric=False), "symmetric activations of 8 bits"),
        (in_int8(strategy="group"), "dynamic by token or all static by tensor"),
        (in_int8(num_bits=4), "symmetric activations of 8 bits"),
        ({"quant_method": "hqq"}, "the quantisation hqq is not read; gptq, awq, compressed-tensors are"),
    ],
)
def test_what_is_not_read_is_refused_by_name(config: dict[str, Any], why: str) -> None:
    with pytest.raises(NotRead, match=why):
        method_of(config)


def with_g_idx(folder: Path, change: Callable[[Tensor], Tensor]) -> str:
    """Change the first tensor that has groups of inputs; return its name."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(each for each in tensors if each.endswith("g_idx"))
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, path)
    return name


def test_groups_of_unequal_numbers_of_inputs_are_refused(tmp_path: Path) -> None:
    quantised_folder(tmp_path, "gptq, desc_act")
    name = with_g_idx(tmp_path, lambda groups: groups.clamp_min(1))
    with pytest.raises(NotRead, match=f"{name}: groups of {GROUP} inputs each are read"):
        loaded(tmp_path)


def test_groups_of_inputs_that_are_all_minus_one_say_nothing(tmp_path: Path) -> None:
    dense = quantised_folder(tmp_path, "W4A16")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = next(each for each in tensors if each.endswith("up_proj.weight_packed")).removesuffix("weight_packed")
    num_in = dense[f"{name}weight"].shape[1]
    save_file(tensors | {f"{name}weight_g_idx": torch.full((num_in,), -1, dtype=torch.int32)}, path)
    assert torch.equal(loaded(tmp_path).state_dict()[f"{name}weight"], dense[f"{name}weight"])


def test_linears_of_one_input_share_a_product_if_they_have_one_order(tmp_path: Path) -> None:
    quantised_folder(tmp_path, "gptq, desc_act")
    with_g_idx(tmp_path, lambda groups: groups.flip(0))  # of layer 0's down_proj, which is alone
    model = loaded(tmp_path)
    patch(model, compile=False)
    for layer in model.model.layers:
        assert is_group([layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj])
        assert is_group([layer.mlp.gate_proj, layer.mlp.up_proj]) and layer.mlp.up_proj.group_order is not None
    unpatch(model)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.k_proj.g_idx"
    save_file(tensors | {name: tensors[name].flip(0).contiguous()}, path)
    model = loaded(tmp_path)
    patch(model, compile=False)
    first = model.model.layers[0].self_attn
    assert is_group([first.k_proj]) and is_group([first.q_proj, first.v_proj])

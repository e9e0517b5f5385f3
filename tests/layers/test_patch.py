"""patch and unpatch: what they accept, what they refuse, when a layer's own forward runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from omniserve.core.errors import UnsupportedModelError
from omniserve.layers.compiled import structure
from omniserve.layers.patched_model import PatchedModel
from omniserve.layers.patching import patch, patched_model, unpatch
from tests.parity.models import tiny_model


def test_length_dependent_rope_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match="rope type 'dynamic'"):
        patch(tiny_model("llama", rope_parameters=rope))


def test_eager_experts_are_refused() -> None:
    model = tiny_model("mixtral")
    model.set_experts_implementation("eager")
    with pytest.raises(UnsupportedModelError, match="grouped_mm"):
        patch(model)


def test_a_refused_model_is_left_alone() -> None:
    model = tiny_model("llama", torch.bfloat16)
    before = set(model.__dict__)
    with pytest.raises(ValueError, match="prepack=True"):
        patch(tiny_model("llama", torch.float64), prepack=True)
    model.train()
    with pytest.raises(ValueError, match="eval"):
        patch(model)
    assert set(model.__dict__) == before


def test_wrong_type_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="Linear"):
        patch(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_patch_twice_is_a_no_op_and_other_options_are_an_error() -> None:
    model = patch(tiny_model("llama"), compile=False)
    installed = model.omniserve
    assert isinstance(installed, PatchedModel)
    assert patch(model, compile=False).omniserve is installed
    with pytest.raises(ValueError, match="unpatch"):
        patch(model, compile=True)


def test_unpatch_of_an_unpatched_model_is_an_error() -> None:
    with pytest.raises(ValueError, match="not patched"):
        unpatch(tiny_model("llama"))


def _held_bytes(model: nn.Module) -> int:
    """Return the bytes of all weights, prepacked ones as they are held."""
    held = {
        tensor.untyped_storage().data_ptr(): tensor.nbytes
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module.__dict__.values())
        if isinstance(tensor, torch.Tensor) and tensor.stride() != (0,) * tensor.ndim
    }
    return sum(held.values())


@pytest.mark.parametrize("family", ["llama_tied", "opt", "mixtral"])
@pytest.mark.parametrize("prepack", [False, "auto"])
def test_layers_of_other_stages_are_freed_and_those_of_this_one_compute_the_same(family: str, prepack: Any) -> None:
    whole, model = (tiny_model(family, num_layers=4) for _ in range(2))
    reference = patched_model(whole, compile=False, prepack=prepack)
    patched = patched_model(model, compile=False, prepack=prepack, keep=lambda num_layers: range(2, num_layers - 1))
    ids = torch.arange(5)
    layer = sum(parameter.numel() for parameter in tiny_model(family, num_layers=1).parameters())
    layer = sum(parameter.numel() for parameter in tiny_model(family, num_layers=2).parameters()) - layer
    with torch.inference_mode():
        rows = patched.embed(ids, ids)
        rotary = patched.rotary(ids) or (None, None)
        assert torch.equal(reference.embed(ids, ids), rows)
        both = zip(patched.pre_attention(2, rows, *rotary), reference.pre_attention(2, rows, *rotary), strict=True)
        assert all(torch.equal(tensor, same) for tensor, same in both)
        assert torch.equal(patched.logits(rows), reference.logits(rows))
        for absent in (0, 1, 3):
            with pytest.raises(KeyError):
                patched.pre_attention(absent, rows, *rotary)
    if not prepack:
        assert _held_bytes(whole) - _held_bytes(model) == 3 * 4 * layer
    with pytest.raises(ValueError, match="layers were freed"):
        unpatch(model)
    with pytest.raises(ValueError, match="chosen when a model is patched"):
        patched_model(model, compile=False, keep=lambda num_layers: range(num_layers))


def test_conversion_of_a_prepacked_model_is_refused_before_anything_changed() -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bf16 on this CPU")
    model = patch(tiny_model("llama", torch.bfloat16), compile=False)
    with pytest.raises(RuntimeError, match="unpatch"):
        model.float()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert unpatch(model).float().dtype is torch.float32


def test_gradients_flow_through_a_model_that_is_patched_without_prepacking() -> None:
    model = tiny_model("llama")
    ids = torch.arange(9)[None]
    model(ids).logits.sum().backward()
    expected = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    patch(model, compile=False, prepack=False)(ids).logits.sum().backward()
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight.grad, expected)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_patched_model_still_gives_attentions_and_hidden_states(family: str) -> None:
    model = tiny_model(family, attn_implementation="eager")
    ids = torch.arange(9)[None]
    wanted = {"output_attentions": True, "output_hidden_states": True}
    if family == "mixtral":
        wanted["output_router_logits"] = True
    with torch.no_grad():
        expected = model(ids, **wanted)
        actual = patch(model, compile=False)(ids, **wanted)
    for key in ("attentions", "hidden_states", *(["router_logits"] if family == "mixtral" else [])):
        assert len(actual[key]) == len(expected[key])
        for got, want in zip(actual[key], expected[key], strict=True):
            torch.testing.assert_close(got, want)


def test_structure_tells_apart_what_a_graph_bakes_in() -> None:
    layer, same = tiny_model("llama", num_layers=2).model.layers
    assert structure(layer) == structure(same)
    same.input_layernorm.variance_epsilon = 0.5
    assert structure(layer) != structure(same)


@pytest.mark.parametrize(("one", "other"), [({"default": 0.5}, {"default": 2.0}), (["a"], ["a", "b"]), (None, 1)])
def test_structure_looks_into_dicts_and_lists(one: object, other: object) -> None:
    """The scaling of a LoRA layer is such a dict, and may differ between layers of equal ranks."""
    layer, same = tiny_model("llama", num_layers=2).model.layers
    layer.self_attn.q_proj.scaling, same.self_attn.q_proj.scaling = one, one
    assert structure(layer) == structure(same)
    same.self_attn.q_proj.scaling = other
    assert structure(layer) != structure(same)


@pytest.mark.parametrize("family", ["llama", "smollm3"])
@pytest.mark.parametrize(
    ("of_generation", "of_config", "expected"),
    [(7, 3, (3, 7)), ([7, 9], None, (7, 9)), (None, [4, 5], (4, 5)), ([], 3, (3,)), (None, None, ())],
)
def test_ends_of_a_sequence_are_one_several_or_none(
    family: str, of_generation: Any, of_config: Any, expected: tuple[int, ...]
) -> None:
    model = tiny_model(family)
    model.generation_config.eos_token_id, model.config.eos_token_id = of_generation, of_config
    assert patch(model, compile=False).omniserve.spec.eos_token_ids == expected


def test_a_model_may_have_no_generation_config() -> None:
    model = tiny_model("smollm3")
    model.generation_config, model.config.eos_token_id = None, 3
    assert patch(model, compile=False).omniserve.spec.eos_token_ids == (3,)


def test_max_model_len_is_checked_against_the_model() -> None:
    family = patch(tiny_model("llama"), compile=False).omniserve.family
    assert family.spec().max_model_len == 512 and family.spec(100).max_model_len == 100
    with pytest.raises(ValueError, match=r"\[1, 512\]"):
        family.spec(513)

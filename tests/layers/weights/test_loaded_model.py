"""patch takes models as users load them, wrapped by PEFT or with accelerate's hooks, and says what it cannot take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from omniserve import Engine, EngineConfig
from omniserve.core.errors import UnsupportedModelError
from omniserve.engine.fingerprint import fingerprint_of
from omniserve.layers.compiled import structure
from omniserve.layers.patched_model import PatchedModel
from omniserve.layers.patching import patch, unpatch
from omniserve.layers.weights.groups import GroupLinear
from tests.parity.models import prepackable_model, tiny_model

FAMILIES = ("llama", "smollm3")  # one kind of layer, two kinds
IDS = torch.arange(9)[None]


def forwards(model: nn.Module) -> dict[str, Any]:
    return {name: module.__dict__.get("forward") for name, module in model.named_modules()}


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft")


def adapted(peft: Any, family: str, **options: Any) -> Any:
    """Return a small model with random LoRA adapters."""
    return with_adapters(peft, tiny_model(family), **options)


def with_adapters(peft: Any, model: PreTrainedModel, **options: Any) -> Any:
    """Wrap a model with random LoRA adapters."""
    options = {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 4, "task_type": "CAUSAL_LM"} | options
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**options), autocast_adapter_dtype=False)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_().mul_(0.3)
    return wrapped.eval()


# --- PEFT -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_peft_model_is_patched_as_it_is(peft: Any, family: str) -> None:
    model = adapted(peft, family)
    with torch.inference_mode():
        before = model(input_ids=IDS).logits
    names, state = sorted(model.__dict__), forwards(model)
    assert patch(model, compile=False) is model
    assert isinstance(model.omniserve, PatchedModel)
    assert model.omniserve is model.get_base_model().omniserve
    assert patch(model, compile=False) is model and patch(model.get_base_model(), compile=False)
    with Engine(model, EngineConfig(device_kv_bytes=1 << 20, host_kv_bytes=0)) as engine:
        assert engine.model is model.omniserve
    with torch.inference_mode():
        torch.testing.assert_close(model(input_ids=IDS).logits, before)  # packed weights are summed in another order
    assert unpatch(model) is model
    assert not hasattr(model, "omniserve")
    assert sorted(model.__dict__) == names and forwards(model) == state
    with pytest.raises(ValueError, match="not patched"):
        unpatch(model)


def test_a_profile_of_a_model_is_not_one_of_its_adapted_form(peft: Any) -> None:
    config = EngineConfig(device_kv_bytes=1 << 20, host_kv_bytes=0)
    plain, model = fingerprint_of(tiny_model("smollm3"), config), adapted(peft, "smollm3")
    assert plain.weights == ""
    assert fingerprint_of(model, config).weights == "peft.Linear"
    assert fingerprint_of(model, config) == fingerprint_of(patch(model, compile=False).get_base_model(), config)
    assert fingerprint_of(unpatch(model).merge_and_unload(), config) == plain


def test_a_profile_of_a_model_is_not_one_of_its_quantised_form() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny_model("smollm3")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    assert fingerprint_of(model, EngineConfig()).weights == "torchao.Int8Tensor"


def test_adapters_may_be_without_a_wrapper(peft: Any) -> None:
    model = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), tiny_model("smollm3"))
    patch(model.eval(), compile=False)


def test_adapters_that_were_added_in_training_mode_are_refused(peft: Any) -> None:
    model = tiny_model("llama")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.5))
    with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
        patch(wrapped)
    assert not model.training  # but the adapters in it are
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj is in training mode"):
        patch(model)
    patch(wrapped.eval(), compile=False)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("PromptTuningConfig", {"num_virtual_tokens": 3}, "PROMPT_TUNING does more than the modules"),
        ("PrefixTuningConfig", {"num_virtual_tokens": 3}, "PREFIX_TUNING does more than the modules"),
        ("PolyConfig", {"target_modules": ["q_proj"]}, "POLY does not run on tokens alone: task_ids"),
        ("LoraConfig", {"target_modules": ["q_proj"], "alora_invocation_tokens": [5, 7]}, "LORA: it applies from"),
    ],
)
def test_adapters_that_do_more_than_the_modules_are_refused(
    peft: Any, kind: str, options: dict[str, Any], reason: str
) -> None:
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(tiny_model("llama"), config).eval()
    with pytest.raises(UnsupportedModelError, match=f"LlamaForCausalLM with an adapter of the type {reason}"):
        patch(model)


def test_scalings_that_differ_between_layers_have_graphs_of_their_own(peft: Any) -> None:
    layers = adapted(peft, "llama", alpha_pattern={"model.layers.1.self_attn.q_proj": 80}).get_base_model().model.layers
    assert structure(layers[0]) == structure(layers[2]) != structure(layers[1])


def test_linears_of_adapters_are_not_prepacked(peft: Any) -> None:
    """Adapters read the weights of each other's linears; a packed linear would be unpacked at each call."""
    model = with_adapters(peft, prepackable_model("llama"))
    patch(model, compile=False, prepack=True)
    held = [name for name, module in model.named_modules() if isinstance(module, GroupLinear)]
    assert len(held) == 3 * 4 + 1 and not any("q_proj" in name or "v_proj" in name or "down" in name for name in held)


def test_a_merged_adapter_may_be_unloaded_and_served_as_a_plain_model(peft: Any) -> None:
    model = adapted(peft, "llama").merge_and_unload()
    assert isinstance(model, PreTrainedModel) and type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    patch(model.eval(), compile=False)


# --- accelerate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_on_one_device_are_out_while_patched(family: str) -> None:
    model = dispatch_model(tiny_model(family), {"": "cpu"}, force_hooks=True)
    with torch.inference_mode():
        before = model(IDS).logits
    state = forwards(model)
    assert sum(forward is not None for forward in state.values()) > 30
    patch(model, compile=False)
    assert [name for name, forward in forwards(model).items() if forward is not None] == [""]
    with torch.inference_mode():
        torch.testing.assert_close(model(IDS).logits, before)
    unpatch(model)
    assert forwards(model) == state


def test_a_forward_below_a_hook_stays() -> None:
    model = tiny_model("smollm3")
    mlp = model.model.layers[1].mlp
    mlp.forward = own = lambda x: 2 * x
    patch(dispatch_model(model, {"": "cpu"}, force_hooks=True), compile=False)
    assert mlp.__dict__["forward"] is own


def test_hooks_are_back_after_a_refusal() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = dispatch_model(tiny_model("llama", rope_parameters=rope), {"": "cpu"}, force_hooks=True)
    state = forwards(model)
    with pytest.raises(UnsupportedModelError, match="rope type"):
        patch(model)
    assert forwards(model) == state


def test_a_hook_that_does_something_is_refused() -> None:
    model = tiny_model("llama")
    add_hook_to_module(model.model.layers[1].mlp, ModelHook())
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp has a ModelHook"):
        patch(model)


def _on_disk(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    model.save_pretrained(folder / "model")
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{index}": "disk" if index else "cpu" for index in range(3)}
    return AutoModelForCausalLM.from_pretrained(folder / "model", device_map=places, offload_folder=folder / "weights")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "offload",
    [
        lambda model, folder: cpu_offload(model, torch.device("cpu")),
        lambda model, folder: disk_offload(model, str(folder), torch.device("cpu")),
        _on_disk,
    ],
    ids=["cpu", "disk", "device map"],
)
def test_offloaded_weights_are_refused(family: str, offload: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match="off their device; all must be on one device: load it with device_map="
    ):
        patch(offload(tiny_model(family), tmp_path))


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}], ids=str)
def test_a_device_map_of_one_device_is_taken(device_map: Any, tmp_path: Path) -> None:
    tiny_model("smollm3").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    patch(model, compile=False)


# --- the state of a model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_without_values_are_refused(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match="on the device 'meta'"):
        patch(tiny_model(family).to("meta"))
    model = tiny_model(family)
    model.model.layers[1].mlp.to("meta")
    with pytest.raises(UnsupportedModelError, match="on the device 'meta'"):
        patch(model)


def test_a_part_in_training_mode_is_refused_by_name() -> None:
    model = tiny_model("smollm3")
    model.model.layers[1].self_attn.train()
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn is in training mode"):
        patch(model)


def test_a_resized_embedding_needs_no_eval() -> None:
    model = tiny_model("smollm3")
    model.resize_token_embeddings(173)
    assert patch(model, compile=False).omniserve.spec.vocab_size == 173

"""Adapters as files, and in the stacks of a model: what is refused, and what is left of one that was there before."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from omniserve import patch, unpatch
from omniserve.core.config import LoRAConfig
from omniserve.core.lora import LoRAError
from omniserve.layers.patched_model import PatchedModel
from omniserve.layers.patching import patched_model
from omniserve.layers.weights.lora_files import read_lora
from tests.parity.models import tiny_model

LORA = LoRAConfig(max_loras=2, max_lora_rank=6)


def save(folder: Path, model: PreTrainedModel, *names: str, rank: int = 4, seed: int = 0, **settings: Any) -> Path:
    """Write an adapter of the linears with these last names, as PEFT does."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in (names or ("q_proj", "down_proj")) and isinstance(module, nn.Linear):
            for letter, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                key = f"base_model.model.{path}.lora_{letter}.weight"
                tensors[key] = torch.randn(shape, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, **settings})
    )
    return folder


def logits(patched: PatchedModel, slots: list[int]) -> Tensor:
    """Return the logits of a token in each row, whose attention is its own value."""

    def attend(layer: int, hidden: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).flatten(1).contiguous()

    with torch.inference_mode():
        ids, positions = torch.full((len(slots),), 5), torch.zeros(len(slots), dtype=torch.int64)
        hidden = patched.embed(ids, positions, torch.tensor(slots))
        return patched.logits(patched.run_layers(patched.layers, hidden, repeat(patched.rotary(positions)), attend))


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama")


def test_rows_have_the_adapter_of_their_slot_whatever_is_beside_them(model: PreTrainedModel, tmp_path: Path) -> None:
    patched = patched_model(model, compile=False, lora=LORA)
    alone = logits(patched, [0] * 6)[0]
    for slot in (1, 2):
        patched.lora.load(slot, read_lora(save(tmp_path / str(slot), model, seed=slot)))
    rows = logits(patched, [0, 1, 2, 1, 0, 7])
    assert torch.equal(rows[0], alone) and torch.equal(rows[4], alone) and torch.equal(rows[5], alone)
    assert torch.equal(rows[1], rows[3]) and torch.equal(rows[1], logits(patched, [1] * 6)[0])
    assert not torch.allclose(rows[1], rows[2]) and not torch.allclose(rows[1], alone)


def test_nothing_is_left_of_an_adapter_that_was_in_the_slot(model: PreTrainedModel, tmp_path: Path) -> None:
    """The next one has a lower rank, and adapts fewer linears."""
    patched = patched_model(model, compile=False, lora=LORA)
    other = read_lora(save(tmp_path / "other", model, "v_proj", rank=2))
    patched.lora.load(1, other)
    expected = logits(patched, [1])
    patched.lora.load(1, read_lora(save(tmp_path / "one", model, "q_proj", "v_proj", "up_proj", rank=6, seed=3)))
    assert not torch.equal(logits(patched, [1]), expected)
    patched.lora.load(1, other)
    assert torch.equal(logits(patched, [1]), expected)


@pytest.mark.parametrize("prepack", ["auto", False])
def test_unpatch_restores_the_model(model: PreTrainedModel, prepack: Any) -> None:
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    patched_model(model, compile=False, prepack=prepack, lora=LORA)
    assert [type(module) for module in model.modules()] != classes
    unpatch(model)
    assert [type(module) for module in model.modules()] == classes
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert not any(name.startswith("lora_") for module in model.modules() for name in vars(module))


def test_a_patched_model_has_the_slots_that_it_was_patched_with(model: PreTrainedModel) -> None:
    patch(model, compile=False)
    assert patched_model(model, compile=False, lora=LoRAConfig()).lora is None
    with pytest.raises(ValueError, match="unpatch"):
        patched_model(model, compile=False, lora=LORA)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "LOHA"}, "the type LOHA"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "experts"),
        ({"alora_invocation_tokens": [1]}, "aLoRA"),
        ({"trainable_token_indices": [1]}, "embedding"),
        ({"init_lora_weights": "pissa_niter_16"}, "changed base weight"),
        ({"lora_alpha": "much"}, "lora_alpha must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number"),
    ],
)
def test_what_is_more_than_lora_is_refused_by_name(
    model: PreTrainedModel, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(LoRAError, match=message):
        read_lora(save(tmp_path / "x", model, **settings))


def changed(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_files_that_do_not_fit_are_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    folder = save(tmp_path / "x", model, "q_proj")
    path = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    good = load_file(folder / "adapter_model.safetensors")

    def refused(message: str, change: Callable[[dict[str, Tensor]], Any]) -> None:
        save_file(good, folder / "adapter_model.safetensors")
        with pytest.raises(LoRAError, match=message):
            patched.lora.check(read_lora(changed(folder, change)))

    patched = patched_model(model, compile=False, lora=LORA)
    refused("needs an A .* and a B", lambda tensors: tensors.pop(path))
    refused("not finite", lambda tensors: tensors[path].fill_(torch.inf))
    refused("no A or B of a linear", lambda tensors: tensors.update({"base_model.model.lm_head.weight": good[path]}))
    refused("no A or B of a linear", lambda tensors: tensors.update({f"{path[:-15]}.lora_embedding_A": good[path]}))
    refused("another model", lambda tensors: tensors.update({path: torch.zeros(4, 3)}))
    refused("must be a matrix of floats", lambda tensors: tensors.update({path: torch.zeros(4, 48).int()}))
    refused("layers.9.*these can: down_proj", lambda tensors: tensors.update(
        {name.replace("layers.0", "layers.9"): tensor.clone() for name, tensor in good.items()}
    ))  # fmt: skip
    high = save(tmp_path / "high", model, rank=9)
    with pytest.raises(LoRAError, match=r"rank 9.*set max_lora_rank"):
        patched.lora.check(read_lora(high))
    (folder / "adapter_model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(LoRAError, match="cannot be read"):
        read_lora(folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(LoRAError, match="only safetensors"):
        read_lora(folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(LoRAError, match="save_pretrained"):
        read_lora(folder)

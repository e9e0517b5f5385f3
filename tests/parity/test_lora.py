"""Adapters by name are exact in fp32: a request's tokens are those of PEFT's model with its adapter, on both tiers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from omniserve import unpatch
from omniserve.core.config import LoRAConfig
from omniserve.layers.patching import patched_model
from tests.parity.engine_histories import Reference, run_histories
from tests.parity.formats import of_codes
from tests.parity.models import tiny_model
from tests.quick import slow_except
from tests.rotation import rotating

peft = pytest.importorskip("peft")

KINDS: dict[str, dict[str, Any]] = {
    "small": {"r": 4, "lora_alpha": 8},
    "scaled": {"r": 7, "lora_alpha": 5, "use_rslora": True},
    "patterns": {"r": 3, "lora_alpha": 6, "rank_pattern": {r".*layers\.1\..*": 5}, "alpha_pattern": {"up_proj": 9}},
}
LORA = LoRAConfig(max_loras=2, max_lora_rank=8)
HOST = {"host_kv_bytes": 1 << 20, "max_host_requests": 16}
FAMILIES = ("llama", "gemma2", "opt", "gpt_neox", "qwen3_moe")


def saved(model: PreTrainedModel, folder: Path, *, seed: int = 1, **options: Any) -> PreTrainedModel:
    """Give a copy of a model a random adapter, which is saved; return the copy."""
    settings = peft.LoraConfig(task_type="CAUSAL_LM", **{"target_modules": "all-linear", **options})
    wrapped = peft.get_peft_model(copy.deepcopy(model), settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    wrapped.save_pretrained(folder)
    return wrapped.eval()


def with_adapters(model: PreTrainedModel, folder: Path, **options: Any) -> Reference:
    """Return the continuations of the model alone and of each kind of adapter, mostly of the same prompts."""
    reference = Reference(model, num_prompts=4)
    for seed, (name, kind) in enumerate(KINDS.items()):
        adapted = saved(model, folder / name, seed=seed, **{**kind, **options})
        other = Reference(adapted, num_prompts=4)
        assert other.tokens != reference.tokens[:4]
        reference.extend(other, name, folder / name)
    return reference


def is_exact(model: PreTrainedModel, reference: Reference, *, compile: bool = False, **settings: Any) -> None:
    patched_model(model, compile=compile, lora=LORA)
    rows = ({"faults": False, "async_steps": True}, {"faults": True, "async_steps": False})
    run_histories(
        model, reference, range(2), reach=("host_tokens", "piggyback_rows", "swaps_out", "loras_left"), rows=rows,
        has_profile=False, lora=LORA, compile=compile, **{**HOST, **settings},
    )  # fmt: skip
    unpatch(model)


@pytest.fixture(scope="module")
def make_adapted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[PreTrainedModel, Reference]]:
    """Return a family's model, which is not patched, and the continuations by its adapters: both are made once."""

    @functools.cache
    def make(family: str) -> tuple[PreTrainedModel, Reference]:
        model = tiny_model(family)
        # Adapters of experts are refused, and PEFT takes these for linears.
        options = {"target_modules": ["q_proj", "k_proj", "o_proj"]} if family == "qwen3_moe" else {}
        return model, with_adapters(model, tmp_path_factory.mktemp(family), **options)

    return make


@pytest.mark.parametrize("family", slow_except(("llama", "gpt_neox"), FAMILIES))
def test_requests_of_several_adapters_on_both_tiers(family: str, make_adapted: Any) -> None:
    """There are more adapters than slots, so that they take turns; the cache of prefixes keeps them apart."""
    is_exact(*make_adapted(family), kv="tiered")


@pytest.mark.parametrize("scheduler", rotating(("neo", "bros", "llumnix", "apex", "conserve"), 1))
def test_other_policies(scheduler: str, make_adapted: Any) -> None:
    """Sub-batches embed rows themselves; rows that leave a step between layers come back with their adapter."""
    model, reference = make_adapted("llama")
    patched_model(model, compile=False, lora=LORA)
    run_histories(model, reference, range(2), reach=("loras_left",), scheduler=scheduler, lora=LORA, **HOST)
    unpatch(model)


def test_compiled_halves_and_constant_shapes(make_adapted: Any) -> None:
    is_exact(*make_adapted("llama"), compile=True, kv="tiered", step_graphs="on")


def test_weights_of_codes_below_adapters(tmp_path: Path) -> None:
    model = of_codes(tiny_model("llama"))
    is_exact(model, with_adapters(model, tmp_path, target_modules=["q_proj", "v_proj", "down_proj"]), kv="tiered")

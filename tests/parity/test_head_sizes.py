"""Heads of real and of odd sizes: exact on both tiers, or refused as the model is patched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig, PreTrainedModel

from omniserve import UnsupportedModelError, patch
from omniserve.core.spec import HEAD_SIZE_STEP, MAX_HEAD_SIZE
from omniserve.layers.tracing import family_of
from tests.parity.engine_histories import Reference, run_histories
from tests.parity.models import tiny_model
from tests.parity.zoo import try_type
from tests.quick import slow_except
from tests.rotation import chosen_of


def gemma4(**fields: Any) -> PreTrainedModel:
    """Build a Gemma 4 with the head sizes of its defaults: 256 in sliding layers, 512 in others."""
    config = Gemma4TextConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=256,
        global_head_dim=512, layer_types=["sliding_attention", "full_attention"], hidden_size_per_layer_input=0,
        vocab_size=4096, intermediate_size=64, num_kv_shared_layers=0, tie_word_embeddings=False, **fields,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.6 * parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def check_histories(model: PreTrainedModel) -> None:
    reference = Reference(model, num_prompts=4, max_tokens=8)
    patch(model, compile=False)
    run_histories(model, reference, range(1), reach=("finished", "host_tokens"), faults=lambda seed: seed % 2 == 1)


@pytest.mark.parametrize("head_size", slow_except((512, *chosen_of((4, 20, 80), 1)), (4, 12, 20, 80, 192, 320, 512)))
def test_heads_of_any_size_are_exact(head_size: int) -> None:
    model = tiny_model("llama", head_dim=head_size)
    kept = family_of(model).spec().head_size
    assert 0 <= kept - head_size < HEAD_SIZE_STEP and kept % HEAD_SIZE_STEP == 0
    check_histories(model)


def test_layers_whose_heads_differ_in_size_are_exact() -> None:
    model = gemma4()
    spec = family_of(model).spec()
    assert spec.head_size == 512 and spec.attention[0].window and not spec.attention[1].window
    check_histories(model)


@pytest.mark.parametrize(
    "model", [lambda: tiny_model("llama", head_dim=516), lambda: tiny_model("llama", head_dim=1024)]
)
def test_larger_heads_are_refused_as_the_model_is_patched(model: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"has heads of .* elements; .* up to {MAX_HEAD_SIZE}"):
        patch(model(), compile=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [
        "deepseek_v3", "exaone4", "falcon", "gemma3_text", "gemma4", "gemma4_text", "glm4_moe_lite", "gpt2", "gpt_oss",
        "gptj", "phi3", "qwen3_next",
    ],
)  # fmt: skip
def test_types_are_exact_with_their_own_sizes(model_type: str) -> None:
    outcome = try_type(model_type, 2, own_sizes=True)
    assert outcome.result == "exact", outcome.detail

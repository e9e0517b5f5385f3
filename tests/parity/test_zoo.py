"""The zoo says of each type what it is; types that people use stay exact."""

from __future__ import annotations

import pytest
from transformers import AutoModelForImageTextToText

from omniserve.layers.tracing import family_of
from tests.parity.zoo import Outcome, page, tiny, try_type

USED = (
    "bloom", "cohere2", "deepseek_v3", "ernie4_5", "exaone4", "falcon", "gemma3_text", "gemma3n_text", "gemma4",
    "gemma4_text", "glm4", "glm4_moe", "gpt2", "gpt_neo", "gpt_oss", "gptj", "granite", "llama4", "mpt", "olmo2",
    "olmo3", "phi", "qwen2_moe", "seed_oss", "smollm3", "starcoder2",
    "granitemoehybrid", "kimi_linear", "lfm2", "minimax", "qwen3_5_text", "qwen3_next",
)  # fmt: skip


# An indexer that picks keys, of its own or of an earlier layer; positions that count from the padding token's number.
UNUSUAL = ("glm_moe_dsa", "roberta")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", (*USED, *UNUSUAL))
def test_types_that_people_use_are_exact(model_type: str) -> None:
    outcome = try_type(model_type, num_histories=2)
    assert outcome.result == "exact", outcome.detail


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma4_unified", "llava", "qwen2_5_vl", "qwen3_vl"])
def test_the_language_model_of_a_model_with_an_encoder_of_images_is_exact(model_type: str) -> None:
    outcome = try_type(model_type, 2, AutoModelForImageTextToText)
    assert outcome.result == "exact", outcome.detail


@pytest.mark.parametrize(
    ("model_type", "longest", "why"),
    [
        ("deepseek_v32", 96, "it picks keys among more than index_topk"),
        ("phi3", 96, "longrope's other frequencies for longer ones"),
        ("roberta", 511, "its number of positions"),
    ],
)
def test_a_model_is_served_up_to_the_length_at_which_it_is_exact(model_type: str, longest: int, why: str) -> None:
    family = family_of(tiny(model_type))
    assert family.spec().max_model_len == longest
    with pytest.raises(ValueError, match=rf"in \[1, {longest}\] for this model \({why}\), got {longest + 1}"):
        family.spec(longest + 1)


def test_a_type_that_is_refused_is_listed_with_the_reason() -> None:
    outcome = try_type("doge", num_histories=1)
    assert (outcome.result, outcome.detail) == (
        "refused", "gives the attention of layer 0 'attention_mask', which no kernel here has",
    )  # fmt: skip
    image_text = [Outcome("llava", "exact", ""), Outcome("blip", "no model", "other arguments")]
    text = page([outcome, Outcome("olmo2", "exact", ""), Outcome("blt", "no model", "too large")], image_text)
    assert "*Exact*:\n\n`llava`" in text and "| `blip` | no model: other arguments |" in text
    assert "| `doge` | gives the attention of layer 0 'attention_mask'" in text
    assert "## Exact (1)\n\n`olmo2`" in text and "| `blt` | no model: too large |" in text

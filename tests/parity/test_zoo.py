"""The zoo says of each type what it is; types that people use stay exact."""

from __future__ import annotations

import pytest

from tests.parity.zoo import Outcome, page, try_type

USED = (
    "cohere2", "deepseek_v3", "ernie4_5", "exaone4", "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "glm4",
    "glm4_moe", "gpt2", "granite", "olmo2", "olmo3", "phi", "qwen2_moe", "seed_oss", "smollm3", "starcoder2",
)  # fmt: skip


# Positions that count from the padding token's number.
UNUSUAL = ("roberta",)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", (*USED, *UNUSUAL))
def test_types_that_people_use_are_exact(model_type: str) -> None:
    outcome = try_type(model_type, num_histories=2)
    assert outcome.result == "exact", outcome.detail


def test_a_type_that_is_refused_is_listed_with_the_reason() -> None:
    outcome = try_type("gpt_oss", num_histories=1)
    assert (outcome.result, outcome.detail) == (
        "refused", "gives the attention of layer 0 's_aux', which no kernel here has",
    )  # fmt: skip
    text = page([outcome, Outcome("olmo2", "exact", ""), Outcome("blt", "no model", "too large")])
    assert "| `gpt_oss` | gives the attention of layer 0 's_aux'" in text
    assert "## Exact (1)\n\n`olmo2`" in text and "| `blt` | no model: too large |" in text

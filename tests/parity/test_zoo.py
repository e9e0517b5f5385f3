"""The zoo says of each type what it is; types that people use stay exact."""

from __future__ import annotations

import pytest

from tests.parity.zoo import Outcome, page, try_type

USED = (
    "bloom", "cohere2", "deepseek_v3", "ernie4_5", "exaone4", "falcon", "gemma3_text", "glm4", "glm4_moe", "gpt2",
    "gpt_neo", "gpt_oss", "gptj", "granite", "llama4", "mpt", "olmo2", "olmo3", "phi", "qwen2_moe", "seed_oss",
    "smollm3", "starcoder2",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model_type", USED)
def test_types_that_people_use_are_exact(model_type: str) -> None:
    outcome = try_type(model_type, num_histories=2)
    assert outcome.result == "exact", outcome.detail


def test_a_type_that_is_refused_is_listed_with_the_reason() -> None:
    outcome = try_type("diffllama", num_histories=1)
    assert (outcome.result, outcome.detail) == (
        "refused", "attends 2 times in model.layers.0; each layer must attend once, and nothing else",
    )  # fmt: skip
    text = page([outcome, Outcome("olmo2", "exact", ""), Outcome("blt", "no model", "too large")])
    assert "| `diffllama` | attends 2 times in model.layers.0" in text
    assert "## Exact (1)\n\n`olmo2`" in text and "| `blt` | no model: too large |" in text

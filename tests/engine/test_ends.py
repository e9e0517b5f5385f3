"""The ends of a model: each id that the tokenizer, the config or the generation config names ends an output."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omniserve import Engine, FinishReason, Request, SamplingParams
from omniserve.core.spec import eos_token_ids
from tests.engine_settings import flat_config
from tests.parity.models import tiny_model
from tests.server.tokenizers_for_tests import byte_level_tokenizer

PROMPT = (1, 2, 3, 4, 5)


def continuation(model: Any, count: int = 24, **options: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **options
    )  # fmt: skip
    return out[0, len(PROMPT) :].tolist()


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    return continuation(model)


@pytest.mark.parametrize(
    ("named_by", "service_class"), [("tokenizer", "LS"), ("config", "BE"), ("generation config", "LS"), ("list", "BE")]
)
def test_each_source_of_ends_counts_beside_the_others(tokens: list[int], named_by: str, service_class: str) -> None:
    end = next(token for i, token in enumerate(tokens) if i > 5 and token not in tokens[:i])
    never = next(token for token in range(3, 99) if token not in tokens)
    ends = dict.fromkeys(("tokenizer", "config", "generation config"), never) | {named_by: end}
    model = tiny_model("llama", eos_token_id=ends["config"])
    in_generation_config = [never, end] if named_by == "list" else ends["generation config"]
    model.generation_config.eos_token_id = in_generation_config
    want = tokens[: tokens.index(end) + 1]
    if named_by in ("generation config", "list"):
        assert continuation(model) == want, "Hugging Face's own generate ends there"
    engine = Engine(
        model, flat_config({"block_size": 8, "compile": False, "device_kv_bytes": 1 << 20, "host_kv_bytes": 1 << 20}),
        tokenizer=_WithEnd(ends["tokenizer"]),  # type: ignore[arg-type]
    )  # fmt: skip
    try:
        sampling = SamplingParams(max_tokens=24)
        more = SamplingParams(max_tokens=24, ignore_eos=True)
        asked = [
            Request(prompt_token_ids=PROMPT, sampling=each, service_class=service_class) for each in (sampling, more)
        ]
        ended, ignoring = engine.generate(asked)
    finally:
        engine.close()
    assert list(ended.token_ids) == want and ended.finish_reason is FinishReason.STOP
    assert list(ignoring.token_ids) == tokens and ignoring.finish_reason is FinishReason.LENGTH
    assert engine.spec.eos_token_ids == tuple(sorted({never, end}))


class _WithEnd:
    """A tokenizer of the tests with another end-of-sequence token."""

    def __init__(self, eos_token_id: int) -> None:
        self._tokenizer = byte_level_tokenizer()
        self.eos_token_id = eos_token_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_ids_come_from_numbers_lists_and_nothing_and_those_beyond_the_vocabulary_are_left_out() -> None:
    sources = [SimpleNamespace(eos_token_id=value) for value in (7, [3, 7, 100], None, (2,), -1)]
    assert eos_token_ids(100, *sources, None, object()) == (2, 3, 7)

"""The sampler on a GPU of fake tensors: it launches whatever parameters ask for, and waits for nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omniserve import SamplingParams
from omniserve.sampling.sampler import Sampler
from tests.fake_cuda.runtime import FakeRuntime
from tests.fake_cuda.watch import is_on_device

VOCAB_SIZE = 160
CUDA = torch.device("cuda")


class _Grammar:
    """A grammar that allows every token."""

    def allowed(self) -> bytes:
        return b"\xff" * (VOCAB_SIZE // 8)

    def accept(self, token_id: int) -> None:
        pass


# Rows of a batch; each is there twice, as filters treat a row alone and all rows in different ways.
PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 0.7, "top_k": 5},
    "top_p": {"temperature": 0.7, "top_p": 0.5},
    "min_p": {"temperature": 0.7, "min_p": 0.1},
    "all_filters": {"temperature": 0.7, "top_k": 5, "top_p": 0.5, "min_p": 0.1},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    "penalties_drawn": {"temperature": 0.7, "repetition_penalty": 1.2},
    "bias": {"logit_bias": ((3, 1.0), (5, -2.0))},
    "logprobs": {"logprobs": 3},
    "logprobs_drawn": {"temperature": 0.7, "logprobs": 0},
}


BATCHES = [*([name] for name in PARAMETERS), ["grammar"], list(PARAMETERS)]


@pytest.mark.parametrize("number", range(len(BATCHES)))
def test_sampling_waits_for_nothing(number: int, gpu: FakeRuntime) -> None:
    names, dtype = BATCHES[number], (torch.bfloat16, torch.float32)[number % 2]
    with gpu.never_waiting():
        sampler = Sampler(vocab_size=VOCAB_SIZE, device=CUDA, seed=0)
        ids = []
        for name in 2 * names:
            ids.append(f"{name}{len(ids)}")
            grammar: Any = _Grammar() if name == "grammar" else None
            sampler.add(ids[-1], SamplingParams(**PARAMETERS.get(name, {})), (1, 2, 3), grammar)
        pending = sampler.launch(torch.empty(len(ids), VOCAB_SIZE, dtype=dtype, device=CUDA), ids)
    assert is_on_device(pending.tokens_R) and pending.tokens_R.dtype is torch.int64
    assert tuple(pending.tokens_R.shape) == (len(ids),)
    tokens, failed = pending.result()  # one event is waited for
    assert set(tokens) == set(ids) and not failed
    told = {name: len(token.logprob.top) for name, (token,) in tokens.items() if token.logprob is not None}
    assert told == {name: 3 if "drawn" not in name else 0 for name in ids if name.startswith("logprobs")}
    assert gpu.launches["download"] == 1

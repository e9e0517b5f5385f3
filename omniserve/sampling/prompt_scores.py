"""Log-probabilities of a prompt's own tokens, from the rows of its chunks.

Legend: T rows of a step, R rows that are scored at a time, D hidden, V vocabulary, N likeliest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from omniserve.core.plan import PromptScores
from omniserve.core.request import TokenLogprob
from omniserve.ops.streams import AsyncHostCopy, upload
from omniserve.sampling.order import likeliest

# The most rows whose logits are held at a time, in float32: 80 MB with a vocabulary of 152,000.
_ROWS_AT_A_TIME = 128


def score_prompts(
    logits: Callable[[Tensor], Tensor], hidden_TD: Tensor, scores: Sequence[tuple[str, int, PromptScores]]
) -> tuple[dict[str, tuple[TokenLogprob, ...]], dict[str, str]]:
    """Return the log-probabilities of prompts by request, and error messages for requests with a NaN.

    Args:
        logits: Turns rows ``[R, D]`` into logits ``[R, V]``.
        hidden_TD: The step's rows after the last layer.
        scores: For each chunk its request, its first row in ``hidden_TD``, and the tokens that these rows predict.
    """
    told: dict[str, tuple[TokenLogprob, ...]] = {}
    failed: dict[str, str] = {}
    for request_id, first_row, wanted in scores:
        entries: list[TokenLogprob] = []
        for begin in range(0, len(wanted.token_ids), _ROWS_AT_A_TIME):
            token_ids = wanted.token_ids[begin : begin + _ROWS_AT_A_TIME]
            row = first_row + begin
            logits_RV = logits(hidden_TD[row : row + len(token_ids)])
            found = logprobs_of(logits_RV, upload(torch.tensor(token_ids), logits_RV.device), wanted.num_top)
            entries += told_logprobs(token_ids, *AsyncHostCopy(found).wait())
        if any(math.isnan(entry.logprob) for entry in entries):
            failed[request_id] = "the model returned non-finite logits for the prompt"
        else:
            told[request_id] = tuple(entries)
    return told, failed


def logprobs_of(logits_RV: Tensor, token_ids_R: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's log-probability of its token ``[R]``, its N likeliest tokens and theirs ``[R, N]``.

    ``num_top`` is N, but there are at most V; equal ones are in the order of ``sampling.order``. The host does not
    wait for the device.
    """
    logits_RV = logits_RV.float()
    logprobs_RV = logits_RV.log_softmax(dim=-1)
    top_ids_RN = likeliest(logits_RV, num_top)
    return logprobs_RV.gather(1, token_ids_R[:, None])[:, 0], top_ids_RN, logprobs_RV.gather(1, top_ids_RN)


def told_logprobs(
    token_ids: Sequence[int], values_R: Tensor, top_ids_RN: Tensor, top_values_RN: Tensor
) -> list[TokenLogprob]:
    """Return the result of ``logprobs_of`` for these tokens as Python objects."""
    rows = zip(token_ids, values_R.tolist(), top_ids_RN.tolist(), top_values_RN.tolist(), strict=True)
    return [
        TokenLogprob(token_id=token_id, logprob=value, top=tuple(zip(ids, top, strict=True)))
        for token_id, value, ids, top in rows
    ]

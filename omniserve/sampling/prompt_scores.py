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
from omniserve.ops.device_copies import AsyncHostCopy, upload

# Logits of so many rows are held at a time, in float32: 80 MB with a vocabulary of 152,000.
_ROWS_AT_A_TIME = 128


def score_prompts(
    logits: Callable[[Tensor], Tensor], hidden_TD: Tensor, scores: Sequence[tuple[str, int, PromptScores]]
) -> tuple[dict[str, tuple[TokenLogprob, ...]], dict[str, str]]:
    """Return the log-probabilities that were asked for.

    Args:
        logits: Turns rows ``[R, D]`` into logits ``[R, V]``.
        hidden_TD: The step's rows after the last layer.
        scores: Request, row of ``hidden_TD`` that comes first, and what to tell of it and the rows behind it.

    Returns:
        Log-probabilities by request, in the order of its tokens, and messages by request for those with a NaN.
    """
    told: dict[str, tuple[TokenLogprob, ...]] = {}
    failed: dict[str, str] = {}
    for request_id, first_row, wanted in scores:
        entries: list[TokenLogprob] = []
        for begin in range(0, len(wanted.token_ids), _ROWS_AT_A_TIME):
            token_ids = wanted.token_ids[begin : begin + _ROWS_AT_A_TIME]
            row = first_row + begin
            entries += token_logprobs(logits(hidden_TD[row : row + len(token_ids)]), token_ids, wanted.num_top)
        if any(math.isnan(entry.logprob) for entry in entries):
            failed[request_id] = "the model returned non-finite logits for the prompt"
        else:
            told[request_id] = tuple(entries)
    return told, failed


def token_logprobs(logits_RV: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Return the log-probability of one token a row, and the row's likeliest tokens.

    Args:
        logits_RV: Any floating dtype.
        token_ids: R of them.
        num_top: N, at most V.
    """
    found = logprobs_of(logits_RV, upload(torch.tensor(token_ids), logits_RV.device), num_top)
    return told_logprobs(token_ids, *AsyncHostCopy(found).wait())


def logprobs_of(logits_RV: Tensor, token_ids_R: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's log-probability of its token ``[R]``, its N likeliest tokens and theirs ``[R, N]``.

    Args:
        logits_RV: Any floating dtype.
        token_ids_R: int64, same device; the host does not wait for it.
        num_top: N, at most V.
    """
    logprobs_RV = logits_RV.float().log_softmax(dim=-1)
    top_RN = logprobs_RV.topk(min(num_top, logprobs_RV.shape[1]), dim=-1)
    return logprobs_RV.gather(1, token_ids_R[:, None])[:, 0], top_RN.indices, top_RN.values


def told_logprobs(
    token_ids: Sequence[int], values_R: Tensor, top_ids_RN: Tensor, top_values_RN: Tensor
) -> list[TokenLogprob]:
    """Return what ``logprobs_of`` found for these tokens, as it is told."""
    rows = zip(token_ids, values_R.tolist(), top_ids_RN.tolist(), top_values_RN.tolist(), strict=True)
    return [
        TokenLogprob(token_id=token_id, logprob=value, top=tuple(zip(ids, top, strict=True)))
        for token_id, value, ids, top in rows
    ]

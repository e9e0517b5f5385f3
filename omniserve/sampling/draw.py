"""From logits to tokens: temperature, top-k, top-p, min-p, and a draw by one number a row.

Legend: R rows of a step that sample, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from omniserve.core.request import SamplingParams
from omniserve.ops.streams import upload

# With a lower one quotients overflow float32, and all probabilities are nan. With this one sampling is greedy.
_MIN_TEMPERATURE = 1e-6
_CPU_ROWS = 4
"""Rows at a time on a CPU; they fit memory that the allocator keeps."""
_GPU_ROWS = 32
"""Rows at a time on other devices; with a vocabulary of 152,000 their sort takes about 200 MB."""


def draw(logits_RV: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> Tensor:
    """Return a token for each row, int64 ``[R]``, by the temperature and the filters of its parameters.

    A row's token is the one at which the cumulative sum of the kept probabilities, in the order of the tokens, passes
    the row's number, in [0, 1 - 2^-52], times their total. So it depends on the row's own logits, parameters and number
    alone, not on other rows, even where probabilities are equal. The host does not wait for a GPU.
    """
    numbers_R1 = upload(torch.tensor(numbers, dtype=torch.float64), logits_RV.device)[:, None]
    tokens: list[Tensor] = []
    rows_at_a_time = _CPU_ROWS if logits_RV.device.type == "cpu" else _GPU_ROWS
    for begin in range(0, len(params), rows_at_a_time):
        rows = slice(begin, begin + rows_at_a_time)
        reached_RV = kept_probs(logits_RV[rows], params[rows]).cumsum(dim=-1, dtype=torch.float64)
        # The first token that passes it has a probability above 0. With nan logits there may be none.
        found_R1 = torch.searchsorted(reached_RV, numbers_R1[rows] * reached_RV[:, -1:], right=True)
        tokens.append(found_R1[:, 0].clamp_(max=logits_RV.shape[1] - 1))
    return torch.cat(tokens)


def kept_probs(logits_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return each row's probabilities, 0 for tokens that a filter removes; float32 ``[R, V]``, not normalised again.

    Temperature comes first, then top-k, top-p and min-p, each on the tokens that the one before left (Hugging Face's
    order). Of tokens with equal probability top-k keeps all or none, and top-p the first ones.
    """
    settings = [(max(p.temperature, _MIN_TEMPERATURE), p.top_k, p.top_p, p.min_p) for p in params]
    settings_R4 = upload(torch.tensor(settings, dtype=torch.float64), logits_RV.device)
    temperature_R1, top_k_R1, top_p_R1, min_p_R1 = settings_R4.split(1, dim=1)
    logits_RV = logits_RV.float() / temperature_R1.float()
    vocab_size = logits_RV.shape[1]
    rows = [row for row, p in enumerate(params) if 0 < p.top_k < vocab_size]
    if rows:
        most = max(params[row].top_k for row in rows)
        logits_RV = _change(logits_RV, rows, lambda some, own: _top_k(some, own(top_k_R1), most))
    probs_RV = logits_RV.softmax(dim=-1)
    rows = [row for row, p in enumerate(params) if p.top_p < 1.0]
    if rows:
        probs_RV = _change(probs_RV, rows, lambda some, own: _top_p(some, own(top_p_R1)))
    rows = [row for row, p in enumerate(params) if p.min_p > 0.0]
    if rows:
        probs_RV = _change(probs_RV, rows, lambda some, own: _min_p(some, own(min_p_R1)))
    return probs_RV


def _change(
    values_RV: Tensor, rows: Sequence[int], change: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]
) -> Tensor:
    """Return values with some rows changed; ``values_RV`` may be overwritten.

    ``change`` gets the values of these rows, and a function that selects the same rows of another tensor.
    """
    if len(rows) == len(values_RV):
        return change(values_RV, lambda own: own)
    index = upload(torch.tensor(rows), values_RV.device)
    return values_RV.index_copy_(0, index, change(values_RV[index], lambda own: own[index]))


def _top_k(logits_RV: Tensor, top_k_R1: Tensor, most: int) -> Tensor:
    kth_R1 = logits_RV.topk(most).values.gather(1, top_k_R1.long() - 1)
    return logits_RV.masked_fill(logits_RV < kth_R1, -math.inf)


def _top_p(probs_RV: Tensor, top_p_R1: Tensor) -> Tensor:
    """Keep the likeliest tokens until their sum reaches top-p (float64), and at least one; ``probs_RV`` add up to 1."""
    sorted_RC, num_needed_R1 = _likeliest(probs_RV, top_p_R1)
    before_RC = (
        sorted_RC.cumsum(dim=-1, dtype=torch.float64) - sorted_RC
    )  # sums in float32 depend on the number of rows
    is_kept_RC = before_RC < top_p_R1
    if num_needed_R1 is not None:
        is_kept_RC &= torch.arange(sorted_RC.shape[1]) < num_needed_R1
    is_kept_RC[:, :1].fill_(True)  # even if top-p is almost 0; an assignment would wait for a GPU
    last_R1 = sorted_RC.gather(1, is_kept_RC.sum(dim=1, keepdim=True) - 1)
    num_equal_R1 = (is_kept_RC & (sorted_RC == last_R1)).sum(dim=1, keepdim=True)
    is_equal_RV = probs_RV == last_R1
    is_kept_RV = is_equal_RV & (is_equal_RV.cumsum(dim=1, dtype=torch.int32) <= num_equal_R1)
    return probs_RV.masked_fill((is_kept_RV | (probs_RV > last_R1)).logical_not_(), 0.0)


def _likeliest(probs_RV: Tensor, top_p_R1: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return enough of the largest probabilities for top-p, in descending order, and how many each row needs."""
    if probs_RV.device.type != "cpu":  # the host would have to wait for the number
        return probs_RV.sort(dim=-1, descending=True).values, None
    # The sum of all lower probabilities is less than top-p leaves out, even if float32 has a tenth of that wrong.
    enough_R1 = (0.9 * (1.0 - top_p_R1) / probs_RV.shape[1]).float()
    num_needed_R1 = (probs_RV >= enough_R1).sum(dim=1, keepdim=True)
    return probs_RV.topk(max(1, int(num_needed_R1.max()))).values, num_needed_R1


def _min_p(probs_RV: Tensor, min_p_R1: Tensor) -> Tensor:
    return probs_RV.masked_fill(probs_RV < min_p_R1.float() * probs_RV.amax(dim=-1, keepdim=True), 0.0)

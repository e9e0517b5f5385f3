"""The steps that turn logits into tokens: temperature, top-k, top-p, min-p, and a draw by one number a row.

Legend: R rows of a step that sample, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from omniserve.core.request import SamplingParams
from omniserve.ops.streams import upload
from omniserve.sampling.order import first_tokens

_GREEDY_BELOW = 1e-5
"""A lower temperature is greedy: quotients would overflow float32, and all probabilities be nan."""
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


def is_greedy(params: SamplingParams) -> bool:
    """Tell whether the first token (``sampling.order``) is all that the parameters leave, whatever the logits."""
    return params.temperature < _GREEDY_BELOW or params.top_k == 1 or params.min_p == 1.0


def kept_probs(logits_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return each row's probabilities, 0 for tokens that a filter removes; float32 ``[R, V]``, not normalised again.

    Temperature comes first, then top-k, top-p and min-p, each on the tokens that the one before left (Hugging Face's
    order). Of equal tokens, top-k and top-p keep as many as they need, the first ones (``sampling.order``); min-p keeps
    all or none, but a single one where it is 1.
    """
    settings = [(max(p.temperature, _GREEDY_BELOW), 1 if is_greedy(p) else p.top_k, p.top_p, p.min_p) for p in params]
    settings_R4 = upload(torch.tensor(settings, dtype=torch.float64), logits_RV.device)
    temperature_R1, top_k_R1, top_p_R1, min_p_R1 = settings_R4.split(1, dim=1)
    rows = [row for row, (_, top_k, _, _) in enumerate(settings) if 0 < top_k < logits_RV.shape[1]]
    logits_RV = logits_RV.to(torch.float32, copy=bool(rows))
    if rows:
        most = int(max(settings[row][1] for row in rows))
        logits_RV = _change(logits_RV, rows, lambda some, own: _top_k(some, own(top_k_R1), most))
    probs_RV = (logits_RV / temperature_R1.float()).softmax(dim=-1)
    rows = [row for row, p in enumerate(params) if p.top_p < 1.0]
    if rows:
        probs_RV = _change(probs_RV, rows, lambda some, own: _top_p(some, own(logits_RV), own(top_p_R1)))
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
    is_kept_RV = first_tokens(logits_RV, logits_RV.topk(most).values, top_k_R1.long())
    return logits_RV.masked_fill(is_kept_RV.logical_not_(), -math.inf)


def _top_p(probs_RV: Tensor, logits_RV: Tensor, top_p_R1: Tensor) -> Tensor:
    """Keep the likeliest tokens until their sum reaches top-p (float64), and at least one; ``probs_RV`` add up to 1."""
    (sorted_RC, ids_RC), num_needed_R1 = _likeliest(probs_RV, logits_RV, top_p_R1)
    # Sums in float32 depend on the number of rows.
    sorted_probs_RC = probs_RV.gather(1, ids_RC)
    before_RC = sorted_probs_RC.cumsum(dim=-1, dtype=torch.float64) - sorted_probs_RC
    is_kept_RC = before_RC < top_p_R1
    if num_needed_R1 is not None:
        is_kept_RC &= torch.arange(sorted_RC.shape[1]) < num_needed_R1
    num_kept_R1 = is_kept_RC.sum(dim=1, keepdim=True).clamp_(min=1)  # even if top-p is almost 0
    return probs_RV.masked_fill(first_tokens(logits_RV, sorted_RC, num_kept_R1).logical_not_(), 0.0)


def _likeliest(probs_RV: Tensor, logits_RV: Tensor, top_p_R1: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """Return enough of the largest logits for top-p, in descending order, with their ids, and how many each row needs.

    Which of the ids of equal ones is where depends on the device; their probabilities are the same.
    """
    if probs_RV.device.type != "cpu":  # the host would have to wait for the number
        values_RV, ids_RV = logits_RV.sort(dim=-1, descending=True)
        return (values_RV, ids_RV), None
    # The sum of all lower probabilities is less than top-p leaves out, even if float32 has a tenth of that wrong.
    enough_R1 = (0.9 * (1.0 - top_p_R1) / probs_RV.shape[1]).float()
    num_needed_R1 = (probs_RV >= enough_R1).sum(dim=1, keepdim=True)
    values_RC, ids_RC = logits_RV.topk(max(1, int(num_needed_R1.max())))
    return (values_RC, ids_RC), num_needed_R1


def _min_p(probs_RV: Tensor, min_p_R1: Tensor) -> Tensor:
    return probs_RV.masked_fill(probs_RV < min_p_R1.float() * probs_RV.amax(dim=-1, keepdim=True), 0.0)

"""The order of tokens, which says what sampling parameters mean at their edges: by logit, equal ones by their ids.

Greedy takes the first token, top-k the first k, top-p the first ones whose probabilities reach it: of equal tokens,
which bf16 has many of, as many as are wanted, the lowest ids first. So each of these ends in greedy as it gets
stricter. Logits are compared as they come, before a temperature, for quotients and probabilities may be equal where
logits are not. Nothing depends on how a device sorts equal values, on the dtype that the logits came in, or on other
rows.

Legend: R rows, V vocabulary, C candidates, N likeliest tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def first_tokens(logits_RV: Tensor, sorted_RC: Tensor, num_R1: Tensor) -> Tensor:
    """Return which tokens are the first ``num_R1`` of their row, bool ``[R, V]``.

    ``sorted_RC`` are at least as many of the row's largest logits, in descending order; the numbers are int64, >= 1.
    """
    last_R1 = sorted_RC.gather(1, num_R1 - 1)
    is_kept_RV = logits_RV >= last_R1
    if logits_RV.device.type == "cpu" and torch.equal(is_kept_RV.count_nonzero(dim=1), num_R1[:, 0]):
        return is_kept_RV  # nothing is equal across the border; on a GPU the host would have to wait to know
    is_equal_RV = logits_RV == last_R1
    num_equal_R1 = num_R1 - (sorted_RC > last_R1).sum(dim=1, keepdim=True)
    is_late_RV = is_equal_RV & (is_equal_RV.cumsum(dim=1, dtype=torch.int32) > num_equal_R1)
    return is_kept_RV & is_late_RV.logical_not_()


def likeliest(logits_RV: Tensor, num: int) -> Tensor:
    """Return the ids of the first ``num`` tokens of each row, in their order, int64 ``[R, N]``; at most V."""
    num_rows, vocab_size = logits_RV.shape
    num = min(num, vocab_size)
    if num == 0:
        return torch.empty(num_rows, 0, dtype=torch.int64, device=logits_RV.device)
    num_R1 = torch.full((num_rows, 1), num, device=logits_RV.device)
    is_first_RV = first_tokens(logits_RV, logits_RV.topk(num, dim=1).values, num_R1)
    ids_V = torch.arange(vocab_size, device=logits_RV.device)
    # Ids differ, so their order is one; with nan logits there may be too few.
    ids_RN = torch.where(is_first_RV, ids_V, vocab_size).topk(num, dim=1, largest=False, sorted=True).values
    ids_RN = ids_RN.clamp(max=vocab_size - 1)
    order_RN = logits_RV.gather(1, ids_RN).sort(dim=1, descending=True, stable=True).indices
    return ids_RN.gather(1, order_RN)

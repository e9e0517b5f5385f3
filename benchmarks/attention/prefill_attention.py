"""Prefill attention of the CPU device tier beside torch's SDPA, which needs the paged cache gathered first.

Legend: T query tokens, C tokens that they see, N query heads, K KV heads, H head size, B blocks, S block size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.attention.decode_attention import BLOCK_SIZE, reference, rms_error
from benchmarks.attention.decode_rows import HEADS
from benchmarks.attention.sizes import Size
from benchmarks.common.bandwidth import ReadLimit
from benchmarks.common.timing import OtherLoad, median_ratio
from omniserve.ops.attention.base import gather_keys

OURS = "ours"


class Prefill:
    """A chunk of one request behind its context, causal: ours reads the paged cache, SDPA a contiguous copy.

    SDPA has two ways for fewer KV heads than query heads (``enable_gqa``, or K and V expanded, which is not timed), and
    two for where its K and V come from: gathered beforehand, or in the time that is taken.
    """

    def __init__(self, model: str, chunk: int, context: int, seed: int) -> None:
        num_heads, kv_heads, head_size = HEADS[model]
        seq_len = chunk + context
        num_blocks = -(-seq_len // BLOCK_SIZE)
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).bfloat16()

        # [B, K, S, H] each, twice the blocks that the request has, so that its own lie scattered.
        self._caches = [normal(2 * num_blocks, kv_heads, BLOCK_SIZE, head_size) for _ in "kv"]
        self._table = torch.randperm(2 * num_blocks, generator=generator)[None, :num_blocks].int()
        self._q_TNH = normal(chunk, num_heads, head_size)
        self._starts = torch.tensor([0, chunk], dtype=torch.int32)
        self._seq_len, self._lens = seq_len, torch.tensor([seq_len], dtype=torch.int32)
        self._scale = head_size**-0.5
        self._causal = context == 0  # SDPA has no causal flag for queries that end with the keys, so: a mask
        self._mask_TC = torch.ones(chunk, seq_len, dtype=torch.bool).tril(context)
        self.flop = 4 * num_heads * head_size * int(self._mask_TC.sum())
        """A multiplication and an addition for q.k and for p.v, of the pairs that are not masked."""
        self._gathered = self._gather()
        self._expanded = [kv.repeat_interleave(num_heads // kv_heads, dim=1) for kv in self._gathered]

    def _gather(self) -> list[torch.Tensor]:
        """Return contiguous K and V, ``[1, K, C, H]``."""
        rows = (gather_keys(cache, self._table[0], 0, self._seq_len) for cache in self._caches)
        return [rows_CKH.transpose(0, 1)[None].contiguous() for rows_CKH in rows]

    def _ours(self) -> torch.Tensor:
        return torch.ops.omniserve.paged_attention(
            self._q_TNH, *self._caches, self._table, self._starts, self._lens, self._scale, 0, 0.0
        )

    def _sdpa(self, k: torch.Tensor, v: torch.Tensor, *, grouped: bool) -> torch.Tensor:
        mask = None if self._causal else self._mask_TC
        q_1NTH = self._q_TNH.transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(
            q_1NTH, k, v, attn_mask=mask, is_causal=self._causal, scale=self._scale, enable_gqa=grouped
        )
        return out[0].transpose(0, 1)

    def calls(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Return the ways to do it, each giving ``[T, N, H]``."""
        return {
            OURS: self._ours,
            "SDPA": lambda: self._sdpa(*self._gathered, grouped=True),
            "SDPA expanded": lambda: self._sdpa(*self._expanded, grouped=False),
            "gather + SDPA": lambda: self._sdpa(*self._gather(), grouped=True),
        }

    def error(self, name: str, out_TNH: torch.Tensor) -> float:
        """Return the RMS error of the chunk's last token."""
        k_CKH, v_CKH = (kv[0].transpose(0, 1) for kv in self._gathered)
        return rms_error(out_TNH[-1], reference(self._q_TNH[-1], k_CKH, v_CKH, self._scale), name)


def measure_prefill(limit: ReadLimit, teams: Sequence[int], size: Size, seed: int) -> dict[str, Any]:
    """Return, by shape and number of threads, each way's seconds, GFLOP/s and speed relative to ours.

    Each shape with each team takes ``size.seconds``, or as long as ``size.repeats`` take.
    """
    results: dict[str, Any] = {}
    for model, chunk, context in size.prefill:
        prefill = Prefill(model, chunk, context, seed)
        calls = prefill.calls()
        for threads in teams:
            limit.use_threads(threads)
            errors = {name: prefill.error(name, call()) for name, call in calls.items()}
            times: dict[str, list[float]] = {name: [] for name in calls}
            began_s, others = time.perf_counter(), OtherLoad()
            while len(times[OURS]) < size.repeats or time.perf_counter() - began_s < size.seconds:
                for name in limit.rng.sample(list(calls), len(calls)):
                    called_s = time.perf_counter()
                    calls[name]()
                    times[name].append(time.perf_counter() - called_s)
            results[f"{model}/{chunk} after {context}/{threads} thread{'s' if threads > 1 else ''}"] = {
                "others_busy_cores": others.cores(), "flop": prefill.flop,
                "candidates": {
                    name: {
                        "gflop_per_s": prefill.flop / statistics.median(times[name]) / 1e9,
                        "speed_of_ours": median_ratio(times[name], times[OURS]), "error": errors[name],
                        "times_s": times[name],
                    }
                    for name in calls
                },
            }  # fmt: skip
    return results

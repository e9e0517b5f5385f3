"""Prefill attention of the CPU device tier beside torch's SDPA, which needs the paged cache gathered first.

Legend: T query tokens, C tokens that they see, N query heads, K KV heads, H head size, B blocks, S block size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.attention.decode_rows import HEADS
from benchmarks.attention.read_limit import ReadLimit
from benchmarks.common.other_load import OtherLoad
from omniserve.ops.attention import gather_keys

OURS = "ours"


@dataclass(frozen=True, kw_only=True)
class PrefillSettings:
    """What is measured, and for how long."""

    shapes: tuple[tuple[str, int, int], ...]
    """(model in HEADS, tokens of the chunk, tokens of the context before it)."""
    threads: tuple[int, ...]
    block_size: int
    dtype: torch.dtype
    seconds: float
    """Of one shape with one number of threads."""
    repeats: int
    """At least so many, even if they take longer."""
    seed: int


class Prefill:
    """One request's chunk behind its context, causal: ours reads the paged cache, SDPA a contiguous copy.

    SDPA has two ways for fewer KV heads than query heads (``enable_gqa``, or K and V expanded, which is not timed), and
    two for where its K and V come from: gathered beforehand, or in the time that is taken.
    """

    def __init__(self, model: str, chunk: int, context: int, block_size: int, dtype: torch.dtype, seed: int) -> None:
        num_heads, kv_heads, head_size = HEADS[model]
        seq_len = chunk + context
        num_blocks = -(-seq_len // block_size)
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        # [B, K, S, H] each, twice the blocks that the request has, so that its own lie scattered.
        self._caches = [normal(2 * num_blocks, kv_heads, block_size, head_size) for _ in "kv"]
        self._table = torch.randperm(2 * num_blocks, generator=generator)[None, :num_blocks].int()
        self._q_TNH = normal(chunk, num_heads, head_size)
        self._starts = torch.tensor([0, chunk], dtype=torch.int32)
        self._seq_len, self._lens = seq_len, torch.tensor([seq_len], dtype=torch.int32)
        self._scale = head_size**-0.5
        self._group = num_heads // kv_heads
        self._causal = context == 0  # SDPA has no causal flag for queries that end with the keys, so: a mask
        self._mask_TC = torch.ones(chunk, seq_len, dtype=torch.bool).tril(context)
        self.flop = 4 * num_heads * head_size * int(self._mask_TC.sum())
        """A multiplication and an addition for q.k and for p.v, of the pairs that are not masked."""
        self._gathered = self._gather()
        self._expanded = [kv.repeat_interleave(self._group, dim=1) for kv in self._gathered]

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

    def error(self, out_TNH: torch.Tensor) -> float:
        """Return the RMS error relative to float64, of the chunk's last token.

        Raises:
            RuntimeError: It is not attention's result.
        """
        k_KCH, v_KCH = (kv[0].double() for kv in self._gathered)
        q_KGH = self._q_TNH[-1].double().unflatten(0, (-1, self._group))
        weights = (torch.einsum("kgh,kch->kgc", q_KGH, k_KCH) * self._scale).softmax(-1)
        expected_NH = torch.einsum("kgc,kch->kgh", weights, v_KCH).flatten(0, 1)
        error = float((out_TNH[-1].double() - expected_NH).pow(2).mean().sqrt() / expected_NH.pow(2).mean().sqrt())
        if not error < 0.05:
            raise RuntimeError(f"RMS error {error:.3g} relative to float64 attention")
        return error


def measure_prefill(limit: ReadLimit, settings: PrefillSettings) -> dict[str, Any]:
    """Return, by shape and threads, each way's seconds, GFLOP/s and speed relative to ours."""
    results: dict[str, Any] = {}
    for model, chunk, context in settings.shapes:
        prefill = Prefill(model, chunk, context, settings.block_size, settings.dtype, settings.seed)
        calls = prefill.calls()
        for threads in settings.threads:
            limit.use_threads(threads)
            errors = {name: prefill.error(call()) for name, call in calls.items()}
            times: dict[str, list[float]] = {name: [] for name in calls}
            began_s, others = time.perf_counter(), OtherLoad()
            while len(times[OURS]) < settings.repeats or time.perf_counter() - began_s < settings.seconds:
                for name in limit.rng.sample(list(calls), len(calls)):
                    called_s = time.perf_counter()
                    calls[name]()
                    times[name].append(time.perf_counter() - called_s)
            results[f"{model}/{chunk} after {context}/{threads} thread{'s' if threads > 1 else ''}"] = {
                "others_busy_cores": others.cores(),
                "flop": prefill.flop,
                "candidates": {
                    name: {
                        "gflop_per_s": prefill.flop / statistics.median(times[name]) / 1e9,
                        # Of the pairs that were timed next to each other.
                        "speed_of_ours": statistics.median(
                            a / b for a, b in zip(times[name], times[OURS], strict=True)
                        ),
                        "error": errors[name],
                        "times_s": times[name],
                    }
                    for name in calls
                },
            }
    return results

"""A stand-in for xformers on a GPU: it refuses what xformers 0.0.35 refuses, and attends in plain torch.

Written from what its Python sources check, for a GPU of compute capability 8.0 or more and torch's own flash kernels,
which know no pages. CPU tensors stand in for CUDA ones. Letters: R sequences, Q queries, C keys, G groups, N heads of
a group, H head size, M pages of a sequence, S keys of a page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def _check_lengths(*lists: Any) -> None:
    for lengths in lists:
        assert not isinstance(lengths, Tensor) and all(type(n) is int for n in lengths), "lengths are ints on the host"
    assert len({len(lengths) for lengths in lists}) == 1, "one length of queries and one of keys for each sequence"


@dataclass
class BlockDiagonalCausalFromBottomRightMask:
    """Sequences one after the other; the last query of each sees all its keys."""

    query_lens: list[int]
    key_lens: list[int]
    device: torch.device

    @classmethod
    def from_seqlens(cls, q_seqlen: Any, kv_seqlen: Any = None, *, device: Any = None) -> Any:
        kv_seqlen = q_seqlen if kv_seqlen is None else kv_seqlen
        _check_lengths(q_seqlen, kv_seqlen)
        if any(keys < queries for queries, keys in zip(q_seqlen, kv_seqlen, strict=True)):
            raise ValueError("Expected `num_keys >= num_queries`")
        assert device is not None, "else it is the current GPU's"
        return cls(list(q_seqlen), list(kv_seqlen), torch.device(device))

    def make_local_attention_from_bottomright(self, window_size: int) -> Any:
        if window_size <= 0:
            raise ValueError(f"Expected `window_size > 0`, but window_size={window_size}")
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(
            self.query_lens, self.key_lens, self.device, window_size
        )

    def sequences(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield the queries of each, the rows of its keys, and which query sees which key."""
        query = key = 0
        for num_queries, num_keys in zip(self.query_lens, self.key_lens, strict=True):
            rows_C = torch.arange(key, key + num_keys)
            yield slice(query, query + num_queries), rows_C, self._seen(num_queries, num_keys)
            query, key = query + num_queries, key + num_keys

    def _seen(self, num_queries: int, num_keys: int) -> Tensor:
        ahead_QC = torch.arange(num_queries)[:, None] + num_keys - num_queries - torch.arange(num_keys)
        return ahead_QC >= 0

    @property
    def num_keys(self) -> int:
        return sum(self.key_lens)


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    window_size: int

    def _seen(self, num_queries: int, num_keys: int) -> Tensor:
        ahead_QC = torch.arange(num_queries)[:, None] + num_keys - num_queries - torch.arange(num_keys)
        return (ahead_QC >= 0) & (ahead_QC < self.window_size)


@dataclass
class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask:
    """Keys lie in pages; the last query of each sequence sees all its keys."""

    query_lens: list[int]
    key_lens: list[int]
    block_tables: Tensor
    page_size: int
    device: torch.device

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Any, kv_seqlen: Any, block_tables: Tensor, page_size: int, *, device: Any = None
    ) -> Any:
        _check_lengths(q_seqlen, kv_seqlen)
        assert block_tables.dim() == 2 and len(block_tables) == len(q_seqlen), "[R, M]"
        assert not block_tables.is_floating_point() and block_tables.device == torch.device(device)
        assert all(n <= block_tables.shape[1] * page_size for n in kv_seqlen), "more keys than pages"
        assert device is not None, "else it is the current GPU's"
        return cls(list(q_seqlen), list(kv_seqlen), block_tables, page_size, torch.device(device))

    def sequences(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        query = 0
        for index, (num_queries, num_keys) in enumerate(zip(self.query_lens, self.key_lens, strict=True)):
            place_C = torch.arange(num_keys)
            rows_C = self.block_tables[index, place_C // self.page_size] * self.page_size + place_C % self.page_size
            ahead_QC = torch.arange(num_queries)[:, None] + num_keys - num_queries - place_C
            yield slice(query, query + num_queries), rows_C, ahead_QC >= 0
            query += num_queries


Mask = BlockDiagonalCausalFromBottomRightMask | PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
PAGED, LOCAL = PagedBlockDiagonalCausalWithOffsetPaddedKeysMask, BlockDiagonalCausalLocalAttentionFromBottomRightMask


def _misaligned(tensor: Tensor, alignment: int) -> bool:
    return bool(tensor.shape[-1] % alignment or tensor.stride(-2) % alignment or tensor.stride(-1) > 1)


def _groups_apart(tensor: Tensor) -> bool:
    """Groups and their heads cannot be seen as one dimension, and heads do not share their rows either."""
    (num_groups, num_heads), (group, head) = tensor.shape[2:4], tensor.stride()[2:4]
    return num_groups > 1 and num_heads > 1 and head != 0 and group != head * num_heads


class TritonSplitK:
    """``triton_splitk.FwOp``."""

    @staticmethod
    def refuses(q: Tensor, k: Tensor, v: Tensor, bias: Mask) -> bool:
        return (
            q.dtype not in HALF
            or q.shape[-1] not in (16, 32, 64, 128, 256, 512)
            or any(_misaligned(tensor, 8) for tensor in (q, k, v))
            or not isinstance(bias, PAGED)
            or q.shape[1] != sum(bias.query_lens)
            or len(set(bias.query_lens)) > 1
            or max(bias.query_lens) > 16
            or bool(k.shape[1] % bias.page_size or bias.page_size % 64)
        )


class Flash:
    """``flash.FwOp`` with torch's kernels."""

    @staticmethod
    def refuses(q: Tensor, k: Tensor, v: Tensor, bias: Mask) -> bool:
        return (
            q.dtype not in HALF
            or q.shape[-1] > 256
            or _misaligned(q, 8)
            or isinstance(bias, PAGED)
            or any(map(_groups_apart, (q, k, v)))
        )


class Cutlass:
    """``cutlass.FwOp``."""

    @staticmethod
    def refuses(q: Tensor, k: Tensor, v: Tensor, bias: Mask) -> bool:
        alignment = 8 if q.dtype in HALF else 4
        return isinstance(bias, PAGED) or _misaligned(q, alignment) or _misaligned(v, alignment)


def dispatched(q: Tensor, k: Tensor) -> list[Any]:
    """Return the operators that are tried where none is named."""
    shares_rows = k.stride(-2) == 0 and k.shape[-2] > 1
    splits = shares_rows and q.shape[1] <= 32 and k.shape[1] >= 256 and 0 < q.shape[0] * q.shape[2] < 64
    return [Flash, *([TritonSplitK] if splits else []), Cutlass]


def validate(q: Tensor, k: Tensor, v: Tensor, bias: Mask) -> None:
    """Raise ValueError for tensors that no operator takes."""
    if not q.dim() == k.dim() == v.dim() == 5:
        raise ValueError("expected [1, tokens, groups, heads of a group, head size]")  # of the kinds it takes, ours
    if not q.device == k.device == v.device == bias.device:
        raise ValueError("not all on one device")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError("not all of one dtype")
    if q.shape[0] != 1 or k.shape[0] != 1 or v.shape[0] != 1:
        raise ValueError("Expected batch_size=1 when using block-diagonal bias")
    if not (k.shape == v.shape and q.shape[2:] == k.shape[2:]):
        raise ValueError("Incompatible shapes; HINT: We don't support broadcasting")


def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Check, and attend."""
    validate(query, key, value, attn_bias)
    assert p == 0.0 and output_dtype is None and isinstance(scale, float), "nothing else is asked of it"
    operators = [op] if op is not None else dispatched(query, key)
    if all(operator.refuses(query, key, value, attn_bias) for operator in operators):
        raise NotImplementedError(f"No operator found for {attn_bias} with {query.shape}, {key.shape}, {query.dtype}")
    if not isinstance(attn_bias, PAGED):
        assert query.shape[1] == sum(attn_bias.query_lens) and key.shape[1] == attn_bias.num_keys
    out = torch.full(query.shape, torch.nan, dtype=query.dtype)
    for queries, rows_C, seen_QC in attn_bias.sequences():
        q_QGNH, (k_CGNH, v_CGNH) = query[0, queries].double(), (side[0, rows_C].double() for side in (key, value))
        scores = torch.einsum("qgnh,cgnh->gnqc", q_QGNH, k_CGNH) * scale
        weights = scores.masked_fill(~seen_QC, -torch.inf).softmax(-1)
        out[0, queries] = torch.einsum("gnqc,cgnh->qgnh", weights, v_CGNH).to(out.dtype)
    return out


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``import xformers`` find the stand-in."""
    ops, fmha, attn_bias = (ModuleType(name) for name in ("ops", "fmha", "attn_bias"))
    for kind in (BlockDiagonalCausalFromBottomRightMask, PagedBlockDiagonalCausalWithOffsetPaddedKeysMask):
        setattr(attn_bias, kind.__name__, kind)
    fmha.memory_efficient_attention_forward = memory_efficient_attention_forward  # type: ignore[attr-defined]
    fmha.triton_splitk = SimpleNamespace(FwOp=TritonSplitK)  # type: ignore[attr-defined]
    ops.fmha, fmha.attn_bias = fmha, attn_bias  # type: ignore[attr-defined]
    modules = {"": ModuleType("xformers"), ".ops": ops, ".ops.fmha": fmha, ".ops.fmha.attn_bias": attn_bias}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"xformers{name}", module)

"""The interface of device attention, the choice of an implementation by name, and what several of them share.

Legend: T packed tokens, N query heads, K KV heads, H head size, B blocks, S block size, R requests, M blocks per
request, C keys.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from omniserve.core.registry import Registry
from omniserve.core.spec import AttentionSpec

F = TypeVar("F", bound=Callable[..., Tensor])


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLengths:
    """The lengths of a step's requests as Python numbers."""

    query_lens: tuple[int, ...]
    """Query tokens of each request in this step."""
    seq_lens: tuple[int, ...]
    """Context of each request, this step's tokens included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMetadata:
    """The blocks that each query of a step sees. One object is built for a step, and every layer attends with it."""

    block_table_RM: Tensor
    """Blocks of each request, int32 ``[R, M]``. Entries behind a request's last block are never read."""
    query_start_loc_R1: Tensor
    """The row where each request's queries begin, int32 ``[R + 1]``; the last entry is T."""
    seq_lens_R: Tensor
    """Context of each request, this step's tokens included, int32 ``[R]``."""
    host_lengths: HostLengths | None = None
    """The lengths in host memory. Without them some implementations copy them from the device, which waits for it."""
    reversed_RM: Tensor | None = None
    """The direction table, bool ``[R, M]``: True where a block runs from the right, so that offset i of the block is
    its row ``S - 1 - i``. None: all blocks run from the left. Paper: bros 6."""
    one_query_each: bool = False
    """Every request has exactly one query token (``T == R``), and nothing may be read back from the device. A request
    that only pads the batch has a seq_len of 0, and its row of the output becomes zeros."""


class DeviceAttention(Protocol):
    """Attention of a step's device rows over the paged cache."""

    def __call__(
        self,
        q_TNH: Tensor,
        k_cache_BKSH: Tensor,
        v_cache_BKSH: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
    ) -> Tensor:
        """Return ``[T, N, H]``, the dtype of q.

        The queries of all requests follow each other; rotary has been applied. The caches are one layer's head-major
        blocks of keys and values, this step's tokens included.

        Raises:
            ValueError: This implementation cannot do what the arguments ask for; the message names one that can.
        """
        ...


DEVICE_ATTENTION: Registry[DeviceAttention] = Registry("device attention", package="omniserve.ops.attention")


def graph_safe(attend: F) -> F:
    """Declare that the launches of an implementation depend on shapes alone if ``one_query_each`` is set.

    So the CUDA graph of a call stays right when the same tensors hold other lengths, blocks and padding.
    """
    attend.graph_safe = True  # type: ignore[attr-defined]
    return attend


def is_graph_safe(attend: DeviceAttention) -> bool:
    """Tell whether calls with ``one_query_each`` may be captured in a CUDA graph (attribute ``graph_safe``)."""
    return bool(getattr(attend, "graph_safe", False))


def resolve_attention(
    name: str,
    device: torch.device,
    layers: Sequence[AttentionSpec] = (),
    *,
    is_directed: bool = False,
    kv_dtype: str = "auto",
) -> DeviceAttention:
    """Return the implementation called ``name``; "auto" takes the one that should be the best on ``device``.

    On CUDA that is ``triton`` if triton can be imported, else ``xformers`` if it can do all ``layers``, else ``sdpa``.
    This order is reasoned, not yet measured on a GPU. With ``is_directed`` some blocks will run from the right
    (``reversed_RM``). With ``kv_dtype`` ``int8`` the caches are as in ``kv/storage.py``.

    Raises:
        ValueError: The name is unknown, or its implementation does not run on this device, in both directions, with
            these layers or with this KV.
    """
    refusals = [refusal for layer in layers if (refusal := why_not_xformers(layer))]
    if name == "auto":
        able = ("triton",) if refusals else ("triton", "xformers")
        installed = (package for package in able if importlib.util.find_spec(package))
        name = "cpu" if device.type == "cpu" else next(installed, "sdpa")
    if refusals and name == "xformers":
        raise ValueError(refusals[0])
    is_interpreted = name == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    wanted = {"cpu": "cpu", "latent": "cpu", "xformers": "cuda", "triton": "cuda"}.get(name, device.type)
    if wanted != device.type and not is_interpreted:
        raise ValueError(f"device attention {name!r} runs on {wanted}, not on {device.type}; give 'sdpa' or 'auto'")
    if is_directed and name == "xformers":
        raise ValueError(
            "the KV manager lets blocks run in two directions, which device attention 'xformers' cannot read; "
            "set attention='triton' or 'sdpa', or a KV manager other than 'bidirectional'"
        )
    if kv_dtype != "auto" and name != "cpu":
        raise ValueError(
            f"device attention {name!r} on {device.type} cannot read KV of {kv_dtype}: set kv_dtype to 'auto'"
            + (", or attention to 'cpu'" if device.type == "cpu" else "; it is for a device that is a CPU")
        )
    attend = DEVICE_ATTENTION.get(name)
    for layer in layers:
        for values in (layer.sinks, layer.alibi_slopes):
            per_head(values, device)
    return attend


def why_not_xformers(spec: AttentionSpec) -> str:
    """Say which part of a layer's attention xformers does not have; empty if it has all of it."""
    kinds = (
        (spec.softcap, "soft-capped attention"),
        (spec.sinks, "attention sinks"),
        (spec.alibi_slopes, "ALiBi here"),
        (spec.chunk, "attention within chunks"),
    )
    missing = next((kind for is_wanted, kind in kinds if is_wanted), None)
    return f"xformers has no {missing}; give attention='triton' or 'sdpa' for this model" if missing else ""


def host_lengths(metadata: AttentionMetadata, name: str) -> HostLengths:
    """Return the lengths of a step's requests for the implementation ``name``, whose launches depend on them.

    Lengths that are not on the host are read back from the device.

    Raises:
        ValueError: The lengths are not on the host, and ``one_query_each`` forbids to read them back. Or the call is
            captured in a CUDA graph, which would repeat the lengths of its capture.
    """
    if metadata.seq_lens_R.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"device attention {name!r} cannot be captured in a CUDA graph: what it launches follows from the lengths; "
            "take attention='triton' or 'flex', or run without graphs"
        )
    if metadata.host_lengths is not None:
        return metadata.host_lengths
    if metadata.one_query_each:
        raise ValueError(
            f"device attention {name!r} needs the lengths on the host, and with one_query_each nothing may be read "
            "back from the device; give host_lengths, or take attention='triton' or 'flex'"
        )
    query_lens = tuple(end - begin for begin, end in pairwise(metadata.query_start_loc_R1.tolist()))
    return HostLengths(query_lens=query_lens, seq_lens=tuple(metadata.seq_lens_R.tolist()))


def gather_keys(cache_BKSH: Tensor, blocks_M: Tensor, first: int, end: int, reversed_M: Tensor | None = None) -> Tensor:
    """Return rows [first, end) of one sequence, ``[end - first, K, H]``, copied out of its blocks."""
    block_size = cache_BKSH.shape[2]
    skipped = first // block_size
    held = slice(skipped, -(-end // block_size))
    rows_MSKH = cache_BKSH[blocks_M[held].long()].transpose(1, 2)
    if reversed_M is not None:
        rows_MSKH = torch.where(reversed_M[held, None, None, None], rows_MSKH.flip(1), rows_MSKH)
    return rows_MSKH.flatten(0, 1)[first - skipped * block_size : end - skipped * block_size]


def head_pages(block_table_RM: Tensor, kv_heads: int) -> Tensor:
    """Return the table ``[R * K, M]`` of (block, KV head) pages: page ``block * K + head`` is one head's rows."""
    heads_K = torch.arange(kv_heads, dtype=block_table_RM.dtype, device=block_table_RM.device)
    pages_RKM = block_table_RM[:, None].clamp(min=0) * kv_heads + heads_K[None, :, None]
    return pages_RKM.flatten(0, 1)


@cache
def per_head(values: tuple[float, ...] | None, device: torch.device) -> Tensor | None:
    """Return a layer's sinks or ALiBi slopes, if it has any, as a tensor ``[N]`` of float32; the same one in each call.

    The first call copies, which no captured graph may hold: `resolve_attention` makes it.
    """
    return None if values is None else torch.tensor(values, dtype=torch.float32).to(device)

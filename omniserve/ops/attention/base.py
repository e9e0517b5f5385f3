"""The contract of device attention, and the choice of an implementation by name.

Legend: T packed tokens, N query heads, K KV heads, H head size, B blocks, S block size, R requests, M blocks per
request.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from omniserve.core.registry import Registry
from omniserve.core.spec import AttentionSpec

F = TypeVar("F", bound=Callable[..., Tensor])


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLengths:
    """Lengths of a batch's requests, on the host: without them some CUDA implementations must wait for the device."""

    query_lens: tuple[int, ...]
    """Query tokens of each request in this step."""
    seq_lens: tuple[int, ...]
    """Context of each request, this step's tokens included."""


class DeviceAttention(Protocol):
    """Attention of a step's device rows over the paged cache."""

    def __call__(
        self,
        q_TNH: Tensor,
        k_cache_BKSH: Tensor,
        v_cache_BKSH: Tensor,
        block_table_RM: Tensor,
        query_start_R1: Tensor,
        seq_lens_R: Tensor,
        spec: AttentionSpec,
        *,
        lengths: HostLengths | None = None,
        reversed_RM: Tensor | None = None,
        one_query_each: bool = False,
    ) -> Tensor:
        """Return ``[T, N, H]``, the dtype of q.

        Args:
            q_TNH: Queries of all requests, one after the other; rotary applied.
            k_cache_BKSH: The layer's keys, head-major blocks, this step's tokens included.
            v_cache_BKSH: The layer's values.
            block_table_RM: Blocks of each request, int32.
            query_start_R1: Where each request's queries begin, int32; the last entry is T.
            seq_lens_R: Context of each request including this chunk, int32.
            spec: Scale, window, softcap.
            lengths: The same lengths on the host; None copies them from the device where they are needed.
            reversed_RM: The direction table: which entries of the block table are of blocks that run from the right,
                bool, so that offset i of such a block is its row ``S - 1 - i``. None: no block does. Paper: bros 6.
            one_query_each: Every request has exactly one query token (``T == R``), and nothing may be read back from
                the device. A padding request has seq_len 0, and its row becomes zeros.

        Raises:
            ValueError: This implementation cannot do what the arguments ask for; the message names one that can.
        """
        ...


DEVICE_ATTENTION: Registry[DeviceAttention] = Registry("device attention", package="omniserve.ops.attention")


def graph_safe(attend: F) -> F:
    """Mark an implementation: with ``one_query_each``, what it launches follows from shapes alone.

    So a CUDA graph that captured a call is right for whatever lengths, blocks and padding the same tensors hold later.
    """
    attend.graph_safe = True  # type: ignore[attr-defined]
    return attend


def is_graph_safe(attend: DeviceAttention) -> bool:
    """Tell whether calls with ``one_query_each`` may be captured in a CUDA graph (attribute ``graph_safe``)."""
    return bool(getattr(attend, "graph_safe", False))


def resolve_attention(name: str, device: torch.device, *, is_directed: bool = False) -> DeviceAttention:
    """Return the implementation called ``name``; "auto" takes what should be the best that ``device`` has.

    On CUDA that is ``triton`` where triton can be imported, else ``xformers``, else ``sdpa``. This order is reasoned,
    not yet measured on a GPU.

    Args:
        is_directed: Some blocks will run from the right (``reversed_RM``).

    Raises:
        ValueError: The name is unknown, or its implementation does not run on this device or in both directions.
    """
    if name == "auto":
        name = "cpu" if device.type == "cpu" else _first_installed("triton", "xformers") or "sdpa"
    if name == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return DEVICE_ATTENTION.get(name)
    if (wanted := {"cpu": "cpu", "xformers": "cuda", "triton": "cuda"}.get(name, device.type)) != device.type:
        raise ValueError(f"device attention {name!r} runs on {wanted}, not on {device.type}; give 'sdpa' or 'auto'")
    if is_directed and name == "xformers":
        raise ValueError(
            "the KV manager lets blocks run in two directions, which device attention 'xformers' cannot read; "
            "set attention='triton' or 'sdpa', or a KV manager other than 'bidirectional'"
        )
    return DEVICE_ATTENTION.get(name)


def _first_installed(*packages: str) -> str | None:
    return next((package for package in packages if importlib.util.find_spec(package)), None)


def host_lengths(
    lengths: HostLengths | None, query_start_R1: Tensor, seq_lens_R: Tensor, *, one_query_each: bool, name: str
) -> HostLengths:
    """Return ``lengths``, or read them back from the device: for implementations whose launches follow from lengths.

    Raises:
        ValueError: They are not given, and ``one_query_each`` forbids to read them back. Or the call is captured in a
            CUDA graph, which would go on with the lengths of its capture.
    """
    if seq_lens_R.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"device attention {name!r} cannot be captured in a CUDA graph: what it launches follows from the lengths; "
            "take attention='triton' or 'flex', or run without graphs"
        )
    if lengths is not None:
        return lengths
    if one_query_each:
        raise ValueError(
            f"device attention {name!r} needs the lengths on the host, and with one_query_each nothing may be read "
            "back from the device; give lengths, or take attention='triton' or 'flex'"
        )
    query_lens = tuple(end - begin for begin, end in pairwise(query_start_R1.tolist()))
    return HostLengths(query_lens=query_lens, seq_lens=tuple(seq_lens_R.tolist()))

"""A capture on the CPU that forgets the Python code as a CUDA graph does: operators are noted and run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from omniserve.core.spec import AttentionSpec
from omniserve.ops.attention import AttentionMetadata
from omniserve.ops.attention.base import per_head
from omniserve.runner.cuda_graphs.capture import DeviceWorkCapture

_READ_BACK = (torch.ops.aten.is_nonzero.default, torch.ops.aten.item.default)  # no tag says so


class Tape(TorchDispatchMode):
    """Notes operators with their arguments, and runs them again into the tensors that they made the first time."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads_back = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        assert not reads_back and func not in _READ_BACK, f"{func}: the step depends on values"
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        # Views of what was given, and what was changed in place, need no copy.
        fresh = [t if t.untyped_storage().data_ptr() not in given else torch.empty(0) for t in made]
        self._noted.append((func, args, kwargs or {}, fresh))
        return result

    def replay(self) -> None:
        for func, args, kwargs, fresh in self._noted:
            result = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
            for mine, again in zip(fresh, result, strict=True):
                if mine.numel():
                    mine.copy_(again)


class TapeCapture(DeviceWorkCapture):
    """Captures on tapes."""

    def _begin(self) -> None:
        self._tape = Tape()
        self._tape.__enter__()

    def _end(self) -> Callable[[], None]:
        self._tape.__exit__(None, None, None)
        return self._tape.replay


def attend(
    q_TNH: Tensor, k_cache_BKSH: Tensor, v_cache_BKSH: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
) -> Tensor:
    """Device attention that looks at no value, padding included."""
    out_TNH: Tensor = torch.ops.omniserve.paged_attention(
        q_TNH, k_cache_BKSH, v_cache_BKSH,
        metadata.block_table_RM, metadata.query_start_loc_R1, metadata.seq_lens_R.clamp(min=1),
        spec.scale, spec.window, spec.softcap, metadata.reversed_RM, spec.chunk,
        per_head(spec.sinks, q_TNH.device), per_head(spec.alibi_slopes, q_TNH.device),
    )  # fmt: skip
    if metadata.one_query_each:
        out_TNH = torch.where((metadata.seq_lens_R == 0)[:, None, None], 0, out_TNH)
    return out_TNH

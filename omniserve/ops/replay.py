"""Replay: a sequence of calls on fixed memory that C++ makes again at once, without Python between them; CPU.

Legend: T tokens, N query heads, K KV heads, H head size, B blocks, S block size, M blocks of a request.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omniserve.core.spec import AttentionSpec
from omniserve.ops.attention.base import AttentionMetadata, per_head

_ops = torch.ops.omniserve_replay


class Replay:
    """Calls that are noted in order and then made by ``run``, any number of times.

    All tensors keep their memory; what is noted is their addresses, so other values need other contents.
    """

    def __init__(self) -> None:
        self._handle: int = _ops.create()
        self._kept: list[Any] = []
        """Tensors and libraries of the kernels, of which the calls have addresses only."""
        self._finalizer = weakref.finalize(self, _ops.destroy, self._handle)

    def add_kernel(self, kernel: Any, arguments: Sequence[Tensor | int]) -> None:
        """Note a call of a C function ``kernel`` of a compiled extension module of torch's, with addresses and numbers.

        Raises:
            ValueError: An argument is neither a tensor nor an int.
        """
        if others := {
            type(each).__name__ for each in arguments if not isinstance(each, Tensor) and type(each) is not int
        }:
            raise ValueError(f"a kernel takes tensors and ints, got {sorted(others)}")
        library = ctypes.CDLL(kernel.__self__.__file__)
        address = ctypes.cast(getattr(library, kernel.__name__), ctypes.c_void_p).value
        self._kept += [kernel, library, *arguments]
        numbers = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
        _ops.add_kernel(self._handle, address, numbers)

    def add_linear(self, x: Tensor, packed: Tensor, bias_O: Tensor | None, out: Tensor) -> None:
        """Note ``packed_linear``, with its result in ``out``, contiguous."""
        _ops.add_linear(self._handle, x, packed, bias_O, out)

    def add_heads(self, x_TNI: Tensor, packed: Tensor, out: Tensor) -> None:
        """Note ``packed_heads``, with its result in ``out``, contiguous."""
        _ops.add_heads(self._handle, x_TNI, packed, out)

    def add_quantized_linear(
        self,
        x: Tensor,
        packed: Tensor,
        bias_O: Tensor | None,
        form: tuple[int, int, int],
        order_I: Tensor | None,
        out: Tensor,
    ) -> None:
        """Note ``quantized_linear`` with bits, scales and group of ``form``, with its result in ``out``, contiguous."""
        _ops.add_quantized_linear(self._handle, x, packed, bias_O, *form, order_I, out)

    def add_int8_linear(
        self, x: Tensor, packed: Tensor, bias_O: Tensor | None, x_scale: Tensor | None, out: Tensor
    ) -> None:
        """Note ``int8_linear``, with its result in ``out``, contiguous."""
        _ops.add_int8_linear(self._handle, x, packed, bias_O, x_scale, out)

    def add_add_lora(
        self, y: Tensor, x: Tensor, slots_T: Tensor, a: Tensor, b: Tensor, scales_S: Tensor, out: Tensor
    ) -> None:
        """Note ``add_lora``, with its result in ``out``, contiguous."""
        _ops.add_add_lora(self._handle, y, x, slots_T, a, b, scales_S, out)

    def add_store_kv(
        self, k_TKH: Tensor, v_TKH: Tensor, k_cache_BKSH: Tensor, v_cache_BKSH: Tensor, slot_mapping_T: Tensor
    ) -> None:
        """Note ``store_kv``."""
        _ops.add_store_kv(self._handle, k_TKH, v_TKH, k_cache_BKSH, v_cache_BKSH, slot_mapping_T)

    def add_attention(
        self,
        q_TNH: Tensor,
        k_cache_BKSH: Tensor,
        v_cache_BKSH: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        out_TNH: Tensor,
    ) -> None:
        """Note ``paged_attention`` without a direction table, with its result in ``out_TNH``, contiguous."""
        assert metadata.reversed_RM is None
        _ops.add_attention(
            self._handle,
            q_TNH,
            k_cache_BKSH,
            v_cache_BKSH,
            metadata.block_table_RM,
            metadata.query_start_loc_R1,
            metadata.seq_lens_R,
            spec.scale,
            spec.window,
            spec.softcap,
            spec.chunk,
            per_head(spec.sinks, q_TNH.device),
            per_head(spec.alibi_slopes, q_TNH.device),
            out_TNH,
        )

    def run(self) -> None:
        """Make all calls, in their order."""
        _ops.run(self._handle)

"""device_attention, warm_up: the attention that a runner calls, and all of its kernels compiled before the first step.

Triton compiles a kernel when a launch first needs it, which would delay a step by a second or more.

Legend: T rows, R requests, M blocks per request, N query heads, H head size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from omniserve.core.setup import RunnerSetup
from omniserve.core.spec import ModelSpec
from omniserve.kv.storage import DeviceKVStorage
from omniserve.layers.patched_model import PatchedModel
from omniserve.ops.attention import AttentionMetadata, DeviceAttention, HostLengths, resolve_attention
from omniserve.ops.attention.native import attend_triton
from omniserve.ops.streams import upload


def device_attention(setup: RunnerSetup, model: PatchedModel) -> DeviceAttention:
    """Return the attention of device rows that the settings name.

    Raises:
        ValueError: This device or model does not allow it.
    """
    execution = setup.config.execution
    return resolve_attention(
        execution.attention,
        model.device,
        model.spec.attention,
        is_directed=setup.is_directed,
        kv_dtype=execution.kv_dtype,
    )


def warm_up(setup: RunnerSetup, model: PatchedModel, storage: DeviceKVStorage, attend: DeviceAttention) -> None:
    """Compile the kernels of an attention that chooses them by shape."""
    if model.device.type == "cuda" and attend is attend_triton:
        warm_up_attention(
            attend,
            storage,
            model.spec,
            max_rows=setup.config.max_num_batched_tokens,
            max_requests=2 * setup.config.max_num_seqs,  # best-effort ones come beside as many latency-sensitive ones
            max_blocks=-(-setup.max_model_len // setup.config.block_size),
            is_directed=setup.is_directed,
        )


@torch.inference_mode()
def warm_up_attention(
    attend: DeviceAttention,
    storage: DeviceKVStorage,
    spec: ModelSpec,
    *,
    max_rows: int,
    max_requests: int,
    max_blocks: int,
    is_directed: bool,
) -> None:
    """Attend to chunks of different lengths, once for each kind of layer; the KV stays as it is.

    The maxima are those of the device rows and requests of a step, and of a request's blocks. With ``is_directed``
    blocks may run from the right: there are two kernels of each kind then, as a step may have a direction table or not.
    Decodes in a captured graph are left out, because their kernels are compiled during the capture.
    """
    k_cache = storage.k_LBKSH
    device, dtype = k_cache.device, k_cache.dtype
    layers = {spec.attention[layer]: layer for layer in storage.k_layers}  # one of each kind
    for query_lens, num_blocks in _shapes(max_rows, max_requests, max_blocks, storage.block_size):
        num_rows, num_requests = sum(query_lens), len(query_lens)
        lens_R = torch.tensor(query_lens, dtype=torch.int32)
        q_TNH = torch.zeros(num_rows, spec.num_heads, spec.head_size, dtype=dtype, device=device)
        block_table_RM = torch.zeros(num_requests, num_blocks, dtype=torch.int32, device=device)
        for is_reversed in {False, is_directed}:
            metadata = AttentionMetadata(
                block_table_RM=block_table_RM,
                query_start_loc_R1=upload(
                    torch.cat([lens_R.new_zeros(1), lens_R.cumsum(0, dtype=torch.int32)]), device
                ),
                seq_lens_R=upload(lens_R, device),
                host_lengths=HostLengths(query_lens=query_lens, seq_lens=query_lens),
                reversed_RM=torch.zeros_like(block_table_RM, dtype=torch.bool) if is_reversed else None,
            )
            for kind, layer in layers.items():
                attend(q_TNH, storage.k_layers[layer], storage.v_layers[layer], metadata, kind)


def _shapes(
    max_rows: int, max_requests: int, max_blocks: int, block_size: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the lengths of first chunks, ``[R]``, and M, such that every kernel is launched.

    A kernel is chosen by the rows of all requests, by their mean per request, and by whether there are many keys. So
    the numbers of rows are powers of two, which fill a tile, and one more, and M is the smallest and the largest.
    """
    powers = _powers_of_two(max_rows)
    for num_rows in sorted({*powers, *(n + 1 for n in powers if n < max_rows)}):
        for num_requests in _powers_of_two(min(num_rows, max_requests)):
            short, longer = divmod(num_rows, num_requests)
            query_lens = (*(short + 1,) * longer, *(short,) * (num_requests - longer))
            num_blocks = -(-query_lens[0] // block_size)
            if num_blocks <= max_blocks:
                yield query_lens, num_blocks
                yield query_lens, max_blocks


def _powers_of_two(largest: int) -> list[int]:
    """Return 1, 2, 4 ... and the largest."""
    return [*(1 << i for i in range((largest - 1).bit_length())), largest]

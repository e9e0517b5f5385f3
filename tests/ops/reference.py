"""Slow references of the operators, for tests: loops and plain torch, with float64 for sums.

Legend: T packed tokens, D hidden, N query heads, K KV heads, H head size, B blocks, S block size or slots, P seats,
R requests, M blocks per request, W a slot's q, k and v side by side, I and O input and output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniserve.core.spec import AttentionSpec
from tests.ops.host_layout import pack_blocks, parts_of_cache, quantize_blocks, quantize_rows, read_blocks, read_cache


def store_kv(k_TKH: Tensor, v_TKH: Tensor, k_cache_BKSH: Tensor, v_cache_BKSH: Tensor, slot_mapping_T: Tensor) -> None:
    """Write each token's K and V to slot ``block * S + offset``; -1 leaves a token out."""
    block_size = k_cache_BKSH.shape[2]
    for token, slot in enumerate(slot_mapping_T.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, block_size)
        for cache_BKSH, row_KH in ((k_cache_BKSH, k_TKH[token]), (v_cache_BKSH, v_TKH[token])):
            if cache_BKSH.dtype == torch.int8:
                codes_BKSH, scales_BKS = parts_of_cache(cache_BKSH)
                codes_BKSH[block, :, offset], scales_BKS[block, :, offset] = quantize_rows(row_KH)
            else:
                cache_BKSH[block, :, offset] = row_KH


def paged_attention(
    q_TNH: Tensor, k_cache_BKSH: Tensor, v_cache_BKSH: Tensor, block_table_RM: Tensor, query_start_R1: Tensor,
    seq_lens_R: Tensor, scale: float, window: int, softcap: float, reversed_RM: Tensor | None = None,
    chunk: int = 0, sinks_N: Tensor | None = None, alibi_slopes_N: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend each request's chunk over its cached keys, the chunk's own included; some blocks run from the right."""
    spec = AttentionSpec(scale=scale, window=window, chunk=chunk)
    k_cache_BKSH, v_cache_BKSH = read_cache(k_cache_BKSH), read_cache(v_cache_BKSH)
    out_TNH = torch.zeros_like(q_TNH, memory_format=torch.contiguous_format)
    starts, seq_lens = query_start_R1.tolist(), seq_lens_R.tolist()
    block_size, group = k_cache_BKSH.shape[2], q_TNH.shape[1] // k_cache_BKSH.shape[1]
    for request, seq_len in enumerate(seq_lens):
        begin, end = starts[request], starts[request + 1]
        if begin == end:
            continue
        q_pos = torch.arange(seq_len - (end - begin), seq_len)
        k_pos = torch.arange(spec.first_key(int(q_pos[0])), seq_len)
        block, offset = block_table_RM[request].long()[k_pos // block_size], k_pos % block_size
        if reversed_RM is not None:
            offset = torch.where(reversed_RM[request][k_pos // block_size], block_size - 1 - offset, offset)
        keys = k_cache_BKSH[block, :, offset].double().repeat_interleave(group, dim=1)
        values = v_cache_BKSH[block, :, offset].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("inh,jnh->nij", q_TNH[begin:end].double(), keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if alibi_slopes_N is not None:
            scores = scores + alibi_slopes_N.double()[:, None, None] * (k_pos[None] - q_pos[:, None])
        seen = k_pos[None] <= q_pos[:, None]
        if window:
            seen &= k_pos[None] > q_pos[:, None] - window
        if chunk:
            seen &= k_pos[None] // chunk == q_pos[:, None] // chunk
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks_N is not None:
            scores = torch.cat([scores, sinks_N.double()[:, None, None].expand(-1, end - begin, 1)], dim=-1)
        weights = scores.softmax(-1)[..., : len(k_pos)]
        out_TNH[begin:end] = torch.einsum("nij,jnh->inh", weights, values).to(q_TNH.dtype)
    return out_TNH


def cpu_attention(
    q_RNH: Tensor, pool_BK2SH: Tensor, scales_BK2S: Tensor | None, block_table_RM: Tensor, seq_lens_R: Tensor,
    scale: float, window: int, softcap: float, num_threads: int, *kinds: Any,
) -> Tensor:  # fmt: skip
    """Attend one query token of each request, the last of its sequence."""
    query_start_R1 = torch.arange(q_RNH.shape[0] + 1)
    k_BKSH, v_BKSH = read_blocks(pool_BK2SH, scales_BK2S)
    numbers = scale, window, softcap
    return paged_attention(
        q_RNH, k_BKSH, v_BKSH, block_table_RM, query_start_R1, seq_lens_R, *numbers, None, *kinds
    )  # fmt: skip


def store_host_kv(
    k_TKH: Tensor, v_TKH: Tensor, pool_BK2SH: Tensor, scales_BK2S: Tensor | None, slot_mapping_T: Tensor
) -> None:
    """Write each token's K and V to slot ``block * S + offset`` of the host pool; -1 leaves a token out."""
    block_size = pool_BK2SH.shape[3]
    for token, slot in enumerate(slot_mapping_T.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, block_size)
        if scales_BK2S is None:
            k_KSH, v_KSH = read_blocks(pool_BK2SH[block])
            k_KSH[:, offset], v_KSH[:, offset] = k_TKH[token], v_TKH[token]
            pool_BK2SH[block] = pack_blocks(k_KSH, v_KSH)
        else:
            values_K2SH, scales_K2S = quantize_blocks(k_TKH[token, :, None], v_TKH[token, :, None])
            pool_BK2SH[block, :, :, offset] = values_K2SH[:, :, 0]
            scales_BK2S[block, :, :, offset] = scales_K2S[:, :, 0]


def piggyback_concat(attn_TD: Tensor, results_RD: Tensor, rows_P: Tensor) -> Tensor:
    """Return a new ``[T + P, D]``: attn, then results[rows]; zeros where a row is -1."""
    zeros_D = attn_TD.new_zeros(attn_TD.shape[1])
    seats = [results_RD[row] if row >= 0 else zeros_D for row in rows_P.tolist()]
    return torch.cat([attn_TD, *(seat[None] for seat in seats)]) if seats else attn_TD.clone()


def residual_store(hidden_TD: Tensor, store_SD: Tensor, slots_P: Tensor) -> None:
    """Write the last P rows of hidden to store[slots]; -1 leaves a row out."""
    first = hidden_TD.shape[0] - slots_P.shape[0]
    for seat, slot in enumerate(slots_P.tolist()):
        if slot >= 0:
            store_SD[slot] = hidden_TD[first + seat]


def residual_fetch(store_SD: Tensor, slots_P: Tensor, hidden_TD: Tensor) -> None:
    """Write store[slots] to the last P rows of hidden; zeros where a slot is -1."""
    first = hidden_TD.shape[0] - slots_P.shape[0]
    for seat, slot in enumerate(slots_P.tolist()):
        hidden_TD[first + seat] = store_SD[slot] if slot >= 0 else 0


def piggyback_receive(
    slots_P: Tensor, wanted_P: Tensor, as_one_1: Tensor, step_1: Tensor, result_flags_S: Tensor,
    host_results_SD: Tensor, results_SD: Tensor, skips_S: Tensor, joined_P: Tensor,
) -> None:  # fmt: skip
    """Let the seats join whose results are there, and those that want none; copy the results that are wanted.

    A seat that wants -1 does as the one before it. With ``as_one`` all or none. The slots of the others are skipped in
    this step.
    """
    seats = [(seat, slot) for seat, slot in enumerate(slots_P.tolist()) if slot >= 0]
    wanted, flags = wanted_P.tolist(), result_flags_S.tolist()
    here: list[tuple[int, int]] = []
    decision = False
    for seat, slot in enumerate(slots_P.tolist()):
        if wanted[seat] != -1:
            decision = slot >= 0 and wanted[seat] in (0, flags[slot])
        if slot >= 0 and decision:
            here.append((seat, slot))
    if as_one_1.item() and len(here) < len(seats):
        here = []
    joined_P.fill_(-1)
    for seat, slot in seats:
        if (seat, slot) not in here:
            skips_S[slot] = step_1[0]
            continue
        joined_P[seat] = slot
        if wanted[seat]:
            results_SD[slot] = host_results_SD[slot]


def piggyback_send(
    hidden_TD: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, slots_P: Tensor, residuals_SD: Tensor,
    mailbox_SW: Tensor, flags_S: Tensor, step_1: Tensor,
) -> None:  # fmt: skip
    """Write the last P rows to their slots: hidden to residuals, q, k and v to the mailbox, then the step to the flags.

    A slot of -1 leaves a row out. A thread that sees a flag also sees its row of the mailbox.
    """
    residual_store(hidden_TD, residuals_SD, slots_P)
    first = hidden_TD.shape[0] - slots_P.shape[0]
    for seat, slot in enumerate(slots_P.tolist()):
        if slot >= 0:
            mailbox_SW[slot] = torch.cat([rows[first + seat].flatten() for rows in (q_TNH, k_TKH, v_TKH)])
            flags_S[slot] = step_1[0]


PANEL = 32
"""Features of a panel of a packed weight."""


def pack_linear(weight_OI: Tensor, packed: Tensor) -> None:
    """Write a weight as panels of 32 features: ``[panels, ceil(I / 2), 32 * 2]`` in bf16, else ``[panels, I, 32]``.

    Features and inputs that the weight does not have are zero.
    """
    num_panels, num_steps, width = packed.shape
    at_once = width // PANEL
    whole = weight_OI.new_zeros(num_panels * PANEL, num_steps * at_once)
    whole[: weight_OI.shape[0], : weight_OI.shape[1]] = weight_OI
    packed.copy_(whole.view(num_panels, PANEL, num_steps, at_once).transpose(1, 2).reshape(packed.shape))


def packed_rows(ids: Tensor, packed: Tensor, in_features: int, out_features: int) -> Tensor:
    """Return the rows of a packed weight, ``[*ids, I]``, that belong to some features."""
    num_panels, num_steps, width = packed.shape
    at_once = width // PANEL
    whole = (
        packed.view(num_panels, num_steps, PANEL, at_once)
        .transpose(1, 2)
        .reshape(num_panels * PANEL, num_steps * at_once)
    )
    return whole[:out_features, :in_features][ids]


def packed_linear(x: Tensor, packed: Tensor, bias_O: Tensor | None, out_features: int) -> Tensor:
    """Return ``x @ weight.T + bias``, ``[*, O]``. The weight is in x's dtype, or in bf16 beside fp32."""
    weight_OI = packed_rows(torch.arange(out_features), packed, x.shape[-1], out_features)
    product = x.double() @ weight_OI.double().T
    return (product if bias_O is None else product + bias_O.double()).to(x.dtype)


def packed_heads(x_TNI: Tensor, packed: Tensor, out_features: int) -> Tensor:
    """Return each head's rows times the head's own weight, ``[N, T, O]``, as ``packed_linear`` does."""
    heads = [
        packed_linear(x_TI, of_head, None, out_features) for x_TI, of_head in zip(x_TNI.unbind(1), packed, strict=True)
    ]
    return torch.stack(heads)


def add_lora(y: Tensor, x: Tensor, slots_T: Tensor, a: Tensor, b: Tensor, scales_S: Tensor) -> Tensor:
    """Return ``y + scale * (x @ A.T) @ B.T``, ``[*, O]``, with the adapter of each row; slots count from 1.

    ``a`` is the packed weight ``[adapters * R, I]``, ``b`` has one of each adapter. Both products are rounded to x's
    dtype.
    """
    num_adapters, num_in, num_out = len(scales_S), x.shape[-1], y.shape[-1]
    rank = b.shape[2] * (b.shape[3] // PANEL)
    a_SRI = packed_rows(torch.arange(num_adapters * rank), a, num_in, num_adapters * rank).view(-1, rank, num_in)
    b_SOR = torch.stack([packed_rows(torch.arange(num_out), packed, rank, num_out) for packed in b])
    return add_dense_lora(y, x, slots_T, a_SRI, b_SOR, scales_S)


def add_dense_lora(y: Tensor, x: Tensor, slots_T: Tensor, a_SRI: Tensor, b_SOR: Tensor, scales_S: Tensor) -> Tensor:
    """Return what ``add_lora`` does, with stacks that are not packed, as on CUDA."""
    rows, out = x.reshape(len(slots_T), x.shape[-1]), y.reshape(len(slots_T), y.shape[-1]).clone()
    for row, slot in enumerate(slots_T.tolist()):
        if 1 <= slot <= len(scales_S):
            low = (a_SRI[slot - 1].double() @ rows[row].double()).to(x.dtype)
            more = (b_SOR[slot - 1].double() @ low.double()).to(x.dtype)
            out[row] = (out[row].double() + scales_S[slot - 1].double() * more.double()).to(x.dtype)
    return out.view(y.shape)


def pack_int8(codes_OI: Tensor, scales_O: Tensor) -> Tensor:
    """Return the bytes of a weight of int8, ``[panels, bytes of a panel]``: scales, sums of codes, and codes."""
    num_out, num_in = codes_OI.shape
    panels, inputs = -(-num_out // PANEL), -(-num_in // 64) * 64
    codes = codes_OI.new_zeros(panels, PANEL, inputs)
    scales = scales_O.new_zeros(panels, PANEL)
    for feature in range(num_out):
        codes[feature // PANEL, feature % PANEL, :num_in] = codes_OI[feature]
        scales[feature // PANEL, feature % PANEL] = scales_O[feature]
    parts = (scales, codes.int().sum(2).int(), codes.unflatten(2, (inputs // 4, 4)).transpose(1, 2).contiguous())
    return torch.cat([part.view(torch.uint8).flatten(1) for part in parts], 1)


def int8_linear(
    x: Tensor, packed: Tensor, bias_O: Tensor | None, out_features: int, x_scale: Tensor | None = None
) -> Tensor:
    """Return the product of rows that are rounded to int8 and a weight of int8, ``[*, O]``, to the bit.

    Each product and sum behind the integer sums is rounded to fp32.
    """
    num_in, panels = x.shape[-1], packed.shape[0]
    scales = packed[:, : PANEL * 4].contiguous().view(torch.float32).flatten()[:out_features]
    codes = packed[:, PANEL * 8 :].contiguous().view(torch.int8)
    fours = codes.view(panels, codes.shape[1] // (4 * PANEL), PANEL, 4).transpose(1, 2)
    codes_OI = fours.reshape(panels * PANEL, codes.shape[1] // PANEL)[:out_features, :num_in]
    wide = x.float()
    if x_scale is not None:
        scale = x_scale.expand(*x.shape[:-1], 1)
    elif num_in:
        scale = wide.abs().amax(-1, keepdim=True) / 127.5
    else:
        scale = wide.new_zeros(*x.shape[:-1], 1)
    rounded = (wide / torch.where(scale == 0, 1.0, scale)).clamp(-128, 127).round()
    sums = (rounded.double() @ codes_OI.double().T).float()  # exact: sums are below 2 ** 31
    product = sums * scale * scales
    return (product if bias_O is None else product + bias_O.float()).to(x.dtype)


F16, F32, AFFINE16, AFFINE32, K_SCALES, K_SIGNED = range(6)
"""Kinds of scales, in the order of ``Scales`` in ``ops/csrc/linear.h``."""
WITH_OFFSET = (AFFINE16, AFFINE32, K_SCALES)


def block_of(scales: int, group: int) -> int:
    """Return the inputs of a record of a weight of codes."""
    return 256 if scales in (K_SCALES, K_SIGNED) else group


def _record_parts(bits: int, scales: int, group: int) -> list[tuple[torch.dtype, int]]:
    """Return what a record holds, in order: each part's dtype, and how many rows of 32 features it has."""
    half, single, byte = torch.float16, torch.float32, torch.uint8
    numbers = {
        F16: [(half, 1)],
        F32: [(single, 1)],
        AFFINE16: [(half, 1), (half, 1)],
        AFFINE32: [(single, 1), (single, 1)],
        K_SCALES: [(half, 1), (half, 1), (byte, 8), (byte, 8)],
        K_SIGNED: [(half, 1), (torch.int8, 16)],
    }[scales]
    block = block_of(scales, group)
    if bits == 8:
        return [*numbers, (byte if scales in WITH_OFFSET else torch.int8, block)]
    upper = [(torch.int32, block * (bits - 4) // 32)] if bits > 4 else []
    return [*numbers, (torch.int32, block // 8), *upper]


def _places(bits: int) -> list[int]:
    """Return where in a word of 32 bits its codes begin: the even inputs in the lower half, the odd in the upper."""
    return [i // 2 * bits + i % 2 * 16 for i in range(32 // bits)]


def _laid_out(values: Tensor) -> Tensor:
    # Tensor.contiguous leaves the strides of what is empty.
    return values.clone(memory_format=torch.contiguous_format)


def pack_codes(codes_OI: Tensor, numbers: tuple[Tensor, ...], bits: int, scales: int, group: int) -> Tensor:
    """Return the bytes of a weight of codes, ``[panels, bytes of a panel]``.

    Args:
        codes_OI: uint8, from 0 to ``2 ** bits - 1``.
        numbers: What a record holds beside the codes, in its order: ``[O, records]`` or ``[O, groups]``.
    """
    num_out, num_in = codes_OI.shape
    num_panels, num_records = -(-num_out // PANEL), -(-num_in // block_of(scales, group))

    def by_record(values: Tensor, rows: int) -> Tensor:
        """Return ``[O, any]`` as ``[panels, records, rows, 32]``. Features and inputs that are not there are zero."""
        whole = values.new_zeros(num_panels * PANEL, num_records * rows)
        whole[:num_out, : values.shape[1]] = values
        return whole.view(num_panels, PANEL, num_records, rows).permute(0, 2, 3, 1)

    def as_words(codes: Tensor, size: int) -> Tensor:
        placed = torch.tensor(_places(size), dtype=torch.int32).unsqueeze(1)
        return (codes.unflatten(2, (-1, 32 // size)) << placed).sum(3, dtype=torch.int32)  # no bit is in two

    layout = _record_parts(bits, scales, group)
    parts = [by_record(number, rows) for number, (_, rows) in zip(numbers, layout, strict=False)]
    if bits == 8:
        values = codes_OI if scales in WITH_OFFSET else (codes_OI.short() - 128).to(torch.int8)
        parts.append(by_record(values, block_of(scales, group)))
    else:
        codes = by_record(codes_OI, block_of(scales, group)).int()
        parts.append(as_words(codes & 15, 4))
        if bits > 4:
            parts.append(as_words(codes >> 4, bits - 4))
    assert [(part.dtype, part.shape[2]) for part in parts] == layout
    return torch.cat([_laid_out(part).view(torch.uint8).flatten(2) for part in parts], 2).flatten(1)


def quantized_rows(
    ids: Tensor, packed: Tensor, in_features: int, out_features: int, bits: int, scales: int, group: int
) -> Tensor:
    """Return the rows of a weight of codes, ``[*ids, I]`` fp32, that belong to some features."""
    block = block_of(scales, group)
    num_panels, num_records = packed.shape[0], -(-in_features // block)
    layout = _record_parts(bits, scales, group)
    sizes = [dtype.itemsize * rows * PANEL for dtype, rows in layout]
    pieces = packed.view(num_panels, num_records, sum(sizes)).split(sizes, 2)
    parts = [
        _laid_out(piece).view(dtype).view(num_panels, num_records, rows, PANEL)
        for piece, (dtype, rows) in zip(pieces, layout, strict=True)
    ]

    def by_word(words: Tensor, size: int) -> Tensor:
        """Return the codes of words, ``[panels, records, inputs, 32]``."""
        return torch.stack([words >> place & (1 << size) - 1 for place in _places(size)], 3).flatten(2, 3)

    def by_input(number: Tensor) -> Tensor:
        return number.float().repeat_interleave(block // number.shape[2], 2)

    zero = 0 if scales in WITH_OFFSET else 1 << (bits - 1)
    if bits == 8:
        *numbers, values = parts  # signed bytes are codes less their zero
    else:
        numbers, words = parts[: -1 if bits == 4 else -2], parts[-1 if bits == 4 else -2 :]
        values = by_word(words[0], 4) - zero
        if bits > 4:
            values += by_word(words[1], bits - 4) << 4
    scale, offset = by_input(numbers[0]), None
    if scales == K_SIGNED:
        scale = scale * by_input(numbers[1])
    elif scales == K_SCALES:
        scale, offset = scale * by_input(numbers[2]), -by_input(numbers[1]) * by_input(numbers[3])
    elif scales in WITH_OFFSET:
        offset = by_input(numbers[1])
    weight = scale * values.float()
    weight = weight if offset is None else weight + offset
    whole = weight.permute(0, 3, 1, 2).reshape(num_panels * PANEL, num_records * block)
    return whole[:out_features, :in_features][ids]


def quantized_linear(
    x: Tensor,
    packed: Tensor,
    bias_O: Tensor | None,
    out_features: int,
    bits: int,
    scales: int,
    group: int,
    order_I: Tensor | None = None,
) -> Tensor:
    """Return ``x @ weight.T + bias``, ``[*, O]``, with the weight as the codes have it: rounded to fp32 alone.

    Args:
        order_I: The column of x that each input of the codes is; None: all in their order.
    """
    if order_I is not None:
        x = x[..., order_I.long()]
    ids = torch.arange(out_features)
    weight_OI = quantized_rows(ids, packed, x.shape[-1], out_features, bits, scales, group)
    product = x.double() @ weight_OI.double().T
    return (product if bias_O is None else product + bias_O.double()).to(x.dtype)

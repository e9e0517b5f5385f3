"""The cases compiled without a GPU: a launch of every kernel for each shape, dtype and feature that matters, by name.

Legend: T packed tokens, H head size, G query heads to a KV head, S block size, I and O input and output features,
R rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch

from omniserve.ops.kernels.attention_launch import Device

Launch = Callable[[Device], Any]
"""Launches one kernel, or two that belong together, as on that device."""

DEVICES = {
    80: Device(shared_bytes=163 << 10, multiprocessors=108),  # A100
    89: Device(shared_bytes=99 << 10, multiprocessors=142),  # L40S
    90: Device(shared_bytes=227 << 10, multiprocessors=132, has_wide_tensor_cores=True),  # H100, H200
    100: Device(shared_bytes=227 << 10, multiprocessors=148, has_wide_tensor_cores=True),  # B200
    120: Device(shared_bytes=99 << 10, multiprocessors=170),  # RTX 5090
}
"""Devices by compute capability."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

FEATURES = {
    "window": {"window": 100},
    "softcap": {"softcap": 30.0},
    "directed": {"reversed_RM": torch.zeros(8, 512, dtype=torch.bool)},
    "sinks": {"sinks_N": torch.zeros(32)},
    "ALiBi": {"alibi_slopes_N": torch.zeros(32)},
    "chunks": {"chunk": 300},
}
"""Features of attention, each with the arguments that ask for it."""
ALL = ("window", "softcap", "directed")
KINDS = ("sinks", "ALiBi", "chunks")

QUICK = (
    ("attend bf16 H128 G4 S64 decode", 90),
    ("attend bf16 H256 G7 S16 decode, window, softcap, directed", 89),
    ("attend bf16 H64 G7 S16 chunk, window, softcap, directed", 80),
    ("attend bf16 H128 G4 S64 prompt", 100),
    ("attend bf16 H64 G8 S64 decode, sinks, ALiBi, chunks", 90),
    ("attend bf16 H256 G7 S16 prompt, window, softcap, directed", 120),
    ("attend fp16 H96 G7 S16 prompt, window, softcap, directed", 90),
    ("attend fp32 H128 G4 S64 decode", 90),
    ("store_kv bf16", 120),
    ("piggyback_concat bf16", 90),
    ("residual_fetch bf16", 90),
    ("gather_rows bf16", 90),
    *(("piggyback_receive bf16", capability) for capability in DEVICES),
    *(("piggyback_send bf16", capability) for capability in DEVICES),
    *((f"copy_blocks bf16 {way}", 90) for way in ("to host", "to host, reversed", "back", "back, reversed")),
    *(("add_lora bf16 I4096 O4096 R16 decode", capability) for capability in (90, 100)),
    *(("add_lora bf16 I4096 O4096 R64 prompt", capability) for capability in (80, 90, 100)),
    ("add_lora fp32 I4096 O4096 R64 prompt", 89),
)
"""(case, compute capability) that the default run of the tests compiles."""


def cases() -> dict[str, Launch]:
    """Return every case."""
    return dict(_attention()) | dict(_rows()) | dict(_blocks()) | dict(_lora())


def _attention() -> Iterator[tuple[str, Launch]]:
    shapes: list[tuple[str, int, int, int, str, tuple[str, ...]]] = []
    for size, kind in product((64, 80, 128, 256), ("decode", "chunk", "prompt")):
        if size != 80:  # padded to 128
            shapes.append(("bf16", size, 4, 64, kind, ()))
        shapes.append(("bf16", size, 7, 16, kind, ALL))
    shapes += [("bf16", 128, 1, 64, "decode", ()), ("bf16", 128, 8, 64, "decode", ())]
    shapes += [("bf16", 128, 8, 64, "prompt", ()), ("fp16", 96, 7, 16, "prompt", ALL)]
    shapes += [("bf16", 64, 8, 64, kind, KINDS) for kind in ("decode", "chunk", "prompt")]
    shapes += [("bf16", 128, 7, 16, "prompt", KINDS)]
    shapes += [
        ("bf16", 512, 8, 64, "decode", ()),
        ("bf16", 512, 7, 16, "prompt", ALL),
        ("fp32", 512, 4, 64, "decode", ()),
    ]
    # fp32 has one tile, whatever the rows.
    shapes += [("fp32", 64, 4, 64, "decode", ()), ("fp32", 128, 4, 64, "decode", ())]
    shapes += [("fp32", 128, 7, 16, "prompt", ALL), ("fp32", 256, 7, 16, "prompt", ALL)]
    for dtype, size, group, block_size, kind, features in shapes:
        name = ", ".join((f"attend {dtype} H{size} G{group} S{block_size} {kind}", *features))
        yield name, functools.partial(_attend, DTYPES[dtype], size, group, block_size, kind, features)


def requests_of(kind: str, group: int) -> tuple[int, int]:
    """Return the requests of a launch of attention, and the query tokens of each."""
    return {"decode": (8, 1), "chunk": (1, 64 // group), "prompt": (1, 2048)}[kind]


def _attend(
    dtype: torch.dtype, head_size: int, group: int, block_size: int, kind: str, features: tuple[str, ...],
    device: Device,
) -> None:  # fmt: skip
    """Launch for 8 decodes of 8192 keys, or one request's chunk of 64 rows or prompt of 2048 tokens; 2 KV heads."""
    from omniserve.ops.kernels.attention import paged_attention

    requests, tokens = requests_of(kind, group)
    cache = torch.empty(2, 2, 2, block_size, head_size, dtype=dtype)
    options: dict[str, Any] = {}
    for feature in features:
        options |= FEATURES[feature]
    if "reversed_RM" in options:
        options["reversed_RM"] = options["reversed_RM"][:requests, : 8192 // block_size]
    for name in {"sinks_N", "alibi_slopes_N"} & set(options):
        options[name] = options[name][: 2 * group]
    paged_attention(
        torch.empty(requests * tokens, 2 * group, head_size, dtype=dtype), cache[0], cache[1],
        torch.zeros(requests, 8192 // block_size, dtype=torch.int32), torch.zeros(requests + 1, dtype=torch.int32),
        torch.zeros(requests, dtype=torch.int32), scale=0.1, one_query_each=tokens == 1, device=device, **options,
    )  # fmt: skip


def _rows() -> Iterator[tuple[str, Launch]]:
    """Yield launches with the shapes of an 8B model: D 4096, N 32, K 8, H 128."""
    from omniserve.ops.kernels import mailbox as post
    from omniserve.ops.kernels import rows

    tokens, seats = torch.zeros(9, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    flags = torch.zeros(6, dtype=torch.int64)
    for name, dtype in DTYPES.items():
        if name == "fp16":
            continue  # moved as bf16 is
        hidden, store = torch.empty(9, 4096, dtype=dtype), torch.empty(6, 4096, dtype=dtype)
        q, k, v = torch.empty(9, 48, 128, dtype=dtype).split([32, 8, 8], 1)
        cache, mailbox = torch.empty(2, 3, 8, 16, 128, dtype=dtype), torch.empty(6, 48 * 128, dtype=dtype)
        for launch, args in (
            (rows.store_kv, (k, v, cache[0], cache[1], tokens)),
            (rows.piggyback_concat, (hidden, store, seats)),
            (rows.residual_fetch, (store, seats, hidden)),
            (rows.gather_rows, (store, seats, store)),
            (post.piggyback_receive, (seats, seats, seats[:1], seats[:1], flags, store, store, flags, seats)),
            (post.piggyback_send, (hidden, q, k, v, seats, store, mailbox, flags, seats[:1])),
        ):
            yield f"{launch.__name__} {name}", _everywhere(functools.partial(launch, *args))


def _blocks() -> Iterator[tuple[str, Launch]]:
    from omniserve.ops.kernels.blocks import copy_blocks

    ids = torch.zeros(4, dtype=torch.int64)
    variants = product(("bf16",), ((True, "to host"), (False, "back")), (False, True))
    for name, (to_host, way), is_reversed in (*variants, ("fp32", (True, "to host"), False)):
        cache = torch.empty(2, 3, 8, 16, 128, dtype=DTYPES[name])
        pool = torch.empty(2, 5, 8, 2, 16, 128, dtype=DTYPES[name])
        label = f"copy_blocks {name} {way}{', reversed' if is_reversed else ''}"
        copy = functools.partial(copy_blocks, to_host=to_host, is_reversed=is_reversed)
        yield label, _everywhere(functools.partial(copy, cache, cache, pool, ids, ids))


LORA_ROWS = {"decode": 8, "chunk": 512, "prompt": 4096}
"""Rows of a launch of add_lora."""


def _lora() -> Iterator[tuple[str, Launch]]:
    for dtype, num_in, num_out, rank, kind in (
        ("bf16", 4096, 4096, 16, "decode"),
        ("bf16", 14336, 4096, 64, "decode"),
        ("bf16", 4095, 1023, 24, "chunk"),
        ("bf16", 4096, 4096, 64, "prompt"),
        ("bf16", 4096, 14336, 256, "prompt"),
        ("fp32", 4096, 4096, 64, "prompt"),
    ):
        launch = functools.partial(_add_lora, DTYPES[dtype], LORA_ROWS[kind], num_in, num_out, rank)
        yield f"add_lora {dtype} I{num_in} O{num_out} R{rank} {kind}", _everywhere(launch)


def _add_lora(dtype: torch.dtype, num_rows: int, num_in: int, num_out: int, rank: int, num_adapters: int = 4) -> None:
    from omniserve.ops.kernels.lora import add_lora

    y, x = torch.empty(num_rows, num_out, dtype=dtype), torch.empty(num_rows, num_in, dtype=dtype)
    a = torch.empty(num_adapters, rank, num_in, dtype=dtype)
    b = torch.empty(num_adapters, num_out, rank, dtype=dtype)
    add_lora(y, x, torch.zeros(num_rows, dtype=torch.int32), a, b, torch.empty(num_adapters))


def _everywhere(launch: Callable[[], Any]) -> Launch:
    return lambda device: launch()


def steps() -> Iterator[Launch]:
    """Yield launches that differ as steps do: numbers of rows, seats and slots, and where index tensors begin."""
    from omniserve.ops.kernels import rows

    hidden = torch.empty(33, 4096, dtype=torch.bfloat16)
    store = torch.empty(17, 4096, dtype=torch.bfloat16)
    slots = torch.zeros(20, dtype=torch.int64)
    for num_rows in (4, 9, 16, 33):
        for first, num_slots in ((0, 1), (1, 16), (2, 17)):
            seats = slots[first : first + num_rows // 4]
            yield _everywhere(functools.partial(rows.residual_fetch, store[:num_slots], seats, hidden[:num_rows]))
            yield _everywhere(functools.partial(rows.piggyback_concat, hidden[:num_rows], store[:num_slots], seats))


def moves() -> Iterator[Launch]:
    """Yield launches that differ as moves do: numbers of layers and blocks, and where index tensors begin."""
    from omniserve.ops.kernels import blocks

    for num_layers, num_blocks in ((1, 1), (2, 3), (16, 16), (3, 17)):
        cache = torch.empty(num_layers, num_blocks, 8, 16, 128, dtype=torch.bfloat16)
        pool, ids = torch.empty(num_layers, 5, 8, 2, 16, 128, dtype=cache.dtype), torch.zeros(2, num_blocks).long()
        copy = functools.partial(blocks.copy_blocks, cache, cache, pool, to_host=True, is_reversed=False)
        yield _everywhere(functools.partial(copy, ids[0], ids[1]))


def lora_steps() -> Iterator[Launch]:
    """Yield launches of add_lora that differ as steps do: numbers of rows and of adapters."""
    for num_rows, num_adapters in ((1, 1), (16, 2), (33, 16), (256, 33)):
        yield _everywhere(functools.partial(_add_lora, torch.bfloat16, num_rows, 4096, 4096, 16, num_adapters))


def attention_steps() -> Iterator[Launch]:
    """Yield launches of attention that differ as steps of decodes do: numbers of requests and of their blocks."""
    for requests, width in ((8, 128), (9, 128), (16, 129), (33, 160)):
        yield functools.partial(_decodes, requests, width)


def _decodes(requests: int, width: int, device: Device) -> None:
    from omniserve.ops.kernels.attention import paged_attention

    cache = torch.empty(2, requests, 8, 64, 128, dtype=torch.bfloat16)
    q, table = torch.empty(requests, 32, 128, dtype=cache.dtype), torch.zeros(requests, width, dtype=torch.int32)
    index = torch.zeros(requests + 1, dtype=torch.int32)
    paged_attention(
        q, cache[0], cache[1], table, index, index[:-1], scale=0.1, one_query_each=True, num_splits=2, device=device
    )

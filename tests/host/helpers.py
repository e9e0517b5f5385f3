"""Parts that the host tier's tests share: a tier with a shadow of every request's history, and a slow reference."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from omniserve.core.setup import HostTierSetup
from omniserve.core.spec import AttentionSpec, ModelSpec
from omniserve.core.stats import HostTierStats
from omniserve.core.work import HOST_BLOCKS, HostEvent, KVMove, MoveDirection
from omniserve.host.tier import HostTier
from omniserve.remote import host_server, network_hosts
from tests.events import ATTENTION_DONE, HOST_LOST, kind_of
from tests.ops.host_layout import pack_blocks, quantize_blocks, read_blocks
from tests.quick import slow_except

# Against a float64 reference on the same rounded inputs.
TOLERANCE = {
    torch.float32: (1e-5, 1e-5),  # (rtol, atol): sums of a few hundred fp32 products and exponentials
    torch.bfloat16: (2**-7, 2**-8),  # the output is rounded to 8 bits, the weights may be too
    torch.float16: (2**-10, 2**-10),  # the output is rounded to 11 bits
}
BLOCK_SIZE = 16
ATTENTION = (AttentionSpec(scale=0.25), AttentionSpec(scale=0.25, window=40), AttentionSpec(scale=0.3, softcap=5.0))
KINDS = (
    AttentionSpec(scale=0.25, sinks=(0.5, -3.0, 2.0, 6.0)),
    AttentionSpec(scale=0.25, alibi_slopes=(0.5, 0.0, 0.125, 0.03)),
    AttentionSpec(scale=0.25, chunk=300),
    AttentionSpec(scale=0.25, window=150, chunk=300, sinks=(1.0,) * 4, alibi_slopes=(0.25,) * 4),
    AttentionSpec(scale=0.25),
)
"""Kinds of attention for the 4 heads of `make_spec`."""


anywhere = pytest.mark.parametrize("place", ["here", "network"])
"""Mark of tests that hold wherever a driver's blocks are."""
anywhere_with_seeds = pytest.mark.parametrize(
    ("place", "seed"), slow_except((("here", 0), ("network", 1)), product(("here", "network"), range(3)))
)
"""The same for random histories."""


def make_spec(
    dtype: torch.dtype = torch.float32,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    attention: Sequence[AttentionSpec] = ATTENTION,
) -> ModelSpec:
    return ModelSpec(
        num_layers=len(attention),
        hidden_size=num_heads * head_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=100,
        max_model_len=1 << 16,
        eos_token_ids=(0,),
        dtype_bytes=dtype.itemsize,
        attention=tuple(attention),
    )


def make_tier(
    spec: ModelSpec,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    num_blocks: int = 200,
    block_size: int = BLOCK_SIZE,
    kv_dtype: str = "auto",
    **sizes: Any,
) -> HostTier:
    """Make a tier with these sizes, fields of HostTierSetup, and others that do for most tests."""
    setup = HostTierSetup(
        block_size=block_size, kv_bytes=num_blocks * spec.kv_block_bytes(block_size, kv_dtype), kv_dtype=kv_dtype,
        **{"num_slots": 8, "num_threads": 2, **sizes},
    )  # fmt: skip
    tier = HostTier(setup, spec=spec, dtype=dtype, device=device)
    if tier.mailbox_SW is not None:
        tier.mailbox_SW.fill_(torch.nan)
    poison(tier, range(tier.num_blocks))
    return tier


class NetworkTier:
    """A host tier, of which all blocks that it is given are those of a host on the network: another tier here."""

    def __init__(self, spec: ModelSpec, *, timeout_s: float = 20.0, **settings: Any) -> None:
        self.far = make_tier(spec, **{n: value for n, value in settings.items() if not n.startswith("mailbox")})
        self.near = make_tier(spec, **settings)
        pairs = [socket.socketpair(), socket.socketpair()]
        near, far = ([pair[side].detach() for pair in pairs] for side in (0, 1))
        self.server = threading.Thread(target=self.far.serve, args=(*far, timeout_s), daemon=True)
        self.server.start()
        self.near.connect(1, *near, self.far.num_blocks, timeout_s)
        self.pool_LBK2SH, self.scales_LBK2S = self.far.pool_LBK2SH, self.far.scales_LBK2S
        self.num_blocks = self.far.num_blocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.near, name)

    def begin_token(self, slot: int, epoch: int, position: int, blocks: Sequence[int], num_rows: int = 1) -> None:
        self.near.begin_token(slot, epoch, position, [HOST_BLOCKS + block for block in blocks], num_rows)

    def start_move(self, move: KVMove, k: Tensor, v: Tensor) -> None:
        there = "dst_block_ids" if move.direction is MoveDirection.TO_HOST else "src_block_ids"
        ids = tuple(HOST_BLOCKS + block for block in getattr(move, there))
        self.near.start_move(dataclasses.replace(move, **{there: ids}), k, v)

    def inject(self, **faults: Any) -> None:
        self.far.inject(**faults)

    def poll(self) -> list[HostEvent]:
        return [event for event in self.near.poll() if kind_of(event) != HOST_LOST]

    def stats(self) -> HostTierStats:
        near, far = self.near.stats(), self.far.stats()
        return dataclasses.replace(
            near, threads_alive=far.threads_alive, busy_seconds=far.busy_seconds, kv_bytes_read=far.kv_bytes_read
        )  # fmt: skip

    def close(self) -> None:
        self.near.close()
        self.server.join()
        self.far.close()


def shorten_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have hosts on the network tried again soon."""
    monkeypatch.setattr(network_hosts, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(network_hosts, "_LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(host_server, "_LAST_SESSION_S", 0.5)


def poison(tier: HostTier, blocks: Sequence[int]) -> None:
    """Make blocks NaN."""
    index = torch.tensor(blocks, dtype=torch.long)
    if tier.scales_LBK2S is None:
        tier.pool_LBK2SH[:, index] = torch.nan
    else:
        tier.pool_LBK2SH[:, index] = -128
        tier.scales_LBK2S[:, index] = torch.nan


def read_pool(tier: HostTier) -> tuple[Tensor, Tensor]:
    """Return K and V of the whole pool in rows, ``[L, B, K, S, H]`` each."""
    return read_blocks(tier.pool_LBK2SH, tier.scales_LBK2S)


def write_blocks(tier: HostTier, layer: int | slice, blocks: Sequence[int], k: Tensor, v: Tensor) -> None:
    """Set whole blocks from K and V in rows, ``[..., blocks, K, S, H]`` each."""
    index = torch.tensor(blocks, dtype=torch.long)
    if tier.scales_LBK2S is None:
        tier.pool_LBK2SH[layer, index] = pack_blocks(k, v)
    else:
        tier.pool_LBK2SH[layer, index], tier.scales_LBK2S[layer, index] = quantize_blocks(k, v)


def rounded(tier: HostTier, rows: Tensor) -> Tensor:
    """Return what the pool makes of rows ``[..., H]``."""
    if tier.scales_LBK2S is None:
        return rows
    values, scales = quantize_blocks(rows[..., None, :], rows[..., None, :])
    return read_blocks(values, scales)[0][..., 0, :]


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    """NaNs, the poison, count too."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[got.itemsize]
    assert torch.equal(got.view(bits), expected.view(bits))


def collect(tier: HostTier, count: int) -> list[HostEvent]:
    """Return the next `count` events. More, or none for a minute, is a failure."""
    events: list[HostEvent] = []
    deadline_s = time.monotonic() + 60
    while len(events) < count:
        assert time.monotonic() < deadline_s, f"{len(events)} of {count} events came: {events}"
        tier.wait(1.0)
        events += tier.poll()
    assert len(events) == count, events
    return events


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "waited for a minute"
        time.sleep(0.001)


def host_threads(name: str = "omni-host") -> list[Path]:
    """Folders in /proc of this process's host tier threads, those whose names begin so."""
    threads = []
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().startswith(name):
                threads.append(task)
        except (FileNotFoundError, ProcessLookupError):
            continue  # some other thread ended in between, or while its name was read
    return threads


def cpu_ticks(task: Path) -> int:
    """User and system time of a thread, in clock ticks (10 ms)."""
    fields = (task / "stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def reference(q_NH: Tensor, k_TKH: Tensor, v_TKH: Tensor, attention: AttentionSpec) -> Tensor:
    """Attention of the last token over its history in float64; ``[N*H]``."""
    position, num_kv_heads = k_TKH.shape[0] - 1, k_TKH.shape[1]
    first = attention.first_key(position)
    q_KGH = q_NH.double().unflatten(0, (num_kv_heads, -1))  # G heads for each KV head
    scores_NT = torch.einsum("kgh,tkh->kgt", q_KGH, k_TKH[first:].double()).flatten(0, 1) * attention.scale
    if attention.softcap:
        scores_NT = attention.softcap * torch.tanh(scores_NT / attention.softcap)
    if attention.alibi_slopes is not None:
        distance_T = torch.arange(first, position + 1) - position
        scores_NT += torch.tensor(attention.alibi_slopes).double()[:, None] * distance_T
    if attention.sinks is not None:
        scores_NT = torch.cat([scores_NT, torch.tensor(attention.sinks).double()[:, None]], dim=1)
    weights_KGT = scores_NT.softmax(-1)[:, : position + 1 - first].unflatten(0, (num_kv_heads, -1))
    return torch.einsum("kgt,tkh->kgh", weights_KGT, v_TKH[first:].double()).flatten()


class Driver:
    """Requests on a tier, one per slot. Free blocks are NaN, and so is what lies past a request's last token."""

    def __init__(self, tier: HostTier, spec: ModelSpec, seed: int = 0) -> None:
        self.tier = tier
        self.spec = spec
        self.dtype = tier.results_SD.dtype
        self.block_size = tier.pool_LBK2SH.shape[4]
        self.rng = torch.Generator().manual_seed(seed)
        self.free = torch.randperm(tier.num_blocks, generator=self.rng).tolist()
        self.blocks: dict[int, list[int]] = {}
        self.history: dict[int, list[tuple[Tensor, Tensor]]] = {}  # slot -> per layer K and V, [T, K, H]
        self._seen: dict[tuple[int, int], tuple[tuple[Tensor, Tensor], list[Tensor]]] = {}
        """(slot, layer) -> its history, and what the pool makes of that, in float64."""
        self.epochs: dict[int, int] = {}
        self.num_rows: dict[int, int] = {}  # slot -> the tokens that it is bound to
        self.expected: dict[tuple[int, int, int], Tensor] = {}  # (slot, epoch, layer) -> [rows, N*H] float64

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.rng).to(self.dtype)

    def start(self, slot: int, context_len: int, num_rows: int = 1) -> None:
        """Give a slot a request with so many tokens behind it, and bind it to the next ones."""
        kv_shape = (context_len, self.spec.num_kv_heads, self.spec.head_size)
        self.blocks[slot] = []
        self.history[slot] = [(self.random(*kv_shape), self.random(*kv_shape)) for _ in range(self.spec.num_layers)]
        self.begin(slot, num_rows)
        blocks = self.blocks[slot]
        for layer, history in enumerate(self.history[slot]):
            sides = []
            for rows_TKH in history:
                padded = torch.full((len(blocks) * self.block_size, *kv_shape[1:]), torch.nan, dtype=self.dtype)
                padded[:context_len] = rows_TKH
                sides.append(padded.view(len(blocks), self.block_size, *kv_shape[1:]).transpose(1, 2))
            write_blocks(self.tier, layer, blocks, *sides)

    def position(self, slot: int) -> int:
        """Tokens that all layers have seen."""
        return min(k_TKH.shape[0] for k_TKH, _ in self.history[slot])

    def begin(self, slot: int, num_rows: int = 1) -> None:
        while len(self.blocks[slot]) * self.block_size < self.position(slot) + num_rows:
            self.blocks[slot].append(self.free.pop())
        self.epochs[slot] = self.epochs.get(slot, 0) + 1
        self.num_rows[slot] = num_rows
        self.tier.begin_token(slot, self.epochs[slot], self.position(slot), self.blocks[slot], num_rows)

    def take_back(self, slot: int, num_tokens: int) -> None:
        """Forget a request's last tokens, and make NaN of what the pool holds of them, as if they had been so."""
        end = self.position(slot) - num_tokens
        self._cut(slot, end)
        blocks = self.blocks[slot]
        pool, scales = self.tier.pool_LBK2SH, self.tier.scales_LBK2S
        for position in range(end, end + num_tokens):
            block, offset = blocks[position // self.block_size], position % self.block_size
            if scales is not None:
                pool[:, block, :, :, offset] = -128
                scales[:, block, :, :, offset] = torch.nan
        if scales is None and num_tokens > 0:
            stale = blocks[end // self.block_size :]
            k, v = read_pool(self.tier)
            sides = [side[:, stale].clone() for side in (k, v)]
            for side in sides:  # [L, blocks, K, S, H]
                side[:, 0, :, end % self.block_size :] = torch.nan
                side[:, 1:] = torch.nan
            write_blocks(self.tier, slice(None), stale, *sides)

    def give_up(self, slot: int, num_tokens: int) -> None:
        """Forget a request's last tokens on their way: the pool keeps what the layers before this have appended."""
        end = self.position(slot) + self.num_rows[slot] - num_tokens  # a layer is still to come
        self.num_rows[slot] -= num_tokens
        self._cut(slot, end)

    def _cut(self, slot: int, end: int) -> None:
        for layer, before in enumerate(self.history[slot]):
            history = self.history[slot][layer] = (before[0][:end], before[1][:end])
            of, seen = self._seen.get((slot, layer), (None, []))
            if of is before:
                self._seen[slot, layer] = history, [rows_TKH[:end] for rows_TKH in seen]

    def submit(self, layer: int, slots: Sequence[int]) -> None:
        """Submit random rows for these slots (-1: an empty seat) and remember what must come out."""
        spec = self.spec
        seats = [slot for slot in slots for _ in range(1 if slot == -1 else self.num_rows[slot])]
        fused = self.random(len(seats), spec.num_heads + 2 * spec.num_kv_heads, spec.head_size)
        q, k, v = fused.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
        for slot in slots:
            if slot != -1:
                at = [index for index, seat in enumerate(seats) if seat == slot]
                self.expected[slot, self.epochs[slot], layer] = self._attend(slot, layer, q[at], k[at], v[at])
        self.send(layer, torch.tensor(seats), q, k, v)

    def _attend(self, slot: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append rows to a request's history; return what must come out for each."""
        before = self.history[slot][layer]
        of, seen = self._seen.get((slot, layer), (None, []))
        if of is not before:
            seen = [rounded(self.tier, rows_TKH).double() for rows_TKH in before]
        k_TKH, v_TKH = (torch.cat([x, rounded(self.tier, new).double()]) for x, new in zip(seen, (k, v), strict=True))
        history = self.history[slot][layer] = (torch.cat([before[0], k]), torch.cat([before[1], v]))
        self._seen[slot, layer] = history, [k_TKH, v_TKH]
        ends = range(len(k_TKH) - len(q) + 1, len(k_TKH) + 1)
        attention = self.spec.attention[layer]
        return torch.stack([reference(row, k_TKH[:n], v_TKH[:n], attention) for row, n in zip(q, ends, strict=True)])

    def send(self, layer: int, slots: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.tier.submit(layer, slots, q, k, v)
        for rows in (q, k, v):
            rows.fill_(float("nan"))  # the tier has its own copy by now

    def check(self, event: HostEvent) -> None:
        """Hold a DONE event against what was submitted; each fits once."""
        assert kind_of(event) == ATTENTION_DONE, event
        num_rows = self.num_rows[event.slot]
        assert event.position == self.history[event.slot][event.layer][0].shape[0] - num_rows
        expected = self.expected.pop((event.slot, event.epoch, event.layer))
        result = self.tier.results_SMD[event.slot, :num_rows].double()
        rtol, atol = TOLERANCE[self.dtype]
        torch.testing.assert_close(result, expected, rtol=rtol, atol=atol)

    def release(self, slot: int) -> None:
        """Poison and free a request's blocks."""
        poison(self.tier, self.blocks[slot])
        self.free = self.blocks.pop(slot) + self.free
        del self.history[slot]

"""The mailbox under load: rows that the device sends from many steps, seen by the host tier's threads.

Each row (q, k, v) also goes to a second host tier by ``submit``, over no mailbox. Both tiers' attention rows, and in
the end both pools, must agree to the bit, so a row that is lost, torn, taken too early or taken twice shows.

Legend: S slots, R rows of a step, N query heads, K KV heads, H head size.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from omniserve.core.work import HostEvent
from omniserve.ops.streams import upload
from tests.events import ATTENTION_DONE, kind_of
from tests.host.helpers import assert_same_bits, make_spec, make_tier

_SLOTS, _BLOCK, _TOKENS = 48, 16, 64
_PATIENCE_S = 20.0
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TIERS: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "a fast tier, a watcher that never rests": ({"mailbox_spin_s": 3600.0}, {}),
    "a fast tier, a watcher that sleeps": ({"mailbox_spin_s": 0.0}, {}),
    "a slow tier": ({}, {"delay_s": 0.0005}),
}
"""Settings of a tier, and what is injected into it."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TIERS)
def test_every_row_arrives_whole_and_once(name: str, device: str) -> None:
    settings, faults = TIERS[name]
    load = Load(torch.device(device), seed=len(name), **settings)
    try:
        load.mailbox.inject(**faults)  # type: ignore[arg-type]
        load.run(100 if device == "cpu" else 6000)
    finally:
        load.close()


@pytest.mark.parametrize("fault", ["torn", "lost", "twice"])
def test_the_load_notices(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}._PATIENCE_S", 1.0)
    load = Load(torch.device("cpu"), 0)
    send = torch.ops.omniserve.piggyback_send
    sent = 0

    def faulty(*args: torch.Tensor) -> None:
        nonlocal sent
        sent += 1
        if fault == "lost" and sent == 3:
            return
        send(*args)
        if fault == "torn" and sent == 3:  # the end of the row came later than its flag
            slots, box = args[4], args[6]
            box[slots[0], -8:] = 0

    monkeypatch.setattr(torch.ops.omniserve, "piggyback_send", faulty)
    if fault == "twice":
        poll = load.mailbox.poll
        monkeypatch.setattr(load.mailbox, "poll", lambda: [event for event in poll() for _ in range(2)])
    if fault == "torn":
        load.mailbox.inject(delay_s=0.01)
    try:
        with pytest.raises(AssertionError, match={"lost": "lost", "twice": "twice", "torn": None}[fault]):
            load.run(100)
    finally:
        load.close()


class Load:
    """Sends random rows from random slots of a device; ``settings`` are of the tier with the mailbox."""

    def __init__(self, device: torch.device, seed: int, **settings: Any) -> None:
        self._device, self._choose = device, random.Random(seed)
        self._spec = make_spec(torch.bfloat16, num_heads=32, num_kv_heads=8, head_size=128)  # rows of 12 KiB
        shared: dict[str, Any] = {
            "dtype": torch.bfloat16, "num_slots": _SLOTS, "num_blocks": _SLOTS * _TOKENS // _BLOCK,
            "block_size": _BLOCK, "pin_memory": device.type == "cuda",
        }  # fmt: skip
        self.mailbox = make_tier(self._spec, mailbox=True, **shared, **settings)
        self._plain = make_tier(self._spec, **shared)
        self._residuals_SD = torch.zeros(_SLOTS, 64, dtype=torch.bfloat16, device=device)
        width = 2048 if device.type == "cuda" else 64
        self._matrix = torch.randn(width, width, device=device)
        self._sent = torch.zeros(_SLOTS)
        """The step of each slot's last row, modulo 128: its residual."""
        self._at = [(0, 0)] * _SLOTS
        """Position of each slot's token, and layer of its next row."""
        self._away: dict[int, dict[int, HostEvent]] = {}
        """Slots with a row on its way, and the events that have come for it, by tier."""
        self._step = self._epoch = 0

    def close(self) -> None:
        """Let the device finish, then stop both tiers."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # until then it writes to the mailbox
        self.mailbox.close()
        self._plain.close()

    def run(self, rows: int) -> None:
        """Send so many rows, and compare what came of them."""
        sent, came_s = 0, time.monotonic()
        while sent < rows or self._away:
            idle = [slot for slot in range(_SLOTS) if slot not in self._away]
            if idle and sent < rows:
                chosen = self._choose.sample(idle, self._choose.randint(1, min(len(idle), rows - sent, 16)))
                self._send(chosen)
                sent += len(chosen)
            if self._poll():
                came_s = time.monotonic()
            missing = sorted(self._away)
            assert time.monotonic() - came_s < _PATIENCE_S, f"the rows of slots {missing} never came: lost"
        assert not self.mailbox.poll() and not self._plain.poll(), "an event more than there were rows"
        assert self.mailbox.stats().tasks_done == rows, f"{self.mailbox.stats().tasks_done} tasks of {rows} rows"
        assert_same_bits(self.mailbox.pool_LBK2SH, self._plain.pool_LBK2SH)
        assert torch.equal(self._residuals_SD[:, 0].cpu().float(), self._sent), "a residual is not its row's"

    def _send(self, slots: list[int]) -> None:
        self._step += 1
        self._epoch += 1
        spec = self._spec
        widths = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        by_layer: dict[int, list[int]] = {}
        for slot in slots:
            position, layer = self._at[slot]
            if layer == 0:
                blocks = list(range(slot * _TOKENS // _BLOCK, (slot + 1) * _TOKENS // _BLOCK))
                for tier in (self.mailbox, self._plain):
                    tier.begin_token(slot, self._epoch, position, blocks)
            by_layer.setdefault(layer, []).append(slot)
            self._away[slot] = {}
            self._sent[slot] = self._step % 128
        layers_R = torch.tensor([layer for layer, group in by_layer.items() for _ in group])
        expected_R = torch.tensor([slot for group in by_layer.values() for slot in group])
        is_early = self._choose.random() < 0.5
        if is_early:
            self.mailbox.expect(self._step, layers_R, expected_R)
        step_1 = torch.full((1,), self._step, dtype=torch.int64, device=self._device)
        for layer, group in by_layer.items():
            seats = torch.tensor([*group, -1])  # one empty
            fused = torch.randn(len(seats), sum(widths), spec.head_size).bfloat16()
            self._plain.submit(layer, seats, *fused.split(widths, 1))
            for _ in range(self._choose.choice((0, 0, 1, 20))):  # rows of a step come while the others are under way
                self._matrix = torch.tanh(self._matrix @ self._matrix)
            # Two device rows, which are sent nowhere, before the seats.
            rows = torch.cat([fused.new_full((2, *fused.shape[1:]), torch.nan), fused])
            hidden_TD = torch.full((len(rows), 64), self._step % 128, dtype=torch.bfloat16, device=self._device)
            # Nothing here waits for the device: it is many steps behind when its matrix products take long.
            torch.ops.omniserve.piggyback_send(
                hidden_TD, *upload(rows, self._device).split(widths, 1), upload(seats, self._device),
                self._residuals_SD, self.mailbox.mailbox_SW, self.mailbox.flags_S, step_1,
            )  # fmt: skip
        if not is_early:
            self.mailbox.expect(self._step, layers_R, expected_R)

    def _poll(self) -> int:
        """Take the events that have come, compare slots that both tiers are done with, and return how many came."""
        came = 0
        for number, tier in enumerate((self.mailbox, self._plain)):
            for event in tier.poll():
                came += 1
                assert kind_of(event) == ATTENTION_DONE, event
                assert number not in self._away.get(event.slot, {number: event}), f"a row came twice: {event}"
                self._away[event.slot][number] = event
                if len(self._away[event.slot]) == 2:
                    self._compare(event.slot, *self._away.pop(event.slot).values())
        if not came:
            self.mailbox.wait(0.001)
        return came

    def _compare(self, slot: int, one: HostEvent, other: HostEvent) -> None:
        position, layer = self._at[slot]
        assert (one.layer, one.position) == (other.layer, other.position) == (layer, position), (one, other)
        assert_same_bits(self.mailbox.results_SD[slot], self._plain.results_SD[slot])
        assert self.mailbox.mailbox_SW is not None
        self.mailbox.mailbox_SW[slot] = torch.nan  # whatever is read before the next row has come is poison
        last = layer + 1 == self._spec.num_layers
        self._at[slot] = ((position + last) % _TOKENS, 0 if last else layer + 1)

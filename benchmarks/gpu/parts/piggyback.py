"""What piggyback rows cost: the operators that bring them in and out, and steps with and without them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, Measured
from benchmarks.gpu.clock import graph_of, median_seconds
from benchmarks.gpu.engines import kv_token_bytes, open_decoding, request, step_times
from benchmarks.gpu.models import LLAMA_8B
from benchmarks.gpu.table import Goal
from omniserve import Engine
from omniserve.sched.piggyback import seat_bucket

GOAL = Goal(at_most=10.0, of="measured")
"""Microseconds a layer. Paper: omniserve reports 75 for 400 rows."""
_CONTEXT = 32  # host attention is not what is measured here
_OUTPUT = 64
_RESIDENTS_A_ROW = 2
"""A token passes a layer in every second step at best: results join a step that was planned after they had come."""


def run(bench: Bench) -> None:
    """Time the operators alone, then steps with more and more rows in seats, and with as many plain rows."""
    model = bench.shelf.patched(LLAMA_8B)
    batch = 4 if bench.dry else 64
    wanted = (1, 4) if bench.dry else (100, 400)
    residents = (0, *(_RESIDENTS_A_ROW * rows for rows in wanted))
    layers = model.omniserve.num_layers
    for rows in wanted:
        seats = seat_bucket(-(-rows // layers), 32)
        bench.take(
            f"operators of {seats} seats beside {batch} rows, a layer", "us",
            functools.partial(_operators_us, bench, model, batch, seats), goal=GOAL,
        )  # fmt: skip
    steps: dict[int, Measured] = {}
    for count in residents:
        bench.take(
            f"step of {batch} LS rows, {count} BE requests on the host", "ms",
            functools.partial(_step_with_residents, bench, model, batch, count, steps),
        )  # fmt: skip
    plain: dict[int, float | None] = {}
    for count in residents[1:]:
        if 0 not in steps or count not in steps:
            continue
        seats = int(steps[count].details["seats"])
        if seats not in plain:
            plain[seats] = bench.take(
                f"step of {batch} + {seats} plain rows", "ms",
                functools.partial(_plain_step_ms, bench, model, batch, seats),
            )  # fmt: skip
        plain_ms = plain[seats]
        if plain_ms is None:
            continue
        for name, other_ms in (("with no seat", steps[0].value), (f"with {seats} plain rows more", plain_ms)):
            added_us = 1e3 * (steps[count].value - other_ms) / layers
            note = f"{steps[count].details['rows_per_step']:.0f} piggyback rows a step"
            bench.take(
                f"{count} residents: a layer longer than {name}", "us",
                functools.partial(Measured, value=added_us, note=note),
                goal=GOAL if "plain" in name else None,
            )  # fmt: skip


def _operators_us(bench: Bench, model: Any, batch: int, seats: int) -> float:
    """Return the microseconds that a layer's operators for piggyback rows take, all seats taken (a graph of 32)."""
    spec, dtype, device = model.omniserve.spec, model.omniserve.dtype, bench.device
    width, slots, layers = spec.num_heads * spec.head_size, 512, 32

    def rows(count: int, size: int) -> Tensor:
        return torch.randn(count, size, device=device, dtype=dtype)

    attn_TD, hidden_TD = rows(batch, width), rows(batch + seats, spec.hidden_size)
    store_SD, results_SD = rows(slots, spec.hidden_size), rows(slots, width)
    slots_P = torch.randperm(slots, device=device)[:seats]
    ops = torch.ops.omniserve
    leave = _leaving(bench, model, hidden_TD, store_SD, slots_P)

    def run() -> None:
        for _ in range(layers):
            leave()
            ops.piggyback_concat.default(attn_TD, results_SD, slots_P)
            ops.residual_fetch.default(store_SD, slots_P, hidden_TD)

    with torch.inference_mode():
        return 1e6 * median_seconds(graph_of(run, device), device, repeats=20) / layers


def _leaving(bench: Bench, model: Any, hidden_TD: Tensor, store_SD: Tensor, slots_P: Tensor) -> Callable[[], None]:
    """Return what takes rows out of a step: ``piggyback_send`` where there is one, else the residuals alone."""
    ops = torch.ops.omniserve
    if not hasattr(ops, "piggyback_send"):
        return lambda: ops.residual_store.default(hidden_TD, store_SD, slots_P)
    spec, num_rows = model.omniserve.spec, hidden_TD.shape[0]
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    q, k, v = (
        torch.randn(num_rows, count, spec.head_size, device=bench.device, dtype=hidden_TD.dtype) for count in heads
    )
    pinned = bench.on_gpu
    mailbox_SW = torch.zeros(store_SD.shape[0], sum(heads) * spec.head_size, dtype=hidden_TD.dtype, pin_memory=pinned)
    flags_S = torch.zeros(store_SD.shape[0], dtype=torch.int64, pin_memory=pinned)
    step_1 = torch.ones(1, dtype=torch.int64, device=bench.device)
    return lambda: ops.piggyback_send.default(
        hidden_TD, q, k, v, slots_P, store_SD, mailbox_SW, flags_S, step_1
    )  # fmt: skip


def _step_with_residents(bench: Bench, model: Any, batch: int, residents: int, taken: dict[int, Measured]) -> Measured:
    """Return the milliseconds of a step beside which so many BE requests decode on the host tier, and keep them."""
    steps, context, output = _lengths(bench)
    be_tokens = _CONTEXT + _OUTPUT
    token_bytes = kv_token_bytes(model.omniserve.spec)
    blocks = batch * -(-(context + output) // 64) + -(-be_tokens // 64) + 1
    with open_decoding(
        model, batch=batch, context=context, output=output, device_kv_bytes=blocks * 64 * token_bytes,
        host_kv_bytes=residents * (be_tokens + 64) * token_bytes, max_host_requests=max(1, residents),
        max_model_len=max(context + output, be_tokens),
    ) as engine:  # fmt: skip
        for i in range(residents):
            engine.add(request(f"be{i}", _CONTEXT, _OUTPUT, engine.spec.vocab_size))
        seats = _Seats(engine)
        for _ in range(_steps_before(bench)):
            engine.step()
        before = engine.stats()
        seats.most = 0
        times = step_times(engine, steps, warm_up=0)
        after = engine.stats()
        rows = (after.piggyback_rows - before.piggyback_rows) / steps
        details = {"seats": seats.most, "rows_per_step": rows, "wall_p50_ms": 1e3 * times.p50_s}
        taken[residents] = Measured(
            value=1e3 * times.mean_s, note=f"{rows:.0f} rows a step, {seats.most} seats", details=details
        )
        return taken[residents]


class _Seats:
    """The most seats that a step had."""

    def __init__(self, engine: Engine) -> None:
        self.most = 0
        engine.on_step = lambda plan, host_works, taken_s: self._look(plan.num_piggyback_slots)

    def _look(self, seats: int) -> None:
        self.most = max(self.most, seats)


def _plain_step_ms(bench: Bench, model: Any, batch: int, more: int) -> float:
    """Return the milliseconds of a step with ``more`` rows that attend to next to nothing, as seats do on a device."""
    steps, context, output = _lengths(bench)
    block_bytes = model.omniserve.spec.kv_block_bytes(64)
    blocks = batch * -(-(context + output) // 64) + more * -(-(1 + output) // 64) + 1
    with open_decoding(
        model, batch=batch, context=context, output=output, device_kv_bytes=blocks * block_bytes,
        max_num_requests=batch + more,
    ) as engine:  # fmt: skip
        for i in range(more):
            engine.add(request(f"ls_more{i}", 1, output, engine.spec.vocab_size))
        return 1e3 * step_times(engine, steps, warm_up=_steps_before(bench)).mean_s


def _lengths(bench: Bench) -> tuple[int, int, int]:
    """Return the steps that are timed, and the context and output of LS requests."""
    steps = 5 if bench.dry else 40
    return steps, 40 if bench.dry else 1024, 4 * steps + 80


def _steps_before(bench: Bench) -> int:
    """Return the steps before those that are timed: until piggyback rows are spread over the layers."""
    return 5 if bench.dry else 2 * LLAMA_8B.fields["num_hidden_layers"]

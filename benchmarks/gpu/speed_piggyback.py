"""Measures what piggyback rows cost: the operators that bring them in and out, and steps with and without them.

Paper: omniserve reports 75 us a layer for 400 rows; the goal here is 10.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.common.engine_run import request
from benchmarks.common.timing import graph_of, median_seconds
from benchmarks.gpu.engines import LLAMA_8B, add_decoding, kv_token_bytes, open_decoding, patched_model, step_ms
from benchmarks.gpu.script import Case, NotHere, Script
from omniserve.sched.seats import seat_bucket

_MOST_US = 10.0
_CONTEXT, _OUTPUT = 32, 64  # of BE requests: host attention is not what is measured here
_RESIDENTS_A_ROW = 2
"""A token passes a layer in every second step at best: results join a step that was planned after they had come."""


def piggyback(script: Script) -> None:
    model = patched_model(LLAMA_8B, script)
    layers = model.omniserve.num_layers
    batch, wanted = (4, (1, 4)) if script.dry else (64, (100, 400))
    for rows in wanted:
        seats = seat_bucket(-(-rows // layers), 32)
        with script.case(f"operators of {seats} seats beside {batch} rows, a layer") as case:
            case.figure(operators_us(script, model, batch, seats), "us", at_most=_MOST_US)
    with script.case(f"step of {batch} LS rows, 0 BE requests on the host") as alone:
        time_steps(script, alone, model, batch, residents=0)
    plain: dict[int, Case] = {}
    for residents in (_RESIDENTS_A_ROW * rows for rows in wanted):
        with script.case(f"step of {batch} LS rows, {residents} BE requests on the host") as case:
            time_steps(script, case, model, batch, residents=residents)
        seats = case.details.get("seats", 0)
        if seats not in plain:
            with script.case(f"step of {batch} + {seats} plain rows") as plain[seats]:
                time_steps(script, plain[seats], model, batch, more=seats)
        for name, other in (("with no seat", alone), (f"with {seats} plain rows more", plain[seats])):
            with script.case(f"{residents} residents: a layer longer than {name}") as added:
                if case.measured is None or other.measured is None:
                    raise NotHere("one of the two steps was not measured")
                added.figure(1e3 * (case.measured - other.measured) / layers, "us",
                             at_most=_MOST_US if other is not alone else None, note=case.note)  # fmt: skip


@torch.inference_mode()
def operators_us(script: Script, model: Any, batch: int, seats: int) -> float:
    """Return the microseconds that a layer's operators for piggyback rows take (a graph of 32).

    All seats are taken, by late joins whose results are there.
    """
    spec, dtype, device = model.omniserve.spec, model.omniserve.dtype, script.device
    width, slots, layers = spec.num_heads * spec.head_size, 512, 32

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    attn_TD, hidden_TD = rows(batch, width), rows(batch + seats, spec.hidden_size)
    store_SD, results_SD = rows(slots, spec.hidden_size), rows(slots, width)
    slots_P = torch.randperm(slots, device=device)[:seats]
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    q, k, v = (rows(batch + seats, count, spec.head_size) for count in heads)
    mailbox_SW = torch.zeros(slots, sum(heads) * spec.head_size, dtype=dtype, pin_memory=script.on_gpu)
    flags_S = torch.zeros(slots, dtype=torch.int64, pin_memory=script.on_gpu)
    step_1 = torch.ones(1, dtype=torch.int64, device=device)
    host_results_SD = torch.zeros(slots, width, dtype=dtype, pin_memory=script.on_gpu)
    result_flags_S, skips_S = torch.zeros(2, slots, dtype=torch.int64, pin_memory=script.on_gpu).fill_(7)
    wanted_P, joined_P, as_one_1 = torch.full_like(slots_P, 7), torch.empty_like(slots_P), torch.zeros_like(step_1)
    ops = torch.ops.omniserve

    def run() -> None:
        for _ in range(layers):
            ops.piggyback_send.default(hidden_TD, q, k, v, slots_P, store_SD, mailbox_SW, flags_S, step_1)
            ops.piggyback_receive.default(
                slots_P, wanted_P, as_one_1, step_1, result_flags_S, host_results_SD, results_SD, skips_S, joined_P
            )
            ops.piggyback_concat.default(attn_TD, results_SD, joined_P)
            ops.residual_fetch.default(store_SD, joined_P, hidden_TD)

    return 1e6 * median_seconds(graph_of(run, device), device, repeats=20) / layers


def time_steps(script: Script, case: Case, model: Any, batch: int, *, residents: int = 0, more: int = 0) -> None:
    """Time steps of LS rows beside ``residents`` BE requests that decode on the host tier, or beside ``more`` rows that
    attend to next to nothing, as seats do."""
    steps, context = (5, 40) if script.dry else (40, 1024)
    output = 4 * steps + 80
    before = 5 if script.dry else 2 * LLAMA_8B.fields["num_hidden_layers"]  # until rows are spread over the layers
    be_tokens, token_bytes = _CONTEXT + _OUTPUT, kv_token_bytes(model)
    blocks = batch * -(-(context + output) // 64) + more * -(-(1 + output) // 64) + -(-be_tokens // 64) + 1
    seats: list[int] = []
    with open_decoding(
        model, batch=batch, context=context, output=output, device_kv_bytes=blocks * 64 * token_bytes,
        host_kv_bytes=residents * (be_tokens + 64) * token_bytes, max_host_requests=max(1, residents),
        max_model_len=max(context + output, be_tokens), max_num_seqs=batch + more,
    ) as engine:  # fmt: skip
        for i in range(residents):
            add_decoding(engine, request(f"be{i}", _CONTEXT, _OUTPUT))
        for i in range(more):
            add_decoding(engine, request(f"ls_more{i}", 1, output))
        for _ in range(before):
            engine.step()
        engine.on_step = lambda plan, host_works, taken_s: seats.append(plan.num_piggyback_seats)
        rows_before = engine.stats().piggyback_rows
        taken_ms, walls_ms = step_ms(engine, steps, warm_up=0)
        rows = (engine.stats().piggyback_rows - rows_before) / steps
    case.figure(
        taken_ms, "ms", note=f"{rows:.0f} piggyback rows a step, {max(seats, default=0)} seats",
        seats=max(seats, default=0), rows_per_step=rows, **walls_ms,
    )  # fmt: skip

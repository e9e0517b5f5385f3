"""What piggyback rows cost: the operators that bring them in and out, and steps with and without them.

Paper: omniserve reports 75 us a layer for 400 rows; the goal here is 10.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.requests import request
from benchmarks.common.timing import median_seconds
from benchmarks.gpu.engines import kv_token_bytes, open_decoding, step_times
from benchmarks.gpu.models import LLAMA_8B, patched_model
from benchmarks.gpu.script import NotHere, Script, argument_parser
from benchmarks.gpu.timing import graph_of
from omniserve import Engine
from omniserve.sched.piggyback import seat_bucket

_MOST_US = 10.0
_CONTEXT = 32  # host attention is not what is measured here
_OUTPUT = 64
_RESIDENTS_A_ROW = 2
"""A token passes a layer in every second step at best: results join a step that was planned after they had come."""


def main(arguments: Sequence[str] | None = None) -> int:
    script = Script("piggyback", argument_parser(__doc__).parse_args(arguments))
    model = patched_model(LLAMA_8B, script)
    layers = model.omniserve.num_layers
    batch, wanted = (4, (1, 4)) if script.dry else (64, (100, 400))
    for rows in wanted:
        seats = seat_bucket(-(-rows // layers), 32)
        with script.case(f"operators of {seats} seats beside {batch} rows, a layer") as case:
            case.figure(operators_us(script, model, batch, seats), "us", at_most=_MOST_US)
    timing = Steps(script, model, batch)
    alone_ms = timing.with_residents(0)[0]
    plain_ms: dict[int, float] = {}
    for residents in (_RESIDENTS_A_ROW * rows for rows in wanted):
        taken_ms, seats, rows_a_step = timing.with_residents(residents)
        if seats not in plain_ms:
            plain_ms[seats] = timing.with_plain_rows(seats)
        others = {"with no seat": alone_ms, f"with {seats} plain rows more": plain_ms[seats]}
        for name, other_ms in others.items():
            with script.case(f"{residents} residents: a layer longer than {name}") as case:
                added_us = 1e3 * (taken_ms - other_ms) / layers
                if math.isnan(added_us):
                    raise NotHere("one of the two steps was not measured")
                goal = _MOST_US if "plain" in name else None
                case.figure(added_us, "us", at_most=goal, note=f"{rows_a_step:.0f} piggyback rows a step")
    return script.end()


@torch.inference_mode()
def operators_us(script: Script, model: Any, batch: int, seats: int) -> float:
    """Return the microseconds that a layer's operators for piggyback rows take, all seats taken (a graph of 32)."""
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
    ops = torch.ops.omniserve

    def run() -> None:
        for _ in range(layers):
            ops.piggyback_send.default(hidden_TD, q, k, v, slots_P, store_SD, mailbox_SW, flags_S, step_1)
            ops.piggyback_concat.default(attn_TD, results_SD, slots_P)
            ops.residual_fetch.default(store_SD, slots_P, hidden_TD)

    return 1e6 * median_seconds(graph_of(run, device), device, repeats=20) / layers


class Steps:
    """Times steps of ``batch`` LS rows with something beside them."""

    def __init__(self, script: Script, model: Any, batch: int) -> None:
        self._script, self._model, self._batch = script, model, batch
        self._steps, self._context = (5, 40) if script.dry else (40, 1024)
        self._output = 4 * self._steps + 80
        # Until piggyback rows are spread over the layers.
        self._before = 5 if script.dry else 2 * LLAMA_8B.fields["num_hidden_layers"]

    def with_residents(self, residents: int) -> tuple[float, int, float]:
        """Return the milliseconds of a step beside which so many BE requests decode on the host tier, its most seats
        and its piggyback rows."""
        be_tokens = _CONTEXT + _OUTPUT
        token_bytes = kv_token_bytes(self._model.omniserve.spec)
        blocks = self._batch * -(-(self._context + self._output) // 64) + -(-be_tokens // 64) + 1
        result = (float("nan"), 0, 0.0)
        with self._script.case(f"step of {self._batch} LS rows, {residents} BE requests on the host") as case:
            with open_decoding(
                self._model, batch=self._batch, context=self._context, output=self._output,
                device_kv_bytes=blocks * 64 * token_bytes, host_kv_bytes=residents * (be_tokens + 64) * token_bytes,
                max_host_requests=max(1, residents), max_model_len=max(self._context + self._output, be_tokens),
            ) as engine:  # fmt: skip
                for i in range(residents):
                    engine.add(request(f"be{i}", _CONTEXT, _OUTPUT, engine.spec.vocab_size))
                for _ in range(self._before):
                    engine.step()
                seats = _seats_of(engine)
                before = engine.stats()
                times = step_times(engine, self._steps, warm_up=0)
                rows = (engine.stats().piggyback_rows - before.piggyback_rows) / self._steps
            result = (1e3 * times.mean_s, max(seats, default=0), rows)
            note = f"{rows:.0f} rows a step, {result[1]} seats"
            case.figure(
                result[0], "ms", note=note, seats=result[1], rows_per_step=rows, wall_p50_ms=1e3 * times.p50_s
            )  # fmt: skip
        return result

    def with_plain_rows(self, more: int) -> float:
        """Return the milliseconds of a step with ``more`` rows that attend to next to nothing, as seats do."""
        blocks = self._batch * -(-(self._context + self._output) // 64) + more * -(-(1 + self._output) // 64) + 1
        with self._script.case(f"step of {self._batch} + {more} plain rows") as case:
            with open_decoding(
                self._model, batch=self._batch, context=self._context, output=self._output,
                device_kv_bytes=blocks * self._model.omniserve.spec.kv_block_bytes(64),
                max_num_seqs=self._batch + more,
            ) as engine:  # fmt: skip
                for i in range(more):
                    engine.add(request(f"ls_more{i}", 1, self._output, engine.spec.vocab_size))
                case.figure(1e3 * step_times(engine, self._steps, warm_up=self._before).mean_s, "ms")
        return case.measured if case.measured is not None else float("nan")


def _seats_of(engine: Engine) -> list[int]:
    """Return a list that gets the seats of each step from now on."""
    seats: list[int] = []
    engine.on_step = lambda plan, host_works, taken_s: seats.append(plan.num_piggyback_seats)
    return seats


if __name__ == "__main__":
    sys.exit(main())

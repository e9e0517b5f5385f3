"""Rows that leave a step between two layers: what looking for new requests costs, and how soon rows are gone."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.common.requests import request
from benchmarks.common.timing import wait_for
from benchmarks.gpu.engines import config_of, drain, open_decoding, open_engine, step_times
from benchmarks.gpu.models import LLAMA_8B, patched_model
from benchmarks.gpu.primed import PRIMED, PRIMED_CONSERVE
from benchmarks.gpu.script import Script, argument_parser
from omniserve import Engine


def main(arguments: Sequence[str] | None = None) -> int:
    script = Script("safepoints", argument_parser(__doc__).parse_args(arguments))
    model = patched_model(LLAMA_8B, script)
    batch, steps = (2, 5) if script.dry else (64, 60)
    name, looking_ms = f"step of {batch} BE rows that looks for requests", 0.0
    with script.case(name) as case, open_best_effort(script, model, PRIMED_CONSERVE) as engine:
        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * steps + 10):  # turn and turn about
            looks = number % 2 == 0
            engine.runner.loop.safepoint = _stay if looks else None
            began_s = time.perf_counter()
            engine.step()
            if number >= 10:
                times[looks].append(time.perf_counter() - began_s)
        looking_ms, without_ms = (1e3 * statistics.median(times[looks]) for looks in (True, False))
        case.figure(looking_ms, "ms", limit=without_ms, at_most=1.005, note="limit: the same without looks")
    # Rows that may leave are in no graph, and no step of theirs overlaps another: that has a price of its own.
    with script.case(f"{name}, over captured steps that overlap") as case:
        with open_best_effort(script, model, PRIMED) as engine:
            other_ms = 1e3 * step_times(engine, 2 * steps, warm_up=10).mean_s
        case.figure(looking_ms, "ms", limit=other_ms, note="limit: captured, overlapping")
    time_leaving(script, model)
    return script.end()


@contextmanager
def open_best_effort(script: Script, model: Any, scheduler: str) -> Iterator[Engine]:
    """Give an engine with BE requests that decode on the device."""
    batch, context, steps = (2, 40, 5) if script.dry else (64, 1024, 60)
    output = 4 * steps + 50
    with open_decoding(
        model, batch=0, context=context, output=output, scheduler=scheduler, max_num_seqs=batch,
        device_kv_bytes=(batch * ((context + output) // 64 + 1) + 1) * model.omniserve.spec.kv_block_bytes(64),
    ) as engine:  # fmt: skip
        for i in range(batch):
            engine.add(request(f"be{i}", context, output, engine.spec.vocab_size))
        yield engine


def _stay() -> bool:
    return False


def time_leaving(script: Script, model: Any) -> None:
    """Have long prompts leave their step at random moments."""
    prompt, repeats = (64, 4) if script.dry else (8192, 12)
    config = config_of(
        model, scheduler="conserve", host_kv_bytes=0, max_model_len=prompt + 2, max_num_batched_tokens=prompt,
        device_kv_bytes=(2 * prompt // 64 + 4) * model.omniserve.spec.kv_block_bytes(64),
    )  # fmt: skip
    name = f"from a signal to the end of a step of {prompt} BE rows"
    with script.case(name) as case, open_engine(model, config) as engine:
        # The first ones compile kernels, and find memory.
        step_s = [_step_s(engine, prompt, None)[0] for _ in range(3)][-1]
        rng = random.Random(0)
        latest = 0.0 if script.dry else 0.8 * step_s
        delays = [_step_s(engine, prompt, rng.uniform(latest / 8, latest))[1] for _ in range(repeats)]
        left = [delay for delay in delays if delay is not None]
        if not left:
            raise RuntimeError(f"none of {repeats} prompts left its step")
        case.figure(
            1e3 * statistics.median(left), "ms", limit=1e3 * step_s / engine.spec.num_layers, delays_s=left,
            note=f"limit: a layer; most {1e3 * max(left):.3g} ms; step {1e3 * step_s:.4g} ms; "
            f"{len(left)} of {repeats} left",
        )  # fmt: skip


def _step_s(engine: Engine, prompt: int, signal_after_s: float | None) -> tuple[float, float | None]:
    """Return the seconds of a prompt's step, and those from the signal to its end; None: the rows stayed to its end."""
    engine.add(request("be", prompt, 2, engine.spec.vocab_size))
    before = engine.stats().layer_preemptions
    began_s = time.perf_counter()
    signal_s = began_s + signal_after_s if signal_after_s is not None else float("inf")
    engine.runner.loop.safepoint = lambda: time.perf_counter() >= signal_s
    engine.step()
    wait_for(engine.model.device)
    ended_s = time.perf_counter()
    has_left = engine.stats().layer_preemptions > before
    drain(engine, ["be"])
    return ended_s - began_s, ended_s - signal_s if has_left else None


if __name__ == "__main__":
    sys.exit(main())

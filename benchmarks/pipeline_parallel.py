"""A model in two stages on two cores beside one process with two threads: tokens a second, and the time of a token.

    python -m benchmarks.pipeline_parallel --record benchmarks/results/pipeline_parallel.json

Three engines with one random model measure in turn, each in processes of its own: ``one`` process with all cores;
``stages``: two ranks with half of the cores and of the layers each, and a step in each of them; ``one step``: the same
ranks, but a step begins when the one before it has passed both. Requests decode at the same time, with 128 tokens
before them at first, or prompts of 512 tokens are computed. ``hand-over``: a step of so many rows is told to both ranks
and passes them, without any layer.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common.ranks import QWEN_HALF_B, engine_of, in_turns
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser, table_of
from omniserve import Engine, EngineConfig, ExecutionConfig, ParallelConfig, Request, SamplingParams
from omniserve.host.cores import available_cores
from omniserve.parallel.group import RankGroup

ARMS = ("one", "stages", "one step")
_PROMPT, _FIRST, _COUNTED = 128, 4, 32
_LONG_PROMPT = 512


def _config(arm: str) -> EngineConfig:
    return EngineConfig(
        host_kv_bytes=0, kv="paged", device_kv_bytes=1 << 28, max_model_len=1024, scheduler="fcfs",
        max_num_batched_tokens=_LONG_PROMPT, parallel=ParallelConfig(pipeline_parallel_size=1 if arm == "one" else 2),
        execution=ExecutionConfig(prefix_cache=False, async_steps=False if arm == "one step" else None),
    )  # fmt: skip


def serve_arm(arm: str, dtype: str, pipe: Connection) -> None:
    """Make an engine, and answer ``(requests, are_prompts)`` by tokens a second and the seconds of a hand-over."""
    with engine_of(_config(arm), dtype) as (engine, group):
        pipe.send("ready")
        while (asked := pipe.recv()) is not None:
            count, are_prompts = asked
            rate = _prompts(engine, count) if are_prompts else _decodes(engine, count)
            hand_over_s = 0.0
            if group is not None:
                rows = _LONG_PROMPT if are_prompts else -(-count // 2)
                hand_over_s = statistics.median(_hand_over_s(group, rows) for _ in range(9))
            pipe.send((rate, hand_over_s))


def _hand_over_s(group: RankGroup, rows: int) -> float:
    began_s = time.perf_counter()
    group.pass_rows(rows)
    return time.perf_counter() - began_s


def _add(engine: Engine, count: int, prompt: int, output: int) -> None:
    rng = random.Random(count)
    for _ in range(count):
        tokens = [rng.randrange(QWEN_HALF_B["vocab_size"]) for _ in range(prompt)]
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        engine.add(Request(prompt_token_ids=tokens, sampling=sampling, service_class="LS"))


def _decodes(engine: Engine, count: int) -> float:
    """Return tokens a second of requests that all decode."""
    _add(engine, count, _PROMPT, _FIRST + _COUNTED + _FIRST)
    tokens, began_s, ended_s = 0, 0.0, 0.0
    while engine.has_unfinished:
        tokens += sum(len(output.new_token_ids) for output in engine.step())
        if not began_s and tokens >= count * _FIRST:
            began_s, at_begin = time.perf_counter(), tokens
        if not ended_s and tokens >= count * (_FIRST + _COUNTED):
            ended_s, at_end = time.perf_counter(), tokens
    return (at_end - at_begin) / (ended_s - began_s)


def _prompts(engine: Engine, count: int) -> float:
    """Return tokens a second of prompts, a step each."""
    _add(engine, count, _LONG_PROMPT, 1)
    began_s = time.perf_counter()
    while engine.has_unfinished:
        engine.step()
    return count * _LONG_PROMPT / (time.perf_counter() - began_s)


def main() -> None:
    parser = argument_parser(
        __doc__, "pipeline_parallel", decodes=[1, 2, 8, 32], prompts=6, rounds=5,
        dtype=("bfloat16", "of the model: bfloat16 or float32"),
    )  # fmt: skip
    args = parser.parse_args()
    loads = {f"{count} decode": (count, False) for count in args.decodes}
    loads[f"{args.prompts} prompts"] = (args.prompts, True)
    raw = in_turns(ARMS, serve_arm, loads, rounds=args.rounds, arguments=(args.dtype,))
    results = {name: _summary(measured) for name, measured in raw.items()}
    print(table_of([{"load": name, **_shown(each)} for name, each in results.items()]))
    config = {**vars(args), "cores": available_cores(), "layers": QWEN_HALF_B["num_hidden_layers"]}
    write_record(Path(args.record), name="pipeline_parallel", config=config, seed=0, results=results)


def _summary(measured: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Any]:
    one = [rate for rate, _ in measured["one"]]
    summary: dict[str, Any] = {"one_tokens_s": statistics.median(one)}
    for arm in ARMS[1:]:
        name = arm.replace(" ", "_")
        rates = [rate for rate, _ in measured[arm]]
        summary[f"{name}_tokens_s"] = statistics.median(rates)
        summary[f"{name}_ratio"] = statistics.median(rate / other for rate, other in zip(rates, one, strict=True))
    summary["hand_over_ms"] = 1e3 * statistics.median(seconds for _, seconds in measured["stages"])
    return {**summary, "raw": measured}


def _shown(summary: Mapping[str, Any]) -> dict[str, str]:
    return {name.replace("_", " "): f"{value:.2f}" for name, value in summary.items() if name != "raw"}


if __name__ == "__main__":
    main()

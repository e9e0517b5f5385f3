"""Steps of two ranks on two cores beside one process with two threads, and what the ranks' collectives take of them.

    python -m benchmarks.tensor_parallel --record benchmarks/results/tensor_parallel.json

Three engines with one random model measure in turn, each in processes of its own: ``one`` process with all cores;
``memory``: two ranks with half of the cores each, which sum through memory that they share; ``sockets``: the same ranks
through gloo on the loopback interface, as between machines. A step has so many decodes with 128 to 256 tokens before
them, or is a prompt's chunk. ``collectives`` is the time of the collectives of such a step's layers when the ranks call
nothing else.
"""

from __future__ import annotations

import random
import secrets
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common.ranks import QWEN_HALF_B, engine_of, free_port, in_turns
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser, table_of
from omniserve import Engine, EngineConfig, ExecutionConfig, ParallelConfig, Request, SamplingParams
from omniserve.core.plan import StepPlan
from omniserve.host.cores import available_cores
from omniserve.profiling.collectives import calls_of_layers, time_collectives

ARMS = ("one", "memory", "sockets")
_PROMPT, _OUTPUT = 128, 96


def _config(arm: str, port: int, secret: str) -> EngineConfig:
    parallel = ParallelConfig() if arm == "one" else ParallelConfig(tensor_parallel_size=2)
    if arm == "sockets":
        parallel = ParallelConfig(tensor_parallel_size=2, rank_listen=f"127.0.0.1:{port}", rank_secret_file=secret)
    return EngineConfig(
        host_kv_bytes=0, kv="paged", device_kv_bytes=1 << 28, max_model_len=1024, parallel=parallel,
        scheduler="fcfs", execution=ExecutionConfig(prefix_cache=False),
    )  # fmt: skip


def serve_arm(arm: str, dtype: str, pipe: Connection) -> None:
    """Make an engine, and answer ``(rows, is_prompt)`` by the median step and its collectives, in seconds."""
    with tempfile.NamedTemporaryFile("w", suffix=".secret") as file:
        file.write(secrets.token_hex(32))
        file.flush()
        config = _config(arm, free_port(), file.name)
        with engine_of(config, dtype) as (engine, group):
            pipe.send("ready")
            while (asked := pipe.recv()) is not None:
                rows, is_prompt = asked
                collectives_s = 0.0
                step_s = _measure(engine, rows, is_prompt=is_prompt)
                if group is not None:
                    calls = calls_of_layers(engine.model)
                    collectives_s = statistics.median(
                        time_collectives(engine.model, group, calls, rows) for _ in range(5)
                    )
                pipe.send((step_s, collectives_s))


def _measure(engine: Engine, rows: int, *, is_prompt: bool) -> float:
    """Return the median of steps that have exactly these rows."""
    seconds: list[float] = []

    def note(plan: StepPlan, host_works: bool, took_s: float) -> None:
        longest = max((len(chunk.token_ids) for chunk in plan.chunks), default=0)
        if plan.num_device_tokens == rows and (longest == rows if is_prompt else longest == 1):
            seconds.append(took_s)

    rng = random.Random(rows)
    engine.on_step = note
    for _ in range(3 if is_prompt else rows):
        prompt = [rng.randrange(32000) for _ in range(rows if is_prompt else _PROMPT)]
        sampling = SamplingParams(max_tokens=1 if is_prompt else _OUTPUT, ignore_eos=True)
        engine.add(Request(prompt_token_ids=prompt, sampling=sampling, service_class="LS"))
        while is_prompt and engine.has_unfinished:  # prompts one by one: two short ones would share a step
            engine.step()
    while engine.has_unfinished:
        engine.step()
    engine.on_step = None
    return statistics.median(seconds)


def main() -> None:
    parser = argument_parser(
        __doc__, "tensor_parallel", decodes=[1, 8, 32], chunk=512, rounds=5,
        dtype=("bfloat16", "of the model: bfloat16 or float32"),
    )  # fmt: skip
    args = parser.parse_args()
    loads = [(rows, False) for rows in args.decodes] + [(args.chunk, True)]
    raw = in_turns(ARMS, serve_arm, {_name(each): each for each in loads}, rounds=args.rounds, arguments=(args.dtype,))
    results = {name: _summary(measured) for name, measured in raw.items()}
    print(table_of([{"step": name, **_shown(each)} for name, each in results.items()]))
    config = {**vars(args), "cores": available_cores(), "layers": QWEN_HALF_B["num_hidden_layers"]}
    write_record(Path(args.record), name="tensor_parallel", config=config, seed=0, results=results)


def _name(load: tuple[int, bool]) -> str:
    rows, is_prompt = load
    return f"chunk of {rows}" if is_prompt else f"{rows} decode{'s' if rows > 1 else ''}"


def _summary(measured: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Any]:
    one = [step_s for step_s, _ in measured["one"]]
    summary: dict[str, Any] = {"one_ms": 1e3 * statistics.median(one)}
    for arm in ARMS[1:]:
        steps = [step_s for step_s, _ in measured[arm]]
        summary[f"{arm}_ms"] = 1e3 * statistics.median(steps)
        summary[f"{arm}_collectives_ms"] = 1e3 * statistics.median(seconds for _, seconds in measured[arm])
        summary[f"{arm}_ratio"] = statistics.median(step / other for step, other in zip(steps, one, strict=True))
    return {**summary, "raw": measured}


def _shown(summary: Mapping[str, Any]) -> dict[str, str]:
    return {name.replace("_", " "): f"{value:.2f}" for name, value in summary.items() if name != "raw"}


if __name__ == "__main__":
    main()

"""Time to first token of a prompt that a prefill engine computes, beside one that is computed here.

    python -m benchmarks.prefill_apart --record benchmarks/results/prefill_apart.json

``here``: an engine alone. ``apart``: it asks a prefill engine, a process of its own that is reached over
loopback. Both have all cores, as one of them waits meanwhile; so the difference is what the hand-over adds. In turn
each gets a prompt that no engine knows.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import secrets
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common.models import SMOLLM_135M, random_llama
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser, table_of
from omniserve import Engine, EngineConfig, PrefillConfig, Request, SamplingParams, patch
from omniserve.host.cores import available_cores
from omniserve.layers.kv_fingerprint import kv_fingerprint
from omniserve.prefill.server import PrefillServer

SHAPE = {**SMOLLM_135M, "max_position_embeddings": 8192}


def _config(prefill: PrefillConfig, chunk: int) -> EngineConfig:
    return EngineConfig(
        scheduler="sarathi", max_num_batched_tokens=chunk, max_model_len=8192, device_kv_bytes=1 << 30,
        host_kv_bytes=1 << 30, prefill=prefill,
        device_threads=available_cores(),  # asked for: none is left to the process that has just worked
    )  # fmt: skip


def serve(chunk: int, secret: str, pipe: Connection) -> None:
    """Be a prefill engine until the pipe ends."""
    model = patch(random_llama(**SHAPE))
    config = _config(PrefillConfig(), chunk)
    with Engine(model, config) as engine:
        server = PrefillServer(engine, fingerprint=kv_fingerprint(model, config), secret=secret.encode())
        pipe.send(server.address)

        def end() -> None:
            with contextlib.suppress(EOFError):
                pipe.recv()
            server.close()

        threading.Thread(target=end, daemon=True).start()
        server.run()


@contextlib.contextmanager
def prefill_engine(chunk: int) -> Iterator[PrefillConfig]:
    """Run a prefill engine in a process of its own; yield how to reach it."""
    context = multiprocessing.get_context("spawn")
    secret = secrets.token_hex(32)
    pipe, other = context.Pipe()
    process = context.Process(target=serve, args=(chunk, secret, other))
    process.start()
    other.close()
    with tempfile.NamedTemporaryFile("w", suffix=".secret") as file:
        file.write(secret)
        file.flush()
        try:
            address = "{}:{}".format(*pipe.recv())
            yield PrefillConfig(
                prefill_engines=(address,), prefill_secret_file=file.name, prefill_placement="always",
            )  # fmt: skip
        finally:
            pipe.close()
            process.join()


def ttft_s(engine: Engine, prompt: list[int]) -> float:
    """Return how long the first token of a prompt takes; nothing else runs."""
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    began_s = time.perf_counter()
    engine.add(Request(prompt_token_ids=prompt, sampling=sampling, service_class="LS"))
    while engine.has_unfinished:
        engine.step()
        if engine.last_plan_was_empty:
            engine.wait(0.01)
    return time.perf_counter() - began_s


def main() -> None:
    parser = argument_parser(
        __doc__, "prefill_apart", lengths=([512, 4096], "of the prompts"), chunk=(512, "tokens of a step"), rounds=7
    )
    args = parser.parse_args()
    rng = random.Random(0)
    raw: dict[int, dict[str, list[float]]] = {length: {"here": [], "apart": []} for length in args.lengths}
    with prefill_engine(args.chunk) as config:
        model = patch(random_llama(**SHAPE))
        with (
            Engine(model, _config(PrefillConfig(), args.chunk)) as here,
            Engine(model, _config(config, args.chunk)) as apart,
        ):
            engines = {"here": here, "apart": apart}
            for number in range(args.rounds + 1):
                for length, measured in raw.items():
                    for arm in engines if number % 2 else reversed(engines):
                        prompt = [rng.randrange(1, SHAPE["vocab_size"]) for _ in range(length)]
                        seconds = ttft_s(engines[arm], prompt)
                        if number:  # the first round compiles
                            measured[arm].append(seconds)
            num_tokens = sum(apart.stats().scheduler.loaded_from("prefilled").values())
    results: dict[str, Any] = {str(length): _summary(measured) for length, measured in raw.items()}
    results["tokens_computed_apart"] = num_tokens
    print(table_of([{"prompt": str(length), **_shown(results[str(length)])} for length in raw]))
    config_of_run = {**vars(args), "cores": available_cores(), "model": "SmolLM-135M's shape"}
    write_record(Path(args.record), name="prefill_apart", config=config_of_run, seed=0, results=results)


def _summary(measured: Mapping[str, list[float]]) -> dict[str, Any]:
    ratios = [apart / here for here, apart in zip(measured["here"], measured["apart"], strict=True)]
    return {
        **{f"{arm}_s": statistics.median(seconds) for arm, seconds in measured.items()},
        "ratio": statistics.median(ratios), "raw": measured,
    }  # fmt: skip


def _shown(summary: Mapping[str, Any]) -> dict[str, str]:
    return {name.replace("_", " "): f"{value:.3f}" for name, value in summary.items() if name != "raw"}


if __name__ == "__main__":
    main()

"""More than one process, device or machine: ranks, stages, CPU hosts on a network, prefill engines, eight GPUs.

python -m benchmarks.machines --list
python -m benchmarks.machines tensor_parallel --record benchmarks/results/machines.json
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import random
import statistics
import sys
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common.cases import Benchmark, Trials
from benchmarks.common.engine_run import SteadyRun
from benchmarks.common.host_tasks import host_tier_of, seconds_of_tasks
from benchmarks.common.models import MODELS, SMOLLM_135M, saved_llama, token_bytes
from benchmarks.common.network import cpu_host, paced_cpu_host, prefill_engine, secret_file, slow_link
from benchmarks.common.ranks import QWEN_HALF_B, engine_of, free_port, processes_of
from benchmarks.common.timing import OtherLoad
from omniserve import (
    SLO,
    ClassSpec,
    Engine,
    EngineConfig,
    ExecutionConfig,
    HostsConfig,
    ParallelConfig,
    PrefillConfig,
    Request,
    SamplingParams,
    patch,
)
from omniserve.core.plan import StepPlan
from omniserve.core.work import HOST_BLOCKS
from omniserve.host.cores import available_cores
from omniserve.parallel.group import RankGroup
from omniserve.profiling.collectives import calls_of_layers, time_collectives
from omniserve.remote.network_hosts import NetworkHosts
from omniserve.simulate import Load, SimulationConfig, simulate
from omniserve.simulate.analytic import analytic_machine, engine_config_for
from omniserve.simulate.hardware import find_devices, find_hosts
from omniserve.simulate.load import fixed_lengths, poisson, requests
from omniserve.simulate.models import find_model
from omniserve.simulate.results import percentile

MACHINES = Benchmark("machines")

# -- ranks ---------------------------------------------------------------------------------------------------------


@MACHINES.case(
    decodes=[1, 8, 32], chunk=512, repeats=5, dtype=("bfloat16", "of the model: bfloat16 or float32"),
    tiny={"decodes": [1], "chunk": 8, "repeats": 1},
)  # fmt: skip
def tensor_parallel(args: argparse.Namespace) -> Trials:
    """Steps of two ranks on two cores beside one process with two threads, and what the collectives take of them.

    Three engines with one random model, Qwen2.5-0.5B's layers, each in processes of its own: ``one`` process with all
    cores; ``memory``: two ranks with half of the cores each, which sum through memory that they share; ``sockets``: the
    same ranks through gloo on the loopback interface, as between machines. A step has so many decodes with 128 to 256
    tokens before them, or is a prompt's chunk. ``collectives_ms`` is the time of the collectives of such a step's
    layers when the ranks call nothing else.
    """
    arms = ("one", "memory", "sockets")
    with processes_of(arms, serve_tensor_parallel, args.dtype) as ask:
        for rows, is_prompt in [*((rows, False) for rows in args.decodes), (args.chunk, True)]:
            label = f"chunk of {rows}" if is_prompt else f"{rows} decode{'s' if rows > 1 else ''}"
            yield label, {arm: functools.partial(ask, arm, (rows, is_prompt)) for arm in arms}


def serve_tensor_parallel(arm: str, dtype: str, pipe: Connection) -> None:
    """Make an engine, and answer ``(rows, is_prompt)`` by the median step and its collectives."""
    parallel = ParallelConfig() if arm == "one" else ParallelConfig(tensor_parallel_size=2)
    with secret_file() as secret:
        if arm == "sockets":
            listen = f"127.0.0.1:{free_port()}"
            parallel = dataclasses.replace(parallel, rank_listen=listen, rank_secret_file=str(secret))
        config = EngineConfig(
            host_kv_bytes=0, kv="paged", device_kv_bytes=1 << 28, max_model_len=1024, parallel=parallel,
            scheduler="fcfs", execution=ExecutionConfig(prefix_cache=False),
        )  # fmt: skip
        with engine_of(config, dtype) as (engine, group):
            pipe.send("ready")
            while (asked := pipe.recv()) is not None:
                rows, is_prompt = asked
                figures = {"step_ms": 1e3 * _step_s(engine, rows, is_prompt=is_prompt)}
                if group is not None:
                    calls = calls_of_layers(engine.model)
                    times_s = [time_collectives(engine.model, group, calls, rows) for _ in range(5)]
                    figures["collectives_ms"] = 1e3 * statistics.median(times_s)
                pipe.send(figures)


def _add(engine: Engine, rng: random.Random, prompt: int, output: int) -> None:
    tokens = [rng.randrange(1, QWEN_HALF_B["vocab_size"]) for _ in range(prompt)]
    sampling = SamplingParams(max_tokens=output, ignore_eos=True)
    engine.add(Request(prompt_token_ids=tokens, sampling=sampling, service_class="LS"))


def _serve(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step()
        if engine.last_plan_was_empty:
            engine.wait(0.01)


def _step_s(engine: Engine, rows: int, *, is_prompt: bool) -> float:
    """Return the median of steps that have exactly these rows."""
    seconds: list[float] = []

    def note(plan: StepPlan, host_works: bool, took_s: float) -> None:
        longest = max((len(chunk.token_ids) for chunk in plan.chunks), default=0)
        if plan.num_device_tokens == rows and (longest == rows if is_prompt else longest == 1):
            seconds.append(took_s)

    rng = random.Random(rows)
    engine.on_step = note
    for _ in range(3 if is_prompt else rows):
        _add(engine, rng, *((rows, 1) if is_prompt else (128, 96)))
        if is_prompt:  # prompts one by one: two short ones would share a step
            _serve(engine)
    _serve(engine)
    engine.on_step = None
    return statistics.median(seconds)


_FIRST, _COUNTED, _LONG_PROMPT = 4, 32, 512


@MACHINES.case(
    decodes=[1, 2, 8, 32], prompts=6, repeats=5, dtype=("bfloat16", "of the model: bfloat16 or float32"),
    tiny={"decodes": [1], "prompts": 1, "repeats": 1},
)  # fmt: skip
def pipeline_parallel(args: argparse.Namespace) -> Trials:
    """A model in two stages on two cores beside one process with two threads: tokens a second, time of a hand-over.

    Three engines with one random model, each in processes of its own: ``one`` process with all cores; ``stages``: two
    ranks with half of the cores and of the layers each, and a step in each of them; ``one step``: the same ranks, but a
    step begins when the one before it has passed both. Requests decode at the same time, with 128 tokens before them at
    first, or prompts of 512 tokens are computed. ``hand_over_ms``: a step of so many rows is told to both ranks and
    passes them, without any layer.
    """
    arms = ("one", "stages", "one step")
    with processes_of(arms, serve_pipeline_parallel, args.dtype) as ask:
        for count, are_prompts in [*((count, False) for count in args.decodes), (args.prompts, True)]:
            label = f"{count} {'prompts' if are_prompts else 'decode'}"
            yield label, {arm: functools.partial(ask, arm, (count, are_prompts)) for arm in arms}


def serve_pipeline_parallel(arm: str, dtype: str, pipe: Connection) -> None:
    """Make an engine, and answer ``(requests, are_prompts)`` by tokens a second and the time of a hand-over."""
    config = EngineConfig(
        host_kv_bytes=0, kv="paged", device_kv_bytes=1 << 28, max_model_len=1024, scheduler="fcfs",
        max_num_batched_tokens=_LONG_PROMPT, parallel=ParallelConfig(pipeline_parallel_size=1 if arm == "one" else 2),
        execution=ExecutionConfig(prefix_cache=False, async_steps=False if arm == "one step" else None),
    )  # fmt: skip
    with engine_of(config, dtype) as (engine, group):
        pipe.send("ready")
        while (asked := pipe.recv()) is not None:
            count, are_prompts = asked
            rate = _prompts_per_s(engine, count) if are_prompts else _decodes_per_s(engine, count)
            figures = {"tokens_per_s": rate}
            if group is not None:
                rows = _LONG_PROMPT if are_prompts else -(-count // 2)
                figures["hand_over_ms"] = 1e3 * statistics.median(_hand_over_s(group, rows) for _ in range(9))
            pipe.send(figures)


def _hand_over_s(group: RankGroup, rows: int) -> float:
    began_s = time.perf_counter()
    group.pass_rows(rows)
    return time.perf_counter() - began_s


def _decodes_per_s(engine: Engine, count: int) -> float:
    """Return tokens a second of requests that all decode."""
    rng = random.Random(count)
    for _ in range(count):
        _add(engine, rng, 128, _FIRST + _COUNTED + _FIRST)
    tokens, began_s, ended_s = 0, 0.0, 0.0
    while engine.has_unfinished:
        tokens += sum(len(output.new_token_ids) for output in engine.step())
        if not began_s and tokens >= count * _FIRST:
            began_s, at_begin = time.perf_counter(), tokens
        if not ended_s and tokens >= count * (_FIRST + _COUNTED):
            ended_s, at_end = time.perf_counter(), tokens
    return (at_end - at_begin) / (ended_s - began_s)


def _prompts_per_s(engine: Engine, count: int) -> float:
    """Return tokens a second of prompts, a step each."""
    rng = random.Random(count)
    for _ in range(count):
        _add(engine, rng, _LONG_PROMPT, 1)
    began_s = time.perf_counter()
    _serve(engine)
    return count * _LONG_PROMPT / (time.perf_counter() - began_s)


# -- CPU hosts -----------------------------------------------------------------------------------------------------

_BLOCK = 16
LINKS = {
    "loopback": (0.0, 0.0), "10 Gb/s": (0.0, 10e9), "1 Gb/s": (0.0, 1e9), "0.2 ms, 10 Gb/s": (0.2e-3, 10e9),
    "0.2 ms, 1 Gb/s": (0.2e-3, 1e9),
}  # fmt: skip
"""Delay of one way in seconds, and bits a second, 0 without a limit. Without a delay the kernel paces the connections;
with one, a program in between delays what it forwards."""


@MACHINES.case(
    shapes=["32/8/128", "64/8/128"], rows=(400, "requests with a task at once"), context=(16, "tokens of each"),
    row_samples=20, models=list(MODELS), ls=(4, "LS requests that decode"), be=(48, "BE requests"), be_prompt=200,
    device_tokens=(1800, "tokens of KV on the device"), window_s=3.0, repeats=9, links=list(LINKS),
    tiny={"shapes": ["4/2/16"], "rows": 8, "row_samples": 2, "models": ["built-in"], "be": 12, "ls": 1,
          "be_prompt": 280, "window_s": 0.2, "repeats": 1},
)  # fmt: skip
def network_hosts(args: argparse.Namespace) -> Trials:
    """A CPU host on the network beside a host tier of the engine's own: time of rows and steps, BE tokens a second.

    ``local`` is a host tier in the engine's process; the others are ``python -m omniserve.host`` in a process of its
    own, with as many threads: ``loopback`` connects to it directly, the rest through a link that is as slow as a
    network.

    A shape (query heads / KV heads / head size): q, k and v of so many requests go to the host, one task each, and
    their results come back; ``p50_ms`` and ``p99_ms`` of ``--row-samples`` times. The context is short, so that this is
    mostly the link. A model: LS requests decode beside BE requests whose attention is on the host.

    Engine, hosts and slow links share this machine's cores: on loopback the host's threads for the network take the
    time of the engine's, which they do not on two machines. Paper: omniserve 4 (distributed CPU attention), 5.3.
    """
    torch.manual_seed(0)
    with ExitStack() as stack:
        hosts = hosts_of(stack, args.links)
        for shape in args.shapes:
            with ExitStack() as tiers, torch.inference_mode():
                load, rows = OtherLoad(), {}
                for link, config in hosts.items():
                    rows[link] = Rows(shape, args.rows, args.context, config)
                    tiers.callback(rows[link].close)
                result = yield shape, {link: functools.partial(rows[link].sample, args.row_samples) for link in rows}
                result["others_busy_cores"] = load.cores()
        for name in args.models:
            model, load = MODELS[name](), OtherLoad()
            with ExitStack() as engines:
                windows = {}
                for link, config in hosts.items():
                    settings = EngineConfig(
                        device_kv_bytes=args.device_tokens * token_bytes(model), hosts=config or HostsConfig(),
                        host_kv_bytes=1 << 30 if config is None else _BLOCK * token_bytes(model), host_threads=1,
                        device_threads=max(1, available_cores() - 1), block_size=_BLOCK,
                        scheduler_options={"swap_in_delay_s": 1e9},
                    )  # fmt: skip
                    engine = engines.enter_context(Engine(model, settings))
                    run = SteadyRun(engine, num_ls=args.ls, num_be=args.be, prompt=args.be_prompt)
                    windows[link] = functools.partial(run.window, args.window_s)
                result = yield name, windows
                result["others_busy_cores"] = load.cores()


def hosts_of(stack: ExitStack, links: list[str]) -> dict[str, HostsConfig | None]:
    """Start the hosts, one a link, which one engine after the other uses; return how they are reached."""
    secret = stack.enter_context(secret_file())
    configs: dict[str, HostsConfig | None] = {"local": None}
    for name in links:
        delay_s, bits_per_s = LINKS[name]
        start = functools.partial(paced_cpu_host, bits_per_s=bits_per_s) if bits_per_s and not delay_s else cpu_host
        address = stack.enter_context(start(secret, threads=1, kv_gib=1.0))
        if delay_s:
            address = stack.enter_context(slow_link(address, delay_s=delay_s, bits_per_s=bits_per_s))
        configs[name] = HostsConfig(cpu_hosts=("{}:{}".format(*address),), cpu_host_secret_file=str(secret))
    return configs


class Rows:
    """A host tier with requests of a few tokens, on this machine or on a host; rows are bf16."""

    def __init__(self, shape: str, requests: int, context: int, hosts: HostsConfig | None) -> None:
        blocks_each = -(-context // _BLOCK)
        self._tier, num_layers = host_tier_of(
            shape, context, dtype=torch.bfloat16, block_size=_BLOCK, num_blocks=requests * blocks_each, least_layers=2,
            num_slots=requests, num_threads=1,
        )  # fmt: skip
        self._layers, self._last, first = itertools.cycle(range(num_layers)), context - 1, 0
        self._hosts: NetworkHosts | None = None
        if hosts is not None:
            self._hosts = NetworkHosts(hosts, self._tier)
            while not self._hosts.poll([]):
                time.sleep(0.01)
            first = HOST_BLOCKS
        self._blocks = (first + torch.arange(requests * blocks_each)).view(requests, blocks_each).tolist()
        num_heads, kv_heads, head_size = map(int, shape.split("/"))
        self._q, self._k = (torch.randn(requests, heads, head_size).bfloat16() for heads in (num_heads, kv_heads))
        for position in range(context):  # fills the blocks, which hold nothing yet
            for layer in range(num_layers):
                self._seconds(layer, position)

    def sample(self, count: int) -> dict[str, float]:
        """Send a row of each request so often, and return percentiles of the times until all results are back."""
        times_ms = [1e3 * self._seconds(next(self._layers), self._last) for _ in range(count)]
        return {"p50_ms": percentile(times_ms, 50), "p99_ms": percentile(times_ms, 99)}

    def _seconds(self, layer: int, position: int) -> float:
        for slot, blocks in enumerate(self._blocks):
            self._tier.begin_token(slot, 0, position, blocks[: position // _BLOCK + 1])
        slots = torch.arange(len(self._blocks))
        return seconds_of_tasks(self._tier, len(slots), layer, slots, self._q, self._k, self._k)

    def close(self) -> None:
        if self._hosts is not None:
            self._hosts.close()
        self._tier.close()


# -- prefill engines -----------------------------------------------------------------------------------------------

_PREFILL_SHAPE = {**SMOLLM_135M, "max_position_embeddings": 8192}


@MACHINES.case(
    lengths=([512, 4096], "of the prompts"), chunk=(512, "tokens of a prompt's step"), repeats=7,
    tiny={"lengths": [100], "chunk": 64, "repeats": 1},
)  # fmt: skip
def prefill_apart(args: argparse.Namespace) -> Trials:
    """Time to first token of a prompt that a prefill engine computes, beside one that is computed here.

    ``here``: an engine alone, with a random model in SmolLM-135M's shape. ``apart``: it asks a prefill engine, a
    process of its own that is reached over loopback. Both have all cores, as one of them waits meanwhile; so the
    difference is what the hand-over adds. In turn each gets a prompt that no engine knows.
    """
    rng, folder = random.Random(0), saved_llama("smollm-135m-8k", _PREFILL_SHAPE)
    model = patch(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval())

    def ttft(engine: Engine, length: int) -> dict[str, float]:
        began_s = time.perf_counter()
        _add(engine, rng, length, 1)
        _serve(engine)
        return {"ttft_s": time.perf_counter() - began_s}

    with (
        prefill_engine(
            folder, scheduler="sarathi", max_num_batched_tokens=args.chunk, max_model_len=8192, device_kv_gib=1,
            host_kv_gib=1, device_threads=available_cores(), profile="none",
        ) as there,
        Engine(model, _prefill_config(PrefillConfig(), args.chunk)) as here,
        Engine(model, _prefill_config(dataclasses.replace(there, prefill_placement="always"), args.chunk)) as apart,
    ):  # fmt: skip
        for length in args.lengths:
            before = sum(apart.stats().scheduler.loaded_from("prefilled").values())
            arms = {"here": functools.partial(ttft, here, length), "apart": functools.partial(ttft, apart, length)}
            result = yield str(length), arms
            after = sum(apart.stats().scheduler.loaded_from("prefilled").values())
            result["tokens_computed_apart"] = after - before


def _prefill_config(prefill: PrefillConfig, chunk: int) -> EngineConfig:
    return EngineConfig(
        scheduler="sarathi", max_num_batched_tokens=chunk, max_model_len=8192, device_kv_bytes=1 << 30,
        host_kv_bytes=1 << 30, prefill=prefill,
        device_threads=available_cores(),  # asked for: none is left to the process that has just worked
    )  # fmt: skip


# -- eight GPUs, simulated -----------------------------------------------------------------------------------------

WAYS = {
    "8 ranks": (1, 8, 1, 0), "2 engines of 4 ranks": (2, 4, 1, 0), "4 ranks, 4 that prefill": (1, 4, 1, 1),
    "2 stages of 4 ranks": (1, 4, 2, 0), "4 stages of 2 ranks": (1, 2, 4, 0),
}  # fmt: skip
"""Name -> engines, tensor parallel devices of a stage, stages, prefill engines."""


@MACHINES.case(
    rates=[1.0, 2.0, 4.0, 8.0], tpots=[0.2, 0.1, 0.06], ttft=2.0, prompt=1024, output=128, step_tokens=512,
    seconds=300.0, network_gbps=(100.0, "between prefill engine and engine"), seed=0, uncounted=0,
    tiny={"rates": [2.0], "tpots": [0.2], "seconds": 10.0},
)  # fmt: skip
def scaling(args: argparse.Namespace) -> Trials:
    """Simulates more devices and hosts: the same number of GPUs, used in different ways.

    Llama-2-70B on eight A100-80GB with NVLink. Each way gets the whole LS rate; of two engines each gets half of it,
    and their best-effort output is added. The load is Poisson, with a backlog of best-effort requests that never ends.
    Steps are analytic (``simulate.analytic``), so nothing here was measured.
    """
    for tpot_s, rate in itertools.product(args.tpots, args.rates):
        arms = {name: functools.partial(run_way, *way, rate, tpot_s, args) for name, way in WAYS.items()}
        yield f"TPOT {tpot_s:g}, {rate:g} LS/s", arms


def run_way(
    engines: int, devices: int, stages: int, prefill_engines: int, rate: float, tpot_s: float, args: argparse.Namespace
) -> dict[str, float]:
    """Simulate a way at an LS rate, and return its figures."""
    host = dataclasses.replace(find_hosts("Xeon-6342")[1], network_bytes_per_s=args.network_gbps * 1e9 / 8)
    machine = analytic_machine(
        find_model("llama-2-70b"), find_devices("A100-80GB")[1], devices, num_stages=stages, hosts=(host,),
        num_prefill_engines=prefill_engines,
    )  # fmt: skip
    slo = SLO(ttft_s=args.ttft, tpot_s=tpot_s)
    config = engine_config_for(
        machine, max_host_requests=256, max_num_batched_tokens=args.step_tokens,
        classes=(ClassSpec(name="LS", kind="LS", slo=slo), ClassSpec(name="BE", kind="BE")),
    )  # fmt: skip
    rng, lengths = random.Random(args.seed), fixed_lengths(args.prompt, args.output)
    load = Load(
        latency_sensitive=requests(poisson(rate / engines, args.seconds, rng), lengths, rng),
        best_effort=requests([0.0] * 100, lengths, rng), backlog=64, duration_s=args.seconds,
        warm_up_s=0.2 * args.seconds,
    )  # fmt: skip
    result = simulate(SimulationConfig(machine=machine, engine=config, load=load, seed=args.seed))
    ls, be = result.classes["LS"], result.classes["BE"]
    return {
        "attainment": ls.attainment, "ttft_p50_s": ls.ttft_p50_s, "tpot_p50_s": ls.tpot_p50_s,
        "be_output_tokens_per_s": engines * be.output_tokens_per_s, "prefilled_share": ls.prefilled_share,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(MACHINES.main())

"""The host tier's features: asynchronous attention, late joins, tasks of several rows, and APEX's: hybrid sub-batches,
asynchronous overlap with pipeline stages."""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import time
from contextlib import ExitStack

import torch

from benchmarks.common.bandwidth import allowed_cpus, fill, normal_tile
from benchmarks.common.cases import Trials
from benchmarks.common.engine_run import SteadyRun, request
from benchmarks.common.host_tasks import host_tier_of, seconds_of_tasks
from benchmarks.common.models import MODELS, SMOLLM_135M, random_llama, token_bytes
from benchmarks.common.timing import OtherLoad
from benchmarks.features import FEATURES
from omniserve import Engine, EngineConfig
from omniserve.simulate import Load, SimulationConfig, simulate
from omniserve.simulate.analytic import analytic_machine, engine_config_for
from omniserve.simulate.hardware import find_devices, find_hosts
from omniserve.simulate.load import fixed_lengths, requests
from omniserve.simulate.models import find_model
from omniserve.simulate.runner import StepRecord


@FEATURES.case(
    be=(24, "BE requests"), be_prompt=256, ls_tokens=60, repeats=5, slowdown=100.0,
    tiny={"be": 4, "be_prompt": 32, "ls_tokens": 4, "repeats": 1},
)  # fmt: skip
def asynchrony(args: argparse.Namespace) -> Trials:
    """LS tokens a second while host attention runs at its speed and 100 times slower: the device does not wait for it.

    One LS request decodes beside BE requests whose attention is on the host tier; its prefill does not count. A random
    model in SmolLM-135M's shape. ``host_tasks`` are the host tier's meanwhile.
    """
    config = EngineConfig(
        device_kv_bytes=64 << 20, host_kv_bytes=1 << 30, scheduler_options={"swap_in_delay_s": 1 << 30}
    )
    with Engine(random_llama(**SMOLLM_135M), config) as engine:
        tier = engine.host_tier
        assert tier is not None
        for i in range(args.be):
            engine.add(request(f"be{i}", args.be_prompt, 1500))
        while (now := engine.stats().scheduler).host_requests < args.be // 2 or now.host_output_tokens < args.be:
            engine.step()
        stats = tier.stats()
        task_s = stats.busy_seconds / max(1, stats.tasks_done)

        def ls_rate(delay_s: float) -> dict[str, float]:
            tier.inject(delay_s=delay_s)
            before, first_s = tier.stats().tasks_done, None
            request_id = engine.add(request("ls", 16, args.ls_tokens + 1))
            while True:
                for output in (output for output in engine.step() if output.request_id == request_id):
                    first_s = first_s if first_s is not None else time.perf_counter()
                    if output.finished:
                        rate = args.ls_tokens / (time.perf_counter() - first_s)
                        return {"ls_tokens_per_s": rate, "host_tasks": tier.stats().tasks_done - before}

        delays_s = {"full speed": 0.0, "slowed": (args.slowdown - 1) * task_s}
        result = yield "LS beside BE", {name: functools.partial(ls_rate, delay) for name, delay in delays_s.items()}
        result["task_s"] = task_s
        tier.inject(delay_s=0.0)


@FEATURES.case(
    models=list(MODELS), ls=(4, "LS requests that decode"), be=(64, "BE requests"), be_prompt=200,
    device_tokens=(1800, "tokens of KV on the device"), window_s=2.0, repeats=7,
    tiny={"models": ["built-in"], "ls": 1, "be": 12, "be_prompt": 280, "window_s": 0.2, "repeats": 1},
)  # fmt: skip
def late_joins(args: argparse.Namespace) -> Trials:
    """Steps a layer of a host token, and BE tokens a second, with late joins and without.

    LS requests decode beside BE requests whose attention is on the host tier. A result has time from when its row is
    sent until the next step reaches that layer; without late joins only until that step begins, so rows of the last
    layers have little.
    """
    for name in args.models:
        model = MODELS[name]()
        with ExitStack() as stack:
            arms = {}
            for arm, late in (("without", False), ("late joins", True)):
                config = EngineConfig(
                    device_kv_bytes=args.device_tokens * token_bytes(model), host_kv_bytes=1 << 30,
                    scheduler_options={"late_joins": late, "swap_in_delay_s": 1e9},
                )  # fmt: skip
                engine = stack.enter_context(Engine(model, config))
                run = SteadyRun(engine, num_ls=args.ls, num_be=args.be, prompt=args.be_prompt)
                arms[arm] = functools.partial(run.window, args.window_s)
            yield name, arms


POOLS = {"fp32": (torch.float32, "auto"), "bf16": (torch.bfloat16, "auto"), "int8": (torch.bfloat16, "int8")}
"""Name of a pool -> dtype of the rows, and of the KV."""
_BLOCK = 16


@FEATURES.case(
    shapes=["32/8/128", "32/32/128", "9/3/64"], pools=["bf16", "fp32", "int8"],
    rows=([1, 2, 4, 8], "tokens of a task; the first is what the others are compared with"),
    requests=4, context=2048, repeats=15, cold_mib=(512, "of K and V"),
    tiny={"shapes": ["4/2/16"], "rows": [1, 3], "requests": 2, "context": 40, "repeats": 1, "cold_mib": 1},
)  # fmt: skip
def host_rows(args: argparse.Namespace) -> Trials:
    """Host attention for several consecutive tokens of a request in one task, over the time for one.

    A shape is query heads / KV heads / head size; a pool is fp32, bf16, or int8 under bf16 rows. A sample is the time
    from the submission of a task of each request until all have answered, at the next one of some layers, which no
    cache holds together. Tasks of one token each, one after the other, would take as many times as long as there are
    rows. Give the machine nothing else to do; OMNISERVE_ISA forces an instruction set.
    """
    torch.manual_seed(0)
    for shape, pool in itertools.product(args.shapes, args.pools):
        with ExitStack() as stack:
            tasks = HostTasks(shape, pool, args.requests, args.context, max(args.rows), args.cold_mib << 20)
            stack.callback(tasks.close)
            load = OtherLoad()
            result = yield f"{shape} {pool}", {str(rows): functools.partial(tasks.ms, rows) for rows in args.rows}
            result |= {"layers": tasks.num_layers, "others_busy_cores": load.cores()}


class HostTasks:
    """Requests of one length on a host tier, as many layers as fill `cold_bytes`, and rows for them."""

    def __init__(self, shape: str, pool: str, requests: int, context: int, max_rows: int, cold_bytes: int) -> None:
        dtype, kv_dtype = POOLS[pool]
        blocks_each, threads = -(-context // _BLOCK), len(allowed_cpus())
        self._tier, self.num_layers = host_tier_of(
            shape, context, dtype=dtype, kv_dtype=kv_dtype, block_size=_BLOCK, num_blocks=requests * blocks_each,
            cold_bytes=cold_bytes, num_slots=requests, max_rows=max_rows, num_threads=threads,
            cores=tuple(allowed_cpus()),
        )  # fmt: skip
        self._context, self._layers = context, itertools.cycle(range(self.num_layers))
        if self._tier.scales_LBK2S is None:
            fill(self._tier.pool_LBK2SH, normal_tile(dtype, 0), threads)
        else:
            fill(self._tier.pool_LBK2SH, torch.randint(-127, 128, (1 << 20,), dtype=torch.int8), threads)
            self._tier.scales_LBK2S.fill_(0.02)
        self._blocks = torch.randperm(requests * blocks_each).view(requests, blocks_each).tolist()
        num_heads, kv_heads, head_size = map(int, shape.split("/"))
        self._q, self._k = (
            torch.randn(requests * max_rows, heads, head_size).to(dtype) for heads in (num_heads, kv_heads)
        )

    @torch.inference_mode()
    def ms(self, num_rows: int) -> dict[str, float]:
        """Run a task of `num_rows` tokens for each request, the last `num_rows` of its context."""
        layer, count = next(self._layers), len(self._blocks) * num_rows
        for slot, blocks in enumerate(self._blocks):
            self._tier.begin_token(slot, 0, self._context - num_rows, blocks, num_rows)
        slots = torch.arange(len(self._blocks)).repeat_interleave(num_rows)
        q, k = self._q[:count], self._k[:count]
        return {"ms": 1e3 * seconds_of_tasks(self._tier, len(self._blocks), layer, slots, q, k, k)}

    def close(self) -> None:
        self._tier.close()


APEX = {
    "llama-2-7b on a T4": ("llama-2-7b", "T4", "Xeon-6130-dual", 48, ((300, 50), (300, 400))),
    "llama-3.1-8b on an A10": ("llama-3.1-8b", "A10", "Xeon-6342-dual", 160, ((1000, 100), (1000, 800))),
}
"""Model, device, host, how many requests are unfinished at a time, and their lengths."""
_BUDGET = 1024
HYBRID = {"without": (False, 0), "with": (True, 0), "with more memory": (False, _BUDGET)}
"""Name -> host rows in the first sub-batch, and tokens of KV that the device holds beside its pool."""


@FEATURES.case(seconds=300.0, warm_up=0.5, seed=0, tiny={"seconds": 5.0}, uncounted=0)
def hybrid_batch(args: argparse.Namespace) -> Trials:
    """Simulates `apex` with host rows in the first sub-batch and without: output tokens a second.

    A pile of requests on APEX's machines (section 5), both orders of prompts and decodes. `with more memory`: without
    such rows, but with device memory for a step's prompts beside the KV pool, a rough estimate of what it would bring
    to send a prompt's KV to the host layer by layer. Paper: apex 3.2, figure 2.
    """

    def run(name: str, lengths: tuple[int, int], order: str, is_hybrid: bool, more_tokens: int) -> dict[str, float]:
        model, device, host, backlog, _ = APEX[name]
        machine = analytic_machine(find_model(model), find_devices(device)[1], hosts=(find_hosts(host)[1],))
        pile = requests([0.0] * 500, fixed_lengths(*lengths), random.Random(args.seed))
        load = Load(best_effort=pile, backlog=backlog, duration_s=args.seconds, warm_up_s=args.warm_up * args.seconds)
        engine = engine_config_for(
            machine, scheduler="apex", max_num_batched_tokens=_BUDGET,
            device_kv_bytes=(machine.device_kv_bytes or 0) + more_tokens * machine.spec.kv_block_bytes(1),
            scheduler_options={"hybrid_first_batch": is_hybrid, "be_order": order},
        )  # fmt: skip
        counts = {"steps": 0, "pipelined_steps": 0, "pipelined_rows": 0, "hybrid_rows": 0}

        def count(step: StepRecord) -> None:
            counts["steps"] += 1
            counts["pipelined_steps"] += bool(step.plan.pipelined)
            counts["pipelined_rows"] += len(step.plan.pipelined)
            counts["hybrid_rows"] += len(step.plan.hybrid)

        result = simulate(SimulationConfig(machine=machine, engine=engine, load=load, seed=args.seed), on_step=count)
        rate = result.classes["BE"].output_tokens_per_s
        return {"output_tokens_per_s": rate, "host_share": result.host_share} | counts

    for name, (*_, all_lengths) in APEX.items():
        for lengths, order in itertools.product(all_lengths, ("decode", "prefill")):
            arms = {arm: functools.partial(run, name, lengths, order, *variant) for arm, variant in HYBRID.items()}
            yield f"{name}, {lengths[0]}:{lengths[1]}, {order}", arms


@FEATURES.case(
    seconds=180.0, warm_up=0.5, seed=0, stages=[1, 2, 4, 8], tiny={"seconds": 5.0, "stages": [1, 2]}, uncounted=0
)  # fmt: skip
def apex_stages(args: argparse.Namespace) -> Trials:
    """Simulates asynchronous overlap with the layers in several stages: what a host token takes for a layer.

    APEX's A10 machine (section 5), with an A10 for each stage and the one host. The pile of requests and the tokens for
    which the device has KV memory are the same with any number of stages. ``cycle_ms`` is the time from one layer to
    the next of a token on the host tier, ``step_ms`` that from one step to the next. Results join in all layers, as in
    the paper; ``planned`` is the last number of stages without late joins. Paper: apex 6 (pipeline parallelism: 75 %
    less waiting with 8 devices).
    """

    def run(lengths: tuple[int, int], num_stages: int, joins_late: bool) -> dict[str, float]:
        name, device, host, backlog, _ = APEX["llama-3.1-8b on an A10"]
        model = find_model(name)
        one, machine = (
            analytic_machine(
                model, find_devices(device)[1], num_stages=n, hosts=(find_hosts(host)[1],),
                late_layers=model.spec.num_layers,
            )
            for n in (1, num_stages)
        )  # fmt: skip
        pile = requests([0.0] * 500, fixed_lengths(*lengths), random.Random(args.seed))
        load = Load(best_effort=pile, backlog=backlog, duration_s=args.seconds, warm_up_s=args.warm_up * args.seconds)
        pools = {pool: (getattr(one, pool) or 0) // num_stages for pool in ("device_kv_bytes", "host_kv_bytes")}
        engine = engine_config_for(
            machine, scheduler="apex", max_num_batched_tokens=_BUDGET,
            scheduler_options={"strategy": "overlapped", "late_joins": joins_late}, **pools,
        )  # fmt: skip
        num_steps = 0

        def count(step: StepRecord) -> None:
            nonlocal num_steps
            num_steps += step.start_s >= load.warm_up_s

        result = simulate(SimulationConfig(machine=machine, engine=engine, load=load, seed=args.seed), on_step=count)
        step_ms = 1e3 * (result.end_s - load.warm_up_s) / num_steps
        rate = result.classes["BE"].output_tokens_per_s
        return {
            "cycle_ms": step_ms * result.host_steps_per_layer,
            "step_ms": step_ms,
            "output_tokens_per_s": rate,
            "host_tokens_per_s": rate * result.host_share,
        }

    for lengths in APEX["llama-3.1-8b on an A10"][-1]:
        arms = {f"{n} stage{'s' * (n > 1)}": functools.partial(run, lengths, n, True) for n in args.stages}
        arms["planned"] = functools.partial(run, lengths, args.stages[-1], False)
        yield f"{lengths[0]}:{lengths[1]}", arms

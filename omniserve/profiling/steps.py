"""Measured steps: a load of both classes drives an engine, and each step gives a sample of (features, seconds)."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from functools import partial

from transformers import PreTrainedModel

from omniserve.core.config import DiskKVConfig, EngineConfig, HostsConfig, PrefillConfig
from omniserve.core.plan import StepPlan
from omniserve.engine.capacity import fit_states, has_host_tier, largest_part, num_blocks, pool_bytes
from omniserve.engine.engine import Engine
from omniserve.host.cores import available_cores
from omniserve.latency import ModelShape, StepSample, features_of
from omniserve.layers.patched_model import PatchedModel
from omniserve.parallel.group import RankGroup
from omniserve.profiling.loads import MEAN_ACTIVE, Arrival, grid_load, mixed_load
from omniserve.profiling.timer import Progress, Timer

_IDLE_WAIT_S = 0.02
_FIRST_STEPS, _FIRST_SEED = 40, 100  # of loads that are not measured, where first calls do not count
_LEAST_SAMPLES = 16  # of either kind, however little time is left: no model can be fitted to none
_LEAST_COARSE = 8  # the same for a coarse profile
_LEAST_ROWS = 32  # of the largest step, however short it shall be
_LEAST_WITH_HOST, _MOST_STEPS_FOR_IT = 8, 64  # of these; if the policy has no use for the host tier, not for ever
_MAX_SAMPLES, _WANTED_SAMPLES = 200, 100  # of each of the two loads
_LEAST_MAX_PROMPT, _MAX_PROMPT, _MAX_OUTPUT = 64, 1024, 64


def measure_steps(
    engine: Engine,
    arrivals: Iterable[Arrival],
    *,
    max_samples: int,
    least: int = 0,
    least_with_host: int = 0,
    go_on: Callable[[], bool] = lambda: True,
    give_way: Callable[[], bool] = lambda: False,
    on_sample: Callable[[], object] = lambda: None,
) -> list[StepSample]:
    """Drive an engine with a load and return a sample of each step, the first few (of cold caches) left out.

    What is unfinished in the end is aborted.

    Args:
        engine: It has no unfinished requests, and is stepped only here.
        arrivals: In the order of their steps.
        max_samples: Most samples; measuring ends earlier if the load does.
        least: Number of samples that are taken whatever ``go_on`` says.
        least_with_host: Number of samples with the host tier at work, too, unless a few times ``least`` were taken.
        go_on: Asked before each step; False ends the run.
        give_way: Called before each step; True if it did other work, with which the step's time would be counted.
        on_sample: Called after each sample, for progress.
    """
    shape = ModelShape.of(engine.spec)
    samples: list[StepSample] = []
    num_steps = num_with_host = 0
    was_interrupted = False

    def record(plan: StepPlan, host_works: bool, seconds: float) -> None:
        nonlocal num_steps, num_with_host, was_interrupted
        num_steps += 1
        features = features_of(plan, shape, host_works=host_works)
        was_interrupted, counts = False, not was_interrupted
        if num_steps > 5 and counts:
            samples.append(StepSample(features=features, seconds=seconds))
            num_with_host += features.host_works
            on_sample()

    waiting = list(reversed(list(arrivals)))
    ids: list[str] = []
    engine.on_step = record
    step = 0
    try:
        while len(samples) < max_samples and (waiting or engine.has_unfinished):
            has_least = len(samples) >= least and (
                num_with_host >= least_with_host or len(samples) >= _MOST_STEPS_FOR_IT
            )
            if has_least and not go_on():
                break
            if not engine.has_unfinished:
                step = max(step, waiting[-1].at_step)
            while waiting and waiting[-1].at_step <= step:
                ids.append(engine.add(waiting.pop().request))
            was_interrupted |= give_way()
            engine.step()
            if engine.last_plan_was_empty:
                engine.wait(_IDLE_WAIT_S)
            else:
                step += 1
    finally:
        engine.on_step = None
        for request_id in ids:
            engine.abort(request_id)
        while engine.has_unfinished:  # slots and moves that are still being given back
            engine.step()
            engine.wait(_IDLE_WAIT_S)
    return samples


def settings_to_measure(config: EngineConfig) -> EngineConfig:
    """Return the settings of engines that only measure: no prefix cache, nothing that needs one, and nothing outside.

    What a load found of another one's prompts would not be in its rows, so there is no disk tier either. Hosts, prefill
    engines and the trace of steps are the server's alone. A prediction is of one step that passes all stages.
    """
    execution = dataclasses.replace(config.execution, prefix_cache=False)
    if config.parallel.pipeline_parallel_size > 1:
        execution = dataclasses.replace(execution, async_steps=False)
    return dataclasses.replace(
        config,
        execution=execution,
        hosts=HostsConfig(),
        prefill=PrefillConfig(),
        disk_kv=DiskKVConfig(),
        trace_steps=None,
    )


def measure_mixed_steps(
    model: PreTrainedModel,
    config: EngineConfig,
    timer: Timer,
    progress: Progress,
    *,
    row_s: float,
    is_coarse: bool = False,
    in_grid: bool = False,
    group: RankGroup | None = None,
) -> tuple[StepSample, ...]:
    """Measure whole steps of an engine in what is left of the time: first device only, then with the host tier.

    The pools are small, so that best-effort requests do move to the host. On a slow device prompts are short, so that
    there is time for enough steps.

    On a GPU the start of an engine, which captures its steps' graphs, does not count against the time limit, nor do its
    first steps, which compile what no module needed; and one engine is gone before the next is made.

    Args:
        row_s: Seconds that a row of a large step takes.
        is_coarse: Take few samples, and of one engine, with the host tier if there is one.
        in_grid: Take samples of ``grid_load`` instead, and of the device alone.
    """
    patched: PatchedModel = model.__dict__["omniserve"]
    spec = patched.spec
    longest = min(config.max_model_len or spec.max_model_len, spec.max_model_len)
    max_output = max(1, min(longest // 4, _MAX_OUTPUT))
    rows_a_step = timer.left_s / (2 * _WANTED_SAMPLES) / row_s
    # A request of either class brings about max_prompt / 5 rows, and is there for about max_output / 3 steps.
    max_prompt = int(5 * rows_a_step * max_output / 3 / (2 * MEAN_ACTIVE))
    max_prompt = max(1, min(longest // 2, _MAX_PROMPT, max(max_prompt, _LEAST_MAX_PROMPT)))
    here = largest_part(config, spec)
    block_bytes = here.kv_block_bytes(config.block_size, config.execution.kv_dtype)
    blocks_each = -(-(max_prompt + max_output) // config.block_size)
    roomy = config.device_kv_bytes
    if not in_grid:  # whose largest points fill the pool
        roomy = min(roomy, round(2 * MEAN_ACTIVE) * blocks_each * block_bytes)
    tight = min(config.device_kv_bytes, max(2 * blocks_each, round(MEAN_ACTIVE * blocks_each / 4)) * block_bytes)
    config = settings_to_measure(config)
    host_bytes = min(config.host_kv_bytes, 2 * roomy)
    has_tier = (
        not in_grid
        and has_host_tier(config)
        and host_bytes >= here.host_block_bytes(config.block_size, config.host_pool_dtype)
    )
    pools = [(roomy, 0), (tight, host_bytes)] if has_tier else [(roomy, 0)]
    pools = pools[-1:] if is_coarse else pools
    longest_step = max(_LEAST_ROWS, int(min(timer.longest_s / row_s, config.max_num_batched_tokens)))
    samples: list[StepSample] = []
    began = timer.spent
    device_threads = config.device_threads or available_cores()  # asked for, none is left to other processes
    for number, (device_bytes, host_bytes) in enumerate(pools):
        end = began + (1.0 - began) * (number + 1) / len(pools)
        small = dataclasses.replace(
            config,
            device_kv_bytes=min(config.device_kv_bytes, pool_bytes(device_bytes, config, spec)),
            host_kv_bytes=host_bytes,
            device_threads=device_threads,
            max_num_batched_tokens=min(config.max_num_batched_tokens, longest_step),
        )
        if not host_bytes:  # a manager that keeps copies on the host cannot do without
            options = {name: value for name, value in config.scheduler_options.items() if name != "checkpoint_kv"}
            small = dataclasses.replace(small, kv="paged", scheduler_options=options)
        num_device_blocks, _ = num_blocks(fit_states(small, spec), here)
        half = max(1, num_device_blocks * config.block_size // 2)
        load = partial(
            mixed_load,
            num_steps=4 * _MAX_SAMPLES,
            vocab_size=spec.vocab_size,
            max_prompt=min(max_prompt, half),
            max_output=min(max_output, half),
        )
        if in_grid:
            load = partial(
                grid_load,
                vocab_size=spec.vocab_size,
                max_step=small.max_num_batched_tokens,
                max_tokens=min(longest, half),
                # Each has a block of its own at least.
                max_requests=min(small.max_num_seqs, small.max_num_batched_tokens, 2 * num_device_blocks // 5),
            )
        progress("whole steps", timer.spent)
        samples += _measure_engine(
            model,
            small,
            load,
            timer,
            progress,
            number=number,
            end=end,
            group=group,
            least=_LEAST_COARSE if is_coarse else _LEAST_SAMPLES,
            max_samples=sys.maxsize if in_grid else _MAX_SAMPLES,
        )
    return tuple(samples)


def _measure_engine(
    model: PreTrainedModel,
    config: EngineConfig,
    load: Callable[[int], list[Arrival]],
    timer: Timer,
    progress: Progress,
    *,
    number: int,
    end: float,
    least: int,
    max_samples: int,
    group: RankGroup | None,
) -> list[StepSample]:
    """Measure steps of an engine of its own until a share of the time limit is over."""
    with timer.preparing():
        engine = Engine(model, config, group=group)
    with engine:
        if not timer.counts_preparing:
            with timer.preparing():
                measure_steps(engine, load(_FIRST_SEED + number), max_samples=_FIRST_STEPS)
        return measure_steps(
            engine,
            load(number),
            max_samples=max_samples,
            least=least,
            least_with_host=min(_LEAST_WITH_HOST, least // 2) if config.host_kv_bytes else 0,
            go_on=lambda: timer.spent < end,
            give_way=timer.give_way,
            on_sample=lambda: progress("whole steps", timer.spent),
        )

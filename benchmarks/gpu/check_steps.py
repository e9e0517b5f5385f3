"""Steps of a tiny model: without graphs, with a few captured shapes, with all; then without any hidden wait.

Every run serves the same prompts, some of them on the host tier, and must give Hugging Face's tokens (fp32, greedy).
After a warm-up, steps may wait for the device at their marked places only, by event: any other synchronising call is an
error with its Python stack. (torch sees calls of its own that synchronise; a non-blocking copy from pageable memory is
none of them.)
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.common.timing import wait_for
from benchmarks.gpu.script import NotHere, Script
from omniserve import Engine, EngineConfig, ExecutionConfig, Request, SamplingParams, patch, unpatch
from tests.parity.engine_histories import BLOCK, Reference
from tests.parity.models import tiny_model

FEW: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_piggyback_seats": 4}
_OVERLAP = {"async_steps": True}
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 1},
    {"temperature": 1.0, "min_p": 0.1},
    {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"logprobs": 3},
    {"prompt_logprobs": 2},
    {"logit_bias": ((5, 2.0),)},
)
"""Sampling parameters beyond the likeliest token that requests may ask for."""


def steps(script: Script) -> None:
    """Serve with and without captured steps, then the same with torch watching for waits."""
    model: Any = tiny_model("llama")
    reference = Reference(model, num_prompts=4 if script.dry else 12)  # on the CPU
    patch(model.to(script.device), compile=False)
    on = "auto" if script.on_gpu else "on"
    with script.case("one step without graphs"), open_tiny(model, step_graphs="off") as engine:
        engine.add(Request(prompt_token_ids=reference.prompts[0], sampling=SamplingParams(max_tokens=1)))
        tokens = [token for output in engine.step() for token in output.new_token_ids]
        wait_for(script.device)
        assert tokens == list(reference.tokens[0][:1]), f"got {tokens}, want {reference.tokens[0][:1]}"
    ways: dict[str, dict[str, Any]] = {
        "without graphs": {"step_graphs": "off"},
        "a few captured shapes": {"step_graphs": on, **FEW},
        "all captured shapes": {"step_graphs": on},
        "all captured shapes, steps that overlap": {"step_graphs": on, **_OVERLAP},
    }
    for name, settings in ways.items():
        with script.case(f"tokens: {name}") as case, open_tiny(model, **settings) as engine:
            serve(engine, reference)
            case.note = described(engine)
    with script.case("torch notices a wait, and none in waiting for an event"):
        script.needs_gpu()
        _notices(script.device)
    for name, settings in ways.items():
        with script.case(f"no hidden wait: {name}") as case, open_tiny(model, **settings) as engine:
            no_hidden_wait(engine, reference, script)
            case.note = described(engine)
    with script.case("tokens: compiled layers, all captured shapes, steps that overlap") as case:
        if script.dry:
            raise NotHere("compiling takes a while; not in a dry run")
        unpatch(model)
        patch(model, compile=True)
        with open_tiny(model, compile=True, step_graphs=on, **_OVERLAP) as engine:
            serve(engine, reference)
            case.note = described(engine)


def open_tiny(model: Any, **settings: Any) -> Engine:
    """Return an engine with so little device memory that some requests decode on the host tier."""
    block_bytes = model.omniserve.spec.kv_block_bytes(BLOCK)
    defaults: dict[str, Any] = {
        "block_size": BLOCK, "max_model_len": 80, "device_kv_bytes": 12 * block_bytes, "host_kv_bytes": 1 << 20,
        "scheduler_options": {"swap_in_delay_s": 0.01, "min_residence_s": 0.0},
    }  # fmt: skip
    execution: dict[str, Any] = {"compile": False, "async_steps": False}
    execution |= {name: settings.pop(name) for name in list(settings) if name in ExecutionConfig.__dataclass_fields__}
    return Engine(model, EngineConfig(execution=ExecutionConfig(**execution), **defaults | settings))


def serve(engine: Engine, reference: Reference, **sampling: Any) -> None:
    """Serve all prompts of a reference, a third of them latency-sensitive, and compare greedy tokens with its.

    With ``sampling``, tokens are not compared.
    """
    params = SamplingParams(**{"max_tokens": reference.max_tokens, "ignore_eos": True} | sampling)
    ids = [
        engine.add(Request(prompt_token_ids=p, sampling=params, service_class="BE" if i % 3 else "LS"))
        for i, p in enumerate(reference.prompts)
    ]
    got: dict[str, list[int]] = defaultdict(list)
    while engine.has_unfinished:
        for output in engine.step():
            got[output.request_id] += output.new_token_ids
        engine.scheduler.check_integrity()
        if engine.last_plan_was_empty:
            engine.wait(0.01)
    wrong = [i for i, name in enumerate(ids) if not sampling and tuple(got[name]) != reference.tokens[i]]
    assert not wrong, f"prompts {wrong} of {len(ids)}: {[(got[ids[i]], reference.tokens[i]) for i in wrong[:2]]}"


def described(engine: Engine) -> str:
    """Return what an engine has done, and how."""
    stats, graphs = engine.stats(), engine.runner.graphs
    assert stats.piggyback_rows > 0, "no row passed through the host tier: this run says nothing about it"
    if graphs is None:
        return f"{stats.steps} steps, {stats.piggyback_rows} piggyback rows"
    shapes = len(graphs._decodes) + len(graphs._chunks)
    captured = graphs.num_decode_steps + graphs.num_chunk_steps
    return f"{stats.steps} steps, {captured} in {shapes} shapes, {stats.piggyback_rows} piggyback rows"


def no_hidden_wait(engine: Engine, reference: Reference, script: Script) -> None:
    """Serve until all is warm, then again with torch watching; greedy first, then every way to sample."""
    work = [functools.partial(serve, engine, reference)]
    work += [functools.partial(serve, engine, reference, **sampling) for sampling in SAMPLINGS]
    for run in work * (0 if script.dry else 2):  # twice: page-locked buffers of every size are there to be used again
        run()
    with waits_are_errors(script.on_gpu):
        for run in work:
            run()


@contextmanager
def waits_are_errors(on_gpu: bool) -> Iterator[None]:
    """Have every synchronising CUDA call raise RuntimeError; without a GPU there is none."""
    if on_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")


def _notices(device: torch.device) -> None:
    """Raise AssertionError unless torch refuses ``item``, and not waiting for an event."""
    value, event = torch.ones(1, device=device), torch.cuda.Event()
    with waits_are_errors(on_gpu=True):
        try:
            value.item()
        except RuntimeError:
            event.record()
            event.synchronize()
        else:
            raise AssertionError("item() was let pass")

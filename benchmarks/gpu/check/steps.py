"""Steps of a tiny model: without graphs, with a few captured shapes, with all; then without any hidden wait.

Every run serves the same prompts, some of them on the host tier, and must give Hugging Face's tokens (fp32, greedy).
After a warm-up, steps may wait for the device at their marked places only, by event: any other synchronising call is a
failure with its Python stack. (torch sees calls of its own that synchronise; a non-blocking copy from pageable memory
is none of them.)
"""

from __future__ import annotations

import functools
import sys
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.common.record import ROOT
from benchmarks.common.timing import wait_for
from benchmarks.gpu.script import NotHere, Script, argument_parser
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
"""What requests may ask of the sampler beside the likeliest token."""


def main(arguments: Sequence[str] | None = None) -> int:
    script = Script("steps", argument_parser(__doc__).parse_args(arguments))
    model: Any = tiny_model("llama")
    reference = Reference(model, num_prompts=4 if script.dry else 12)  # on the CPU
    patch(model.to(script.device), compile=False)
    on = "auto" if script.on_gpu else "on"
    with script.case("one step without graphs") as case, open_tiny(model, step_graphs="off") as engine:
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
    with script.case("torch notices a wait, and none in waiting for an event") as case:
        _notices(script)
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
    return script.end()


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


def serve(
    engine: Engine, reference: Reference, *, meanwhile: Callable[[], object] | None = None, **sampling: Any
) -> None:
    """Serve all prompts of a reference, a third of them latency-sensitive, and compare greedy tokens with its.

    Args:
        engine: Without requests.
        reference: Prompts, and Hugging Face's tokens.
        meanwhile: Called before each step.
        sampling: Given: tokens are not compared.

    Raises:
        AssertionError: A token differs, or the engine's books do not balance.
    """
    params = SamplingParams(**{"max_tokens": reference.max_tokens, "ignore_eos": True} | sampling)
    ids = [
        engine.add(Request(prompt_token_ids=p, sampling=params, service_class="BE" if i % 3 else "LS"))
        for i, p in enumerate(reference.prompts)
    ]
    got: dict[str, list[int]] = defaultdict(list)
    while engine.has_unfinished:
        if meanwhile is not None:
            meanwhile()
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
    """Serve until all is warm, then again with torch watching; greedy first, then every way to sample.

    Raises:
        AssertionError: The host waited for the device at a place that is not marked; the message has each Python stack.
    """
    work = [functools.partial(serve, engine, reference)]
    work += [functools.partial(serve, engine, reference, **sampling) for sampling in SAMPLINGS]
    for run in work * (0 if script.dry else 2):  # twice: page-locked buffers of every size are there to be used again
        run()
    with noted_waits(script.on_gpu) as stacks:
        for run in work:
            run()
    text = "\n\n".join(stacks)
    assert not stacks, f"{len(stacks)} places wait for the device:\n{text}"
    if script.on_gpu:  # the same once more, so that what cannot be noted as a warning still fails
        torch.cuda.set_sync_debug_mode("error")
        try:
            work[0]()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@contextmanager
def noted_waits(on_gpu: bool) -> Iterator[list[str]]:
    """Yield a list that gets the Python stack of every place with a synchronising CUDA call, each place once."""
    stacks: dict[str, None] = {}

    def note(message: object, category: type[Warning], *_: object) -> None:
        if "synchronizing CUDA" in str(message):
            frames = [f for f in traceback.extract_stack()[:-1] if f.filename.startswith(str(ROOT))]
            places = [f"  {f.filename.removeprefix(f'{ROOT}/')}:{f.lineno} {f.name}: {f.line}" for f in frames[-6:]]
            stacks["\n".join(places)] = None

    result: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # type: ignore[assignment]
        if on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield result
        finally:
            if on_gpu:
                torch.cuda.set_sync_debug_mode("default")
            result += stacks


def _notices(script: Script) -> None:
    """Raise AssertionError unless torch reports ``item``, and not waiting for an event."""
    if not script.on_gpu:
        raise NotHere("needs a GPU")
    one = torch.ones(1, device=script.device)
    with noted_waits(on_gpu=True) as stacks:
        one.item()
    assert len(stacks) == 1, f"item() was noted {len(stacks)} times"
    with noted_waits(on_gpu=True) as stacks:
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
    assert not stacks, f"waiting for an event was noted: {stacks}"


if __name__ == "__main__":
    sys.exit(main())

"""Models and engines of the GPU scripts: random weights, requests that decode without prefill, steps by the clock."""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common.engine_run import request
from benchmarks.common.timing import seconds, wait_for
from benchmarks.gpu.script import Script
from omniserve import Engine, EngineConfig, ExecutionConfig, Request
from omniserve.core.work import MoveDirection
from omniserve.latency.profile import Profile
from omniserve.layers.patching import patch
from omniserve.ops.attention import DEVICE_ATTENTION, resolve_attention
from omniserve.sched.request_table import RequestTable
from omniserve.sched.state import BE, Phase
from omniserve.simulate.results import percentile

NEVER_S = float(1 << 30)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's architecture: transformers' name of its type, and fields of its configuration."""

    name: str
    model_type: str
    fields: dict[str, Any]


LLAMA_8B = Shape(name="Llama-3.1-8B", model_type="llama", fields={
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
})  # fmt: skip
QWEN_32B = Shape(name="Qwen2.5-32B", model_type="qwen2", fields={
    "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
    "num_key_value_heads": 8, "vocab_size": 152064, "max_position_embeddings": 32768, "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
})  # fmt: skip
TINY = Shape(name="tiny", model_type="llama", fields={
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096, "tie_word_embeddings": False,
})  # fmt: skip


def random_model(shape: Shape, device: torch.device) -> Any:
    """Return a bf16 model in eval mode; its weights are drawn on the device and were nowhere else."""
    torch.manual_seed(0)
    no_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model(shape.model_type, **shape.fields, **no_tokens)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.pad_token_id = 0
    return model


def patched_model(shape: Shape, script: Script) -> Any:
    """Return a random model, patched; in a dry run the tiny one, not compiled."""
    return patch(random_model(TINY if script.dry else shape, script.device), compile=not script.dry)


def kv_token_bytes(model: Any) -> int:
    """Return the bytes of K and V of one token, all layers."""
    return int(model.omniserve.spec.kv_block_bytes(1))


def weight_bytes(model: Any) -> int:
    """Return the bytes of weights that a step reads: all but the rows of the embedding that are not looked up."""
    total = sum(p.nbytes for p in model.parameters())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return total if tied else total - model.get_input_embeddings().weight.nbytes


def attentions(device: torch.device) -> dict[str, str]:
    """Return the names of device attention, each with why it does not run here; empty: it does."""
    reasons = {}
    for name in DEVICE_ATTENTION.names():
        if name in ("xformers", "triton") and importlib.util.find_spec(name) is None:
            reasons[name] = f"{name} is not installed"
            continue
        try:
            resolve_attention(name, device)
            reasons[name] = ""
        except ValueError as error:  # of another kind of device
            reasons[name] = str(error)
    return reasons


def add_decoding(engine: Engine, new: Request) -> None:
    """Add a request that begins where it decodes, as if all of its prompt but the last token were computed.

    So a step can be timed without the prefill that leads to it. BE requests decode on the host tier if there is one,
    all others on the device. The KV is not the prompt's: ``open_engine`` fills it with something finite.

    Raises:
        ValueError: A pool has no room for it, or the host tier no slot.
    """
    request_id = engine.add(new)
    try:
        _skip_prefill(engine.scheduler.requests, request_id)
    except ValueError:
        engine.abort(request_id)
        raise


def _skip_prefill(requests: RequestTable, request_id: str) -> None:
    state = requests.states[request_id]
    to_host = state.kind is BE and requests.residents.is_up
    if to_host and requests.residents.slots.num_free == 0:
        raise ValueError(f"the host tier has no slot for {request_id}: raise max_host_requests")
    if requests.kv.allocate(request_id, state.num_tokens) is None:
        raise ValueError(f"the device pool has no room for the {state.num_tokens} tokens of {request_id}")
    if to_host:
        assert requests.kv.moves is not None
        move = requests.kv.moves.start(request_id, MoveDirection.TO_HOST)
        if move is None:
            raise ValueError(f"the host pool has no room for the {state.num_tokens} tokens of {request_id}")
        requests.kv.moves.finish(move.move_id, succeeded=True)
        requests.residents.take_slot(state)
    requests.waiting[state.kind].remove(state)
    state.num_computed_tokens = state.num_tokens - 1
    state.phase = Phase.HOST if to_host else Phase.DEVICE
    (requests.residents.queue if to_host else requests.device[state.kind]).add(state)


def config_of(model: Any, execution: Mapping[str, Any] | None = None, **settings: Any) -> EngineConfig:
    """Return an engine's settings, with the model's way of being compiled."""
    is_compiled = bool(model.__dict__["_omniserve_patch"].options[0])
    return EngineConfig(execution=ExecutionConfig(compile=is_compiled, **execution or {}), **settings)


@contextmanager
def open_engine(model: Any, config: EngineConfig, profile: Profile | None = None) -> Iterator[Engine]:
    """Give an engine whose device KV is random, and whose host KV is 0: what was not computed can still be read."""
    reclaim_memory(model.device)
    with Engine(model, config, profile=profile) as engine:
        for pool in (engine.runner._storage.k_LBKSH, engine.runner._storage.v_LBKSH):
            pool.normal_()
        yield engine


@contextmanager
def open_decoding(model: Any, *, batch: int, context: int, output: int, **settings: Any) -> Iterator[Engine]:
    """Give an engine with LS requests ``ls0`` and so on that decode at a context, and need no prefill."""
    blocks = batch * -(-(context + output) // 64)
    defaults: dict[str, Any] = {
        "host_kv_bytes": 0, "max_model_len": context + output,
        "device_kv_bytes": (blocks + 1) * 64 * kv_token_bytes(model), "max_num_seqs": max(batch, 1),
        "max_num_batched_tokens": max(batch, 512),
    }  # fmt: skip
    settings = defaults | settings
    options = {"ls_reserve_fraction": 0.0, "swap_in_delay_s": NEVER_S}
    config = config_of(model, scheduler_options=options, **settings)
    with open_engine(model, config) as engine:
        renew(engine, batch, context, output)
        yield engine


def renew(engine: Engine, batch: int, context: int, output: int) -> None:
    """Begin anew with these LS requests: what is compared is measured at the same contexts."""
    for i in range(batch):
        engine.abort(f"ls{i}")
    for i in range(batch):
        add_decoding(engine, request(f"ls{i}", context, output))


def serve_step(engine: Engine) -> None:
    """Make a step, and wait a little where there was nothing to do."""
    engine.step()
    if engine.last_plan_was_empty:
        engine.wait(0.01)


def drain(engine: Engine, names: list[str]) -> None:
    """Abort requests, and step until what they held has been given back."""
    for name in names:
        engine.abort(name)
    while engine.has_unfinished:
        engine.step()
        engine.wait(0.01)
    wait_for(engine.model.device)


def step_ms(engine: Engine, count: int, *, warm_up: int = 6) -> tuple[float, dict[str, Any]]:
    """Time ``count`` steps, after a few that are not.

    Returns:
        The mean by the device's events around all of them: its idle time between two steps counts. And percentiles by
        the wall clock, of a step alone.
    """
    for _ in range(warm_up):
        engine.step()
    walls: list[float] = []

    def run() -> None:
        for _ in range(count):
            began_s = time.perf_counter()
            if any(output.finished for output in engine.step()):
                raise RuntimeError("a request ended while steps were timed: give it more tokens")
            walls.append(1e3 * (time.perf_counter() - began_s))

    mean_ms = 1e3 * seconds(run, engine.model.device) / count
    return mean_ms, {"wall_p50_ms": percentile(walls, 50), "wall_p99_ms": percentile(walls, 99)}


def reclaim_memory(device: torch.device) -> None:
    """Give back unused memory, page-locked too: a closed engine holds its pools until a garbage collection."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()

"""The papers' figures that only hardware can show, measured on the machine at hand: a GPU beside its CPU, or a CPU.

    python -m benchmarks.paper.measured --list
    python -m benchmarks.paper.measured modules streams --record benchmarks/results/measured.json

Without a GPU the device tier is this CPU, so that no gap between CPU and GPU can be seen; how each module's time grows
with its rows can. Other figures of hardware are cases of other benchmarks: OmniServe's Table 2 of
``benchmarks.latency_model``, Fig. 2a of ``benchmarks.coserve``, BROS's Fig. 14 of ``benchmarks.costs scheduling``,
ConServe's costs of ``benchmarks.features safepoints checkpointing``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import omniserve
from benchmarks.common.cases import Benchmark, Trials
from benchmarks.common.models import MODELS
from benchmarks.common.timing import median_seconds
from omniserve.core.spec import AttentionSpec
from omniserve.ops.attention import AttentionMetadata, HostLengths, resolve_attention

MEASURED = Benchmark("paper.measured")
_BLOCK = 64
_CALLS = 30  # of which a sample is the median
_COLD_BYTES = 128 << 20  # of KV that is walked over before the same is read again, if the model has so many layers


def devices() -> list[torch.device]:
    """Return the devices whose modules are compared: the CPU, and a GPU if there is one."""
    return [torch.device(name) for name in (("cpu", "cuda") if torch.cuda.is_available() else ("cpu",))]


class Layer:
    """The modules of a model's layers on a device: each call is of the next layer, so that no cache holds its data."""

    def __init__(self, shape: str, device: torch.device) -> None:
        self._model, self.device = omniserve.patch(MODELS[shape]().to(device)).omniserve, device
        spec = self._model.spec
        self._heads, self._kv_heads, self._head_size = spec.num_heads, spec.num_kv_heads, spec.head_size
        self._attend, self._scale = resolve_attention("auto", device), AttentionSpec(scale=spec.head_size**-0.5)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self._model.dtype)

    def qkv(self, rows: int) -> Callable[[], object]:
        """Return what runs the norm, Q, K, V and the rotary embedding of so many rows."""
        hidden_TD = self._random(rows, self._model.spec.hidden_size)
        tables = self._model.rotary(torch.arange(rows, device=self.device)) or (None, None)
        layers = itertools.cycle(range(self._model.num_layers))
        return lambda: self._model.pre_attention(next(layers), hidden_TD, *tables)

    def mlp(self, rows: int) -> Callable[[], object]:
        """Return what runs the output projection, the norm and the MLP of so many rows."""
        hidden_TD = self._random(rows, self._model.spec.hidden_size)
        attn_TD = self._random(rows, self._heads * self._head_size)
        layers = itertools.cycle(range(self._model.num_layers))
        return lambda: self._model.post_attention(next(layers), attn_TD, hidden_TD)

    def attention(self, requests: int, queries: int, context: int) -> Callable[[], object]:
        """Return what attends with the last ``queries`` tokens of each request's context."""
        blocks = -(-context // _BLOCK)
        shape = (requests * blocks, self._kv_heads, _BLOCK, self._head_size)
        copies = min(self._model.num_layers, -(-_COLD_BYTES // (2 * math.prod(shape) * self._model.dtype.itemsize)))
        caches = itertools.cycle([(self._random(*shape), self._random(*shape)) for _ in range(copies)])
        metadata = AttentionMetadata(
            block_table_RM=torch.randperm(requests * blocks, device=self.device).int().view(requests, blocks),
            query_start_loc_R1=torch.arange(requests + 1, device=self.device, dtype=torch.int32) * queries,
            seq_lens_R=torch.full((requests,), context, device=self.device, dtype=torch.int32),
            host_lengths=HostLengths(query_lens=(queries,) * requests, seq_lens=(context,) * requests),
        )  # fmt: skip
        q_TNH = self._random(requests * queries, self._heads, self._head_size)
        return lambda: self._attend(q_TNH, *next(caches), metadata, self._scale)


def _ms(layer: Layer, run: Callable[[], object]) -> dict[str, float]:
    with torch.inference_mode():
        return {"ms": 1e3 * median_seconds(run, layer.device, repeats=_CALLS)}


_SHAPE: dict[str, Any] = {"model": ("SmolLM-135M", "of benchmarks.common.models")}
_TINY: dict[str, Any] = {"repeats": 1, "context": 70}


@MEASURED.case(
    **_SHAPE, rows=[1, 8, 32, 128, 512, 1024], requests=[1, 2, 4, 8, 16, 32], prompts=[128, 256, 512, 1024, 2048],
    context=(1000, "tokens before a decode"), repeats=5, tiny=_TINY | {"rows": [1, 8], "requests": [1], "prompts": [8]},
)  # fmt: skip
def modules(args: argparse.Namespace) -> Trials:
    """What a layer's modules take by rows: OmniServe's Fig. 2b-c, Fig. 8 and Table 1, APEX's Fig. 1.

    Milliseconds of one layer. Dense modules by rows, decode attention by requests at one context, prefill attention by
    the prompt's length. With a GPU the ratios in brackets are its times by the CPU's: the gap between the two.
    """
    layers = {device.type: Layer(args.model, device) for device in devices()}
    with torch.inference_mode():
        for rows in args.rows:
            yield f"QKV, {rows} rows", {name: _arm(layer, layer.qkv(rows)) for name, layer in layers.items()}
            yield f"proj and MLP, {rows} rows", {name: _arm(layer, layer.mlp(rows)) for name, layer in layers.items()}
        for requests in args.requests:
            loads = {name: layer.attention(requests, 1, args.context) for name, layer in layers.items()}
            yield f"decode attention, {requests} requests", {n: _arm(layers[n], run) for n, run in loads.items()}
        for prompt in args.prompts:
            loads = {name: layer.attention(1, prompt, prompt) for name, layer in layers.items()}
            yield f"prefill attention, {prompt} tokens", {n: _arm(layers[n], run) for n, run in loads.items()}


def _arm(layer: Layer, run: Callable[[], object]) -> Callable[[], dict[str, float]]:
    return functools.partial(_ms, layer, run)


@MEASURED.case(
    **_SHAPE, decodes=(50, "LS rows"), context=(500, "tokens of each"), beside=([5, 200], "rows of the other stream"),
    seconds=(0.5, "of a sample"), repeats=5, tiny=_TINY | {"decodes": 2, "beside": [1], "seconds": 0.05},
)  # fmt: skip
def streams(args: argparse.Namespace) -> Trials:
    """How much a second stream of output projections slows a layer's modules down: OmniServe's Fig. 5.

    Two workflows side by side on the device, which post-attention piggybacking avoids: on a GPU two CUDA streams, on a
    CPU two threads that share its cores. Milliseconds of the module, and in brackets the ratio to the module alone.
    """
    device = devices()[-1]
    layer = Layer(args.model, device)
    with torch.inference_mode():
        works = {
            "QKV": layer.qkv(args.decodes), "attention": layer.attention(args.decodes, 1, args.context),
            "proj and MLP": layer.mlp(args.decodes),
        }  # fmt: skip
        for name, work in works.items():
            work()  # compiles it, as the workflow beside it does for its rows
            arms: dict[str, Any] = {"alone": functools.partial(_timed_beside, layer, work, None, args.seconds)}
            for rows in args.beside:
                other = layer.mlp(rows)
                other()
                arms[f"beside {rows} rows"] = functools.partial(_timed_beside, layer, work, other, args.seconds)
            yield name, arms


def _timed_beside(
    layer: Layer, work: Callable[[], object], other: Callable[[], object] | None, seconds: float
) -> dict[str, float]:
    """Return the mean milliseconds of ``work``, called again and again while another thread calls ``other``."""
    ended = threading.Event()
    failed: list[BaseException] = []

    def interfere() -> None:
        assert other is not None
        try:
            with torch.inference_mode(), _stream_of(layer.device):
                while not ended.is_set():
                    other()
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=interfere) if other is not None else None
    if thread is not None:
        thread.start()
    try:
        with torch.inference_mode(), _stream_of(layer.device) as stream:
            began_s, count = time.perf_counter(), 0
            while time.perf_counter() - began_s < seconds:
                work()
                count += 1
            if stream is not None:
                stream.synchronize()
            mean_s = (time.perf_counter() - began_s) / count
    finally:
        ended.set()
        if thread is not None:
            thread.join()
    if failed:
        raise failed[0]
    return {"ms": 1e3 * mean_s}


class _stream_of:
    """A CUDA stream of its own for a ``with`` block; on a CPU, None."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._entered = torch.cuda.stream(self._stream) if self._stream is not None else None

    def __enter__(self) -> torch.cuda.Stream | None:
        if self._entered is not None:
            self._entered.__enter__()
        return self._stream

    def __exit__(self, *error: object) -> None:
        if self._entered is not None:
            self._entered.__exit__(*error)


@MEASURED.case(
    **_SHAPE, batch=(64, "LS rows of the step"), rows=[5, 50, 100, 200, 400], repeats=9,
    tiny={"batch": 2, "rows": [2], "repeats": 1},
)  # fmt: skip
def piggyback_operators(args: argparse.Namespace) -> Trials:
    """What bringing piggyback rows in and out of a step takes a layer: OmniServe's Fig. 19a.

    Microseconds of storing the rows' residuals, of putting results into the batch, and of fetching their residuals from
    rows in no order (paper, GPU: queues and storing at most 75 us for 400 rows, fetching about 500 us).
    """
    device = devices()[-1]
    model = omniserve.patch(MODELS[args.model]().to(device)).omniserve
    hidden, width = model.spec.hidden_size, model.spec.num_heads * model.spec.head_size
    ops = torch.ops.omniserve
    for rows in args.rows:
        slots = 2 * rows

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).to(model.dtype)

        attn_TD, results_RD = random(args.batch, width), random(slots, width)
        hidden_TD, store_SD = random(args.batch + rows, hidden), random(slots, hidden)
        leaving_TD, slots_P = random(rows, hidden), torch.randperm(slots, device=device)[:rows]
        operators = {
            "residual_store": functools.partial(ops.residual_store, leaving_TD, store_SD, slots_P),
            "piggyback_concat": functools.partial(ops.piggyback_concat, attn_TD, results_RD, slots_P),
            "residual_fetch": functools.partial(ops.residual_fetch, store_SD, slots_P, hidden_TD),
        }
        yield f"{rows} rows", {name: functools.partial(_us, device, run) for name, run in operators.items()}


def _us(device: torch.device, run: Callable[[], object]) -> dict[str, float]:
    with torch.inference_mode():
        return {"us": 1e6 * median_seconds(run, device, repeats=50)}


if __name__ == "__main__":
    sys.exit(MEASURED.main())

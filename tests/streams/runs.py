"""Random histories on a lazy device; see ``tests/parity/engine_histories.py``. For a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

import torch

from omniserve import Engine, FinishReason, Request, SamplingParams, patch
from omniserve.core.request import Arrival
from omniserve.host.mover import StagedMover
from omniserve.host.moves import HostMoves
from omniserve.layers import patching
from omniserve.layers.tracing import TracedFamily, family_of
from tests.engine_settings import flat_config
from tests.parity.engine_histories import BLOCK, Reference, Tally, poison, watch_received_joins, with_prediction
from tests.parity.models import tiny_model
from tests.sched import preemptible
from tests.streams.cuda import FakeCuda
from tests.streams.device import Order
from tests.streams.tensors import HostWork, LazyTensor

_EMPTY_STEPS = 300
"""Number of empty steps in a row after which nothing comes any more; each waits up to 10 ms."""

_SHARED: dict[str, Any] = {
    "attention": "tests.streams.cuda:attend",
    "device_threads": 1,
    "async_steps": True,
    "step_graphs": "off",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_piggyback_seats": 4,
    "max_host_requests": 16,
    "swap_in_delay_s": 0.0,
    "min_residence_s": 0.0,
}
_HOST: dict[str, Any] = {**_SHARED, "scheduler": "omniserve", "kv": "tiered", "device_blocks": 9, "host_blocks": 60}

CASES: Mapping[str, Mapping[str, Any]] = {
    "device": {**_SHARED, "scheduler": "sarathi", "kv": "paged", "device_blocks": 12, "host_blocks": 0},
    "host": _HOST,
    "staged moves": {**_HOST, "is_staged": True},
    "late results": {**_HOST, "host_delay_s": 0.06},
    "failing moves": {**_HOST, "is_staged": True, "moves_fail": True},
    "checkpoints": {**_HOST, "kv": "incremental", "checkpoint_kv": True},
    "conserve": {**_HOST, "scheduler": "conserve", "kv": "incremental", "checkpoint_kv": True},
    "shared blocks": {**_HOST, "kv": "bidirectional"},
    "safepoints": {**_HOST, "scheduler": preemptible.NAME},
    "neo": {**_HOST, "scheduler": "neo"},
    "apex": {**_HOST, "scheduler": "apex"},
    "llumnix": {**_HOST, "scheduler": "llumnix"},
}
"""Cases of histories: settings of the engine, sizes of the pools in blocks, and which mover moves."""
for _name in ("device", "host", "late results", "staged moves", "checkpoints", "shared blocks", "safepoints"):
    CASES = {**CASES, f"{_name}, graphs": {**CASES[_name], "step_graphs": "on"}}

_DRAFTS = {**_HOST, "host_delay_s": 0.02, "drafts": True}
CASES = {**CASES, "drafts": _DRAFTS, "drafts, graphs": {**_DRAFTS, "step_graphs": "on"}}

REACH: Mapping[str, tuple[str, ...]] = {
    "device": ("device_tokens",),
    "conserve": ("checkpoints",),
    "safepoints": ("layer_preemptions",),
    "llumnix": ("swaps_out",),
    "late results": ("late_joins", "missed_joins", "host_output_tokens"),
    "drafts": ("late_drafts", "missed_drafts", "accepted_drafts", "rejected_drafts"),
    "failing moves": ("host_failures", "host_output_tokens"),
    "checkpoints": ("checkpoints", "swaps_out", "host_output_tokens"),
}
"""Counters that the histories of a case must move; where nothing is said, rows went to the host tier and came back."""


def reach_of(case: str) -> tuple[str, ...]:
    """Return the counters that the histories of a case must move."""
    name = case.removesuffix(", graphs")
    reach = REACH.get(name, ("swaps_out", "host_output_tokens"))
    if name == case:
        return reach
    return (*reach, "decode_graphs", "chunk_graphs", *(["left_graphs"] if name == "safepoints" else []))


class Bench:
    """Models on a lazy device, and histories of them.

    Args:
        max_tokens: Most tokens that a request asks for.
    """

    def __init__(self, max_tokens: int = 6) -> None:
        torch.set_num_threads(1)  # the layers are tiny
        self._references: dict[str, Reference] = {}
        self._models: dict[str, Any] = {}
        self._layers: dict[str, TracedFamily] = {}
        self._max_tokens = max_tokens
        self._of_host("llama")
        self.cuda = FakeCuda()

    def _of_host(self, family: str) -> Any:
        model = tiny_model(family, num_layers=2)
        self._references[family] = Reference(model, num_prompts=6, max_tokens=self._max_tokens)
        self._models[family] = model
        self._layers[family] = family_of(model)  # while there are values to look at

    def _model(self, family: str) -> Any:
        if family not in self._models:
            self._of_host(family)
        model = self._models[family]
        if "omniserve" not in model.__dict__:
            layers = self._layers[family]
            self.cuda.to_device(model)
            layers.embedding_and_head.probe = torch.empty(0, dtype=model.dtype, device=model.device)
            with mock.patch.object(patching, "family_of", lambda model, **_: layers):
                patch(model, compile=False, prepack=False)
        return model

    def play(self, scene: Callable[[Bench], None], order: Order) -> None:
        """Run a scene under the lazy device."""
        with self.cuda.mode:
            self.cuda.device.forget()
            self.cuda.device.set_order(order)
            try:
                scene(self)
            finally:
                self.cuda.device.forget()

    @contextlib.contextmanager
    def engine(self, case: str, order: Order, *, family: str = "llama", **more: Any) -> Iterator[tuple[Any, Any]]:
        """Yield a function that makes an engine, and the reference of its model, under the lazy device.

        Args:
            case: A key of CASES.
            order: When the device runs what it is given.
            family: A key of MODELS.
            more: Settings that differ.
        """
        settings = {**CASES[case], **more}
        with ExitStack() as stack:
            stack.enter_context(self.cuda.mode)
            self.cuda.device.forget()
            model = self._model(family)
            for name in ("host_delay_s", "drafts"):
                settings.pop(name, None)
            if settings.pop("is_staged", False):
                stack.enter_context(_staged())
            if settings.pop("moves_fail", False):
                stack.enter_context(_out_of_memory())
            block_bytes = model.omniserve.spec.kv_block_bytes(BLOCK)
            for name in ("device", "host"):
                settings[f"{name}_kv_bytes"] = block_bytes * settings.pop(f"{name}_blocks")
            config = flat_config({"block_size": BLOCK, "max_model_len": 80, "compile": False, **settings})
            self.cuda.device.drain()
            self.cuda.device.set_order(order)
            try:
                yield (lambda: Engine(model, config)), self._references[family]
            finally:
                self.cuda.device.forget()
                gc.collect()

    def run(
        self,
        case: str,
        order: Order,
        seed: int,
        *,
        change: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        abort_rate: float = 0.02,
        closes_after: int | None = None,
        faults: bool = False,
        **more: Any,
    ) -> dict[str, Any]:
        """Run a random history to its end and compare every request's tokens with Hugging Face's.

        Args:
            case: A key of CASES.
            order: When the device runs what it is given.
            seed: Of the history.
            change: Changes the product for the run.
            abort_rate: Chance of an abort before each step.
            closes_after: Close the engine after so many steps.
            faults: Host attention is late and out of order.
            more: See ``engine``.

        Returns:
            The engine's counters, and the numbers of steps that were graphs.

        Raises:
            AssertionError: Tokens differ, the history stands still, or the device uses host memory after the close.
        """
        rng = random.Random(seed)
        with self.engine(case, order, **more) as (make, reference), change():
            joins = Tally()
            which: dict[str, tuple[int, int]] = {}
            got: dict[str, list[int]] = {}
            ended: dict[str, FinishReason] = {}
            arrivals = [rng.randrange(len(reference.prompts)) for _ in range(rng.randint(5, 9))]
            with make() as engine:
                if engine.preemption is not None:
                    engine.preemption.arrivals = lambda: [Arrival(_ARRIVING)] if rng.random() < 0.2 else []
                if faults:
                    engine.host_tier.inject(delay_s=rng.choice((0.0, 0.001)), shuffle_seed=seed)
                if delay_s := CASES[case].get("host_delay_s"):
                    engine.host_tier.inject(delay_s=delay_s)
                watch_received_joins(engine, joins)
                num_empty = 0
                for step in itertools.count():
                    while arrivals and rng.random() < 0.5:
                        index, max_tokens = arrivals.pop(), rng.randint(1, reference.max_tokens)
                        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
                        kind = rng.choice(["LS", "BE", "BE", "BE"])
                        request = Request(
                            prompt_token_ids=reference.prompts[index], sampling=sampling, service_class=kind
                        )
                        if CASES[case].get("drafts"):
                            request = with_prediction(request, reference.tokens[index], rng)
                        request_id = engine.add(request)
                        which[request_id], got[request_id] = (index, max_tokens), []
                    if step == closes_after or not (arrivals or engine.has_unfinished):
                        break
                    if which and rng.random() < abort_rate and engine.abort(victim := rng.choice(list(which))):
                        ended[victim] = FinishReason.ABORT
                    poison(engine)
                    for output in engine.step():
                        got[output.request_id] += output.new_token_ids
                        if output.finish_reason is not None:
                            ended[output.request_id] = output.finish_reason
                    engine.scheduler.check_integrity()
                    num_empty = num_empty + 1 if engine.last_plan_was_empty else 0
                    assert num_empty < _EMPTY_STEPS, "the history stands still"
                    if engine.last_plan_was_empty:
                        engine.wait(0.01)
                stats = engine.stats()
                tally = dataclasses.asdict(stats.scheduler)
                tally |= {"device_tokens": stats.device_tokens, "host_failures": stats.host.failures}
                names = ("late_joins", "missed_joins", "late_drafts", "missed_drafts")
                tally |= {name: getattr(joins, name) for name in names}
                if (constant := engine.runner.graphs) is not None:
                    tally |= {"decode_graphs": constant.num_decode_steps, "chunk_graphs": constant.num_chunk_steps}
                    tally["left_graphs"] = getattr(constant, "num_steps_left", 0)
            late = [work for work in self.cuda.device.works() if isinstance(work, HostWork)]
            self.cuda.device.drain()
            num_late = sum(work.uses_host_memory() for work in late)
        for request_id, (index, max_tokens) in which.items():
            want = list(reference.tokens[index][:max_tokens])
            if ended.get(request_id) is not FinishReason.LENGTH:
                assert closes_after is not None or ended[request_id] is FinishReason.ABORT, ended[request_id]
                want = want[: len(got[request_id])]
            assert got[request_id] == want, f"{request_id}, prompt {index}: {got[request_id]}, not {want}"
        assert num_late == 0, f"the engine is closed, and {num_late} kernels had yet to use host memory"
        return tally


_ARRIVING = Request(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1), service_class="LS")
"""Asked of policies whose rows may leave a step."""


@contextlib.contextmanager
def _staged() -> Iterator[None]:
    """Let moves go as those of an int8 pool do, some blocks at a time, with a pool that is exact."""
    make = HostMoves.__init__

    @functools.wraps(make)
    def make_staged(moves: HostMoves, pool: torch.Tensor, dtype: torch.dtype, host_copy: Any, **kwargs: Any) -> None:
        make(moves, pool, dtype, host_copy, **kwargs)
        shape = moves._block_shape
        block_bytes = 2 * torch.Size(shape).numel() * dtype.itemsize
        moves.mover = StagedMover(
            shape, dtype, moves._num_pool_blocks, host_copy, pin_memory=True, staging_bytes=2 * block_bytes
        )

    with mock.patch.object(HostMoves, "__init__", make_staged):
        yield


@contextlib.contextmanager
def _out_of_memory() -> Iterator[None]:
    """Let moves fail now and then after their keys and before their values: no device memory is left."""
    num_calls, rng = 0, random.Random(0)

    def failing(name: str) -> Callable[..., torch.Tensor]:
        call = getattr(torch.Tensor, name)

        def call_or_fail(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
            nonlocal num_calls
            if tensor.dim() == 5:  # a cache
                num_calls += 1
                if num_calls % 2 == 0 and rng.random() < 0.5:
                    raise torch.OutOfMemoryError("made up")
            return call(tensor, *args)

        return call_or_fail

    with ExitStack() as stack:
        for name in ("index_select", "index_copy_"):
            stack.enter_context(mock.patch.object(LazyTensor, name, failing(name)))
        yield

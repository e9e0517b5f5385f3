"""A whole engine on the fake GPU, and plans for it.

Launching a step must not wait for anything, whatever is in it; the host tier's threads and its memory are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from omniserve import Engine, SamplingParams
from omniserve.core.plan import DeviceChunk, PiggybackEntry, PiggybackJoin, StepOutput, StepPlan
from omniserve.core.work import HostEvent, KVMove, MoveDirection
from omniserve.layers import patching
from omniserve.layers.tracing.traced import TracedFamily
from omniserve.layers.weights import groups
from omniserve.runner.cuda_graphs import graph_runner
from omniserve.runner.runner import LaunchedStep
from tests.engine_settings import flat_config
from tests.events import ATTENTION_DONE, kind_of
from tests.fake_cuda.runtime import FakeRuntime
from tests.fake_cuda.watch import is_on_device
from tests.parity.models import blank_model

BLOCK = 8
SEATS = 4
_EVENT_TIMEOUT_S = 30.0


class FakeGpuEngine:
    """An engine whose device is the fake GPU, and the steps that a test gives it.

    Args:
        gpu: The runtime.
        family: A key of ``tests.parity.models.MODELS``.
        dtype: The model's.
        config: Of the engine, where it differs from a small one that captures few shapes.
    """

    def __init__(self, gpu: FakeRuntime, family: str, dtype: torch.dtype, **config: Any) -> None:
        self.gpu = gpu
        self.may_wait = False
        """The host may wait for the device while it launches a step."""
        self.hidden: list[Tensor] = []
        """The hidden states of each step, after the last layer."""
        settings = flat_config(
            {
                "compile": False, "block_size": BLOCK, "device_kv_bytes": 1 << 17, "host_kv_bytes": 1 << 20,
                "max_num_batched_tokens": 8, "max_num_seqs": 1, "max_piggyback_seats": SEATS, "max_host_requests": 8,
                "host_threads": 1, "attention": "triton", "step_graphs_limit_s": 1e6, **config,
            }
        )  # fmt: skip
        with gpu.lenient(), pytest.MonkeyPatch.context() as patch:  # an engine may wait for the device as it starts
            self.model = blank_model(family, dtype, num_layers=2)
            layers = TracedFamily(self.model)  # on the CPU: it looks at values, which fake tensors do not have
            self.model.to("cuda")
            layers.embedding_and_head.probe = layers.embedding_and_head.probe.to("cuda")
            patch.setattr(patching, "family_of", lambda model, **_: layers)
            patch.setattr(graph_runner, "DECODE_ROWS", (0,))  # and all that max_num_seqs allows: few shapes
            # A Parameter on the fake GPU is a FakeTensor, which `is_plain` takes for a subclass of some library's.
            patch.setattr(groups, "is_plain", lambda module, kind=nn.Linear: type(module) is kind)
            patch.setattr(graph_runner.gc, "collect", lambda: 0)  # takes as long as all captures here
            self.engine = Engine(self.model, settings)
        self._watch_launches()
        self._deliver_at_once()
        self.num_layers = self.engine.spec.num_layers
        self._step_id = 0

    def _watch_launches(self) -> None:
        runner, gpu = self.engine.runner, self.gpu
        launch, run_layers = runner.launch, runner._run_layers

        def watched(plan: StepPlan) -> LaunchedStep:
            with nullcontext() if self.may_wait else gpu.never_waiting():
                return launch(plan)

        def noted(*args: Any) -> Any:
            output = run_layers(*args)
            self.hidden.append(output.hidden_TD)
            assert is_on_device(output.hidden_TD) and is_on_device(output.sampled.rows)
            assert output.hidden_TD.dtype is self.engine.model.dtype
            return output

        runner.launch, runner._run_layers = watched, noted  # type: ignore[method-assign]

    def _deliver_at_once(self) -> None:
        """Write the flags that a GPU would write while it runs the step."""
        tier = self.engine.host_tier
        if tier is None:
            return
        expect, flags_S = tier.expect, tier.flags_S
        assert flags_S is not None

        def delivered(step: int, layers_R: Tensor, slots_R: Tensor, widths_R: Tensor, **settings: bool) -> None:
            expect(step, layers_R, slots_R, widths_R, **settings)
            flags_S.view(-1, tier.max_rows)[slots_R] = step

        tier.expect = delivered  # type: ignore[method-assign]

    def __enter__(self) -> FakeGpuEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        # What was put in their place refers to the objects themselves: with such cycles the host pool would live until
        # a garbage collection, and ask CUDA to release its memory when the fake GPU is gone.
        self.engine.runner.__dict__.pop("launch")
        self.engine.runner.__dict__.pop("_run_layers")
        if self.engine.host_tier is not None:
            self.engine.host_tier.__dict__.pop("expect")

    def sample(self, request_id: str, **params: Any) -> None:
        """Tell the sampler of a request."""
        self.engine._sampler.add(request_id, SamplingParams(**params), (1, 2, 3))

    def run(self, **plan: Any) -> StepOutput:
        """Run a plan to its end."""
        self._step_id += 1
        runner = self.engine.runner
        return runner.collect(runner.launch(StepPlan(step_id=self._step_id, **plan)))

    def host_event(self) -> HostEvent:
        """Wait for the host tier's next event."""
        tier = self.engine.host_tier
        assert tier is not None
        for _ in range(100):
            tier.wait(_EVENT_TIMEOUT_S / 100)
            if events := tier.poll():
                (event,) = events
                return event
        raise AssertionError("the host tier reports nothing")

    def pass_host_tier(self, chunks: tuple[DeviceChunk, ...] = ()) -> StepOutput:
        """Send a token through all layers by way of the host tier, beside some chunks; return the last step's output.

        Args:
            chunks: Of every step.
        """
        entry = PiggybackEntry(
            request_id="host", token_id=3, position=BLOCK + 1, slot=2, epoch=0, block_ids=(0, 1)
        )  # fmt: skip
        output = self.run(chunks=chunks, entries=(entry,), num_piggyback_seats=SEATS)
        for layer in range(self.num_layers):
            event = self.host_event()
            assert (kind_of(event), event.layer, event.slot) == (ATTENTION_DONE, layer, 2), event.message
            join = PiggybackJoin(request_id="host", position=BLOCK + 1, slot=2, epoch=0, layer=layer)
            output = self.run(chunks=chunks, joins=(join,), num_piggyback_seats=SEATS)
        return output

    def move(self, direction: MoveDirection, *, move_id: int, is_reversed: bool = False) -> HostEvent:
        """Run a step that moves blocks, and return the move's event."""
        move = KVMove(
            request_id="moved", move_id=move_id, direction=direction, src_block_ids=(0, 2), dst_block_ids=(3, 1),
            is_reversed=is_reversed,
        )  # fmt: skip
        self.run(work=(move,))
        return self.host_event()


def chunk(request_id: str, num_tokens: int, start: int = 0, **fields: Any) -> DeviceChunk:
    """Return a chunk that samples."""
    num_blocks = -(-(start + num_tokens) // BLOCK)
    return DeviceChunk(
        request_id=request_id, token_ids=(1,) * num_tokens, start=start, block_ids=tuple(range(num_blocks)),
        samples=True, **fields,
    )  # fmt: skip


@contextmanager
def engine_on(gpu: FakeRuntime, family: str, dtype: torch.dtype, **config: Any) -> Iterator[FakeGpuEngine]:
    """Yield an engine, and close it."""
    with FakeGpuEngine(gpu, family, dtype, **config) as engine:
        yield engine

"""Capturing ends when its budget is spent, the most useful steps are captured by then, and it is said how many."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from omniserve import Engine, EngineConfig, ExecutionConfig
from omniserve.core.config import GIB
from omniserve.core.plan import DeviceChunk, StepPlan
from omniserve.runner.cuda_graphs import graph_runner
from omniserve.runner.cuda_graphs.budget import Budget
from omniserve.runner.cuda_graphs.graph_runner import CudaGraphRunner
from omniserve.runner.cuda_graphs.shapes import StepShape
from tests.parity.test_engine import model_and_reference

ROWS = (0, 1, 2, 4, 8, 16, 24, 32, 48, 64)


class Device:
    """A clock and a memory meter that captures move on."""

    def __init__(self) -> None:
        self.now_s, self.used_bytes = 100.0, 7 * GIB

    def takes(self, seconds: float, num_bytes: int) -> None:
        self.now_s += seconds
        self.used_bytes += num_bytes


class MeteredCapture:
    """Captures nothing, and takes a second and 10 MB for a whole step, 5 s and 50 MB for one in pieces."""

    def __init__(self, device: Device, first_s: float = 0.0) -> None:
        self._device = device
        self._first_s = first_s

    def full(self, run: Any) -> Any:
        self._device.takes(1.0 + self._first_s, 10_000_000)
        self._first_s = 0.0  # kernels are compiled once
        return run

    def piecewise(self, run: Any) -> Any:
        self._device.takes(5.0, 50_000_000)
        return run


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[CudaGraphRunner, Device]]:
    """Return what captures the steps of an engine with these settings, as far as they go."""

    def captured(first_s: float = 0.0, **settings: Any) -> tuple[CudaGraphRunner, Device]:
        device = Device()
        monkeypatch.setattr(graph_runner, "Budget", partial(Budget, clock=lambda: device.now_s))
        monkeypatch.setattr(graph_runner, "_used_bytes", lambda _: device.used_bytes)
        monkeypatch.setattr(graph_runner, "Capture", lambda: MeteredCapture(device, first_s))
        model, _ = model_and_reference("llama", "cpu")
        config = EngineConfig(
            block_size=8, device_kv_bytes=1 << 20, host_kv_bytes=1 << 20, max_model_len=64, max_num_batched_tokens=64,
            max_num_seqs=32, host_threads=1,
            execution=ExecutionConfig(compile=False, step_graphs="on", **settings),
        )  # fmt: skip
        with Engine(model, config) as engine:
            assert engine.runner.graphs is not None
            return engine.runner.graphs, device

    return captured


def decodes(num: int) -> StepPlan:
    return StepPlan(step_id=0, chunks=tuple(chunk(str(i), 1) for i in range(num)))


def chunk(request_id: str, num_tokens: int) -> DeviceChunk:
    tokens = (1,) * num_tokens
    return DeviceChunk(request_id=request_id, token_ids=tokens, start=0, block_ids=tuple(range(8)), samples=True)


def test_all_is_captured_where_there_is_room(captured: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        graphs, _ = captured(step_graphs_limit_s=1000.0)
    assert set(graphs._decodes) == {StepShape(n, p) for n in ROWS for p in (0, 4, 16, 32) if n + p}
    assert set(graphs._chunks) == {StepShape(n, p) for n in (16, 64) for p in (0, 4, 16, 32)}
    assert "captured 47 of 47 step shapes in 79.0 s and 0.74 GiB" in caplog.text
    assert "are not captured" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "limit_s", "limit_bytes"),
    [
        ({"step_graphs_limit_s": 30.0}, 30.0, 2 * GIB),
        ({"step_graphs_limit_s": 1e6, "step_graphs_gib": 0.275}, 1e6, int(0.275 * GIB)),
    ],
    ids=["seconds", "bytes"],
)
def test_budget_is_kept_and_spent_on_the_most_useful_steps(
    settings: dict[str, Any], limit_s: float, limit_bytes: int, captured: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        graphs, device = captured(**settings)
    seconds, num_bytes = device.now_s - 100.0, device.used_bytes - 7 * GIB
    assert seconds < limit_s and num_bytes < limit_bytes
    # The largest of each take 6 s, other decodes without and with all seats 18 s, and the next chunks 5 s.
    assert set(graphs._decodes) == {StepShape(n, p) for n in ROWS for p in (0, 32) if n + p}
    assert set(graphs._chunks) == {StepShape(64, 32), StepShape(16, 0)}
    assert "captured 21 of 47 step shapes in 29.0 s and 0.27 GiB" in caplog.text
    assert "26 step shapes are not captured" in caplog.text


def test_steps_that_fit_nothing_recorded_run_eagerly(captured: Any) -> None:
    graphs, _ = captured(step_graphs_limit_s=8.5)
    assert set(graphs._decodes) == {StepShape(64, 32), StepShape(0, 32), StepShape(1, 0)}
    # The first small one of a kind is tried, whatever it takes.
    assert set(graphs._chunks) == {StepShape(64, 32), StepShape(16, 0)}
    assert graphs.shape_for(decodes(1)) == StepShape(1, 0)
    assert graphs.shape_for(decodes(2)) == StepShape(64, 32), "the smallest of those that hold it"
    assert graphs.shape_for(decodes(64)) == StepShape(64, 32)
    assert graphs.shape_for(decodes(65)) is None
    assert graphs.shape_for(StepPlan(step_id=0, chunks=(chunk("a", 3),))) == StepShape(16, 0)
    assert graphs.shape_for(StepPlan(step_id=0, chunks=(chunk("a", 17),))) == StepShape(64, 32)


def test_small_steps_are_not_left_out_because_the_first_one_compiled_kernels(captured: Any) -> None:
    graphs, device = captured(first_s=31.0, step_graphs_limit_s=60.0)
    assert {StepShape(n, p) for n in ROWS for p in (0, 32) if n + p} <= set(graphs._decodes)
    assert device.now_s - 100.0 <= 60.0


@pytest.mark.parametrize("settings", [{"step_graphs_limit_s": 0.0}, {"step_graphs_gib": 0.0}], ids=str)
def test_nothing_is_captured_without_a_budget(settings: dict[str, Any], captured: Any) -> None:
    graphs, device = captured(**settings)
    assert not graphs._decodes and not graphs._chunks and device.now_s == 100.0
    assert graphs.shape_for(decodes(1)) is None
    assert graphs.shape_for(StepPlan(step_id=0, chunks=(chunk("a", 3),))) is None


def test_memory_is_what_the_gpu_has_less_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's memory counts, not torch's alone: graphs also take memory of the driver."""
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (30, 80))
    assert graph_runner._used_bytes(torch.device("cuda", 1)) == 50 and asked == [torch.device("cuda", 1)]
    assert graph_runner._used_bytes(torch.device("cpu")) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step_graphs_limit_s": -1.0}, "step_graphs_limit_s must be a number >= 0"),
        ({"step_graphs_limit_s": float("nan")}, "step_graphs_limit_s must be a number >= 0"),
        ({"step_graphs_gib": -1.0}, "step_graphs_gib must be a number >= 0"),
    ],
    ids=str,
)
def test_budgets_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExecutionConfig(**settings)

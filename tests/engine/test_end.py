"""Tests of an engine's end, and of an engine that goes on when its host tier hangs."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from omniserve import Engine, EngineConfig, EngineStopped, ExecutionConfig, HostsConfig, Stalled
from omniserve.core.config import DiskKVConfig
from omniserve.engine import parts as parts_module
from omniserve.engine.step_log import StepLog
from omniserve.host import tier as tier_module
from omniserve.host.disk import DiskTier
from omniserve.host.tier import HostTier
from omniserve.remote.network_hosts import NetworkHosts
from tests.engine.conftest import BLOCK
from tests.engine.test_engine import hf_tokens, request
from tests.host.helpers import host_threads
from tests.parity.engine_histories import made_up_profile

MakeEngine = Callable[..., Engine]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls that a host tier makes to the device and to its threads as it ends, in order."""
    calls: list[str] = []
    host = tier_module._host

    def destroy(handle: int, timeout_s: float) -> int:
        calls.append("destroy")
        return host.destroy(handle, timeout_s)

    def close(handle: int, timeout_s: float) -> int:
        calls.append("close")
        return host.close(handle, timeout_s)

    names = ("create", "cancel", "stats", "inject", "start_move")
    fake = SimpleNamespace(close=close, destroy=destroy, **{name: getattr(host, name) for name in names})
    monkeypatch.setattr(tier_module, "_host", fake)
    monkeypatch.setattr(tier_module, "drain", lambda device: calls.append(f"drain {device}"))
    return calls


def engine_in_a_step(model: PreTrainedModel) -> Engine:
    """Return one with a step that was launched and not collected."""
    config = EngineConfig(
        block_size=BLOCK,
        device_kv_bytes=1 << 20,
        host_kv_bytes=1 << 20,
        execution=ExecutionConfig(compile=False, async_steps=True),
    )
    engine = Engine(model, config)
    engine.add(request(5, 20))
    engine.step()
    assert engine._stepper.is_in_flight
    return engine


@pytest.mark.parametrize("ends", ["drop", "cycle", "close"])
def test_an_engine_that_ends_in_a_step_waits_for_the_device_first(
    model: PreTrainedModel, calls: list[str], ends: str
) -> None:
    gc.collect()
    calls.clear()  # of tiers that other tests left to the collector
    before = set(host_threads("omni-"))
    engine = engine_in_a_step(model)
    if ends == "cycle":
        engine.itself = engine  # type: ignore[attr-defined]
    if ends == "close":
        engine.close()
        engine.close()
        assert calls == ["drain cpu", "close"]
        calls.clear()
    gc.disable()
    try:
        del engine
        assert ends != "cycle" or not calls
    finally:
        gc.enable()
    gc.collect()
    assert calls == ["drain cpu", "destroy"]
    assert set(host_threads("omni-")) <= before


def test_the_devices_failure_ends_the_threads_too(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(device: torch.device) -> None:
        raise Stalled("the device hangs")

    engine = make_engine()
    monkeypatch.setattr(tier_module, "drain", hangs)
    with pytest.raises(Stalled, match="the device hangs"):
        engine.close()
    assert engine.host_tier is not None and not engine.host_tier.healthy
    with pytest.raises(EngineStopped):
        engine.step()


def test_a_forked_child_cannot_use_its_parents_engine_nor_end_it(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    parent = os.getpid()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: parent + 1)
        for call in (engine.step, lambda: engine.add(request())):
            with pytest.raises(EngineStopped, match=f"that of process {parent}, which was forked: make another one"):
                call()
        engine.close()
    (completion,) = engine.generate([request(5, 4)])
    assert list(completion.token_ids) == hf_tokens(5, 4)


def step_until(engine: Engine, got: dict[str, list[int]], over: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not over():
        assert time.monotonic() < deadline_s, "nothing gets on"
        for output in engine.step():
            got[output.request_id] += output.new_token_ids
        engine.scheduler.check_integrity()
        if engine.last_plan_was_empty:
            engine.wait(0.01)


def test_a_host_tier_that_hangs_costs_ls_no_token_and_those_that_wait_for_it_alone_are_told(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(device_blocks=16, host_blocks=200)
    tier = engine.host_tier
    assert tier is not None
    got = {engine.add(request(12 + i, 30, "BE")): list[int]() for i in range(8)}
    step_until(engine, got, lambda: engine.stats().scheduler.host_output_tokens >= 4)
    tier.inject(delay_s=3600)
    step_until(engine, got, lambda: tier.attends)  # from now on it does so for an hour
    tier._progress.patience_s = 0.2
    ls = engine.add(request(6, 40))
    got[ls] = []
    step_until(engine, got, lambda: len(got[ls]) == 40)
    assert got[ls] == hf_tokens(6, 40)
    with pytest.raises(Stalled, match=r"[0-9]+ requests wait for the host tier, which is stalled"):
        step_until(engine, got, lambda: not engine.has_unfinished)
    assert not engine.stats().host.healthy
    ls = engine.add(request(7, 10))
    got[ls] = []
    step_until(engine, got, lambda: len(got[ls]) == 10)
    assert got[ls] == hf_tokens(7, 10), "it still goes on"


def test_a_second_sub_batch_that_hangs_is_given_up_and_the_step_goes_on(model: PreTrainedModel) -> None:
    block_bytes = model.omniserve.spec.kv_block_bytes(BLOCK)
    config = EngineConfig(
        block_size=BLOCK, device_kv_bytes=16 * block_bytes, host_kv_bytes=200 * block_bytes,
        execution=ExecutionConfig(compile=False), scheduler="neo",
    )  # fmt: skip
    with Engine(model, config, profile=made_up_profile(model, config)) as engine:
        tier = engine.host_tier
        assert tier is not None
        pipelined = 0
        launch = engine.runner.launch

        def note(plan):  # type: ignore[no-untyped-def]
            nonlocal pipelined
            pipelined += len(plan.pipelined)
            if pipelined > 20 and plan.pipelined:
                tier.inject(delay_s=3600)
            return launch(plan)

        engine.runner.launch = note  # type: ignore[method-assign]
        tier._progress.patience_s = 0.4
        prompts = {engine.add(request(12 + i, 40, "BE")): 12 + i for i in range(8)}
        got = {request_id: list[int]() for request_id in prompts}
        ls = engine.add(request(6, 60))
        got[ls] = []
        step_until(engine, got, lambda: len(got[ls]) == 60)
        assert got[ls] == hf_tokens(6, 60)
        assert pipelined > 20 and tier.is_stalled and not tier.healthy
        step_until(engine, got, lambda: not engine.has_unfinished)
        for request_id, prompt in prompts.items():
            assert got[request_id] == hf_tokens(prompt, 40), "recomputed on the device"


_MADE = (
    ("make_host_tier", HostTier), ("open_disk", DiskTier), ("make_kv", None), ("make_scheduler", None),
    ("make_log", StepLog), ("connect_hosts", NetworkHosts), ("connect_prefill_engines", None), ("make_runner", None),
)  # fmt: skip
"""What makes each part of an engine, in their order, and what then has to be closed."""


@pytest.mark.parametrize("failing", [name for name, _ in _MADE])
def test_an_engine_that_cannot_be_made_leaves_nothing_open(
    failing: str, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed: list[type] = []

    def note(part: type[Any]) -> None:
        close = part.close
        monkeypatch.setattr(part, "close", lambda self: (closed.append(part), close(self)))

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    def keepers() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("host-keeper")]

    for _, part in _MADE:
        if part is not None:
            note(part)
    monkeypatch.setattr(parts_module, failing, fail)
    (tmp_path / "secret").write_text("a secret of many characters")
    config = EngineConfig(
        block_size=BLOCK, device_kv_bytes=1 << 20, host_kv_bytes=1 << 20, execution=ExecutionConfig(compile=False),
        hosts=HostsConfig(cpu_hosts=("127.0.0.1:1",), cpu_host_secret_file=str(tmp_path / "secret")),
        disk_kv=DiskKVConfig(gib=0.01, dir=str(tmp_path / "kv")), trace_steps=str(tmp_path / "trace"),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="injected"):
        Engine(model, config)
    names = [name for name, _ in _MADE]
    made = [part for name, part in _MADE[: names.index(failing)] if part is not None]
    assert closed == made[::-1]
    assert not host_threads("omni-") and not keepers()

"""The end of a tier, however it comes: first the device is waited for, then the threads end, then the memory goes."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omniserve import Stalled
from omniserve.host import progress
from omniserve.host import tier as tier_module
from omniserve.host.memory import allocate_pool
from omniserve.host.tier import HostTier
from tests.host.helpers import Driver, collect, host_threads, make_spec, make_tier

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda")


@pytest.fixture(scope="module", autouse=True)
def what_is_there_before() -> Iterator[None]:
    """What other tests have left is collected, and then left out of collections, which would take a second each."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls that a GPU's tier makes to the GPU and to its threads as it ends, in order; its pool is page-locked."""
    gc.collect()  # tiers of other tests
    calls: list[str] = []

    def note(name: str, call: Callable[..., Any] = lambda *_: 0) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            calls.append(name)
            return call(*args)

        return noted

    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", note("drain"))
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=note("unregister"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    host = tier_module._host
    noted_host = SimpleNamespace(
        create=host.create, cancel=host.cancel, stats=host.stats, inject=host.inject, start_move=host.start_move,
        close=note("close", host.close), destroy=note("destroy", host.destroy),
    )  # fmt: skip
    monkeypatch.setattr(tier_module, "_host", noted_host)

    def locked_pool(*args: Any, pin_memory: bool, **kwargs: Any) -> torch.Tensor:
        return allocate_pool(*args, pin_memory=True, **kwargs)

    monkeypatch.setattr(tier_module, "allocate_pool", locked_pool)
    return calls


def gpu_tier(**settings: Any) -> HostTier:
    return make_tier(make_spec(), device=CUDA, num_blocks=8, **settings)


def test_a_dropped_tier_waits_for_the_device_first(calls: list[str]) -> None:
    tier = gpu_tier()
    assert len(host_threads()) == 2 and not calls
    del tier
    assert calls == ["drain", "destroy", "unregister"] and not host_threads()


def test_a_tier_in_a_cycle_does_too(calls: list[str]) -> None:
    tier = gpu_tier()
    tier.itself = tier  # type: ignore[attr-defined]
    del tier
    gc.collect()
    assert calls == ["drain", "destroy", "unregister"] and not host_threads()


def test_closing_does_too_and_once_more_does_no_harm(calls: list[str]) -> None:
    tier = gpu_tier()
    tier.close()
    assert calls == ["drain", "close"] and not host_threads()
    tier.close()
    calls.clear()
    del tier
    assert calls == ["drain", "destroy", "unregister"]


def test_a_view_of_the_pool_keeps_its_memory(calls: list[str]) -> None:
    tier = gpu_tier()
    view = tier.pool_LBK2SH[0]
    del tier
    assert calls == ["drain", "destroy"]
    del view
    assert calls[2:] == ["unregister"]


def still_there(handle: int) -> bool:
    try:
        return torch.ops.omniserve_host.stats(handle)[2] == 0  # and no thread lives
    except ValueError:
        return False


def test_what_a_hanging_device_may_still_use_is_kept(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def never(device: torch.device) -> None:
        raise Stalled("it hangs")

    monkeypatch.setattr(tier_module, "drain", never)
    handles = []
    for closes in (True, False):
        tier = gpu_tier()
        handles.append(tier._handle)
        if closes:
            with pytest.raises(Stalled, match="it hangs"):
                tier.close()
        del tier
        assert calls == ["close"] and not host_threads(), "the memory was not unlocked"
        assert still_there(handles[-1])
        calls.clear()
    assert [record.getMessage() for record in caplog.records] == ["the host tier's memory stays: it hangs"]
    for handle in handles:
        torch.ops.omniserve_host.destroy(handle, 60)


def test_a_device_that_has_failed_uses_nothing_any_more(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failed(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", failed)
    tier = gpu_tier()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        tier.close()
    assert calls == ["close"] and not host_threads()
    del tier
    assert calls == ["close", "destroy", "unregister"]
    assert "after a failure of the device: CUDA error" in caplog.text


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run what makes a tier of a faked GPU, and then `code`; what is done at its end is written to stdout."""
    start = """
import atexit, contextlib, gc, multiprocessing, os, sys, torch
from omniserve.host import memory, tier as tier_module
from tests.host.helpers import Driver, collect, host_threads, make_spec, make_tier
parent = os.getpid()
def say(text):
    os.write(1, (text if os.getpid() == parent else f"{text} in a child").encode() + b"\\n")
class Host:
    def __getattr__(self, name):
        return getattr(torch.ops.omniserve_host, name)
    def destroy(self, handle, timeout_s):
        say("destroy")
        return torch.ops.omniserve_host.destroy(handle, timeout_s)
class Runtime:
    def cudaHostUnregister(self, address):
        say("unregister")
        return 0
tier_module._host = Host()
tier_module.drain = lambda device: say("drain")
torch.cuda.cudart, torch.cuda.check_error = Runtime, lambda error: None
torch.cuda.device = lambda device: contextlib.nullcontext()
gc.freeze()  # as in a server: what was imported takes long to collect, in each process again
atexit.register(gc.unfreeze)
tier = make_tier(make_spec(), mailbox=True, num_blocks=8)
# Views keep the memory whose pages the pool is.
region = memory._Region(-1, 4096)
region.locked_at, region.process_id = 1, os.getpid()
driver = Driver(tier, make_spec())
driver.start(0, 20)
"""
    return subprocess.run(
        [sys.executable, "-c", start + code], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )


def test_at_exit_the_device_is_waited_for_too_in_a_cycle_or_with_a_task_in_hand() -> None:
    done = run_python("""
tier.inject(delay_s=3600)
driver.submit(0, [0])
tier.itself = tier
""")
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["drain", "destroy"], "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_ends_without_touching_its_parents_tier() -> None:
    """Regression: at its end it joined threads that it did not have."""
    done = run_python("""
def in_child(end):
    child = os.fork()
    if child == 0:
        end()
        sys.exit(0)  # as any process ends
    say(f"{end.__name__}: {os.waitpid(child, 0)[1]}")
def just_exits():
    pass
def closes():
    tier.close()
def drops():
    global tier, driver, region
    del tier, driver, region
    gc.collect()
for end in (just_exits, closes, drops):
    in_child(end)
process = multiprocessing.get_context("fork").Process(target=drops)
process.start()
process.join()
say(f"process: {process.exitcode}")
assert len(host_threads()) == 2
driver.submit(0, [0])
driver.check(collect(tier, 1)[0])
del tier, driver
del region
""")
    ended = ["just_exits: 0", "closes: 0", "drops: 0", "process: 0", "drain", "destroy", "unregister"]
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, ended, "")


# -- threads that hang -------------------------------------------------------------------------------------------------


def hanging_tier() -> HostTier:
    """Return a tier with a thread that sleeps for a while whatever comes: it looks for a flag that does not come."""
    tier = make_tier(make_spec(), num_blocks=8, mailbox=True, mailbox_spin_s=0.0, mailbox_sleep_s=0.7)
    driver = Driver(tier, make_spec())
    for slot in range(2):
        driver.start(slot, 5)
    assert tier.flags_S is not None and tier.mailbox_SW is not None
    tier.mailbox_SW[0] = 1.0
    tier.flags_S[0] = 1
    tier.expect(1, torch.tensor([0, 0]), torch.tensor([0, 1]))
    collect(tier, 1)  # it has seen the first flag,
    time.sleep(0.05)  # and missed the other
    return tier


def test_a_thread_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "_CLOSE_S", 0.05)
    tier = hanging_tier()
    with pytest.raises(Stalled, match=r"1 threads of the host tier did not end within 0\.05 s"):
        tier.close()
    assert [task.joinpath("comm").read_text().strip() for task in host_threads("omni-")] == ["omni-mailbox"]
    monkeypatch.setattr(tier_module, "_CLOSE_S", 60.0)
    tier.close()  # waits for it again
    assert not host_threads("omni-")
    (event,) = collect(tier, 1)
    assert "closed" in event.message


def test_a_dropped_tier_with_such_a_thread_keeps_its_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tier_module, "_CLOSE_S", 0.05)
    tier = hanging_tier()
    handle = tier._handle
    del tier
    assert "memory stays: 1 of its threads did not end within 0.05 s" in caplog.text
    assert still_there(handle)
    assert torch.ops.omniserve_host.destroy(handle, 60) == 0 and not still_there(handle)


class Clock:
    """Time in the tier's eyes."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def look(tier: HostTier, clock: Clock, *, times: int, every_s: float = 1.0) -> int:
    """Poll until the tier is stalled or has been polled so often; return how often."""
    for number in range(times):
        if tier.is_stalled:
            return number
        clock.now_s += every_s
        assert tier.poll() == []
    return times


def test_a_tier_that_does_not_get_on_is_stalled(
    open_driver: Callable[..., Driver], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    driver = open_driver(num_slots=2)
    tier = driver.tier
    driver.start(0, 20)
    assert look(tier, clock, times=30) == 30 and tier.healthy, "it has nothing to do"
    tier.inject(delay_s=3600)
    driver.submit(0, [0])
    assert look(tier, clock, times=3, every_s=3600) == 3, "its caller was away, not the tier"
    assert 5 <= look(tier, clock, times=30) <= 10, "half of its patience, or all of it"
    assert tier.is_stalled and not tier.healthy
    look(tier, clock, times=30)
    (line,) = caplog.records
    assert line.levelno == logging.ERROR
    assert "with 1 tasks and 0 moves in hand, its 2 threads finished nothing for 10 s" in line.getMessage()
    tier.inject()
    driver.check(collect(tier, 1)[0])
    assert not tier.healthy, "whoever waited for it has given up"


def test_a_tier_that_gets_on_however_slowly_is_not_stalled(open_driver: Callable[..., Driver], clock: Clock) -> None:
    driver = open_driver(num_slots=2, num_threads=1)
    tier = driver.tier
    for slot in range(2):
        driver.start(slot, 20)
    clock.now_s = 0.0
    for _ in range(5):  # one task hangs, and the thread does others meanwhile
        tier.inject(delay_s=3600)
        driver.submit(0, [0])
        assert look(tier, clock, times=8) == 8
        tier.inject()
        driver.check(collect(tier, 1)[0])
        driver.begin(0)
        driver.history[0] = [(k[:20], v[:20]) for k, v in driver.history[0]]
    assert tier.healthy


def test_rows_that_are_never_sent_stall_the_tier(open_driver: Callable[..., Driver], clock: Clock) -> None:
    driver = open_driver(num_slots=1, mailbox=True)
    driver.start(0, 20)
    driver.tier.expect(1, torch.tensor([0]), torch.tensor([0]))
    driver.tier.cancel(0)
    look(driver.tier, clock, times=30)
    assert driver.tier.is_stalled

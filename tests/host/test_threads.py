"""Life and death of the threads: none at import, none busy when idle, none left after close. And the sanitizers."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.events import ATTENTION_FAILED, kind_of
from tests.host.helpers import Driver, collect, cpu_ticks, host_threads, make_spec, make_tier, wait_until

CSRC = Path(__file__).parents[2] / "omniserve" / "ops" / "csrc"


def test_importing_starts_no_thread_and_exit_needs_no_close() -> None:
    code = """
import torch
from tests.host.helpers import Driver, host_threads, make_spec, make_tier
assert not host_threads()
driver = Driver(make_tier(make_spec(), mailbox=True), make_spec())
assert len(host_threads()) == 2
driver.start(0, 100)
driver.start(1, 100)
driver.tier.expect(1, torch.tensor([0]), torch.tensor([1]))
driver.tier.inject(delay_s=3600)
driver.submit(0, [0])
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parents[2])


def test_idle_threads_use_no_cpu(open_driver: Callable[..., Driver]) -> None:
    driver = open_driver(num_threads=3)
    driver.start(0, 500)
    driver.submit(0, [0])
    driver.check(collect(driver.tier, 1)[0])
    threads = host_threads()
    assert len(threads) == 3
    before = sum(map(cpu_ticks, threads))
    time.sleep(0.5)  # 50 ticks for a thread that spins
    assert sum(map(cpu_ticks, threads)) - before < 5


def test_waiting_does_not_hold_the_gil_and_ends_with_an_event(open_driver: Callable[..., Driver]) -> None:
    driver = open_driver()
    driver.start(0, 5)
    order = []

    def wait() -> None:
        driver.tier.wait(30)
        order.append("woke")

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.05)  # into its wait
    order.append("submitted")
    driver.submit(0, [0])
    waiter.join()
    assert order == ["submitted", "woke"]
    driver.check(collect(driver.tier, 1)[0])


def test_close_with_queued_work_is_prompt_and_reports_it(open_driver: Callable[..., Driver]) -> None:
    driver = open_driver(num_slots=6)
    tier = driver.tier
    for slot in range(6):
        driver.start(slot, 300)
    tier.inject(delay_s=3600)
    driver.submit(0, range(6))
    assert tier.busy and tier.attends
    tier.close()
    tier.close()
    assert not host_threads() and not tier.healthy and not tier.busy
    events = tier.poll()
    assert sorted(event.slot for event in events) == list(range(6))
    assert ATTENTION_FAILED in {kind_of(event) for event in events}
    assert tier.poll() == []
    with pytest.raises(ValueError, match="the host tier is closed"):
        driver.submit(1, [0])


def test_a_dropped_tier_takes_its_threads_along() -> None:
    gc.collect()
    assert not host_threads()
    tier = make_tier(make_spec(), num_threads=2)
    assert len(host_threads()) == 2
    del tier
    assert not host_threads(), "without waiting for the garbage collector"


def test_threads_are_pinned_to_the_cores_asked_for() -> None:
    core = max(os.sched_getaffinity(0))
    tier = make_tier(make_spec(), num_threads=2, cores=(core,))
    assert [os.sched_getaffinity(int(task.name)) for task in host_threads()] == [{core}, {core}]
    tier.close()
    for nowhere in (1023, -1, 100_000):
        with pytest.raises(ValueError, match=f"cannot be pinned to core {nowhere}"):
            make_tier(make_spec(), cores=(core, nowhere))
    wait_until(lambda: not host_threads())


def test_bad_sizes_are_refused() -> None:
    spec = make_spec()
    with pytest.raises(ValueError, match="num_slots must be >= 1, got 0"):
        make_tier(spec, num_slots=0)
    with pytest.raises(ValueError, match="num_threads must be >= 1, got 0"):
        make_tier(spec, num_threads=0)
    with pytest.raises(ValueError, match="less than one block of 16 tokens: give at least"):
        make_tier(spec, num_blocks=0)
    with pytest.raises(ValueError, match="has 2 bytes, but the model's has 4"):
        make_tier(spec, dtype=torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_random_histories_under_a_sanitizer(tmp_path: Path, sanitizer: str) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    assert compiler is not None, "the project needs a C++ compiler: install g++ or set CXX"
    program = tmp_path / "stress"
    parts = {*CSRC.glob("host_*.cpp")} - {*CSRC.glob("host_*_ops.cpp")}  # torch's side
    sources = [str(path) for path in (Path(__file__).with_name("stress.cpp"), *sorted(parts))]
    flags = ["-std=c++17", "-O0", "-g1", f"-fsanitize={sanitizer}", "-pthread", f"-I{CSRC}"]
    subprocess.run([compiler, *flags, *sources, "-o", str(program)], check=True)
    for seed in ("1", "2"):
        done = subprocess.run([str(program), seed, "200"], capture_output=True, text=True, timeout=300)
        if "unexpected memory mapping" in done.stderr:
            pytest.skip("this kernel's address randomisation is more than the sanitizer can take")
        assert done.returncode == 0, done.stdout + done.stderr

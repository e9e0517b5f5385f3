"""Collectives through memory that processes share."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from omniserve.ops import shared_memory
from omniserve.ops.shared_memory import SharedMemoryGroup, make_file

_SHAPES = [(1,), (3, 5), (64, 96), (700, 1024)]


def _in_thread(work: Callable[..., Any], *args: Any) -> None:
    """Run in a thread that has no OpenMP threads of the parent's to wait for."""
    thread = threading.Thread(target=work, args=args)
    thread.start()
    thread.join()
    os._exit(0)


def _fork(work: Callable[..., Any], *args: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=_in_thread, args=(work, *args))
    process.start()
    return process


def _values(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in _SHAPES]


def _take_part(path: str, rank: int, num_ranks: int, dtype: torch.dtype, pause_s: float) -> list[Any]:
    torch.set_num_threads(1)
    group = SharedMemoryGroup(path, rank, num_ranks, 30.0)
    results: list[Any] = []
    for index, x in enumerate(_values(rank, dtype)):
        if index % 2 == rank % 2:
            time.sleep(pause_s)
        with torch.inference_mode(index % 3 == 0):
            results.append((group.all_reduce(x), group.all_gather(x)))
        group.broadcast(x)
        results.append(x)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sums_and_parts_of_all_ranks(num_ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_SLOT_BYTES", 1 << 16)  # the largest go in several turns
    path = make_file(num_ranks)
    others = [_fork(_take_part, path, rank, num_ranks, dtype, 0.01) for rank in range(1, num_ranks)]
    got = _take_part(path, 0, num_ranks, dtype, 0.02)
    for process in others:
        process.join()
    os.unlink(path)
    values = [_values(rank, dtype) for rank in range(num_ranks)]
    for index in range(len(_SHAPES)):
        parts = [each[index] for each in values]
        (total, gathered), shared = got[2 * index], got[2 * index + 1]
        want = torch.stack(parts).sum(0) if num_ranks == 2 else torch.stack(parts).float().sum(0).to(dtype)
        assert torch.equal(total, want)
        assert torch.equal(gathered, torch.stack(parts))
        assert torch.equal(shared, parts[0])


def _come_once(path: str) -> None:
    SharedMemoryGroup(path, 1, 2, 30.0)
    time.sleep(60.0)


@pytest.mark.parametrize(("fault", "told"), [(signal.SIGKILL, "rank 1 is gone"), (signal.SIGSTOP, "did not come")])
def test_a_rank_that_is_gone_or_late_is_told(fault: signal.Signals, told: str) -> None:
    path = make_file(2)
    other = _fork(_come_once, path)
    group = SharedMemoryGroup(path, 0, 2, 0.5)
    os.kill(other.pid, fault)
    with pytest.raises(RuntimeError, match=told):
        group.all_reduce(torch.ones(3))
    other.kill()
    other.join()
    os.unlink(path)

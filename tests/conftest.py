"""Options and fixtures of all tests."""

from __future__ import annotations

import argparse
import os
from typing import Any
from zlib import crc32

import pytest
import torch

from omniserve.host.cores import available_cores
from tests.durations import Durations, UnitScheduling, longest_first
from tests.real.checkpoint import FOLDER
from tests.stub_server import stub  # noqa: F401 (a fixture)
from tests.triton_interpreter import interpret_triton

if not torch.cuda.is_available():
    interpret_triton()

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):  # the cores are shared with them
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of processes of tests: one more than there are cores, as tests of servers wait for them."""
    return available_cores() + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> UnitScheduling | None:
    """Share tests out by file or function (``tests/durations.py``), where ``--dist loadgroup`` is given."""
    return UnitScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Durations(is_written=config.getoption("--write-durations")))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption(
        "--slow-part", type=_part, metavar="K/N", help="also run part K, from 0 to N-1, of the tests marked slow"
    )
    parser.addoption("--exhaustive", action="store_true", help="also run the tests marked exhaustive")
    parser.addoption("--write-durations", action="store_true", help="write tests/durations.json")
    parser.addoption("--real", action="store_true", help="get trained weights for the tests marked real, 270 MB")


def _part(text: str) -> tuple[int, int]:
    """Read ``K/N``."""
    part, _, num_parts = text.partition("/")
    if not (part.isdecimal() and num_parts.isdecimal() and int(part) < int(num_parts)):
        raise argparse.ArgumentTypeError(f"must be K/N with K from 0 to N-1, got {text!r}")
    return int(part), int(num_parts)


def _is_in(slow_part: tuple[int, int], item: pytest.Item) -> bool:
    part, num_parts = slow_part
    return crc32(item.nodeid.encode()) % num_parts == part


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what cannot run here: tests marked ``gpu`` without a GPU, tests of a mark without its option.

    Of the cases of one function that are skipped for one reason, the first is reported, and the others are deselected.
    """
    left_out = {}
    if not torch.cuda.is_available():
        left_out["gpu"] = "needs a CUDA device"
    if not config.getoption("--slow"):
        left_out["slow"] = "takes long: give --slow"
    if not config.getoption("--exhaustive"):
        left_out["exhaustive"] = "tries every case, which takes long: give --exhaustive"
    if not (config.getoption("--real") or FOLDER.exists()):
        left_out["real"] = "needs trained weights, a download of 270 MB: make real"
    slow_part = config.getoption("--slow-part")
    kept: list[pytest.Item] = []
    repeated: list[pytest.Item] = []
    reported = set()
    for item in items:
        for mark, reason in left_out.items():
            is_wanted = mark == "slow" and slow_part is not None and _is_in(slow_part, item)
            if item.get_closest_marker(mark) is not None and not is_wanted:
                item.add_marker(pytest.mark.skip(reason=reason))
        skips = [mark.kwargs["reason"] for mark in item.iter_markers("skip")]
        skips += [mark.kwargs["reason"] for mark in item.iter_markers("skipif") if mark.args[0]]
        if skips and (case := (item.nodeid.partition("[")[0], skips[0])) in reported:
            repeated.append(item)
        else:
            kept.append(item)
            if skips:
                reported.add(case)
    config.hook.pytest_deselected(items=repeated)
    items[:] = longest_first(kept) if "PYTEST_XDIST_WORKER" in os.environ else kept

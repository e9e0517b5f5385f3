"""A pytest plugin (``-p benchmarks.gpu.outcome_log``) that writes each outcome as it comes: a run that is cut has some.

The file is named by ``GPU_TEST_LOG``; a line is a JSON object with ``test`` and ``outcome``. With xdist only the
process that distributes the tests writes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

VARIABLE = "GPU_TEST_LOG"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the outcome of a test, or of its set-up or end if that is not what it should be."""
    if report.when == "call" or not report.passed:
        _note(report.nodeid, report.outcome)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note what could not even be collected."""
    if report.failed:
        _note(report.nodeid, report.outcome)


def _note(test: str, outcome: str) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(os.environ[VARIABLE]).open("a") as log:
            log.write(json.dumps({"test": test, "outcome": outcome}) + "\n")

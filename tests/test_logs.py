"""Logs of all programs: what libraries write comes as the program's own lines do, and known noise does not come."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys, warnings
from omniserve.core import logs
noisy = logging.getLogger("some.library")  # as torch and transformers do
noisy.addHandler(logging.StreamHandler())
noisy.propagate = False
{before}
noisy.warning("early")
{set_up}
noisy.warning("later")
logging.getLogger("torchao").warning("Failed to load /x/_C_mxfp8.so: no")
logging.getLogger("torchao").warning("of use")
logging.getLogger("torch.utils._pytree").warning("<enum 'A'> is an Enum subclass and is now natively supported by x")
warnings.warn("old", FutureWarning)
late = logging.getLogger("late.library")
late.addHandler(logging.StreamHandler())
late.propagate = False
late.warning("from a library")
print("printed")
print("half", end="", file=sys.stderr)
print(" a line\\nand another", file=sys.stderr)
logs.take_over_loggers()
late.warning("taken over")
"""


def run(set_up: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = PROGRAM.format(set_up=set_up, before=before)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)


@pytest.mark.parametrize("holds", [False, True])
def test_all_that_python_writes_is_json(holds: bool) -> None:
    done = run("logs.set_up_logs('info', 'json')", before="logs.hold_logs(); logs.take_over_loggers()" if holds else "")
    # What comes before the program says how is kept only if it is asked for.
    lines = [json.loads(line) for line in (done.stderr + done.stdout).splitlines() if holds or line != "early"]
    told = [(line["logger"], line["message"]) for line in lines if line["logger"] != "py.warnings"]
    assert told == [("some.library", "early")] * holds + [
        ("some.library", "later"),
        ("torchao", "of use"),
        ("stderr", "from a library"),
        ("stdout", "printed"),
        ("stderr", "half a line"),
        ("stderr", "and another"),
        ("late.library", "taken over"),
    ]
    assert any(line["logger"] == "py.warnings" and "FutureWarning: old" in line["message"] for line in lines)


def test_what_is_logged_before_the_settings_are_known_is_kept() -> None:
    code = """
import logging
from omniserve.core import logs
logs.hold_logs()
logging.getLogger("a").warning("early %d", 1)
logs.set_up_logs("warning", "json")
logging.getLogger("b").warning("later")
logging.getLogger("b").info("not asked for")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert [json.loads(line)["message"] for line in done.stderr.splitlines()] == ["early 1", "later"]


def test_for_people_each_line_has_level_and_logger() -> None:
    done = run("logs.set_up_logs('info', 'text')")
    assert "WARNING some.library: later\nWARNING torchao: of use\n" in done.stderr
    assert done.stdout == "printed\n"
    assert "Failed to load" not in done.stderr and "Enum subclass" not in done.stderr


def test_another_program_is_told_to_log_likewise() -> None:
    code = "from omniserve.core import logs; print(logs.log_flags()); logs.set_up_logs('error', 'text'); "
    code += "print(logs.log_flags())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n['--log-level', 'error', '--log-format', 'text']\n"


def test_a_log_that_cannot_be_written_ends_nothing() -> None:
    code = """
import logging, os, sys
from omniserve.core import logs
logs.set_up_logs("info", "json")
os.close(2)
logging.getLogger("a").info("lost")
print("lost, too", file=sys.stderr)
os.write(1, b"goes on")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "goes on")

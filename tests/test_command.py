"""The command ``omniserve``."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from omniserve import __version__
from omniserve.__main__ import PROGRAMS


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "omniserve", *arguments], capture_output=True, text=True)


def test_it_is_installed() -> None:
    scripts = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"omniserve": "omniserve.__main__:main"}


def test_it_lists_its_commands() -> None:
    done = run()
    assert done.returncode == 0 and all(f"  {name} " in done.stdout for name in PROGRAMS)
    assert run("--version").stdout == f"omniserve {__version__}\n"
    assert all(importlib.util.find_spec(f"omniserve.{module}") for module, _ in PROGRAMS.values())


@pytest.mark.parametrize("name", ["serve", "explain", "bench"])
def test_a_command_is_its_program(name: str) -> None:
    done = run(name, "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: omniserve {name} "), done.stderr
    done = run(name, "--no-such-flag")
    assert done.returncode == 2 and done.stderr.startswith(f"omniserve {name}: error: there is no flag --no-such-flag")


def test_another_is_told_with_the_nearest() -> None:
    done = run("server")
    assert done.returncode == 2
    assert done.stderr == "omniserve: error: there is no command 'server'; did you mean serve? (--help lists them)\n"

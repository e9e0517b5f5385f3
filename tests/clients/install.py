"""Environments of clients: each has one of its own, with pinned packages from PyPI or npm, kept from run to run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent
_CONSTRAINTS = _FOLDER.parents[1] / "constraints.txt"  # torch is what the server is tested with, and no larger build


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """A client of ``clients.toml``."""

    name: str
    packages: tuple[str, ...] = ()
    """Requirements for pip, with versions."""
    npm: tuple[str, ...] = ()
    """Packages for npm, with versions."""
    without_dependencies: bool = False
    """``packages`` are all that is installed: what they require beside that is not used here."""
    heavy: bool = False
    """The client installs much: ``python -m tests.clients`` tries it, pytest does not."""
    fails: str = ""
    """Why the client is expected not to work; empty: it is expected to."""
    left_out: str = ""
    """Why the client is not tried at all; empty: it is."""

    @property
    def scenario(self) -> Path:
        """The script that tries it."""
        return _FOLDER / "scenarios" / f"try_{self.name.replace('-', '_')}.py"

    @property
    def version(self) -> str:
        """The version of its first package."""
        first = next(iter((*self.packages, *self.npm)), "")
        return first.replace("==", "@").rpartition("@")[2]


class NotInstalled(Exception):
    """A client's packages could not be installed; the message is the installer's own."""


def read_clients(path: Path = _FOLDER / "clients.toml") -> dict[str, Client]:
    """Return the known clients by name."""
    clients = {}
    for name, table in tomllib.loads(path.read_text()).items():
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
        clients[name] = Client(name=name, **fields)
    return clients


def wait(process: subprocess.Popen, timeout_s: float) -> bool:
    """Wait for a process which leads a group of its own; if it takes longer, end the group and return False."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return True


def environment(client: Client, cache: Path, *, timeout_s: float) -> Path:
    """Return the folder of a client's virtual environment, which is made if the cache has none with these packages.

    Raises:
        NotInstalled: pip or npm failed, or all took longer than ``timeout_s``.
    """
    folder = cache.absolute() / client.name
    stamp = folder / "installed.json"
    wanted = json.dumps([sys.version, client.packages, client.npm, client.without_dependencies])
    if stamp.exists() and stamp.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + timeout_s
    # Without pip in it: this environment's installs into that one.
    _call(end_s, sys.executable, "-m", "venv", "--without-pip", str(folder))
    if client.packages:
        _call(
            end_s, sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-q",
            "--no-compile", "--disable-pip-version-check", *_torch_constraint(folder),
            *(["--no-deps"] if client.without_dependencies else []), *client.packages,
        )  # fmt: skip
    if client.npm:
        if shutil.which("npm") is None:
            raise NotInstalled("there is no npm here")
        _call(end_s, "npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *client.npm)
    stamp.write_text(wanted)
    return folder


def _torch_constraint(folder: Path) -> list[str]:
    path = folder / "constraints.txt"
    path.write_text("".join(f"{line}\n" for line in _CONSTRAINTS.read_text().split() if line.startswith("torch==")))
    return ["-c", str(path)]


def _call(end_s: float, *command: str) -> None:
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, process_group=0,
            env=os.environ | {"CI": "true"},
        )  # fmt: skip
        if not wait(process, max(end_s - time.monotonic(), 0.0)):
            raise NotInstalled(f"it was not installed in time ({' '.join(command[:3])} was stopped)")
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()] or ["it printed nothing"]
    if process.returncode:
        raise NotInstalled(next((line for line in lines if "error" in line.lower()), lines[-1]))

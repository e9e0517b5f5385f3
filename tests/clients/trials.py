"""Trials: a server with the scripted model, and what each client's script says about it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common.server import Server, ServerProcess
from tests.clients.install import Client, NotInstalled, environment, wait
from tests.clients.scenarios.scripts import SCRIPTS
from tests.scripted_model import write_scripted_model

MODEL = "scripted"
_MAX_LENGTH = 16384  # Codex's first prompt has some 9,000
# Not compiled, and no objective to speak of: a trial shows what the server understands, on a machine of any speed.
_FLAGS = (
    "--device cpu --dtype float32 --execution compile=false --ls-ttft-slo 1000 --ls-tpot-slo 1000 "
    "--limit profile_time_limit_s=2 --reasoning-parser qwen3"
).split()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a client's trial."""

    client: Client
    errors: Mapping[str, str | None] = field(default_factory=dict)
    """Results of checks by name: the client's own error, or None if the client got what it should."""
    not_installed: str = ""
    """The installer's error."""
    broken: str = ""
    """Why the script did not run to its end."""

    @property
    def works(self) -> bool:
        """The client was tried to the end, and all checks passed."""
        return bool(self.errors) and not self.broken and not any(self.errors.values())

    @property
    def is_as_expected(self) -> bool:
        """The client works, or could not be tried, or is known not to work, and does not."""
        return bool(self.not_installed or self.client.left_out) or self.works != bool(self.client.fails)

    def row(self) -> tuple[str, str, str, str]:
        """Return the cells of a table: client, version, what became of it, and why or what was checked."""
        name, version = self.client.name, self.client.version
        if self.client.left_out:
            return name, version, "not tried", self.client.left_out
        if self.not_installed:
            return name, version, "not installed", _shortened(self.not_installed)
        if self.works:
            return name, version, "works", ", ".join(check.replace("_", " ") for check in self.errors)
        told = [f"{check.replace('_', ' ')}: {_shortened(error)}" for check, error in self.errors.items() if error]
        known = [f"(known: {self.client.fails})"] if self.client.fails else []
        return name, version, "does not work", "; ".join([*told, *([self.broken] if self.broken else []), *known])


@contextmanager
def scripted_server(folder: Path) -> Iterator[tuple[Server, Path]]:
    """Serve the scripted model; yields the server and the model's folder. Its log is ``folder/server.log``."""
    model_folder = folder / "model"
    write_scripted_model(model_folder, SCRIPTS, max_length=_MAX_LENGTH)
    homes = {"XDG_CACHE_HOME": str(folder / "cache"), "XDG_DATA_HOME": str(folder / "data")}
    arguments = ["--model", str(model_folder), "--served-model-name", MODEL, *_FLAGS]
    with ServerProcess(arguments, folder / "server.log", environment=homes) as server:
        server.wait_until_healthy(600.0)
        yield server, model_folder


def try_client(
    client: Client, server: Server, model_folder: Path, *, cache: Path, folder: Path, install_timeout_s: float,
    trial_timeout_s: float,
) -> Outcome:  # fmt: skip
    """Install a client, run its script against a server and return what became of it.

    What the script and the client print is ``folder/NAME.log``. The client is on its own: it gets no API key of this
    environment, and fetches nothing from a hub.
    """
    if client.left_out:
        return Outcome(client)
    try:
        home = environment(client, cache, timeout_s=install_timeout_s)
    except NotInstalled as error:
        return Outcome(client, not_installed=str(error))
    work = folder / client.name
    work.mkdir(parents=True)
    report = work / "report.json"
    variables = {
        "TRIAL_URL": server.base_url,
        "TRIAL_MODEL": MODEL,
        "TRIAL_MODEL_FOLDER": str(model_folder),
        "TRIAL_REPORT": str(report),
        "TRIAL_ENVIRONMENT": str(home),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "huggingface"),
        "HOME": str(work),
        "PYTHONUNBUFFERED": "1",
        "OPENAI_API_KEY": "none",
    }
    proxies = ("http_proxy", "https_proxy", "all_proxy")
    kept = {name: value for name, value in os.environ.items() if name.lower() not in proxies}
    command = [str(home / "bin" / "python"), str(client.scenario)]
    log_path = folder / f"{client.name}.log"
    broken = ""
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=work, env=kept | variables, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            process_group=0,
        )  # fmt: skip
        if not wait(process, trial_timeout_s):
            broken = f"it took more than {trial_timeout_s:g} s"
    if not broken and process.returncode:
        last = log_path.read_text(errors="replace").strip().splitlines()[-1:]
        broken = f"it ended with status {process.returncode}: {''.join(last)}"
    return Outcome(client, errors=json.loads(report.read_text()) if report.exists() else {}, broken=broken)


def _shortened(text: str, length: int = 300) -> str:
    text = " ".join(text.split()).replace("|", "/")
    return text if len(text) <= length else f"{text[:length]}..."

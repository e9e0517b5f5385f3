"""Kill, stop and cut off engines again and again during batches and chats; see that no line is lost or done twice.

And that every call is answered: by its whole text, or by an error that says what happened. Two engines are the server's
own, two on "other machines", to which connections lead that can be cut.

``python -m tests.server.kill_engines --kills 50 --seed 1``; the test beside this does the same with few kills.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import psutil

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))

from batch_inputs import lines_of_batch, results, submit, wait_for
from proxy import Proxy, free_address
from running import RunningServer, wait_until
from tokenizers_for_tests import byte_level_tokenizer

from omniserve.server.engines.curve import make_keys

LINES_PER_BATCH = 150
NUM_BATCHES = 2
NUM_CHATS = 4
HEARTBEAT_S = 2
_HERE = Path(__file__).parent


@dataclass
class Report:
    """Counts of what happened."""

    kills: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    lines: int = 0
    calls: int = 0
    whole: int = 0
    """Calls that got their whole text."""
    told: Counter[str] = field(default_factory=Counter)
    """Errors that others got."""
    restarts: float = 0

    def __str__(self) -> str:
        return (
            f"{self.kills.total()} kills {dict(self.kills)}: {self.batches} batches of {self.lines} lines, 0 lost, 0 "
            f"doubled; {self.calls} calls: {self.whole} whole, {self.told.total()} told of it {dict(self.told)}, 0 "
            f"unanswered; {self.restarts:g} times an engine was ready again"
        )


class RemoteEngine:
    """``omniserve engine`` in a process, behind a connection that can be cut."""

    def __init__(self, keys: Path) -> None:
        self._keys, self._inside, self.address = keys, free_address(), free_address()
        self.proxy = Proxy(self.address, self._inside)
        self.start()

    def start(self) -> None:
        command = [sys.executable, str(_HERE / "engine_fake.py"), "--listen", self._inside, "--keys", str(self._keys)]
        command += ["--heartbeat", str(HEARTBEAT_S), "--restarts", "1000", "--no-faults"]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=_environment())

    def close(self) -> None:
        self.proxy.close()
        self.process.kill()
        self.process.wait()


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _engines_of(pid: int) -> list[psutil.Process]:
    """Return the engine processes that a process has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(pid).children(recursive=True)
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    return []


class Torture:
    """A server, its engines, and those that use it.

    Args:
        folder: Holds everything; empty.
        rng: Decides when what happens.
    """

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._folder, self._rng, self.report = folder, rng, Report()
        self._tokenizer = byte_level_tokenizer()
        self._tokenizer.save_pretrained(folder / "tokenizer")
        make_keys(folder / "keys")
        self._remote = [RemoteEngine(folder / "keys") for _ in range(2)]
        file = folder / "engines.json"
        file.write_text(json.dumps({"keys": "keys", "engines": [each.address for each in self._remote]}))
        command = [sys.executable, str(_HERE / "serve_fake.py"), "--tokenizer", str(folder / "tokenizer")]
        command += ["--data-dir", str(folder / "data"), "--no-faults", "--replicas", "2", "--engines", str(file)]
        for limit in (f"engine_heartbeat_s={HEARTBEAT_S}", "engine_restarts=1000", "batch_concurrency=16"):
            command += ["--limit", limit]
        pauses = {"omniserve.server.engines.supervisor._LONGEST_PAUSE_S": 0.5}
        self._server = RunningServer(command, FAKE_CONSTANTS=json.dumps(pauses)).wait_until_ready()
        self._wait_until_all_are_up()
        self._over = threading.Event()
        self._wrong: list[str] = []
        self._lock = threading.Lock()
        self._accepted: dict[str, int] = {}

    def run(self, num_kills: int) -> None:
        """Kill; then finish everything and check it."""
        users = [threading.Thread(target=self._chat, args=[i], daemon=True) for i in range(NUM_CHATS)]
        users.append(threading.Thread(target=self._send_batches, daemon=True))
        for user in users:
            user.start()
        ways = [self._kill_own, self._stop_own, self._kill_remote, self._kill_agent, self._stop_agent, self._cut]
        for i in range(num_kills):
            time.sleep(self._rng.uniform(0.2, 1.5))
            ways[i % len(ways)]()
            if i % 3 == 2:  # up to three are away at a time
                self._wait_until_all_are_up()
            assert not self._wrong, self._wrong
        self._wait_until_all_are_up()
        self._over.set()
        for user in users:
            user.join(120)
            assert not user.is_alive(), "a call was not answered"
        assert not self._wrong, self._wrong
        client = self._server.client()
        for batch_id, number in self._accepted.items():
            self._check_results(client, batch_id, number)
        self.report.batches, self.report.lines = len(self._accepted), len(self._accepted) * LINES_PER_BATCH
        self.report.restarts = self._server.metric("omniserve_engine_restarts_total")
        assert self._server.stop() == 0, "".join(self._server.log[-20:])

    def close(self) -> None:
        self._server.close()
        for each in self._remote:
            each.close()

    def _states(self) -> list[str]:
        return [each["state"] for each in httpx.get(f"{self._server.url}/admin/engines", timeout=30).json()["data"]]

    def _wait_until_all_are_up(self) -> None:
        wait_until(lambda: self._states() == ["up"] * 4, lambda: "".join(self._server.log[-20:]))

    def _signal(self, what: str, processes: list[psutil.Process], number: int) -> psutil.Process | None:
        """Send a signal to one of some processes, and count it; none may be there, as another is being started."""
        wait_until(lambda: self._states().count("up") >= 2)  # else there is no engine that could go on
        for process in self._rng.sample(processes, len(processes)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
                self.report.kills[what] += 1
                return process
        return None

    def _kill_own(self) -> None:
        self._signal("kill -9 of an engine", _engines_of(self._server.process.pid), signal.SIGKILL)

    def _stop_own(self) -> None:
        """Stop an engine for good: the server has to kill it."""
        self._signal("SIGSTOP of an engine", _engines_of(self._server.process.pid), signal.SIGSTOP)

    def _kill_remote(self) -> None:
        of_remotes = [process for each in self._remote for process in _engines_of(each.process.pid)]
        self._signal("kill -9 of a remote engine", of_remotes, signal.SIGKILL)

    def _kill_agent(self) -> None:
        each = self._rng.choice(self._remote)
        if self._signal("kill -9 of a remote machine's process", [psutil.Process(each.process.pid)], signal.SIGKILL):
            each.process.wait()
            each.start()

    def _stop_agent(self) -> None:
        """Stop a remote process for longer than the heartbeat; it goes on then, and must not answer twice."""
        agent = self._rng.choice(self._remote)
        process = psutil.Process(agent.process.pid)
        if self._signal("SIGSTOP of a remote machine's process", [process], signal.SIGSTOP):
            time.sleep(1.5 * HEARTBEAT_S)
            process.send_signal(signal.SIGCONT)

    def _cut(self) -> None:
        wait_until(lambda: self._states().count("up") >= 2)
        self._rng.choice(self._remote).proxy.cut()
        self.report.kills["cut connection"] += 1

    def _text(self, prompt: list[int], num_tokens: int) -> str:
        tokens = [prompt[i % len(prompt)] for i in range(num_tokens)]
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _chat(self, user: int) -> None:
        rng, client = random.Random(user), self._server.client()
        while not self._over.is_set():
            prompt, num_tokens = [100 + rng.randrange(200) for _ in range(4)], rng.randint(5, 120)
            fields = {"model": "fake", "prompt": prompt, "max_tokens": num_tokens, "extra_body": {"ignore_eos": True}}
            text, told = "", None
            try:
                if rng.random() < 0.5:
                    for part in client.completions.create(**fields, stream=True):
                        text += part.choices[0].text
                else:
                    text = client.completions.create(**fields).choices[0].text
            except (openai.APITimeoutError, openai.APIConnectionError) as error:
                self._wrong.append(f"not answered: {error!r}")
                return
            except openai.APIError as error:
                told = error
            expected = self._text(prompt, num_tokens)
            with self._lock:
                self.report.calls += 1
                if told is None:
                    self.report.whole += 1
                    if text != expected:
                        self._wrong.append(f"{text!r} is not {expected!r}")
                else:
                    self.report.told[_short(str(told))] += 1
                    if not expected.startswith(text) or "engine" not in str(told):
                        self._wrong.append(f"{text!r} is no part of {expected!r}, {told!r}")

    def _send_batches(self) -> None:
        try:
            client, number = self._server.client(), 0
            while not self._over.is_set():
                running = [submit(client, lines_of_batch(number + i, LINES_PER_BATCH)).id for i in range(NUM_BATCHES)]
                self._accepted |= {batch_id: number + i for i, batch_id in enumerate(running)}
                number += NUM_BATCHES
                for batch_id in running:
                    wait_for(client, batch_id)
        except Exception as error:
            self._wrong.append(f"batches: {error!r}")

    def _check_results(self, client: openai.OpenAI, batch_id: str, number: int) -> None:
        batch = wait_for(client, batch_id)
        assert batch.status == "completed" and batch.error_file_id is None, batch
        found, lines = results(client, batch.output_file_id), lines_of_batch(number, LINES_PER_BATCH)
        assert [entry["custom_id"] for entry in found] == [line["custom_id"] for line in lines]
        assert len({entry["id"] for entry in found}) == len(lines)
        for entry, line in zip(found, lines, strict=True):
            expected = self._text(line["body"]["prompt"], line["body"]["max_tokens"])
            assert entry["response"]["body"]["choices"][0]["text"] == expected, (entry, line)


def _short(message: str) -> str:
    known = ("exit code", "no sign of life", "was cut", "ended on its machine", "lost", "has stopped")
    return next((each for each in known if each in message), message)


def torture(folder: Path, *, kills: int, seed: int) -> Report:
    """Kill engines ``kills`` times and check everything; return what happened."""
    trial = Torture(folder, random.Random(seed))
    try:
        trial.run(kills)
    finally:
        trial.close()
    return trial.report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    print(json.dumps(vars(args)), flush=True)
    with tempfile.TemporaryDirectory() as name:
        print(torture(Path(name), kills=args.kills, seed=args.seed))

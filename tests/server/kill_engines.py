"""Kill, stop and cut off engines, API workers and the front during batches and chats; see that no line is lost.

Nor done twice, and that every call is answered: by its whole text, or by an error that says what happened, unless its
own connection was one of a worker or a front that was killed. The engines are those of ``engines_to_kill``.

``python -m tests.server.kill_engines --kills 50 --seed 1``, with ``--ray`` on a Ray cluster of this machine; the tests
beside this do the same with few kills.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx
import openai
import psutil

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))

from batch_inputs import lines_of_batch, results, submit, wait_for
from engines_to_kill import HEARTBEAT_S, Engines, EnginesOfRay, OwnAndRemoteEngines
from running import RunningServer, wait_until
from tokenizers_for_tests import byte_level_tokenizer

from omniserve.server.workers.process import PROCESS_NAME

T = TypeVar("T")

LINES_PER_BATCH = 150
NUM_BATCHES = 2
NUM_CHATS = 4
NUM_WORKERS = 2
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
    cut: int = 0
    """Calls on connections of workers or fronts that were killed, or while there was no front."""

    def __str__(self) -> str:
        return (
            f"{self.kills.total()} kills {dict(self.kills)}: {self.batches} batches of {self.lines} lines, 0 lost, 0 "
            f"doubled; {self.calls} calls: {self.whole} whole, {self.told.total()} told of it {dict(self.told)}, "
            f"{self.cut} cut with their worker or front, 0 unanswered"
        )


class Torture:
    """A server, its engines, and those that use it.

    Args:
        folder: Holds everything; empty.
        rng: Decides when what happens.
        engines: The server's.
    """

    def __init__(self, folder: Path, rng: random.Random, engines: Engines) -> None:
        self._folder, self._rng, self._engines, self.report = folder, rng, engines, Report()
        self._tokenizer = byte_level_tokenizer()
        self._tokenizer.save_pretrained(folder / "tokenizer")
        self._cuts: list[list[float]] = []
        """When connections were or may be cut, by workers or fronts that die: from and, if it is over, until."""
        self._doomed: set[psutil.Process | None] = set()
        """Workers that were killed, or that the front has to kill: until then connections may still be theirs."""
        self._over = threading.Event()
        self._wrong: list[str] = []
        self._lock = threading.Lock()
        self._accepted: dict[str, int] = {}
        self._server = self._start()
        self._wait_until_all_are_up()

    def _start(self) -> RunningServer:
        command = [sys.executable, str(_HERE / "serve_fake.py"), "--tokenizer", str(self._folder / "tokenizer")]
        command += ["--data-dir", str(self._folder / "data"), "--no-faults", *self._engines.flags]
        command += ["--api-processes", str(NUM_WORKERS)]
        for limit in (f"engine_heartbeat_s={HEARTBEAT_S}", "engine_restarts=1000", "batch_concurrency=16"):
            command += ["--limit", limit]
        pauses = {"omniserve.server.engines.supervisor._LONGEST_PAUSE_S": 0.5}
        return RunningServer(command, FAKE_CONSTANTS=json.dumps(pauses)).wait_until_ready()

    def run(self, num_kills: int) -> None:
        """Kill; then finish everything and check it."""
        users = [threading.Thread(target=self._chat, args=[i], daemon=True) for i in range(NUM_CHATS)]
        users.append(threading.Thread(target=self._send_batches, daemon=True))
        for user in users:
            user.start()
        ways = [*self._engines.ways(self), self._kill_worker, self._stop_worker, self._kill_front]
        self._rng.shuffle(ways)
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
        assert self._server.stop() == 0, self._log()
        unseen = [self._server.log[i : i + 8] for i, line in enumerate(self._server.log) if "never retrieved" in line]
        assert not unseen, f"{len(unseen)} tasks failed, and nobody saw it: {unseen[0]}"

    def close(self) -> None:
        self._server.close()

    @property
    def server_pid(self) -> int:
        """The front's process."""
        return self._server.process.pid

    def choice(self, things: list[T]) -> T:
        """Return one of some things."""
        return self._rng.choice(things)

    def note(self, what: str) -> None:
        """Count something that was done to the engines."""
        self.report.kills[what] += 1

    def wait_until_two_are_up(self) -> None:
        """Wait until an engine can go on when another one goes."""
        wait_until(lambda: self._states().count("up") >= 2, self._log)

    def signal(self, what: str, processes: list[psutil.Process], number: int) -> psutil.Process | None:
        """Send a signal to one of some processes, and count it; none may be there, as another is being started."""
        self.wait_until_two_are_up()
        for process in self._rng.sample(processes, len(processes)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
                self.note(what)
                return process
        return None

    def _states(self) -> list[str]:
        """Return the engines' states; none from a worker that is being killed."""
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"{self._server.url}/admin/engines", timeout=5)
            if answer.status_code == 200:
                return [each["state"] for each in answer.json()["data"]]
        return []

    def _wait_until_all_are_up(self) -> None:
        wait_until(
            lambda: self._states() == ["up"] * self._engines.number,
            lambda: f"{self._states()}, {self.report}\n{self._log()}",
        )
        wait_until(lambda: len(self._workers()) == NUM_WORKERS and not self._doomed & {*self._workers()}, self._log)
        with self._lock:
            now_s = time.monotonic()
            self._cuts = [[begin_s, min(end_s, now_s)] for begin_s, end_s in self._cuts]

    def _log(self) -> str:
        return "".join(self._server.log[-20:])

    def _workers(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.server_pid).children()
            return [child for child in children if child.name() == PROCESS_NAME]
        return []

    def _begin_cut(self) -> None:
        with self._lock:
            self._cuts.append([time.monotonic(), float("inf")])

    def _may_be_cut(self, since_s: float) -> bool:
        """Return whether a connection made at a time may have been one of a worker or a front that has died."""
        with self._lock:
            return any(end_s >= since_s for _, end_s in self._cuts)

    def _kill_worker(self) -> None:
        self._begin_cut()
        self._doomed.add(self.signal("kill -9 of an API worker", self._workers(), signal.SIGKILL))

    def _stop_worker(self) -> None:
        """Stop a worker for good: the front has to kill it."""
        self._begin_cut()
        self._doomed.add(self.signal("SIGSTOP of an API worker", self._workers(), signal.SIGSTOP))

    def _kill_front(self) -> None:
        """Kill the first process alone: its engines and workers have to notice; then another one takes over."""
        self._begin_cut()
        self._server.process.kill()
        self._server.wait()
        self.note("kill -9 of the front")
        self._server = self._start()

    def _text(self, prompt: list[int], num_tokens: int) -> str:
        tokens = [prompt[i % len(prompt)] for i in range(num_tokens)]
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _chat(self, user: int) -> None:
        rng = random.Random(user)
        while not self._over.is_set():
            prompt, num_tokens = [100 + rng.randrange(200) for _ in range(4)], rng.randint(5, 120)
            fields = {"model": "fake", "prompt": prompt, "max_tokens": num_tokens, "extra_body": {"ignore_eos": True}}
            text, told, began_s, client = "", None, time.monotonic(), self._server.client()
            try:
                if rng.random() < 0.5:
                    for part in client.completions.create(**fields, stream=True):
                        text += part.choices[0].text
                else:
                    text = client.completions.create(**fields).choices[0].text
            except openai.APIError as error:
                told = error
            except httpx.TransportError as error:  # in the middle of a stream
                told = openai.APIConnectionError(message=repr(error), request=None)  # type: ignore[arg-type]
            expected = self._text(prompt, num_tokens)
            is_cut = isinstance(told, openai.APIConnectionError) and self._may_be_cut(began_s)
            with self._lock:
                self.report.calls += 1
                if is_cut:
                    self.report.cut += 1
                elif isinstance(told, openai.APIConnectionError):
                    self._wrong.append(f"not answered: {told!r}")
                elif told is None:
                    self.report.whole += 1
                    if text != expected:
                        self._wrong.append(f"{text!r} is not {expected!r}")
                else:
                    self.report.told[_short(str(told))] += 1
                    if "engine" not in str(told):
                        self._wrong.append(f"nothing of engines is in {told!r}")
                if not expected.startswith(text):
                    self._wrong.append(f"{text!r} is no part of {expected!r}")
            if is_cut:
                time.sleep(1)

    def _send_batches(self) -> None:
        try:
            number = 0
            while not self._over.is_set():
                running = [self._answered(self._submission(number + i)) for i in range(NUM_BATCHES)]
                self._accepted |= {batch_id: number + i for i, batch_id in enumerate(running)}
                number += NUM_BATCHES
                for batch_id in running:
                    self._answered(functools.partial(wait_for, batch_id=batch_id))
        except Exception as error:
            self._wrong.append(f"batches: {error!r}")

    def _submission(self, number: int) -> Callable[[openai.OpenAI], str]:
        return lambda client: submit(client, lines_of_batch(number, LINES_PER_BATCH)).id

    def _answered(self, ask: Callable[[openai.OpenAI], T]) -> T:
        """Return what a client is told; it asks again where its connection is cut with a worker or a front."""
        while True:
            began_s = time.monotonic()
            try:
                return ask(self._server.client())
            except (openai.APIConnectionError, openai.InternalServerError) as error:
                is_told = isinstance(error, openai.InternalServerError) and "first process" not in str(error)
                if is_told or not self._may_be_cut(began_s):
                    raise
            time.sleep(0.1)

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


def torture(folder: Path, *, kills: int, seed: int, with_ray: bool = False) -> Report:
    """Kill ``kills`` times and check everything; return what happened."""
    kind = EnginesOfRay if with_ray else OwnAndRemoteEngines
    with contextlib.closing(kind(folder)) as engines:
        trial = Torture(folder, random.Random(seed), engines)
        try:
            trial.run(kills)
        finally:
            trial.close()
    return trial.report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--ray", action="store_true", help="engines on a Ray cluster of three nodes")
    args = parser.parse_args()
    print(json.dumps(vars(args)), flush=True)
    with tempfile.TemporaryDirectory() as name:
        print(torture(Path(name), kills=args.kills, seed=args.seed, with_ray=args.ray))

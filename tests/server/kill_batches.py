"""Kill a server with its engine again and again while it works on batches; see that nothing is lost or done twice.

``python -m tests.server.kill_batches --kills 50 --seed 1``; the test beside this does the same with few kills.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import openai

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))

from batch_inputs import lines_of_batch, prompt_of, results, submit, wait_for
from running import RunningServer
from tokenizers_for_tests import byte_level_tokenizer

LINES_PER_BATCH = 100
FLAGS = ("--limit", "batch_concurrency=16")
MAX_LIFE_S = 1.5


@dataclass
class Report:
    """Counts of what happened."""

    kills: int = 0
    batches: int = 0
    lines: int = 0
    runs: int = 0
    """Lines given to the engine; more than ``lines`` by those that were killed under way."""
    files_read: int = 0
    unanswered: int = 0
    """Calls that a kill cut off."""
    seen_running: Counter[str] = field(default_factory=Counter)
    """States of batches when the server was killed."""

    def __str__(self) -> str:
        return (
            f"{self.kills} kills, {self.batches} batches, {self.lines} lines run {self.runs} times, "
            f"{self.files_read} files read meanwhile, {self.unanswered} calls cut off, "
            f"batches killed in {dict(self.seen_running)}"
        )


class Torture:
    """One data folder and the servers that live and die on it.

    Args:
        folder: Holds everything; empty.
        rng: Decides when what happens.
    """

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._folder = folder
        self._rng = rng
        self._log = folder / "work"
        self._log.touch()
        self._tokenizer_folder = folder / "tokenizer"
        byte_level_tokenizer().save_pretrained(self._tokenizer_folder)
        self._accepted: dict[str, int] = {}
        """Number of each batch that the server said it accepted."""
        self._numbers = itertools.count()
        self._done: dict[tuple[int, int], int] = {}
        """Length of the work log when a line (batch number, line number) was first seen to be done."""
        self.report = Report()

    def run(self, num_kills: int) -> None:
        """Live and die; then finish everything and check it."""
        # A slow machine may have had no work under way by then.
        while self.report.kills < num_kills or not (self.report.seen_running["in_progress"] or self.report.kills > 9):
            self._one_life()
            self._note_what_is_done()
        server = self._start().wait_until_ready()
        client = server.client()
        self._submit(client)
        for batch_id in [batch.id for batch in client.batches.list()]:
            # A batch whose creation was cut off may be there or not. If it is, it is as good as any.
            batch = wait_for(client, batch_id)
            assert batch.status == "completed", batch
        for batch_id, number in self._accepted.items():
            self._check_results(client, batch_id, number)
        assert server.stop() == 0
        self._check_work()

    def _start(self) -> RunningServer:
        script = Path(__file__).with_name("serve_fake.py")
        command = [
            sys.executable,
            str(script),
            "--tokenizer",
            str(self._tokenizer_folder),
            "--limit",
            "shutdown_timeout_s=20",
        ]
        command += ["--data-dir", str(self._folder / "data"), "--work-log", str(self._log), *FLAGS]
        return RunningServer(command, own_group=True)

    def _one_life(self) -> None:
        server = self._start().wait_until_ready()
        end = threading.Timer(self._rng.uniform(0, MAX_LIFE_S), server.kill_group)
        end.start()
        try:
            client = server.client()
            for _ in range(1000):
                running = [batch for batch in client.batches.list(limit=10).data if batch.completed_at is None]
                if not running or (len(running) < 3 and self._rng.random() < 0.1):
                    self._submit(client)
                self._read_some_files(client)
        except (openai.APIConnectionError, openai.APITimeoutError):
            self.report.unanswered += 1
        end.join()
        self.report.kills += 1

    def _submit(self, client: openai.OpenAI) -> None:
        number = next(self._numbers)
        batch = submit(client, lines_of_batch(number, LINES_PER_BATCH))
        self._accepted[batch.id] = number

    def _read_some_files(self, client: openai.OpenAI) -> None:
        files = client.files.list(limit=20).data
        for file in self._rng.sample(files, min(2, len(files))):
            content = client.files.content(file.id).read()
            assert len(content) == file.bytes and content.count(b"\n") == LINES_PER_BATCH, f"{file} is half-written"
            self.report.files_read += 1

    def _note_what_is_done(self) -> None:
        """Note the lines that are done, while no server lives: what the database has now is what was promised."""
        log_end = self._log.stat().st_size
        with sqlite3.connect(self._folder / "data" / "omniserve.sqlite3") as database:
            statuses = database.execute("select id, status from omniserve_batches").fetchall()
            done = database.execute("select batch_id, number from omniserve_lines where state = 2").fetchall()
        self.report.seen_running.update(status for _, status in statuses if status != "completed")
        completed = [batch_id for batch_id, status in statuses if status == "completed"]
        done += [(batch_id, n + 1) for batch_id in completed for n in range(LINES_PER_BATCH)]
        for batch_id, number in done:
            if batch_id in self._accepted:
                self._done.setdefault((self._accepted[batch_id], number - 1), log_end)

    def _check_results(self, client: openai.OpenAI, batch_id: str, number: int) -> None:
        batch = client.batches.retrieve(batch_id)
        assert batch.request_counts is not None and batch.error_file_id is None
        lines = lines_of_batch(number, LINES_PER_BATCH)
        assert batch.request_counts.completed == batch.request_counts.total == len(lines)
        found = results(client, batch.output_file_id)
        assert [entry["custom_id"] for entry in found] == [line["custom_id"] for line in lines]
        assert len({entry["id"] for entry in found}) == len(lines)
        for entry, line in zip(found, lines, strict=True):
            prompt, max_tokens = line["body"]["prompt"], line["body"]["max_tokens"]
            tokens = [prompt[i % len(prompt)] for i in range(max_tokens)]
            expected = byte_level_tokenizer().decode(tokens, skip_special_tokens=True)
            assert entry["response"]["body"]["choices"][0]["text"] == expected, (entry, line)

    def _check_work(self) -> None:
        lines_of = {tuple(prompt_of(b, n)): (b, n) for b in self._accepted.values() for n in range(LINES_PER_BATCH)}
        log, at, runs = self._log.read_bytes(), 0, Counter[tuple[int, int]]()
        for entry in log.splitlines(keepends=True):
            prompt = tuple(map(int, entry.split()[1:]))
            if prompt in lines_of:
                key = lines_of[prompt]
                runs[key] += 1
                assert at < self._done.get(key, len(log)), f"line {key} was done, and was run again"
            at += len(entry)
        self.report.batches, self.report.lines, self.report.runs = len(self._accepted), len(lines_of), runs.total()
        assert runs.keys() == set(lines_of.values()), "every line was run"


def torture(folder: Path, *, kills: int, seed: int) -> Report:
    """Kill servers ``kills`` times and check everything; return what happened."""
    trial = Torture(folder, random.Random(seed))
    trial.run(kills)
    return trial.report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    print(json.dumps(vars(args)), flush=True)
    with tempfile.TemporaryDirectory() as name:
        print(torture(Path(name), kills=args.kills, seed=args.seed))

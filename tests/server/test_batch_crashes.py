"""Death at each single step that touches disk or database, from the upload to the end of a batch."""

from __future__ import annotations

import io
import json
import os
import shutil
import sqlite3
import threading
from contextlib import contextmanager
from pathlib import Path

from batch_inputs import completion_line, jsonl
from sqlalchemy import URL

from omniserve.server.batches.database import BATCHES, FILES, Database
from omniserve.server.batches.files import FileFolder
from omniserve.server.batches.lines import LineResult, check_file
from omniserve.server.batches.locks import make_lock
from omniserve.server.batches.owner import Owner
from omniserve.server.batches.runner import finish
from omniserve.server.batches.store import NewBatch, NewFile, Store
from omniserve.server.fields import UnknownFields

ENDPOINT = "/v1/completions"
WRONG = 3
CONTENT = jsonl(completion_line(i, prompt=[i + 1]) for i in range(5))


class Killed(BaseException):
    pass


class Steps:
    """Counts what this thread does with disk or database; from a given step on, everything fails.

    The server that other tests share goes on in its own threads.
    """

    def __init__(self, monkeypatch) -> None:
        self._thread = threading.get_ident()
        self.num_done = 0
        self.die_at: int | None = None
        for place, name in ((os, "fsync"), (Path, "rename"), (Path, "unlink"), (Path, "open")):
            monkeypatch.setattr(place, name, self._counted(getattr(place, name)))
        write = Database.write

        @contextmanager
        def write_or_die(database: Database):
            self._step()
            with write(database) as connection:
                yield connection
                self._step()  # just before it is kept
            self._step()  # just after

        monkeypatch.setattr(Database, "write", write_or_die)

    def _step(self) -> None:
        if threading.get_ident() != self._thread:
            return
        if self.die_at is not None and self.num_done >= self.die_at:
            raise Killed
        self.num_done += 1

    def _counted(self, function):
        def counted(*args, **kwargs):
            self._step()
            return function(*args, **kwargs)

        return counted


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Life:
    """One server's life on a folder, from its start."""

    def __init__(self, folder: Path, clock: Clock, computed: list[int]) -> None:
        self.files = FileFolder(folder / "files")
        self.database = Database(URL.create("sqlite", database=str(folder / "db")), clock)
        self.store = Store(self.database, self.files)
        self._lock = make_lock(self.database, "fake")
        self._computed = computed

    def end(self) -> None:
        """Free what the death of the process frees."""
        self._lock.release()
        self.database.close()

    def accept(self) -> str:
        """Do what a client asks for; what is returned was promised."""
        file = self.store.add_file(NewFile(filename="f", purpose="batch"), [CONTENT[:99], CONTENT[99:]])
        new = NewBatch(
            model="fake",
            endpoint=ENDPOINT,
            input_file_id=file["id"],
            completion_window="24h",
            window_s=86400,
            metadata=None,
        )
        return str(self.store.create_batch(new)["id"])

    def work(self) -> None:
        """Become the owner and do all that there is to do."""
        owner = Owner.take(self.database, self._lock, "fake")
        assert owner is not None
        self.owner = owner
        while self._work_on_batch() or self._work_on_lines():
            pass

    def _work_on_batch(self) -> bool:
        batch = self.owner.next_batch()
        if batch is None:
            return False
        if batch["status"] == "validating":
            file = self.store.file(batch["input_file_id"])
            content = self.files.path(file["id"], file["num_bytes"]).read_bytes()
            found = check_file(io.BytesIO(content), ENDPOINT, lambda _: None, 100, UnknownFields())
            assert self.owner.accept_lines(batch["id"], found.lines)
        else:
            assert finish(self.store, self.owner, batch)
        return True

    def _work_on_lines(self) -> bool:
        lines = self.owner.pending_lines(2)
        for line in lines:
            raw = self.files.read_part(line.input_file_id, line.start, line.length)
            number = json.loads(raw)["body"]["prompt"][0]
            self._computed.append(number)
            assert self.owner.save([LineResult(key=line.key, ok=number != WRONG, text=str(number))]) == []
        return bool(lines)


def live_and_die(folder: Path, steps: Steps, clock: Clock, computed: list[int], die_at: int | None) -> str | None:
    """Live until the given step; return the batch if it was accepted."""
    accepted, life = None, None
    steps.num_done, steps.die_at = 0, die_at
    try:
        life = Life(folder, clock, computed)
        accepted = life.accept()
        life.work()
    except Killed:
        pass
    finally:
        steps.die_at = None
        if life is not None:
            life.end()
    return accepted


def results_in(folder: Path) -> list[int]:
    """Return the results that the database has."""
    with sqlite3.connect(folder / "db") as database:
        if not database.execute("select * from sqlite_master where name = 'omniserve_lines'").fetchall():
            return []
        if database.execute("select * from omniserve_batches where status = 'completed'").fetchall():
            return list(range(1, 6))
        return [int(row[0]) for row in database.execute("select result from omniserve_lines where state = 2")]


def test_death_at_every_step_loses_nothing_repeats_nothing_and_leaves_nothing(tmp_path, monkeypatch):
    steps, clock = Steps(monkeypatch), Clock()
    assert live_and_die(tmp_path / "whole", steps, clock, [], None)
    num_steps = steps.num_done
    assert num_steps > 60
    for die_at in range(num_steps):
        folder, computed = tmp_path / str(die_at), list[int]()
        accepted = live_and_die(folder, steps, clock, computed, die_at)
        done = results_in(folder)
        first_computed = list(computed)

        life = Life(folder, clock, computed)
        life.work()
        batches = life.store.page(BATCHES, limit=9).rows
        assert accepted is None or [batch["id"] for batch in batches] == [accepted]
        for batch in batches:
            assert (batch["status"], batch["total"], batch["completed"], batch["failed"]) == ("completed", 5, 4, 1)
            for column, expected in (("output_file_id", [1, 2, 4, 5]), ("error_file_id", [WRONG])):
                file = life.store.file(batch[column])
                content = life.files.path(file["id"], file["num_bytes"]).read_bytes()
                assert [int(text) for text in content.splitlines()] == expected
            again = computed[len(first_computed) :]
            assert not set(again) & set(done), f"death at step {die_at}: {done} were done, {again} were run again"
            assert len(again) <= 5 - len(done)

        clock.now_s += 2 * 3600
        for path in (folder / "files").glob(".unfinished-*"):
            os.utime(path, (0, 0))
        life.store.sweep()
        known = {row["id"] for row in life.store.page(FILES, limit=9).rows}
        assert {path.name for path in (folder / "files").iterdir()} == known
        life.end()
        shutil.rmtree(folder)

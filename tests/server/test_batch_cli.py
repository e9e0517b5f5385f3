"""``python -m omniserve.batch``: without a server, and against one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import batch_fake
import pytest
from batch_inputs import completion_line, jsonl, line, prompt_of
from fake_engine import SLOW
from tokenizers_for_tests import byte_level_tokenizer

from omniserve.server.batches import cli
from omniserve.server.batches import offline as offline_run
from omniserve.server.batches.cli import RemoteBatches, RemoteError, main
from tests.quick import slow_except

ABC = byte_level_tokenizer()("abc").input_ids


@pytest.fixture
def offline(tmp_path, tokenizer_folder):
    """Start a run of ``in.jsonl`` to ``out.jsonl`` with the fake engine, in a process that can be killed."""

    def start() -> subprocess.Popen:
        command = [sys.executable, str(Path(__file__).with_name("batch_fake.py")), str(tokenizer_folder)]
        return subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)

    return start


@pytest.fixture
def run_here(tmp_path, tokenizer_folder, engines_in_threads, monkeypatch, caplog, capfd):
    """Run ``in.jsonl`` to ``out.jsonl`` with the fake engine; return the exit status and the log."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO", logger="omniserve.batch")

    def run() -> tuple[int, str]:
        caplog.clear()
        status = batch_fake.run(str(tokenizer_folder))
        assert "\r" not in capfd.readouterr().err, "a bar is for terminals"
        return status, caplog.text

    return run


def wait_until(run: subprocess.Popen, is_so: Callable[[], bool]) -> None:
    """Wait for something that happens while a run goes on."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert run.poll() is None, run.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def num_done(folder: Path) -> int:
    """Return how many lines the journal has results of."""
    path = folder / "out.jsonl.journal" / "omniserve.sqlite3"
    if not path.exists():
        return 0
    try:
        with sqlite3.connect(path) as database:
            return sum(row[0] for row in database.execute("select completed from omniserve_batches"))
    except sqlite3.OperationalError:  # the tables are just being made
        return 0


def ids(path: Path) -> list[str]:
    return [json.loads(entry)["custom_id"] for entry in path.read_text().splitlines()]


def test_run_writes_answers_and_errors_in_order(tmp_path, run_here):
    lines = [completion_line(i, prompt=ABC) for i in range(20)]
    lines[7] = line("wrong", {"prompt": "a", "max_tokens": "red"})
    (tmp_path / "in.jsonl").write_bytes(jsonl(lines))
    status, log = run_here()
    assert status == 1 and "1 of 20 lines have an error" in log and "19 lines in out.jsonl" in log
    assert ids(tmp_path / "out.jsonl") == [entry["custom_id"] for entry in lines if entry["custom_id"] != "wrong"]
    assert ids(tmp_path / "out.errors.jsonl") == ["wrong"]
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.errors.jsonl", "out.jsonl", "work"], "no journal is left"


def test_without_a_terminal_the_log_says_how_far_a_run_is(monkeypatch, caplog):
    monkeypatch.setattr(offline_run, "_SAY_EVERY_S", 0.0)
    monkeypatch.setattr(offline_run, "_POLL_S", 0.0)
    caplog.set_level("INFO", logger="omniserve.batch")
    states = iter([(0, 0, "in_progress"), (5, 2, "in_progress"), (8, 2, "completed")])

    def batch(_):
        completed, failed, status = next(states)
        return {"completed": completed, "failed": failed, "total": 10, "status": status}

    store, engine = SimpleNamespace(batch=batch), SimpleNamespace(stopped=asyncio.Event())
    last = asyncio.run(offline_run._follow(store, "batch", engine, asyncio.Event()))
    assert last["status"] == "completed"
    assert caplog.messages == [f"{done} of 10 lines are done" for done in (0, 7, 10)]


@pytest.mark.parametrize("how", slow_except((signal.SIGKILL,), [signal.SIGINT, signal.SIGKILL]))
def test_run_that_was_stopped_goes_on_where_it_was_and_nothing_else_touches_its_journal(
    tmp_path, offline, run_here, monkeypatch, how
):
    lines = [completion_line(i, prompt=[SLOW, *prompt_of(0, i)], max_tokens=12) for i in range(24)]
    (tmp_path / "in.jsonl").write_bytes(jsonl(lines))
    run = offline()
    wait_until(run, lambda: num_done(tmp_path) >= 4)
    status, log = run_here()
    assert "another process works with" in log and status == 2
    os.killpg(run.pid, how)
    log = run.communicate(timeout=60)[1]
    if how == signal.SIGINT:
        assert run.returncode == 130 and "run the same command again" in log
    (tmp_path / "in.jsonl").write_bytes(jsonl(lines[:5]))
    status, log = run_here()
    assert "is of another run" in log and status == 2
    (tmp_path / "in.jsonl").write_bytes(jsonl(lines))
    done, work = num_done(tmp_path), (tmp_path / "work").read_text().splitlines()
    assert 4 <= done < 24 and not (tmp_path / "out.jsonl").exists()
    monkeypatch.setattr("fake_engine.SLOW_STEP_S", 0.001)
    status, log = run_here()
    assert status == 0 and "going on" in log, log
    assert ids(tmp_path / "out.jsonl") == [entry["custom_id"] for entry in lines]
    repeated = (tmp_path / "work").read_text().splitlines()[len(work) :]
    assert len(repeated) == 24 - done, "what was done is not computed again"


def test_wrong_input_is_told_line_by_line(tmp_path, run_here):
    (tmp_path / "in.jsonl").write_bytes(jsonl([completion_line(0, prompt=ABC)] * 2))
    status, log = run_here()
    assert "in.jsonl: line 2: the custom_id 'line-0' is that of line 1" in log
    assert status == 2 and not (tmp_path / "out.jsonl").exists()


def test_submit_status_fetch_and_cancel(tmp_path, server, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_POLL_S", 0.05)
    path = tmp_path / "in.jsonl"
    path.write_bytes(jsonl([completion_line(0, prompt=ABC), line("wrong", {"prompt": []})]))
    at = ["--url", server.url]
    assert main(["submit", str(path), *at]) == 0
    batch_id = capsys.readouterr().out.strip()
    assert main(["fetch", batch_id, "-o", str(tmp_path / "out.jsonl"), *at]) == 1
    assert ids(tmp_path / "out.jsonl") == ["line-0"] and ids(tmp_path / "out.errors.jsonl") == ["wrong"]
    assert "completed: 1 + 1 failed of 2" in capsys.readouterr().err
    assert main(["status", batch_id, *at]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "completed"
    assert main(["cancel", batch_id, *at]) == 2
    assert "cannot be cancelled" in capsys.readouterr().err
    assert main(["status", "batch_none", *at]) == 2
    assert main(["status", "x", "--url", "http://127.0.0.1:1"]) == 2
    assert "see --url" in capsys.readouterr().err


class Answers(ThreadingHTTPServer):
    """A server that gives these answers one after the other, the last one for ever; None hangs up."""

    def __init__(self, *answers):
        self.answers = list(answers)
        super().__init__(("127.0.0.1", 0), OneAnswer)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        self.batches = RemoteBatches(f"http://127.0.0.1:{self.server_port}", "none")

    def __exit__(self, *args):
        self.shutdown()
        super().__exit__(*args)


class OneAnswer(BaseHTTPRequestHandler):
    def do_GET(self):
        answers = self.server.answers
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is not None:
            status, headers, body = answer
            self.send_response(status)
            for name, value in ({"content-length": len(json.dumps(body))} | headers).items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args):
        pass


RUNS, ENDED = ((200, {}, {"id": "b", "status": status}) for status in ("in_progress", "completed"))
BUSY = (503, {"retry-after": 7}, {"error": {"message": "the database is locked"}})


@pytest.fixture
def pauses(monkeypatch):
    """Seconds that are slept, on a clock of its own."""
    pauses, clock = [], [0.0]

    def sleep(seconds):
        pauses.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(cli, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: clock[0]))
    return pauses


def test_wait_outlasts_a_server_that_is_away_for_a_while(pauses):
    with Answers(
        RUNS, BUSY, (503, {"retry-after": "tomorrow"}, {}), None, (503, {"retry-after": 9999}, {}), ENDED
    ) as at:
        assert at.batches.wait("b", lambda batch: None)["status"] == "completed"
    assert pauses == [2, 7, 2, 2, 60]


def test_wait_ends_where_there_was_never_an_answer_or_none_for_long_or_a_clear_one(pauses):
    with Answers(BUSY) as at, pytest.raises(RemoteError, match="the database is locked"):
        at.batches.wait("b", lambda batch: None)
    assert pauses == []
    with Answers(RUNS, None) as at, pytest.raises(RemoteError, match="is the server there"):
        at.batches.wait("b", lambda batch: None)
    assert 600 < sum(pauses) < 610
    with Answers(RUNS, (404, {}, {"error": {"message": "there is no batch"}})) as at:
        with pytest.raises(RemoteError, match="there is no batch"):
            at.batches.wait("b", lambda batch: None)


@pytest.mark.parametrize("content", [b"", b"no JSON", b"{}", b'{"url": "/v1/moderations"}'])
def test_file_that_does_not_say_what_it_is_for(tmp_path, capsys, content):
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(SystemExit):
        main(["submit", str(path)])
    assert "the first line of" in capsys.readouterr().err


def test_file_with_a_byte_order_mark_says_what_it_is_for(tmp_path, capsys):
    path = tmp_path / "in.jsonl"
    text = jsonl([line("a", {})]).decode()
    path.write_bytes(("\ufeff\n\ufeff" + text).encode())
    assert main(["submit", "--url", "http://127.0.0.1:9", str(path)]) == 2
    assert "is the server there" in capsys.readouterr().err
    path.write_bytes(text.encode("utf-16"))
    with pytest.raises(SystemExit):
        main(["submit", str(path)])
    assert "in.jsonl is UTF-16; save it as UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("alone", slow_except((False,), (False, True)), ids=["here", "in a process"])
def test_run_with_the_built_in_model(tmp_path, engines_in_threads, monkeypatch, alone):
    lines = [line(f"{i}", {"model": None, "prompt": "The with statement", "max_tokens": 4}) for i in range(3)]
    (tmp_path / "in.jsonl").write_bytes(jsonl(lines))
    flags = "--execution compile=false --device cpu --device-kv-gib 0.01 --host-kv-gib 0"
    flags += " --device-threads 1 --host-threads 1"
    arguments = ["run", "in.jsonl", "-o", "out.jsonl", *flags.split()]
    if alone:
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "omniserve.batch", *arguments]
        assert subprocess.run(command, cwd=tmp_path, timeout=300, env=os.environ | {"PYTHONPATH": path}).returncode == 0
    else:
        monkeypatch.chdir(tmp_path)
        assert main(arguments) == 0
    assert ids(tmp_path / "out.jsonl") == ["0", "1", "2"]

"""Tests of the runner when its database does not answer, and when batches are late: no server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from types import SimpleNamespace

import pytest

from omniserve.server.access.limits import Limits
from omniserve.server.batches.files import BatchSettings
from omniserve.server.batches.lines import CheckedLine, LineKey, LineResult, PendingLine
from omniserve.server.batches.locks import make_lock
from omniserve.server.batches.owner import Owner
from omniserve.server.batches.runner import BatchRunner
from omniserve.server.batches.store import NewBatch, NewFile, Store
from omniserve.server.fields import UnknownFields

PATIENCE_S = 60


class Bench:
    """A runner whose lines take as long as is said, and that looks at the clock often."""

    def __init__(self, folder, monkeypatch, *, concurrency: int, line_s: float, hurried_s: float) -> None:
        self.store = Store.open(BatchSettings(data_dir=folder))
        self.starts: Counter[LineKey] = Counter()
        self.callers: list[str | None] = []
        """Callers of the lines that ended, in this order."""
        self.hurried: list[LineKey] = []
        self.stopped: list[LineKey] = []
        self._seconds = (line_s, hurried_s)
        monkeypatch.setattr("omniserve.server.batches.line_worker.run_line", self._run_line)
        monkeypatch.setattr("omniserve.server.batches.runner._POLL_S", 0.05)
        service = SimpleNamespace(
            model_name="m",
            limits=Limits(batch_concurrency=concurrency),
            check_open=lambda: None,
            check_model=lambda model: None,
            unknown_fields=UnknownFields(),
            engine=SimpleNamespace(engines=[None]),
            weights={"heavy": 2.0},
            metrics=SimpleNamespace(scaling=SimpleNamespace(batch_pressure=0.0)),
        )
        self.runner = BatchRunner(service, self.store)  # type: ignore[arg-type]

    async def _run_line(self, service, line: PendingLine, raw: bytes, *, escalated: bool) -> LineResult:
        self.starts[line.key] += 1
        if escalated:
            self.hurried.append(line.key)
        try:
            await asyncio.sleep(self._seconds[escalated])
        except asyncio.CancelledError:
            self.stopped.append(line.key)
            raise
        self.callers.append(line.caller)
        num_tokens = 3 if line.caller == "wordy" else 1
        return LineResult(key=line.key, ok=True, text="{}", num_input_tokens=0, num_output_tokens=num_tokens)

    def add(self, num_lines: int, window_s: float, model: str = "m", caller: str | None = None) -> str:
        body = {"model": model, "prompt": "x"}
        lines = [
            {"custom_id": f"{i}", "method": "POST", "url": "/v1/completions", "body": body} for i in range(num_lines)
        ]
        parts = [json.dumps(line).encode() + b"\n" for line in lines]
        file = self.store.add_file(NewFile(filename="f", purpose="batch", caller=caller), parts)
        batch = NewBatch(
            model=model, endpoint="/v1/completions", input_file_id=file["id"], completion_window="1h",
            window_s=window_s, metadata=None, caller=caller,
        )  # fmt: skip
        batch_id: str = self.store.create_batch(batch)["id"]
        self.runner.notice()
        return batch_id

    def num_done(self, batch_id: str) -> int:
        return self.store.batch(batch_id)["completed"]

    def accept(self, batch_id: str, num_lines: int = 1) -> None:
        """Validate a batch."""
        model = self.store.batch(batch_id)["model"]
        lock = make_lock(self.store.database, model)
        owner = Owner.take(self.store.database, lock, model)
        assert owner is not None
        lines = [CheckedLine(i + 1, f"{i}", 0, 10) for i in range(num_lines)]
        assert owner.accept_lines(batch_id, lines)
        lock.release()


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_late_batch_comes_before_one_that_expires_sooner_and_both_go_on(tmp_path, monkeypatch, concurrency):
    bench = Bench(tmp_path, monkeypatch, concurrency=concurrency, line_s=0.3, hurried_s=0.01)

    async def trial() -> None:
        soon = bench.add(30 * concurrency, window_s=60)  # 9 s
        bench.runner.start()
        await until(lambda: bench.num_done(soon) >= concurrency)
        late = bench.add(250 * concurrency, window_s=61)  # 75 s
        await until(lambda: bench.num_done(late))
        before = bench.num_done(soon)
        assert bench.stopped and before < 20 * concurrency, "its first lines did not wait for a place"
        await until(lambda: bench.num_done(soon) >= before + 3 * concurrency)
        await bench.runner.stop()
        assert {batch_id for batch_id, _ in bench.hurried} == {late}
        assert max(bench.starts.values()) <= 2, "nobody gives way again and again"

    asyncio.run(trial())


def test_nobody_gives_way_to_a_late_batch_of_another_model(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, concurrency=1, line_s=0.1, hurried_s=0.1)

    async def trial() -> None:
        late = bench.add(1, window_s=0.6, model="other")
        bench.accept(late)
        on_time = bench.add(12, window_s=3600)
        bench.runner.start()
        await until(lambda: bench.num_done(on_time) == 12)
        assert bench.store.batch(late)["status"] != "in_progress", "its window is over"
        await bench.runner.stop()
        assert bench.starts == Counter({(on_time, i + 1): 1 for i in range(12)})

    asyncio.run(trial())


def test_nobody_gives_way_to_a_late_batch_whose_file_is_gone_again_and_again(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, concurrency=1, line_s=0.1, hurried_s=0.1)

    async def trial() -> None:
        damaged = bench.add(1, window_s=61)
        bench.accept(damaged, num_lines=1000)
        bench.store.files.remove(bench.store.batch(damaged)["input_file_id"])
        on_time = bench.add(10, window_s=60)
        bench.runner.start()
        await until(lambda: bench.num_done(on_time) == 10)
        await bench.runner.stop()
        assert bench.store.batch(damaged)["problem"] is not None and bench.starts.total() <= 11

    asyncio.run(trial())


def test_batch_that_waits_for_its_turn_is_not_late_for_that(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, concurrency=2, line_s=0.15, hurried_s=0.15)

    async def trial() -> None:
        first = bench.add(12, window_s=43_200)
        bench.runner.start()
        await until(lambda: bench.starts)
        second = bench.add(20_000, window_s=43_200)  # 1,500 s
        await until(lambda: bench.num_done(first) == 12 and bench.num_done(second) >= 2)
        await bench.runner.stop()
        assert not bench.hurried
        assert len(bench.stopped) <= 2, "those that run as it stops"

    asyncio.run(trial())


def test_owner_that_cannot_prove_its_lock_stops_its_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("omniserve.server.batches.runner._PROOF_S", 0.3)
    bench = Bench(tmp_path, monkeypatch, concurrency=2, line_s=PATIENCE_S, hurried_s=PATIENCE_S)
    answers = threading.Event()

    async def trial() -> None:
        batch_id = bench.add(3, window_s=43_200)
        bench.runner.start()
        await until(lambda: len(bench.starts) == 2)
        with monkeypatch.context() as patch:
            patch.setattr(Owner, "prove", lambda owner: answers.wait(PATIENCE_S))
            await until(lambda: len(bench.stopped) == 2)
        assert bench.starts.total() == 2 and not answers.is_set()
        answers.set()
        await until(lambda: bench.starts.total() == 4)
        assert set(bench.stopped) == {(batch_id, 1), (batch_id, 2)}, "it took the lock again"
        await bench.runner.stop()

    try:
        asyncio.run(trial())
    finally:
        answers.set()


def test_former_owner_stops_its_lines_and_writes_nothing(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, concurrency=2, line_s=0.1, hurried_s=0.1)

    async def trial() -> None:
        batch_id = bench.add(3, window_s=43_200)
        bench.runner.start()
        await until(lambda: len(bench.starts) == 2)
        (place,) = tmp_path.glob("*.lock")
        place.unlink()  # as if it had lost the lock without notice
        lock = make_lock(bench.store.database, "m")
        assert Owner.take(bench.store.database, lock, "m") is not None
        await asyncio.sleep(0.3)
        assert bench.num_done(batch_id) == 0 and bench.starts.total() == 2
        lock.release()
        await until(lambda: bench.num_done(batch_id) == 3)
        await bench.runner.stop()

    asyncio.run(trial())


def test_callers_share_the_lines_that_run_by_weight_and_tokens(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, concurrency=4, line_s=0.01, hurried_s=0.01)

    async def trial() -> None:
        batches = [bench.add(120, window_s=3600 + i, caller=name) for i, name in enumerate(("wordy", "calm", "heavy"))]
        for batch in batches:
            bench.accept(batch, 120)
        bench.runner.start()
        await until(lambda: len(bench.callers) >= 150)
        await bench.runner.stop()

    asyncio.run(trial())
    counts = Counter(bench.callers[20:150])
    # A line of "wordy" has three times as many tokens: 1/3 : 1 : 2 lines.
    expected = {"wordy": 13, "calm": 39, "heavy": 78}
    assert counts == pytest.approx(expected, abs=4)


def test_a_caller_with_one_line_does_not_wait_for_all_of_another(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, concurrency=2, line_s=0.01, hurried_s=0.01)

    async def trial() -> None:
        bench.accept(bench.add(200, window_s=60, caller="busy"), 200)
        bench.runner.start()
        await until(lambda: len(bench.callers) >= 20)
        single = bench.add(1, window_s=3600, caller="single")
        await until(lambda: bench.num_done(single))
        await bench.runner.stop()

    asyncio.run(trial())
    assert bench.callers.count("busy") < 150

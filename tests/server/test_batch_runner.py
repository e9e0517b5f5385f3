"""What the runner does when its database does not answer, and when batches are late: no server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from types import SimpleNamespace

import pytest

from omniserve.server.batches.claims import ClaimedLine, Claims, LineKey, LineResult
from omniserve.server.batches.leftovers import NewFile
from omniserve.server.batches.lines import CheckedLine
from omniserve.server.batches.runner import BatchRunner
from omniserve.server.batches.running_lines import RunningLine
from omniserve.server.batches.settings import BatchSettings
from omniserve.server.batches.storage import Storage
from omniserve.server.batches.store import NewBatch

PATIENCE_S = 60


class Bench:
    """A runner whose lines take as long as is said, and that looks at the clock often."""

    def __init__(self, folder, monkeypatch, *, concurrency: int, line_s: float, hurried_s: float) -> None:
        settings = BatchSettings(data_dir=folder, concurrency=concurrency)
        self.storage = Storage.open(settings)
        self.starts: Counter[LineKey] = Counter()
        self.hurried: list[LineKey] = []
        self.stopped: list[LineKey] = []
        self._seconds = (line_s, hurried_s)
        monkeypatch.setattr("omniserve.server.batches.running_lines.run_line", self._run_line)
        for place in ("runner", "loops"):
            monkeypatch.setattr(f"omniserve.server.batches.{place}.POLL_S", 0.05)
        service = SimpleNamespace(model_name="m", check_open=lambda: None, check_model=lambda model: None)
        self.runner = BatchRunner(service, self.storage, settings)  # type: ignore[arg-type]

    async def _run_line(self, service, line: ClaimedLine, raw: bytes, *, escalated: bool) -> LineResult:
        self.starts[line.key] += 1
        if escalated:
            self.hurried.append(line.key)
        try:
            await asyncio.sleep(self._seconds[escalated])
        except asyncio.CancelledError:
            self.stopped.append(line.key)
            raise
        return LineResult(key=line.key, ok=True, text="{}")

    def add(self, num_lines: int, window_s: float, model: str = "m") -> str:
        body = {"model": model, "prompt": "x"}
        lines = [
            {"custom_id": f"{i}", "method": "POST", "url": "/v1/completions", "body": body} for i in range(num_lines)
        ]
        file_id, num_bytes = self.storage.write_file([json.dumps(line).encode() + b"\n" for line in lines])
        self.storage.store.add_file(NewFile(id=file_id, filename="f", purpose="batch", num_bytes=num_bytes))
        batch = NewBatch(
            model=model, endpoint="/v1/completions", input_file_id=file_id, completion_window="1h", window_s=window_s,
            metadata=None,
        )  # fmt: skip
        batch_id: str = self.storage.store.create_batch(batch)["id"]
        self.runner.notice()
        return batch_id

    def num_done(self, batch_id: str) -> int:
        return self.storage.store.batch(batch_id)["completed"]

    def accept(self, batch_id: str, num_lines: int = 1) -> None:
        """Validate a batch."""
        model = self.storage.store.batch(batch_id)["model"]
        assert self.storage.progress.claim_batch("other", model, PATIENCE_S)["id"] == batch_id
        lines = [CheckedLine(i + 1, f"{i}", 0, 10) for i in range(num_lines)]
        assert self.storage.progress.accept_lines(batch_id, "other", lines)


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


@pytest.mark.parametrize("where", ["at another server", "at a server of another model"])
def test_nobody_gives_way_to_a_late_batch_that_has_no_line_to_run(tmp_path, monkeypatch, where):
    bench = Bench(tmp_path, monkeypatch, concurrency=1, line_s=0.3, hurried_s=0.3)

    async def trial() -> None:
        late = bench.add(1, window_s=2, model="other" if where == "at a server of another model" else "m")
        bench.accept(late)
        if where == "at another server":
            other = Claims(bench.storage.database, owner="other", model="m", lease_s=PATIENCE_S)
            assert [line.key for line in other.claim(1)] == [(late, 1)]
        on_time = bench.add(12, window_s=3600)
        bench.runner.start()
        await until(lambda: bench.num_done(on_time) == 12)
        assert bench.storage.store.batch(late)["status"] != "in_progress", "its window is over"
        await bench.runner.stop()
        assert bench.starts == Counter({(on_time, i + 1): 1 for i in range(12)})

    asyncio.run(trial())


def test_nobody_gives_way_to_a_late_batch_whose_file_is_gone_again_and_again(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, concurrency=1, line_s=0.2, hurried_s=0.2)

    async def trial() -> None:
        damaged = bench.add(1, window_s=61)
        bench.accept(damaged, num_lines=1000)
        bench.storage.files.remove(bench.storage.store.batch(damaged)["input_file_id"])
        on_time = bench.add(10, window_s=60)
        bench.runner.start()
        await until(lambda: bench.num_done(on_time) == 10)
        await bench.runner.stop()
        assert bench.storage.store.batch(damaged)["problem"] is not None and bench.starts.total() <= 11

    asyncio.run(trial())


def test_batch_that_waits_for_its_turn_is_not_late_for_that(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, concurrency=2, line_s=0.5, hurried_s=0.5)

    async def trial() -> None:
        first = bench.add(12, window_s=43_200)
        bench.runner.start()
        await until(lambda: bench.starts)
        second = bench.add(20_000, window_s=43_200)  # 5,000 s
        await until(lambda: bench.num_done(first) == 12 and bench.num_done(second) >= 2)
        await bench.runner.stop()
        assert not bench.hurried
        assert len(bench.stopped) <= 2, "those that run as it stops"

    asyncio.run(trial())


def test_lines_are_dropped_at_the_end_of_their_lease_even_if_the_database_hangs(tmp_path, monkeypatch):
    settings = BatchSettings(data_dir=tmp_path, lease_s=0.3)
    storage = Storage.open(settings)
    answers = threading.Event()

    async def trial() -> None:
        runner = BatchRunner(SimpleNamespace(model_name="m"), storage, settings)  # type: ignore[arg-type]
        line = ClaimedLine(
            batch_id="b", number=1, custom_id="x", endpoint="e", input_file_id="f", start=0, length=1,
            engine_stops=0, escalated=False,
        )  # fmt: skip
        entry = RunningLine(line, b"", False, asyncio.create_task(asyncio.sleep(PATIENCE_S)))
        runner._running.add(entry)

        def hang() -> set[object]:
            assert answers.wait(PATIENCE_S)
            return set()

        monkeypatch.setattr(runner._claims, "renew", hang)
        renewing = asyncio.create_task(runner._leases.renew())
        while runner._running.by_key:
            await asyncio.sleep(0.01)
        assert entry.task.cancelled() and not renewing.done()
        answers.set()
        await renewing
        await runner.stop()

    try:
        asyncio.run(trial())
    finally:
        answers.set()

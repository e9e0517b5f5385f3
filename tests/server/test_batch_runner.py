"""What the runner does when its database does not answer: no server."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

from omniserve.server.batches.claims import ClaimedLine
from omniserve.server.batches.runner import BatchRunner
from omniserve.server.batches.running_lines import RunningLine
from omniserve.server.batches.settings import BatchSettings
from omniserve.server.batches.storage import Storage

PATIENCE_S = 60


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

"""The two files that a batch ends with: answers, and errors, each in the order of the input."""

from __future__ import annotations

from collections.abc import Iterator

from omniserve.server.batches.database import StorageError
from omniserve.server.batches.leftovers import NewFile
from omniserve.server.batches.line_run import not_run_text
from omniserve.server.batches.progress import Progress
from omniserve.server.batches.rows import Row
from omniserve.server.batches.storage import Storage

_LINES_PER_READ = 500


def finish(storage: Storage, batch: Row, owner: str) -> bool:
    """Write the output file and the error file of a batch whose lines are done, and end it; one without lines is not.

    The files are new ones each time: who comes too late, or does it again after a crash, cannot touch what was given
    out.

    Returns:
        False if the batch is no longer the owner's.

    Raises:
        StorageError: Disk or database do not work.
    """
    written: list[NewFile] = []
    finished = False
    try:
        files = {ok: _write(storage, batch, ok, written) for ok in (True, False)}
        finished = storage.progress.finish_batch(batch["id"], owner, files[True], files[False])
    finally:
        if not finished:
            storage.discard(*(file.id for file in written))
    return finished


def _write(storage: Storage, batch: Row, ok: bool, written: list[NewFile]) -> NewFile | None:
    if not (batch["completed"] if ok else batch["failed"]):
        return None
    file_id, num_bytes = storage.write_file(_texts(storage.progress, batch, ok))
    file = NewFile(
        id=file_id,
        filename=f"{batch['id']}_{'output' if ok else 'error'}.jsonl",
        purpose="batch_output",
        num_bytes=num_bytes,
        expires_after_s=batch["outputs_expire_after_s"],
        caller=batch["caller"],
    )
    written.append(file)
    return file


def _texts(progress: Progress, batch: Row, ok: bool) -> Iterator[bytes]:
    after, num_lines = 0, 0
    while rows := progress.results(batch["id"], after, _LINES_PER_READ):
        for row in rows:
            if row["ok"] is ok:
                num_lines += 1
                text = row["result"] or not_run_text(row["custom_id"], batch["outcome"])
                yield text.encode() + b"\n"
        after = rows[-1]["number"]
    expected = batch["completed"] if ok else batch["failed"]
    if num_lines != expected:
        raise StorageError(
            f"the database has {num_lines} of {expected} results of the batch {batch['id']}: another server has ended "
            "it in the meantime, or the database is damaged",
            status=500,
            code="storage_damaged",
        )

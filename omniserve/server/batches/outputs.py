"""The two files that a batch ends with: answers, and errors, each in the order of the input."""

from __future__ import annotations

from collections.abc import Iterator

from omniserve.server.batches.files import FileFolder
from omniserve.server.batches.line_run import not_run_text
from omniserve.server.batches.store import NewFile, Row, Store

_LINES_PER_READ = 500


def write_outputs(store: Store, files: FileFolder, batch: Row) -> tuple[NewFile | None, NewFile | None]:
    """Write the output file and the error file of a batch whose lines are done; None for one without lines.

    The files' ids follow from the batch's: who does it again after a crash writes the same files again.

    Raises:
        StorageError: Disk or database do not work.
    """
    return _write(store, files, batch, ok=True), _write(store, files, batch, ok=False)


def _write(store: Store, files: FileFolder, batch: Row, *, ok: bool) -> NewFile | None:
    if not (batch["completed"] if ok else batch["failed"]):
        return None
    kind = "output" if ok else "error"
    file_id = f"file-{batch['id'].removeprefix('batch_')}-{kind}"
    return NewFile(
        id=file_id,
        filename=f"{batch['id']}_{kind}.jsonl",
        purpose="batch_output",
        num_bytes=files.write(file_id, _texts(store, batch, ok)),
        expires_after_s=batch["outputs_expire_after_s"],
    )


def _texts(store: Store, batch: Row, ok: bool) -> Iterator[bytes]:
    after = 0
    while rows := store.results(batch["id"], after, _LINES_PER_READ):
        for row in rows:
            if row["ok"] is ok:
                text = row["result"] or not_run_text(row["custom_id"], batch["outcome"])
                yield text.encode() + b"\n"
        after = rows[-1]["number"]

"""A disk that is full: clear errors, and everything goes on when there is room again."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from batch_inputs import PATIENCE_S, completion_line, prompt_of, results, submit, upload, wait_for


@pytest.fixture
def small_disk(tmp_path) -> Iterator[tuple[Path, Callable[[int], None]]]:
    """A folder on a disk of its own, and what gives the disk another size in KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(*options: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(["mount", "-t", "tmpfs", "-o", *options, "tmpfs", str(folder)], capture_output=True)

    try:
        mounted = mount("size=2m")
    except FileNotFoundError:
        pytest.skip("there is no mount program")
    complaint = mounted.stderr.decode().strip()
    if any(sign in complaint for sign in ("permission denied", "not permitted", "superuser")):
        pytest.skip(f"a disk of its own needs the right to mount: {complaint}")
    assert mounted.returncode == 0, complaint

    def resize(num_kib: int) -> None:
        assert mount(f"remount,size={num_kib}k").returncode == 0

    try:
        yield folder, resize
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def used_kib(folder: Path) -> int:
    done = subprocess.run(["df", "--output=used", "-k", str(folder)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


@pytest.mark.slow
def test_full_disk_is_told_and_batches_go_on_when_there_is_room(start_server, small_disk):
    folder, resize = small_disk
    server = start_server("--data-dir", str(folder), "--limit", "batch_concurrency=8").wait_until_ready()
    client = server.client()
    with pytest.raises(openai.APIStatusError, match="no room") as caught:
        upload(client, b"x" * (3 << 20))
    assert (caught.value.status_code, caught.value.code) == (507, "storage_full")
    assert client.files.list().data == [], "nothing is half there"

    lines = [completion_line(i, prompt=prompt_of(0, i), max_tokens=100) for i in range(1000)]
    batch = submit(client, lines)
    wait_for(client, batch.id, ["in_progress"])
    resize(used_kib(folder) + 64)
    deadline = time.monotonic() + PATIENCE_S
    while not any("no room" in entry for entry in server.log):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    done = client.batches.retrieve(batch.id).request_counts.completed
    assert done < 1000
    with pytest.raises(openai.APIStatusError, match="no room"):
        upload(client, b"x" * (1 << 20))
    resize(64 << 10)
    batch = wait_for(client, batch.id)
    assert batch.status == "completed" and batch.omniserve["problem"] is None
    assert batch.request_counts.model_dump() == {"total": 1000, "completed": 1000, "failed": 0}
    assert len(results(client, batch.output_file_id)) == 1000
    known = {file.id for file in client.files.list()}
    assert {path.name for path in (folder / "files").iterdir()} == known

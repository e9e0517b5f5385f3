"""Input files, files on the disk, and urgency: no server."""

from __future__ import annotations

import errno
import io
import json
import os

import pytest

from omniserve.server.batches.database import StorageError
from omniserve.server.batches.files import FileFolder
from omniserve.server.batches.lines import MAX_LINE_BYTES, body_of, check_file
from omniserve.server.batches.urgency import Pace, num_urgent, predict
from omniserve.server.cli import parse_args
from omniserve.server.errors import ApiError
from omniserve.server.fields import UnknownFields

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def check(content: bytes, max_lines: int = 10):
    def only_m(model):
        if model not in (None, "m"):
            raise ApiError("no such model", code="model_not_found")

    return check_file(io.BytesIO(content), "/v1/completions", only_m, max_lines, UnknownFields())


def changed(**fields) -> bytes:
    line = {name: value for name, value in (GOOD | fields).items() if value is not ...}
    return json.dumps(line).encode()


def test_lines_are_found_where_they_are():
    lines = [changed(custom_id="é", body={"prompt": "日本"}), changed(custom_id="b", body={"model": "m"})]
    content = lines[0] + b"\r\n\n  \n" + lines[1]  # no newline at the end
    found = check(content)
    assert not found.faults
    assert [(line.number, line.custom_id) for line in found.lines] == [(1, "é"), (4, "b")]
    for line, raw in zip(found.lines, lines, strict=True):
        part = content[line.start : line.start + line.length]
        assert json.loads(body_of(part)) == json.loads(raw)["body"]


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b"\xff\xfe{}", "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (changed(custom_id=...), "missing_required_parameter", "custom_id"),
        (changed(body=...), "missing_required_parameter", "body"),
        (changed(custom_id=7), "invalid_custom_id", "custom_id"),
        (changed(custom_id=""), "invalid_custom_id", "custom_id"),
        (changed(custom_id="a\0b"), "invalid_custom_id", "custom_id"),
        (changed(custom_id="\ud800"), "invalid_json_line", None),
        (changed(method="GET"), "invalid_method", "method"),
        (changed(url="/v1/chat/completions"), "mismatched_url", "url"),
        (changed(body=[]), "invalid_body", "body"),
        (changed(body={"model": "other"}), "model_not_found", "body.model"),
        (changed(body={"model": 5}), "invalid_model", "body.model"),
    ],
)
def test_fault_names_its_line(raw, code, param):
    (fault,) = check(changed(custom_id="first") + b"\n" + raw + b"\n").faults
    assert (fault.line, fault.code, fault.param) == (2, code, param)


def test_byte_order_marks_before_lines_are_skipped():
    # Two files, each with a mark and the first without a newline before its end; then an empty one, with a mark.
    lines = [changed(custom_id=name) for name in "abc"]
    mark = "\ufeff".encode()
    content = mark + lines[0] + b"\r\n" + lines[1] + b"\n" + mark + lines[2] + b"\n" + mark + b"\n" + mark
    found = check(content)
    assert not found.faults
    assert [(line.number, line.custom_id) for line in found.lines] == [(1, "a"), (2, "b"), (3, "c")]
    for line in found.lines:
        assert json.loads(body_of(content[line.start : line.start + line.length])) == GOOD["body"]
    [fault] = check(mark + lines[0] + mark + lines[1]).faults
    assert "each request needs a line of its own" in fault.message


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_file_in_another_encoding_is_told_plainly(encoding):
    text = (changed() + b"\n" + changed(custom_id="b") + b"\n").decode()
    [fault] = check(text.encode(encoding)).faults
    assert (fault.code, fault.line) == ("invalid_encoding", None)
    assert fault.message == f"the file is {encoding[:6].upper()}; save it as UTF-8"
    # Behind lines that are UTF-8.
    faults = check(changed() + b"\n" + text.encode(encoding)).faults
    assert f"the text is {encoding[:6].upper()}; send UTF-8" in faults[0].message


def test_unknown_fields_of_a_line_are_dropped_or_refused():
    def found(refuse):
        file = io.BytesIO(changed(colour=1, hue=None))
        return check_file(file, "/v1/completions", lambda _: None, 10, UnknownFields(refuse=refuse))

    assert [line.custom_id for line in found(False).lines] == ["a"]
    [fault] = found(True).faults
    assert (fault.line, fault.code, fault.param) == (1, "unknown_parameter", "colour")


def test_empty_file_too_many_lines_and_too_many_faults():
    assert [fault.code for fault in check(b" \n\n").faults] == ["empty_file"]
    many = b"\n".join(changed(custom_id=str(i)) for i in range(4))
    assert not check(many, max_lines=4).faults
    assert [(fault.code, fault.line) for fault in check(many, max_lines=3).faults] == [("too_many_requests", 4)]
    assert len(check(b"x\n" * 1000).faults) == 100


def test_line_that_is_too_long_does_not_hide_the_next_one():
    long = changed(body={"prompt": "x" * (2 * MAX_LINE_BYTES + 5)})
    found = check(long + b"\nno JSON")
    assert [(fault.line, fault.code) for fault in found.faults] == [(1, "line_too_long"), (2, "invalid_json_line")]


def test_file_is_whole_or_not_there(tmp_path):
    folder = FileFolder(tmp_path / "files")
    assert folder.write("a", [b"one", b"two"]) == 6
    assert folder.path("a", 6).read_bytes() == b"onetwo"
    assert folder.read_part("a", 2, 3) == b"etw"

    def broken():
        yield b"some"
        assert not (tmp_path / "files" / "b").exists()
        raise RuntimeError("the client went away")

    with pytest.raises(RuntimeError):
        folder.write("b", broken())
    assert os.listdir(tmp_path / "files") == ["a"]


def test_two_writers_of_one_name_do_not_mix(tmp_path):
    first, second = FileFolder(tmp_path), FileFolder(tmp_path)

    def parts():
        yield b"first "
        second.write("a", [b"the second"])
        yield b"writer"

    first.write("a", parts())
    assert (tmp_path / "a").read_bytes() == b"first writer" and os.listdir(tmp_path) == ["a"]


def test_new_names_survive_a_power_cut(tmp_path, monkeypatch):
    synced: set[tuple[int, int]] = set()
    fsync = os.fsync

    def note(descriptor):
        found = os.fstat(descriptor)
        synced.add((found.st_dev, found.st_ino))
        fsync(descriptor)

    def is_synced(path):
        return (path.stat().st_dev, path.stat().st_ino) in synced

    monkeypatch.setattr(os, "fsync", note)
    folder = FileFolder(tmp_path / "new" / "files")
    assert is_synced(tmp_path) and is_synced(tmp_path / "new")
    assert not is_synced(tmp_path / "new" / "files")
    folder.write("a", [b"x"])
    assert is_synced(tmp_path / "new" / "files") and is_synced(tmp_path / "new" / "files" / "a")


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 507), (errno.EDQUOT, 507), (errno.EIO, 503)])
def test_disk_that_fails_keeps_what_was_there(tmp_path, monkeypatch, number, status):
    folder = FileFolder(tmp_path)
    folder.write("a", [b"old"])

    def fail(_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StorageError, match=os.strerror(number)) as caught:
            folder.write("a", [b"new"])
    assert caught.value.status == status
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_bytes() == b"old"


def test_damaged_files_are_told(tmp_path):
    folder = FileFolder(tmp_path)
    folder.write("a", [b"12345"])
    for call in (lambda: folder.path("a", 6), lambda: folder.read_part("a", 3, 3), lambda: folder.open("b")):
        with pytest.raises(StorageError, match="damaged or missing"):
            call()
    folder.remove("a")
    folder.remove("a")
    with pytest.raises(StorageError, match="damaged or missing"):
        folder.path("a", 5)


def test_only_abandoned_remains_are_removed(tmp_path):
    folder = FileFolder(tmp_path)
    for name, age_s in ((".unfinished-old", 9999), (".unfinished-new", 5), ("file-old", 9999)):
        (tmp_path / name).touch()
        then = os.stat(tmp_path).st_mtime - age_s
        os.utime(tmp_path / name, (then, then))
    folder.remove_abandoned()
    assert sorted(os.listdir(tmp_path)) == [".unfinished-new", "file-old"]


def test_urgency_is_the_share_of_the_speed_that_is_missing():
    assert num_urgent(80, 100, 64) == 0
    assert num_urgent(90, 100, 64) == 0
    assert num_urgent(180, 100, 64) == 32
    assert num_urgent(91, 100, 64) == 1
    assert num_urgent(10, 0, 64) == num_urgent(10, -5, 64) == 64
    assert num_urgent(0, -1, 64) == 64, "the window is over before it is known what a line takes"


def test_pace_is_learned_from_what_was_done():
    pace = Pace()
    for second in range(101):
        pace.add(second, 2 * second, 4)
    assert pace.line_s == pytest.approx(2, rel=0.02)
    for second in range(101, 201):  # ten times slower: the old speed is forgotten
        pace.add(second, 200 + (second - 100) // 5, 4)
    assert pace.line_s == pytest.approx(20, rel=0.1)


def test_lines_under_way_take_as_long_as_they_have_run_at_least():
    pace = Pace()
    for second in range(2001):
        pace.add(second, 0, 8)
    assert pace.line_s == 2000
    pace.add(2001, 1, 8)  # the first of eight that ran side by side
    assert pace.line_s == 2001


def test_batch_that_waits_for_its_turn_has_no_pace():
    pace = Pace()
    for second in range(100):
        pace.add(second, 0, 0)
    assert pace.line_s is None
    for second in range(100, 131):
        pace.add(second, (second - 100) // 3, 1)
    assert pace.line_s == pytest.approx(3, rel=0.1)
    for second in range(131, 5000):  # others come before it again
        pace.add(second, 10, 0)
    assert pace.line_s == pytest.approx(3, rel=0.2)


def test_batches_are_predicted_one_behind_the_other():
    assert predict([(200, 6.0), (20_000, None)], 4) == [300, 30_300]
    assert predict([(200, 6.0), (100, 12.0), (10, None)], 4) == [300, 600, 622.5]
    assert predict([(7, None), (9, None)], 0) == [0, 0], "nobody ran yet"
    assert predict([(1, 8.0)], 64) == [8.0], "one line is not shared out"


def test_password_of_the_database_is_not_printed(capsys):
    with pytest.raises(SystemExit):
        parse_args(
            ["--database-url", "postgresql://me:secret@host/name", "--limit", "max_file_mib=7", "--print-config"]
        )
    printed = capsys.readouterr().out
    assert "secret" not in printed and "# database-url: not shown" in printed and "limit: [max_file_mib=7] " in printed

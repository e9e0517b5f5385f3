"""The owner's lock, its fence, and what it writes: SQLite, and PostgreSQL where its programs are installed."""

from __future__ import annotations

import dataclasses
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import URL, Engine, event, make_url

from omniserve.server.batches.database import BATCHES, FILES, Database, StorageError
from omniserve.server.batches.files import BatchSettings, FileFolder, refuse_network_folder
from omniserve.server.batches.lines import CheckedLine, LineFault, LineResult
from omniserve.server.batches.locks import Lock, make_lock
from omniserve.server.batches.owner import NotOwner, Owner
from omniserve.server.batches.runner import finish
from omniserve.server.batches.store import NewBatch, NewFile, Store, make_known
from omniserve.server.errors import ApiError


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(params=["sqlite", "postgres"])
def url(request, tmp_path) -> URL:
    if request.param == "sqlite":
        return make_url(f"sqlite:///{tmp_path}/db.sqlite3")
    return make_url(request.getfixturevalue("postgres"))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def database(url, clock) -> Iterator[Database]:
    database = opened_empty(url, clock)
    yield database
    database.close()


def opened_empty(url: URL, clock: Clock | None = None) -> Database:
    database = Database(url, clock)
    with database.write() as connection:
        for table in ("files", "leftovers", "batches", "lines", "owners"):
            connection.exec_driver_sql(f"delete from omniserve_{table}")
    return database


class Held:
    """The owner of a database's batches, as a process of its own would be."""

    def __init__(self, database: Database, model: str = "m") -> None:
        self.lock: Lock = make_lock(database, model)
        owner = Owner.take(database, self.lock, model)
        assert owner is not None, "another one has the lock"
        self.owner: Owner = owner


@pytest.fixture
def owner(database) -> Iterator[Owner]:
    held = Held(database)
    yield held.owner
    held.lock.release()


class NoDisk:
    """A stand-in for a folder of files: nothing is written, and what is removed is noted."""

    def __init__(self) -> None:
        self.removed: list[str] = []
        self.is_broken = False

    def write(self, file_id: str, parts) -> int:
        return sum(map(len, parts))

    def remove(self, file_id: str) -> None:
        if self.is_broken:
            raise StorageError("the disk is broken")
        self.removed.append(file_id)

    def remove_abandoned(self) -> None:
        pass


def store_of(database: Database, disk: NoDisk | None = None) -> Store:
    return Store(database, disk or NoDisk())  # type: ignore[arg-type]


def make_file(database: Database, **fields) -> str:
    return store_of(database).add_file(NewFile(filename="f", purpose="batch", **fields), [b"x"])["id"]


def new_batch(database: Database, *, window_s: float = 3600.0, model: str = "m") -> str:
    return store_of(database).create_batch(
        NewBatch(
            model=model,
            endpoint="/v1/completions",
            input_file_id=make_file(database),
            completion_window="1h",
            window_s=window_s,
            metadata=None,
        )
    )["id"]


def make_batch(owner: Owner, num_lines: int, *, window_s: float = 3600.0) -> str:
    """Return a batch of which the lines are pending."""
    batch_id = new_batch(owner._database, window_s=window_s)
    found = owner.next_batch()
    assert found is not None and found["id"] == batch_id
    assert owner.accept_lines(batch_id, [CheckedLine(i + 1, f"id-{i}", 10 * i, 10) for i in range(num_lines)])
    return batch_id


def result(key, text="{}", ok=True) -> LineResult:
    return LineResult(key=key, ok=ok, text=text, num_input_tokens=3, num_output_tokens=4)


def keys_of(lines) -> list[tuple[str, int]]:
    return [line.key for line in lines]


def test_one_process_at_a_time_owns_the_batches_of_a_model(url, database):
    first, other = Held(database), Held(database, "other")
    second = Database(url)
    lock = make_lock(second, "m")
    assert Owner.take(second, lock, "m") is None
    first.owner.prove()
    first.lock.release()
    assert Owner.take(second, lock, "m") is not None
    with pytest.raises(NotOwner, match="another process has the lock"):
        first.owner.prove()
    other.owner.prove()
    for held in (other.lock, lock):
        held.release()
    second.close()


def test_former_owner_changes_nothing(url, database, clock):
    """Whatever it was about to write; with its lock lost without its knowledge."""
    former = Held(database)
    batch, unchecked = make_batch(former.owner, 3, window_s=100), new_batch(database, window_s=100)
    (key, *_) = keys_of(former.owner.pending_lines(3))
    former.lock.release()
    now = Held(database)
    clock.now_s += 200
    before = dict(store_of(database).batch(batch))
    for write in (
        lambda: former.owner.save([result(key)]),
        lambda: former.owner.escalate([key]),
        lambda: former.owner.note_engine_stops(key, 1),
        lambda: former.owner.put_off(batch, "held up"),
        lambda: former.owner.accept_lines(unchecked, [CheckedLine(1, "x", 0, 1)]),
        lambda: former.owner.fail_batch(unchecked, [LineFault("m", "c")]),
        lambda: former.owner.finish_batch(batch, None, None),
        former.owner.expire_batches,
    ):
        with pytest.raises(NotOwner, match="taken over"):
            write()
    assert dict(store_of(database).batch(batch)) == before
    assert store_of(database).batch(unchecked)["status"] == "validating"
    assert len(now.owner.pending_lines(9)) == 3 and not any(line.engine_stops for line in now.owner.pending_lines(9))
    assert now.owner.save([result(key)]) == [] and now.owner.save([result(key)]) == [key]
    now.lock.release()


def test_lock_that_was_lost_is_taken_again_unless_another_server_had_it(url, database):
    held = Held(database)
    held.lock.release()
    held.owner.prove()
    assert Owner.take(database, make_lock(Database(url), "m"), "m") is None, "it has the lock"
    held.lock.release()
    other = Held(database)
    other.lock.release()
    with pytest.raises(NotOwner):
        held.owner.prove()
    held.lock.release()


def test_file_of_the_lock_that_is_removed(tmp_path):
    database = Database(make_url(f"sqlite:///{tmp_path}/db"))
    held = Held(database)
    (place,) = tmp_path.glob("*.lock")
    place.unlink()
    assert not held.lock.is_held()
    held.owner.prove()
    place.unlink()
    other = Held(database)
    with pytest.raises(NotOwner):
        held.owner.prove()
    other.lock.release()


def test_lock_of_a_frozen_owner_is_free_after_a_while(postgres, monkeypatch):
    monkeypatch.setattr("omniserve.server.batches.locks._PG_GONE_AFTER_S", 1)
    database = opened_empty(make_url(postgres))
    held, waiting = Held(database), make_lock(database, "m")
    for _ in range(6):
        time.sleep(0.2)
        held.owner.prove()
        assert not waiting.acquire()
    deadline = time.monotonic() + 30
    while not waiting.acquire():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(StorageError):
        held.lock.is_held()
    with pytest.raises(NotOwner):
        held.owner.prove()
    waiting.release()
    database.close()


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "ext4"])
def test_network_file_systems_are_refused_for_sqlite(tmp_path, monkeypatch, kind):
    mounts, folder = tmp_path / "mounts", tmp_path / "a share" / "omniserve"
    mounts.write_text(
        "1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n"
        f"2 1 0:50 / {str(tmp_path / 'a share').replace(' ', chr(92) + '040')} rw shared:2 - {kind} server:/x rw\n"
    )
    monkeypatch.setattr("omniserve.server.batches.files._MOUNTS", mounts)
    refuse_network_folder(tmp_path)
    if kind == "ext4":
        Store.open(BatchSettings(data_dir=folder)).database.close()
    else:
        with pytest.raises(StorageError, match=rf"network file system \({kind}\).*local disk.*--database-url"):
            Store.open(BatchSettings(data_dir=folder))


def version_3(database: Database) -> None:
    """Give the tables the columns that they had in version 3."""
    with database.write() as connection:
        connection.exec_driver_sql("alter table omniserve_batches drop column cached_tokens")
        connection.exec_driver_sql("update omniserve_schema set version = 3")


def version_2(database: Database) -> None:
    """Give the tables the columns that they had in version 2."""
    version_3(database)
    with database.write() as connection:
        for table in ("batches", "lines"):
            for column in (
                "owner varchar(128)",
                "lease_until double precision not null default 0.0",
                "not_before double precision not null default 0.0",
            ):
                connection.exec_driver_sql(f"alter table omniserve_{table} add column {column}")
        connection.exec_driver_sql("create index omniserve_lines_by_owner on omniserve_lines (owner)")
        connection.exec_driver_sql("create index omniserve_lines_by_lease on omniserve_lines (state, lease_until)")
        connection.exec_driver_sql("drop table omniserve_owners")
        connection.exec_driver_sql("update omniserve_schema set version = 2")


def test_a_batch_of_version_3_goes_on_and_counts_cached_tokens(url, database):
    held = Held(database)
    batch = make_batch(held.owner, 3)
    held.owner.save([result((batch, 1))])
    held.lock.release()
    version_3(database)
    for _ in range(2):
        Database(url).close()
    now = Held(Database(url))
    for number, cached in ((2, 16), (3, 32)):
        assert now.owner.save([dataclasses.replace(result((batch, number)), num_cached_tokens=cached)]) == []
    row = store_of(database).batch(batch)
    assert (row["status"], row["completed"], row["cached_tokens"]) == ("finalizing", 3, 48)
    now.lock.release()


def test_half_done_batch_of_version_2_is_taken_over(url, database):
    held = Held(database)
    batch, unchecked = make_batch(held.owner, 5), new_batch(database)
    held.owner.save([result((batch, 1), "old")])
    held.owner.note_engine_stops((batch, 3), 2)
    held.lock.release()
    version_2(database)
    with database.write() as connection:  # a server of version 2 died while it ran two lines and checked a batch
        claim = "set owner = 'dead', lease_until = 1e12, not_before = 1e12"
        connection.exec_driver_sql(f"update omniserve_lines {claim}, state = 1 where number in (2, 3)")
        connection.exec_driver_sql(f"update omniserve_batches {claim}")

    for _ in range(2):
        migrated = Database(url)
        migrated.close()
    now = Held(Database(url))
    assert now.owner.next_batch()["id"] == unchecked
    assert now.owner.accept_lines(unchecked, [CheckedLine(1, "x", 0, 1)])
    lines = [line for line in now.owner.pending_lines(9) if line.batch_id == batch]
    assert [line.number for line in lines] == [3, 2, 4, 5] and lines[0].is_suspect
    assert now.owner.save([result((batch, n), "new") for n in range(1, 6)]) == [(batch, 1)]
    assert [line["result"] for line in now.owner.results(batch, 0, 9)] == ["old"] + ["new"] * 4
    row = store_of(database).batch(batch)
    assert (row["status"], row["completed"]) == ("finalizing", 5)
    now.lock.release()


def test_lines_come_in_order_and_the_tightest_window_first(database, owner):
    loose, tight = make_batch(owner, 4, window_s=500), make_batch(owner, 3, window_s=100)
    lines = keys_of(owner.pending_lines(4))
    assert lines == [(tight, 1), (tight, 2), (tight, 3), (loose, 1)]
    assert keys_of(owner.pending_lines(9, held=set(lines))) == [(loose, 2), (loose, 3), (loose, 4)]
    owner.put_off(loose, "it cannot be read")
    assert keys_of(owner.pending_lines(9)) == lines[:3]
    assert store_of(database).batch(loose)["problem"] == "it cannot be read"
    assert Held(database, "other").owner.pending_lines(9) == []


def test_lines_of_batches_that_come_first_are_taken_before_all_others(owner):
    tight, loose, looser = (make_batch(owner, 4, window_s=window_s) for window_s in (100, 500, 600))
    keys = keys_of(owner.pending_lines(5, first={looser: 1, loose: 2}))
    assert keys == [(loose, 1), (loose, 2), (looser, 1), (tight, 1), (tight, 2)]
    held = set(keys)
    assert keys_of(owner.pending_lines(1, held=held, first={loose: 3, "gone": 1})) == [(loose, 3)]
    held.add((loose, 3))
    assert keys_of(owner.pending_lines(9, held=held, first={loose: 3}))[:2] == [(loose, 4), (tight, 3)]
    owner.note_engine_stops((loose, 2), 2)
    line = owner.pending_lines(9, first={loose: 1})[0]
    assert line.is_suspect and line.key == (loose, 2)


def test_batches_in_progress_say_how_many_lines_may_be_what_ends_the_engine(owner, clock):
    loose, tight = make_batch(owner, 2, window_s=500), make_batch(owner, 3, window_s=100)
    owner.note_engine_stops((tight, 1), 2)
    owner.note_engine_stops((tight, 2), 2)
    owner.note_engine_stops((tight, 3), 1)
    owner.save([result((tight, 2))])
    now, batches = owner.running_batches()
    assert now == clock.now_s
    assert [(batch["id"], batch["num_suspects"]) for batch in batches] == [(tight, 1), (loose, 0)]


@pytest.mark.parametrize("is_old", [False, True])
def test_suspects_are_found_without_a_look_at_every_line(tmp_path, is_old):
    url = make_url(f"sqlite:///{tmp_path}/db")
    if is_old:
        database = Database(url)
        with database.write() as connection:
            connection.exec_driver_sql("drop index omniserve_lines_suspect")
        database.close()
    database, plans = Database(url), []
    held = Held(database)
    make_batch(held.owner, 1)

    @event.listens_for(Engine, "before_cursor_execute")
    def explain(connection, cursor, statement, parameters, *_):
        if statement.startswith("SELECT omniserve_lines") and "engine_stops >=" in statement:
            plans.extend(cursor.execute(f"explain query plan {statement}", parameters).fetchall())

    try:
        held.owner.pending_lines(1)
    finally:
        event.remove(Engine, "before_cursor_execute", explain)
    assert ["omniserve_lines_suspect" in str(plan) for plan in plans] == [True]
    held.lock.release()
    database.close()


def test_lines_that_may_end_the_engine_run_one_at_a_time(owner):
    first, second = make_batch(owner, 4, window_s=100), make_batch(owner, 1, window_s=200)
    for key in ((first, 1), (first, 3), (second, 1)):
        owner.note_engine_stops(key, 2)
    assert keys_of(owner.pending_lines(9)) == [(first, 1), (first, 2), (first, 4)]
    assert keys_of(owner.pending_lines(9, with_suspect=False)) == [(first, 2), (first, 4)]
    assert keys_of(owner.pending_lines(1)) == [(first, 1)]
    owner.save([result((first, 1)), result((first, 3))])
    assert keys_of(owner.pending_lines(9)) == [(first, 2), (first, 4), (second, 1)]


def test_result_is_written_once_and_the_last_one_closes_the_batch(database, owner):
    store = store_of(database)
    batch = make_batch(owner, 2)
    first, second = keys_of(owner.pending_lines(2))
    assert owner.save([result(first, "one")]) == []
    assert owner.save([result(first, "again")]) == [first]
    assert store.batch(batch)["status"] == "in_progress"
    assert owner.save([result(second, "two", ok=False)]) == []
    row = store.batch(batch)
    assert (row["status"], row["completed"], row["failed"]) == ("finalizing", 1, 1)
    assert (row["input_tokens"], row["output_tokens"]) == (6, 8)
    assert [(line["ok"], line["result"]) for line in owner.results(batch, 0, 9)] == [(True, "one"), (False, "two")]


def test_escalation_and_ends_of_the_engine_survive_a_take_over(database):
    before = Held(database)
    batch = make_batch(before.owner, 2)
    for _ in range(2):
        before.owner.escalate([(batch, 1)])
        before.owner.note_engine_stops((batch, 2), 1)
    before.lock.release()
    now = Held(database)
    assert store_of(database).batch(batch)["escalated"] == 1
    found = [(line.escalated, line.engine_stops) for line in now.owner.pending_lines(2)]
    assert found == [(True, 0), (False, 1)]
    now.owner.escalate([(batch, 1), (batch, 2)])
    assert store_of(database).batch(batch)["escalated"] == 2
    now.lock.release()


@pytest.mark.parametrize("end", ["cancel", "expire"])
def test_end_of_a_batch_takes_its_lines_from_the_owner(database, owner, clock, end):
    store = store_of(database)
    batch = make_batch(owner, 4, window_s=100)
    keys = keys_of(owner.pending_lines(3))
    owner.save([result(keys[0])])
    if end == "cancel":
        assert store.cancel_batch(batch)["status"] == "cancelling"
    else:
        clock.now_s += 100
        owner.expire_batches()
        assert store.batch(batch)["status"] == "finalizing"
    assert owner.save([result(keys[1])]) == [keys[1]]
    assert owner.pending_lines(9) == [] and owner.running_batches()[1] == []
    row = store.batch(batch)
    assert (row["completed"], row["failed"]) == (1, 3)
    assert [line["result"] for line in owner.results(batch, 0, 9)] == ["{}", None, None, None]


def test_cancelling_while_results_are_written_keeps_them_all(database, owner):
    store = store_of(database)
    batch = make_batch(owner, 1)
    owner.save([result((batch, 1))])
    assert owner.next_batch()["id"] == batch
    owner.put_off(batch, "the disk is full")
    assert owner.next_batch() is None
    assert store.cancel_batch(batch)["status"] == "cancelling"
    file = store.write_file(NewFile(id="file-out", filename="o", purpose="batch_output"), [b"x"])
    assert owner.finish_batch(batch, file, None)
    row = store.batch(batch)
    assert (row["status"], row["output_file_id"], row["completed"]) == ("cancelled", "file-out", 1)
    assert owner.results(batch, 0, 9) == [] and not owner.finish_batch(batch, None, None)


def test_batch_without_a_server_of_its_model_is_finalized_by_another_one(database, owner, clock):
    other = Held(database, "other")
    expired, cancelled = new_batch(database, window_s=10), new_batch(database)
    clock.now_s += 10
    other.owner.expire_batches()
    store_of(database).cancel_batch(cancelled)
    assert other.owner.next_batch() is None, "it is left to the server of its model"
    clock.now_s += 60
    for _ in range(2):
        batch = other.owner.next_batch()["id"]
        assert batch in (expired, cancelled) and other.owner.finish_batch(batch, None, None)
    assert other.owner.next_batch() is None
    other.lock.release()


def test_cancelled_while_it_is_checked(database, owner):
    store = store_of(database)
    file_id = make_file(database)
    new = NewBatch(model="m", endpoint="e", input_file_id=file_id, completion_window="1h", window_s=9, metadata=None)
    batch = store.create_batch(new)["id"]
    store.cancel_batch(batch)
    assert not owner.accept_lines(batch, [CheckedLine(1, "x", 0, 1)])
    assert not owner.fail_batch(batch, [LineFault("m", "c")])
    assert store.batch(batch)["status"] == "cancelling"
    with pytest.raises(ApiError, match="not finished"):
        store.delete_file(file_id)


def test_input_file_that_has_expired_is_not_taken_and_one_that_is_read_stays(database, clock):
    disk = NoDisk()
    store = store_of(database, disk)

    def new(file_id: str) -> NewBatch:
        return NewBatch(
            model="m", endpoint="e", input_file_id=file_id, completion_window="1h", window_s=9, metadata=None
        )

    used, unused, lasting = (make_file(database, expires_after_s=after_s) for after_s in (100, 100, None))
    store.create_batch(new(used))
    clock.now_s += 100
    with pytest.raises(ApiError, match="has expired"):
        store.create_batch(new(unused))
    store.sweep()
    assert {row["id"] for row in store.page(FILES, limit=9).rows} == {used, lasting}
    assert disk.removed == [unused]
    for row_id in ("file-\0", "file-\ud800", "file-é"):
        with pytest.raises(ApiError, match="there is no file"):
            store.file(row_id)


def test_files_of_who_died_while_writing_are_swept_up_and_no_others(database, clock):
    disk = NoDisk()
    store = store_of(database, disk)
    known = make_file(database)
    dead, discarded = (
        store.write_file(NewFile(id=f"file-{name}", filename="f", purpose="batch"), [b"x"])
        for name in ("dead", "discarded")
    )
    store.discard(known)
    store.sweep()
    assert disk.removed == [], "nobody is dead yet"
    store.discard(discarded.id)
    assert disk.removed == ["file-discarded"]
    clock.now_s += 3600
    disk.is_broken = True
    with pytest.raises(StorageError, match="broken"):
        store.sweep()
    disk.is_broken = False
    store.sweep()
    store.sweep()
    assert disk.removed == ["file-discarded", "file-dead"]
    with pytest.raises(StorageError, match="send it again"), database.write() as connection:
        make_known(connection, dead, clock.now_s)
    with pytest.raises(ApiError, match="there is no file"):
        store.file("file-dead")
    disk.is_broken = True
    store.delete_file(known)
    with pytest.raises(ApiError, match="there is no file"):
        store.file(known)
    disk.is_broken = False
    store.sweep()
    assert disk.removed[2:] == [known]


def test_file_that_took_too_long_to_write_is_not_known_and_not_kept(database, clock):
    disk = NoDisk()
    store = store_of(database, disk)

    def slow():
        yield b"x"
        clock.now_s += 3600
        store.sweep()

    with pytest.raises(StorageError, match="send it again"):
        store.add_file(NewFile(id="file-slow", filename="f", purpose="batch"), slow())
    assert disk.removed == ["file-slow"] and not store.page(FILES, limit=9).rows


def test_who_ends_a_batch_too_late_touches_nothing_of_what_was_given_out(database, clock, tmp_path, monkeypatch):
    monkeypatch.setattr("omniserve.server.batches.runner._LINES_PER_READ", 2)
    store = Store(database, FileFolder(tmp_path / "files"))
    late = Held(database)
    batch_id = make_batch(late.owner, 6)
    late.owner.save([result((batch_id, n), f"line {n}", ok=n % 2 == 0) for n in range(1, 7)])
    batch = late.owner.next_batch()
    read = late.owner.results
    frozen: list[bool] = []

    def freeze_at_the_second_page(*args):
        if args[1:] == (2, 2) and not frozen:
            frozen.append(True)
            late.lock.release()
            now = Held(database)
            assert finish(store, now.owner, batch)
            now.lock.release()
        return read(*args)

    monkeypatch.setattr(late.owner, "results", freeze_at_the_second_page)
    with pytest.raises(StorageError, match="another server has ended it"):
        finish(store, late.owner, batch)
    assert frozen
    row = store.batch(batch_id)
    assert row["status"] == "completed"
    contents = {}
    for column in ("output_file_id", "error_file_id"):
        file = store.file(row[column])
        contents[column] = store.files.path(file["id"], file["num_bytes"]).read_bytes()
    assert contents == {"output_file_id": b"line 2\nline 4\nline 6\n", "error_file_id": b"line 1\nline 3\nline 5\n"}
    clock.now_s += 3600
    store.sweep()
    assert {path.name for path in (tmp_path / "files").iterdir()} == {row["output_file_id"], row["error_file_id"]}


def test_who_loses_a_batch_while_its_files_are_written_leaves_none(database, tmp_path):
    store = Store(database, FileFolder(tmp_path / "files"))
    late = Held(database)
    batch_id = make_batch(late.owner, 2)
    late.owner.save([result((batch_id, 1)), result((batch_id, 2))])
    batch = late.owner.next_batch()
    late.lock.release()
    now = Held(database)
    with pytest.raises(NotOwner):
        finish(store, late.owner, batch)
    assert list((tmp_path / "files").iterdir()) == []
    now.lock.release()


WAITING = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"


@pytest.mark.parametrize("call", ["save", "escalate", "cancel", "expire"])
def test_nobody_waits_in_a_circle(postgres, call):
    """A transaction that locks lines one after the other has locked their batch before."""
    url = make_url(postgres)
    database, other = opened_empty(url), Database(url)
    held = Held(database)
    batch = make_batch(held.owner, 2, window_s=0.0 if call == "expire" else 3600.0)
    keys = [(batch, 1), (batch, 2)]
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: held.owner.save([result(key) for key in keys]),
        "escalate": lambda: held.owner.escalate(keys),
        "cancel": lambda: store_of(database).cancel_batch(batch),
        "expire": held.owner.expire_batches,
    }
    with ThreadPoolExecutor(1) as thread:
        with other.write() as connection:
            line = "select * from omniserve_lines where batch_id = %s and number = %s for update"
            connection.exec_driver_sql("select * from omniserve_batches where id = %s for update", (batch,))
            connection.exec_driver_sql(line, (batch, 2))
            calling = thread.submit(calls[call])
            while not calling.done():
                with database.read() as watching:
                    if watching.exec_driver_sql(WAITING).scalar():
                        break
            connection.exec_driver_sql(line, (batch, 1))
        calling.result()
    held.lock.release()
    database.close()
    other.close()


def test_owner_that_is_frozen_within_a_transaction_does_not_hold_up_the_others(postgres, monkeypatch):
    monkeypatch.setattr("omniserve.server.batches.database._PG_IDLE_TIMEOUT_S", 0.5)
    frozen, other = opened_empty(make_url(postgres)), Database(make_url(postgres))
    held = Held(frozen)
    batch = make_batch(held.owner, 1)
    with pytest.raises(StorageError, match="the database failed"), held.owner.write() as connection:
        connection.exec_driver_sql("update omniserve_batches set problem = 'frozen'")
        held.lock.release()
        now = Held(other)
        assert store_of(other).cancel_batch(batch)["problem"] is None
    assert store_of(frozen).batch(batch)["status"] == "cancelling", "and it can go on"
    with pytest.raises(NotOwner):
        held.owner.put_off(batch, "late")
    now.lock.release()
    frozen.close()
    other.close()


def test_owner_that_is_frozen_while_it_sends_a_statement_does_not_hold_up_the_others(postgres, monkeypatch):
    monkeypatch.setattr("omniserve.server.batches.database._PG_IDLE_TIMEOUT_S", 1.0)
    monkeypatch.setattr("omniserve.server.batches.database._BUSY_TIMEOUT_S", 0.1)
    frozen, other = opened_empty(make_url(postgres)), Database(make_url(postgres))
    held = Held(frozen)
    num_refused = 0
    with pytest.raises(StorageError, match="the database failed"), held.owner.write() as connection:
        half_sent = connection.connection.driver_connection.pgconn
        half_sent.enter_pipeline_mode()
        half_sent.send_query_params(b"select $1::int", [b"1"])  # without the message that ends a statement
        half_sent.send_flush_request()
        half_sent.flush()
        held.lock.release()
        deadline = time.monotonic() + 20
        while True:
            try:
                now = Held(other)
                break
            except StorageError as error:
                assert error.code == "storage_busy" and time.monotonic() < deadline
                num_refused += 1
        half_sent.exit_pipeline_mode()
        connection.exec_driver_sql("select 1")
    assert num_refused > 1, "a transaction is not ended at once"
    make_batch(now.owner, 1)
    with pytest.raises(NotOwner):
        held.owner.put_off("batch", "late")
    now.lock.release()
    frozen.close()
    other.close()


def test_there_is_no_new_owner_while_the_former_one_writes(url, database):
    former = Held(database)
    batch = make_batch(former.owner, 1)
    order: list[str] = []

    def take_over() -> None:
        now = Held(Database(url))
        order.append("taken over")
        now.lock.release()

    with ThreadPoolExecutor(1) as thread:
        with former.owner.write() as connection:
            former.lock.release()
            taking = thread.submit(take_over)
            time.sleep(0.3)
            connection.exec_driver_sql("update omniserve_batches set problem = 'written'")
            order.append("written")
        taking.result()
    assert order == ["written", "taken over"]
    assert store_of(database).batch(batch)["problem"] == "written"


def test_opening_at_once_makes_the_tables_once(url):
    opened: list[Database] = []
    threads = [threading.Thread(target=lambda: opened.append(Database(url))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 4
    for database in opened:
        database.close()


def test_opening_waits_for_who_makes_the_database(tmp_path):
    path = tmp_path / "db.sqlite3"
    # As a server does before it has changed to a write-ahead log; SQLite's own timeout does not count here.
    first = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    first.execute("BEGIN IMMEDIATE")
    order: list[str] = []

    def end() -> None:
        order.append("made")
        first.close()

    timer = threading.Timer(0.5, end)
    timer.start()
    Database(make_url(f"sqlite:///{path}")).close()
    order.append("opened")
    assert order == ["made", "opened"]
    timer.join()


def test_database_of_another_version_is_refused(tmp_path):
    url = make_url(f"sqlite:///{tmp_path}/db")
    database = Database(url)
    with database.write() as connection:
        connection.exec_driver_sql("update omniserve_schema set version = 99")
    database.close()
    with pytest.raises(StorageError, match="schema 99"):
        Database(url)


def test_database_that_is_locked(tmp_path, monkeypatch):
    monkeypatch.setattr("omniserve.server.batches.database._BUSY_TIMEOUT_S", 0.05)
    first = Database(make_url(f"sqlite:///{tmp_path}/db"))
    second = Database(make_url(f"sqlite:///{tmp_path}/db"))
    held = Held(second)
    with first.write():
        with pytest.raises(StorageError, match="locked by another process") as caught:
            held.owner.expire_batches()
        assert caught.value.status == 503 and caught.value.retry_after_s is not None
        assert store_of(second).page(BATCHES, limit=9).rows == [], "reading goes on"
    held.owner.expire_batches()
    held.lock.release()


def test_database_that_is_full_keeps_what_it_had(tmp_path):
    database = Database(make_url(f"sqlite:///{tmp_path}/db"))
    store = store_of(database)
    held = Held(database)
    batch = make_batch(held.owner, 50)
    keys = keys_of(held.owner.pending_lines(50))
    with database.write() as connection:
        pages = connection.exec_driver_sql("pragma page_count").scalar()
        connection.exec_driver_sql(f"pragma max_page_count = {pages}")
    with pytest.raises(StorageError, match="no room") as caught:
        held.owner.save([result(key, "x" * 10_000) for key in keys])
    assert caught.value.status == 507
    assert store.batch(batch)["completed"] == 0
    with database.write() as connection:
        connection.exec_driver_sql("pragma max_page_count = 100000")
    assert held.owner.save([result(key, "x" * 10_000) for key in keys]) == []
    assert store.batch(batch)["completed"] == 50


def test_database_that_is_not_there():
    for wrong in ("nonsense://u:secret@h/x", "mysql://u:secret@h/x", "sqlite://", "sqlite:///:memory:"):
        with pytest.raises(StorageError, match=f"--database-url {wrong[:5]}.*must be postgresql://") as caught:
            Database(make_url(wrong))
        assert "secret" not in str(caught.value)
    pytest.importorskip("psycopg")
    with pytest.raises(StorageError, match="the database failed") as caught:
        Database(make_url("postgresql://user:secret@127.0.0.1:1/none?password=secret"))
    assert "secret" not in str(caught.value)

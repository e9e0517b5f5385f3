"""Claims, leases and results in the database: SQLite, and PostgreSQL where its programs are installed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import URL, Engine, event, make_url

from omniserve.server.batches.claims import Claims, LineResult
from omniserve.server.batches.database import Database, StorageError
from omniserve.server.batches.files import FileFolder
from omniserve.server.batches.leftovers import Leftovers, NewFile
from omniserve.server.batches.lines import CheckedLine, LineFault
from omniserve.server.batches.outputs import finish
from omniserve.server.batches.progress import Progress
from omniserve.server.batches.rows import new_id
from omniserve.server.batches.storage import Storage
from omniserve.server.batches.store import NewBatch, Store
from omniserve.server.errors import ApiError

LEASE_S = 10.0


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
        for table in ("files", "leftovers", "batches", "lines"):
            connection.exec_driver_sql(f"delete from omniserve_{table}")
    return database


def owner(database: Database, name: str, steady_s: Callable[[], float] = lambda: 0.0) -> Claims:
    return Claims(database, owner=name, model="m", lease_s=LEASE_S, steady_s=steady_s)


def free_overdue(claims: Claims, steady: Clock) -> int:
    """Look twice, with half a lease in between."""
    assert claims.free_overdue() == 0
    steady.now_s += LEASE_S / 2
    return claims.free_overdue()


def make_file(database: Database, **fields) -> str:
    file_id = new_id("file-")
    Leftovers(database).announce(file_id)
    fields = {"filename": "f", "purpose": "batch", "num_bytes": 1} | fields
    return Store(database).add_file(NewFile(id=file_id, **fields))["id"]


def make_batch(database: Database, num_lines: int, *, window_s: float = 3600.0) -> str:
    batch = Store(database).create_batch(
        NewBatch(
            model="m",
            endpoint="/v1/completions",
            input_file_id=make_file(database),
            completion_window="1h",
            window_s=window_s,
            metadata=None,
        )
    )
    progress = Progress(database)
    claimed = progress.claim_batch("maker", "m", LEASE_S)
    assert claimed is not None and claimed["id"] == batch["id"]
    lines = [CheckedLine(i + 1, f"id-{i}", 10 * i, 10) for i in range(num_lines)]
    assert progress.accept_lines(batch["id"], "maker", lines)
    return batch["id"]


def result(key, text="{}", ok=True) -> LineResult:
    return LineResult(key=key, ok=ok, text=text, num_input_tokens=3, num_output_tokens=4)


def test_lines_go_to_one_owner_in_order_and_the_tightest_window_first(database):
    loose, tight = make_batch(database, 4, window_s=500), make_batch(database, 3, window_s=100)
    a, b = owner(database, "a"), owner(database, "b")
    assert [line.key for line in a.claim(4)] == [(tight, 1), (tight, 2), (tight, 3), (loose, 1)]
    assert [line.key for line in b.claim(9)] == [(loose, 2), (loose, 3), (loose, 4)]
    assert a.claim(9) == b.claim(9) == []
    assert Claims(database, owner="c", model="other", lease_s=1).claim(9) == []


def test_lines_of_batches_that_come_first_are_taken_before_all_others(database, clock):
    tight, loose, looser = (make_batch(database, 4, window_s=window_s) for window_s in (100, 500, 600))
    a = owner(database, "a")
    keys = [line.key for line in a.claim(5, first={looser: 1, loose: 2})]
    assert keys == [(loose, 1), (loose, 2), (looser, 1), (tight, 1), (tight, 2)]
    assert [line.key for line in a.claim(1, first={loose: 3, "gone": 1})] == [(loose, 3)]
    assert [line.key for line in a.claim(9, first={loose: 3})][:2] == [(loose, 4), (tight, 3)]
    for key in keys[:3]:
        a.give_back(key, delay_s=0, engine_stopped=True)
    assert [line.number for line in a.claim(9, first={loose: 2})] == [1, 2, 1]
    for _ in range(2):
        a.give_back((loose, 2), delay_s=0, engine_stopped=True)
        (line,) = a.claim(9, first={loose: 2})
    assert line.is_suspect and line.key == (loose, 2)


def test_batches_in_progress_say_how_many_lines_run_and_whether_one_can_be_claimed(database, clock):
    progress = Progress(database)

    def found() -> list[tuple[str, int, bool]]:
        now, batches = progress.running_batches("m")
        assert now == clock.now_s
        return [(batch["id"], batch["num_running"], bool(batch["is_claimable"])) for batch in batches]

    loose, tight = make_batch(database, 2, window_s=500), make_batch(database, 2, window_s=100)
    a, b = owner(database, "a"), owner(database, "b")
    a.claim(1)
    assert found() == [(tight, 1, True), (loose, 0, True)]
    b.claim(1)
    assert found() == [(tight, 2, False), (loose, 0, True)]
    b.give_back((tight, 2), delay_s=5)
    assert found() == [(tight, 1, False), (loose, 0, True)]
    clock.now_s += 5
    assert found() == [(tight, 1, True), (loose, 0, True)]
    for _ in range(2):
        b.give_back(b.claim(1)[0].key, delay_s=0, engine_stopped=True)
    assert found() == [(tight, 1, False), (loose, 0, True)], "a line that may be what ends the engine may have to wait"
    a.save([result((tight, 1))])
    assert found()[0][1] == 0 and progress.running_batches("other")[1] == []


@pytest.mark.parametrize("is_old", [False, True])
def test_suspects_are_found_without_a_look_at_every_line(tmp_path, is_old):
    url = make_url(f"sqlite:///{tmp_path}/db")
    if is_old:
        database = Database(url)
        with database.write() as connection:
            connection.exec_driver_sql("drop index omniserve_lines_suspect")
        database.close()
    database, plans = Database(url), []
    make_batch(database, 1)

    @event.listens_for(Engine, "before_cursor_execute")
    def explain(connection, cursor, statement, parameters, *_):
        if statement.startswith("SELECT omniserve_lines") and "engine_stops >=" in statement:
            plans.extend(cursor.execute(f"explain query plan {statement}", parameters).fetchall())

    try:
        owner(database, "a").claim(1)
    finally:
        event.remove(Engine, "before_cursor_execute", explain)
    assert ["omniserve_lines_suspect" in str(plan) for plan in plans] == [True]
    database.close()


def test_lease_that_is_renewed_holds_and_one_that_ends_is_taken_over(database, clock):
    batch, steady = make_batch(database, 2), Clock()
    a, b = owner(database, "a"), owner(database, "b", steady)
    a.claim(2)
    for _ in range(5):
        clock.now_s += LEASE_S * 0.9
        assert a.renew() == {(batch, 1), (batch, 2)}
        assert free_overdue(b, steady) == 0 and b.claim(9) == []
    clock.now_s += LEASE_S + 1
    assert free_overdue(b, steady) == 2
    assert [line.key for line in b.claim(1)] == [(batch, 1)]
    assert a.renew() == set(), "what was taken over is lost to the first owner"
    assert a.save([result((batch, 1))]) == [(batch, 1)], "and its result is dropped"
    assert b.save([result((batch, 1))]) == []
    assert Store(database).batch(batch)["completed"] == 1


def test_jump_of_the_clock_takes_no_lines_from_who_lives(database, clock):
    batch, steady = make_batch(database, 2), Clock()
    a, b = owner(database, "a", steady), owner(database, "b", steady)
    a.claim(1)
    b.claim(1)
    clock.now_s += 1000 * LEASE_S
    assert a.free_overdue() == b.free_overdue() == 0
    steady.now_s += LEASE_S / 3
    assert a.renew() == {(batch, 1)}
    steady.now_s += LEASE_S / 6
    assert b.free_overdue() == 0 and a.free_overdue() == 1, "a has renewed its lease, b has not"
    assert [line.number for line in a.claim(2)] == [2]


def test_lines_that_may_end_the_engine_run_one_at_a_time(database, clock):
    make_batch(database, 4, window_s=100)
    make_batch(database, 1, window_s=200)
    a = owner(database, "a")
    for _ in range(2):
        for line in [line for line in a.claim(9) if line.number in (1, 3)]:
            a.give_back(line.key, delay_s=0, engine_stopped=True)
    assert a.claim(9, with_suspect=False) == []
    assert [line.number for line in a.claim(9)] == [1]
    a.release()
    assert [line.number for line in a.claim(9, with_suspect=False)] == [2, 4]
    a.release()
    assert [line.number for line in a.claim(1)] == [1]
    assert [line.number for line in owner(database, "b").claim(9)] == [3, 2, 4], "each server has one"


def test_result_is_written_once_and_the_last_one_closes_the_batch(database):
    store, progress = Store(database), Progress(database)
    batch = make_batch(database, 2)
    a = owner(database, "a")
    first, second = (line.key for line in a.claim(2))
    assert a.save([result(first, "one")]) == []
    assert a.save([result(first, "again")]) == [first]
    assert store.batch(batch)["status"] == "in_progress"
    assert a.save([result(second, "two", ok=False)]) == []
    row = store.batch(batch)
    assert (row["status"], row["completed"], row["failed"]) == ("finalizing", 1, 1)
    assert (row["input_tokens"], row["output_tokens"]) == (6, 8)
    assert [(line["ok"], line["result"]) for line in progress.results(batch, 0, 9)] == [(True, "one"), (False, "two")]


def test_line_that_is_given_back_waits_and_counts_the_ends_of_the_engine(database, clock):
    batch = make_batch(database, 1)
    a = owner(database, "a")
    (line,) = a.claim(1)
    a.give_back(line.key, delay_s=5, engine_stopped=True)
    assert a.claim(1) == []
    clock.now_s += 5
    (line,) = owner(database, "b").claim(1)
    assert line.key == (batch, 1) and line.engine_stops == 1


def test_release_frees_only_what_is_ones_own(database):
    batch = make_batch(database, 3)
    a, b = owner(database, "a"), owner(database, "b")
    a.claim(2)
    b.claim(1)
    a.release()
    assert [line.number for line in b.claim(9)] == [1, 2]
    assert b.renew() == {(batch, 1), (batch, 2), (batch, 3)}


def test_escalation_is_counted_once_and_survives_a_takeover(database, clock):
    store = Store(database)
    batch = make_batch(database, 2)
    a = owner(database, "a")
    a.claim(2)
    a.escalate([(batch, 1)])
    a.escalate([(batch, 1)])
    assert store.batch(batch)["escalated"] == 1
    clock.now_s += LEASE_S + 1
    steady = Clock()
    b = owner(database, "b", steady)
    assert free_overdue(b, steady) == 2
    assert [line.escalated for line in b.claim(2)] == [True, False]


@pytest.mark.parametrize("end", ["cancel", "expire"])
def test_end_of_a_batch_takes_its_lines_from_everybody(database, clock, end):
    store, progress = Store(database), Progress(database)
    batch = make_batch(database, 4, window_s=100)
    a = owner(database, "a")
    keys = [line.key for line in a.claim(3)]
    a.save([result(keys[0])])
    if end == "cancel":
        assert store.cancel_batch(batch)["status"] == "cancelling"
    else:
        clock.now_s += 100
        assert progress.expire_batches() == [batch]
        assert store.batch(batch)["status"] == "finalizing"
    assert a.save([result(keys[1])]) == [keys[1]]
    assert a.renew() == set() and a.claim(9) == []
    row = store.batch(batch)
    assert (row["completed"], row["failed"]) == (1, 3)
    assert [line["result"] for line in progress.results(batch, 0, 9)] == ["{}", None, None, None]


def test_cancelling_while_results_are_written_keeps_them_all(database):
    store, progress, leftovers = Store(database), Progress(database), Leftovers(database)
    batch = make_batch(database, 1)
    a = owner(database, "a")
    a.save([result(line.key) for line in a.claim(1)])
    assert progress.claim_batch("a", "m", LEASE_S)["id"] == batch
    assert store.cancel_batch(batch)["status"] == "cancelling"
    leftovers.announce("file-out")
    file = NewFile(id="file-out", filename="o", purpose="batch_output", num_bytes=5)
    assert progress.finish_batch(batch, "a", file, None)
    row = store.batch(batch)
    assert (row["status"], row["output_file_id"], row["completed"]) == ("cancelled", "file-out", 1)


def test_whole_batch_has_one_owner_at_a_time(database, clock):
    progress = Progress(database)
    batch = make_batch(database, 1)
    a = owner(database, "a")
    a.save([result(line.key) for line in a.claim(1)])
    assert progress.claim_batch("a", "m", LEASE_S)["id"] == batch
    assert progress.claim_batch("b", "m", LEASE_S) is None
    clock.now_s += LEASE_S + 1
    assert progress.claim_batch("b", "m", LEASE_S)["id"] == batch
    assert not progress.finish_batch(batch, "a", None, None), "the first one came too late"
    assert progress.finish_batch(batch, "b", None, None)
    assert progress.results(batch, 0, 9) == []


def test_cancelled_while_it_is_checked(database):
    store, progress = Store(database), Progress(database)
    file_id = make_file(database)
    new = NewBatch(model="m", endpoint="e", input_file_id=file_id, completion_window="1h", window_s=9, metadata=None)
    batch = store.create_batch(new)["id"]
    progress.claim_batch("a", "m", LEASE_S)
    store.cancel_batch(batch)
    assert not progress.accept_lines(batch, "a", [CheckedLine(1, "x", 0, 1)])
    assert not progress.fail_batch(batch, "a", [LineFault("m", "c")])
    assert store.batch(batch)["status"] == "cancelling"
    with pytest.raises(ApiError, match="not finished"):
        store.delete_file(file_id)


def test_input_file_that_has_expired_is_not_taken_and_one_that_is_read_stays(database, clock):
    store, leftovers = Store(database), Leftovers(database)

    def new(file_id: str) -> NewBatch:
        return NewBatch(
            model="m", endpoint="e", input_file_id=file_id, completion_window="1h", window_s=9, metadata=None
        )

    used, unused, lasting = (make_file(database, expires_after_s=after_s) for after_s in (100, 100, None))
    store.create_batch(new(used))
    clock.now_s += 100
    with pytest.raises(ApiError, match="has expired"):
        store.create_batch(new(unused))
    leftovers.forget_expired()
    page = store.list_files(limit=9, after=None, newest_first=False, purpose=None)
    assert {row["id"] for row in page.rows} == {used, lasting}
    removed: list[str] = []
    leftovers.sweep(removed.append)
    assert removed == [unused]
    for row_id in ("file-\0", "file-\ud800", "file-é"):
        with pytest.raises(ApiError, match="there is no file"):
            store.file(row_id)


def test_files_of_who_died_while_writing_are_swept_up_and_no_others(database, clock):
    store, leftovers = Store(database), Leftovers(database)
    known = make_file(database)
    for file_id in ("file-dead", "file-discarded"):
        leftovers.announce(file_id)
    removed: list[str] = []
    leftovers.discard(known)
    leftovers.sweep(removed.append)
    assert removed == [], "nobody is dead yet"
    leftovers.discard("file-discarded")
    leftovers.sweep(removed.append)
    assert removed == ["file-discarded"]

    def fail(_: str) -> None:
        raise StorageError("the disk is broken")

    clock.now_s += 3600
    with pytest.raises(StorageError, match="broken"):
        leftovers.sweep(fail)
    leftovers.sweep(removed.append)
    leftovers.sweep(removed.append)
    assert removed == ["file-discarded", "file-dead"]
    with pytest.raises(StorageError, match="send it again"):
        store.add_file(NewFile(id="file-dead", filename="f", purpose="batch", num_bytes=1))
    with pytest.raises(ApiError, match="there is no file"):
        store.file("file-dead")
    store.delete_file(known)
    leftovers.sweep(removed.append)
    assert removed[2:] == [known]


def test_who_ends_a_batch_too_late_touches_nothing_of_what_was_given_out(database, clock, tmp_path, monkeypatch):
    monkeypatch.setattr("omniserve.server.batches.outputs._LINES_PER_READ", 2)
    storage = Storage(database, FileFolder(tmp_path / "files"))
    batch_id = make_batch(database, 6)
    a = owner(database, "a")
    a.save([result(line.key, f"line {line.number}", ok=line.number % 2 == 0) for line in a.claim(6)])
    late = storage.progress.claim_batch("late", "m", LEASE_S)
    assert late is not None
    read = storage.progress.results
    frozen: list[bool] = []

    def freeze_at_the_second_page(*args):
        if args[1:] == (2, 2) and not frozen:
            frozen.append(True)
            clock.now_s += LEASE_S + 1
            mine = storage.progress.claim_batch("b", "m", LEASE_S)
            assert mine is not None and finish(storage, mine, "b")
        return read(*args)

    monkeypatch.setattr(storage.progress, "results", freeze_at_the_second_page)
    with pytest.raises(StorageError, match="another server has ended it"):
        finish(storage, late, "late")
    assert frozen
    row = storage.store.batch(batch_id)
    assert row["status"] == "completed"
    contents = {}
    for column in ("output_file_id", "error_file_id"):
        file = storage.store.file(row[column])
        contents[column] = storage.files.path(file["id"], file["num_bytes"]).read_bytes()
    assert contents == {"output_file_id": b"line 2\nline 4\nline 6\n", "error_file_id": b"line 1\nline 3\nline 5\n"}
    clock.now_s += 3600
    storage.sweep()
    assert {path.name for path in (tmp_path / "files").iterdir()} == {row["output_file_id"], row["error_file_id"]}


def test_who_loses_a_batch_while_its_files_are_written_leaves_none(database, clock, tmp_path, monkeypatch):
    storage = Storage(database, FileFolder(tmp_path / "files"))
    make_batch(database, 2)
    a = owner(database, "a")
    a.save([result(line.key) for line in a.claim(2)])
    batch = storage.progress.claim_batch("late", "m", LEASE_S)
    assert batch is not None
    clock.now_s += LEASE_S + 1
    assert storage.progress.claim_batch("b", "m", LEASE_S) is not None
    assert not finish(storage, batch, "late")
    assert list((tmp_path / "files").iterdir()) == []


WAITING = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"


@pytest.mark.parametrize("call", ["renew", "save", "escalate", "release", "cancel", "free_overdue", "claim"])
def test_nobody_waits_in_a_circle(postgres, call):
    """Who locks lines one after the other has locked their batch before, or does not wait."""
    url = make_url(postgres)
    database, other = opened_empty(url), Database(url)
    store = Store(database)
    batch = make_batch(database, 2)
    claims = Claims(database, owner="a", model="m", lease_s=0.001 if call == "free_overdue" else LEASE_S)
    keys = [line.key for line in claims.claim(2 if call != "claim" else 0)]
    steady = Clock()
    late = owner(database, "b", steady)
    late.free_overdue()
    steady.now_s += LEASE_S
    calls: dict[str, Callable[[], object]] = {
        "renew": claims.renew,
        "save": lambda: claims.save([result(key) for key in keys]),
        "escalate": lambda: claims.escalate(keys),
        "release": claims.release,
        "cancel": lambda: store.cancel_batch(batch),
        "free_overdue": late.free_overdue,
        "claim": lambda: claims.claim(2),
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
    database.close()
    other.close()


def test_server_that_is_frozen_within_a_transaction_does_not_hold_up_the_others(postgres, monkeypatch):
    monkeypatch.setattr("omniserve.server.batches.database._PG_IDLE_TIMEOUT_S", 0.2)
    frozen, other = opened_empty(make_url(postgres)), Database(make_url(postgres))
    batch = make_batch(frozen, 1)
    with pytest.raises(StorageError, match="the database failed"), frozen.write() as connection:
        connection.exec_driver_sql("update omniserve_batches set problem = 'frozen'")
        assert Store(other).cancel_batch(batch)["problem"] is None
    assert Store(frozen).batch(batch)["status"] == "cancelling", "and it can go on"
    frozen.close()
    other.close()


def test_many_claim_at_once_and_no_line_goes_twice(url, database):
    store, num_lines = Store(database), 400
    batch = make_batch(database, num_lines)
    taken: list[list[int]] = [[] for _ in range(6)]

    def work(i: int) -> None:
        mine = Database(url)
        claims = owner(mine, f"worker-{i}")
        while lines := claims.claim(7):
            taken[i] += [line.number for line in lines]
            assert claims.save([result(line.key) for line in lines]) == []
        mine.close()

    # The real clock: expiry of the batch does not matter here, and leases are long.
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(taken))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = sorted(number for some in taken for number in some)
    assert numbers == list(range(1, num_lines + 1))
    assert (store.batch(batch)["status"], store.batch(batch)["completed"]) == ("finalizing", num_lines)


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
    with first.write():
        with pytest.raises(StorageError, match="locked by another process") as caught:
            Progress(second).expire_batches()
        assert caught.value.status == 503 and caught.value.retry_after_s is not None
        assert Store(second).list_batches(limit=9, after=None).rows == [], "reading goes on"
    assert Progress(second).expire_batches() == []


def test_database_that_is_full_keeps_what_it_had(tmp_path):
    database = Database(make_url(f"sqlite:///{tmp_path}/db"))
    store = Store(database)
    batch = make_batch(database, 50)
    claims = owner(database, "a")
    keys = [line.key for line in claims.claim(50)]
    with database.write() as connection:
        pages = connection.exec_driver_sql("pragma page_count").scalar()
        connection.exec_driver_sql(f"pragma max_page_count = {pages}")
    with pytest.raises(StorageError, match="no room") as caught:
        claims.save([result(key, "x" * 10_000) for key in keys])
    assert caught.value.status == 507
    assert store.batch(batch)["completed"] == 0
    with database.write() as connection:
        connection.exec_driver_sql("pragma max_page_count = 100000")
    assert claims.save([result(key, "x" * 10_000) for key in keys]) == []
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

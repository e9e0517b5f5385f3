"""Stored responses: SQLite, and PostgreSQL where its programs are installed."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import make_url

from omniserve.server.batches.database import Database
from omniserve.server.errors import ApiError
from omniserve.server.responses.store import NewResponse, ResponseStore

TTL_S = 100.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(params=["sqlite", "postgres"])
def database(request, tmp_path, clock):
    is_sqlite = request.param == "sqlite"
    url = f"sqlite:///{tmp_path}/db.sqlite3" if is_sqlite else request.getfixturevalue("postgres")
    database = Database(make_url(url), clock)
    with database.write() as connection:
        connection.exec_driver_sql("delete from omniserve_responses")
    yield database
    database.close()


@pytest.fixture
def store(database):
    return ResponseStore(database, ttl_s=TTL_S)


def message(text):
    return {"type": "message", "role": "user", "content": text}


def response(key, text, *, before=None, status="completed"):
    output = [{"id": f"msg_{key}_0", "type": "message", "role": "assistant", "content": text}]
    return {"id": f"resp_{key}", "status": status, "previous_response_id": before, "output": output}


def new(key, text, answer, *, caller=None, **more):
    items = json.dumps([message(text)])
    return NewResponse(id=f"resp_{key}", caller=caller, input=items, response=response(key, answer, **more))


def refused(call, status=404):
    with pytest.raises(ApiError) as caught:
        asyncio.run(call)
    assert caught.value.status == status
    return caught.value.message


def test_a_response_is_kept_as_it_is_and_for_its_time(store, clock):
    text = 'Grüße "a" \\ 日本 🙂 \u0001 %s :x'
    asyncio.run(store.put(new("a", text, text)))
    assert asyncio.run(store.get("resp_a", None)) == response("a", text)
    assert asyncio.run(store.input_items("resp_a", None)) == [{"id": "msg_a_i0"} | message(text)]
    clock.now_s += TTL_S - 1
    asyncio.run(store.get("resp_a", None))
    clock.now_s += 1
    assert "its time is over" in refused(store.get("resp_a", None))
    store._swept_s = -1e9
    asyncio.run(store.put(new("b", "b", "b")))
    with store._database.read() as connection:
        assert connection.exec_driver_sql("select id from omniserve_responses").all() == [("resp_b",)]


def test_a_response_belongs_to_its_caller(store):
    asyncio.run(store.put(new("a", "hi", "ho", caller="ann")))
    for read in (store.get, store.input_items, store.delete):
        assert "resp_a" in refused(read("resp_a", "bob"))
    assert "msg_a_0" in refused(store.items(["msg_a_0"], "bob"), 400)
    assert asyncio.run(store.get("resp_a", "ann")) == asyncio.run(store.get("resp_a", None))
    asyncio.run(store.delete("resp_a", "ann"))
    refused(store.get("resp_a", None))


def test_a_conversation_is_read_over_its_responses(store):
    asyncio.run(store.put(new("a", "one", "two")))
    asyncio.run(store.put(new("b", "three", "four", before="resp_a")))
    items = asyncio.run(store.conversation("resp_b", None, most=4))
    assert [item["content"] for item in items] == ["one", "two", "three", "four"]
    assert "more than 3 items" in refused(store.conversation("resp_b", None, most=3), 400)
    found = asyncio.run(store.items(["msg_b_0", "msg_a_i0"], None))
    assert (found["msg_b_0"]["content"], found["msg_a_i0"]["content"]) == ("four", "one")
    asyncio.run(store.delete("resp_a", None))
    assert "resp_a" in refused(store.conversation("resp_b", None, most=4), 400)


@pytest.mark.parametrize("name", ["resp_\0", "resp_é", "resp_\ud800", "", "' or 1=1 --", "resp_" + "x" * 10000])
def test_an_id_that_no_response_has_is_not_there(store, name):
    refused(store.get(name, None))
    refused(store.delete(name, None))


def test_a_running_response_changes_until_it_ends_or_is_lost(store, clock):
    running = new("a", "hi", "", status="in_progress")
    asyncio.run(store.put(running, alive_s=10))
    assert "still runs" in refused(store.conversation("resp_a", None, most=9), 400)
    clock.now_s += 9
    assert asyncio.run(store.change("resp_a", None, alive_s=10))
    clock.now_s += 9
    assert asyncio.run(store.get("resp_a", None))["status"] == "in_progress"
    clock.now_s += 1
    assert asyncio.run(store.get("resp_a", None))["status"] == "failed", "nobody works on it any more"
    assert asyncio.run(store.change("resp_a", response("a", "ho"), alive_s=None))
    assert asyncio.run(store.get("resp_a", None)) == response("a", "ho")
    assert not asyncio.run(store.change("resp_a", response("a", "late"), alive_s=None)), "it has ended"
    asyncio.run(store.delete("resp_a", None))
    assert not asyncio.run(store.change("resp_a", None, alive_s=10))


def test_many_write_at_once(store):
    def work(i):
        asyncio.run(store.put(new(f"k{i}", f"in {i}", f"out {i}", caller=f"c{i % 3}")))
        return asyncio.run(store.get(f"resp_k{i}", f"c{i % 3}"))["output"][0]["content"]

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(40))) == [f"out {i}" for i in range(40)]

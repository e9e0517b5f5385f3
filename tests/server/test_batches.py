"""Files and batches, as the openai client sees them."""

from __future__ import annotations

import io
import json
import signal
import time
from collections.abc import Callable

import fake_engine
import httpx
import openai
import pytest
from batch_inputs import PATIENCE_S, completion_line, jsonl, line, prompt_of, results, submit, upload, wait_for
from fake_engine import BAD_OUTPUT, DIE, REJECT_WITHOUT_HINT, SLOW
from tokenizers_for_tests import byte_level_tokenizer

from omniserve.server.batches import lines as lines_of_batches
from omniserve.server.batches import runner
from tests.quick import slow_except

ABC = byte_level_tokenizer()("abc").input_ids
RUNNING = 'omniserve_requests_running{service_class="BE"}'
SLOW_LINE = {"prompt": [SLOW, *ABC], "max_tokens": 400, "ignore_eos": True}


@pytest.fixture
def often(monkeypatch) -> None:
    """Have runners look ten times as often at the clock, and at what other servers did."""
    monkeypatch.setattr(runner, "_POLL_S", 0.1)


@pytest.fixture
def slow_step(monkeypatch) -> Callable[[float], None]:
    """Say how long the slow steps of the engines here take."""
    return lambda seconds: monkeypatch.setattr(fake_engine, "SLOW_STEP_S", seconds)


def test_file_comes_back_as_it_was_and_can_be_deleted(client):
    content = b'{"any": "thing"}\nno JSON\n\xff'
    file = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.object) == (len(content), "in.jsonl", "batch", "file")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == content
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match=file.id):
            call(file.id)


def test_files_are_listed_in_pages(client):
    ids = [upload(client, [completion_line(i, prompt=ABC)]) for i in range(5)]
    newest = [file.id for file in client.files.list(purpose="batch")]
    assert newest[:5] == ids[::-1]
    oldest_first = [file.id for file in client.files.list(order="asc", limit=2)]  # over all pages
    assert oldest_first[-5:] == ids
    assert client.files.list(limit=2, after=ids[3]).data[0].id == ids[2]
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.files.list(limit=0)
    with pytest.raises(openai.NotFoundError):
        client.files.list(after="file-none")


def test_expiry_of_a_file_is_told(client):
    file = client.files.create(
        file=("x", io.BytesIO(b"x")), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert file.expires_at == pytest.approx(file.created_at + 3600, abs=1)


FILE = {"file": b"x"}


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"files": {"other": b"y"}, "data": {"purpose": "batch"}}, "no file"),
        ({"files": FILE, "data": {}}, "purpose is missing"),
        ({"files": FILE, "data": {"purpose": "vision"}}, "purpose"),
        ({"files": FILE, "data": {"purpose": "batch", "expires_after[seconds]": "5"}}, "expires_after"),
        ({"content": b"purpose=batch", "headers": {"content-type": "application/x-www-form-urlencoded"}}, "got"),
        ({"json": {"purpose": "batch"}}, "multipart/form-data"),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, "boundary"),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=y"}}, "cannot be read"),
    ],
)
def test_wrong_uploads_are_refused(server, sent, message):
    answer = httpx.post(f"{server.url}/v1/files", **sent)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_name_of_a_file_is_only_a_name(start_server, tmp_path):
    data = tmp_path / "data"
    client = start_server("--data-dir", str(data)).wait_until_ready().client()
    name = '../../"escaped" é;\r\nx'
    file = client.files.create(file=(name, b"content"), purpose="batch")
    answer = client.files.with_raw_response.content(file.id)
    assert answer.content == b"content" and "x" not in answer.headers
    assert [path.name for path in (data / "files").iterdir()] == [file.id]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]
    for wrong in ("..%2F..%2Fomniserve.sqlite3", "%00", "..", "file-%ED%A0%80"):
        answer = httpx.get(f"{client.base_url}files/{wrong}/content")
        assert answer.status_code == 404, answer.text
    client.files.delete(file.id)
    assert list((data / "files").iterdir()) == []


def test_file_that_is_too_large_is_refused(start_server):
    client = start_server("--limit", "max_file_mib=1").wait_until_ready().client()
    with pytest.raises(openai.APIStatusError, match="larger than 1 MiB") as caught:
        upload(client, b"x" * (2 << 20))
    assert caught.value.status_code == 413
    assert client.files.list().data == []
    assert upload(client, b"x" * (1 << 20))


def test_batch_gives_what_the_same_requests_give(client):
    prompts = ["The quick brown", "fox", "jumps"]
    batch = submit(
        client,
        [line(f"id {i}", {"prompt": p, "max_tokens": 5 + i, "seed": 1}) for i, p in enumerate(prompts)],
        metadata={"for": "a test"},
    )
    assert (batch.status, batch.object, batch.completion_window) == ("validating", "batch", "24h")
    batch = wait_for(client, batch.id)
    assert batch.status == "completed" and batch.errors is None and batch.error_file_id is None
    assert batch.metadata == {"for": "a test"} and batch.model == "fake" and batch.endpoint == "/v1/completions"
    assert batch.request_counts.model_dump() == {"total": 3, "completed": 3, "failed": 0}
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at <= batch.expires_at
    assert batch.omniserve == {"escalated": 0, "problem": None}
    lines = results(client, batch.output_file_id)
    assert [entry["custom_id"] for entry in lines] == ["id 0", "id 1", "id 2"]
    total = 0
    for i, entry in enumerate(lines):
        assert set(entry) == {"id", "custom_id", "response", "error"} and entry["error"] is None
        assert set(entry["response"]) == {"status_code", "request_id", "body"}
        assert entry["response"]["status_code"] == 200
        alone = client.completions.create(
            model="fake", prompt=prompts[i], max_tokens=5 + i, seed=1, extra_body={"service_tier": "flex"}
        ).model_dump(exclude_unset=True)
        body = entry["response"]["body"]
        total += body["usage"]["total_tokens"]
        for answer in (alone, body):
            del answer["id"], answer["created"]
        assert body == alone
    assert batch.usage.total_tokens == total == batch.usage.input_tokens + batch.usage.output_tokens
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert client.batches.list(limit=1).data[0] == batch


def test_chat_batch(client):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 6}
    batch = submit(client, [line("a", body, "/v1/chat/completions")], endpoint="/v1/chat/completions")
    (entry,) = results(client, wait_for(client, batch.id).output_file_id)
    alone = client.chat.completions.create(model="fake", **body)
    assert entry["response"]["body"]["choices"][0]["message"]["content"] == alone.choices[0].message.content


def test_unknown_fields_are_dropped(server, client):
    content = jsonl([line("a", {"prompt": ABC, "colour": 1}) | {"tint": 1}])
    form = {"purpose": "batch", "hue": "red"}
    upload = httpx.post(f"{server.url}/v1/files", files={"file": content}, data=form)
    assert upload.headers["x-omniserve-ignored-fields"] == "hue"
    body = {"input_file_id": upload.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h", "hue": 1}
    answer = httpx.post(f"{server.url}/v1/batches", json=body)
    assert answer.headers["x-omniserve-ignored-fields"] == "hue"
    batch = wait_for(client, answer.json()["id"])
    assert (batch.status, batch.request_counts.completed) == ("completed", 1)


def test_files_with_byte_order_marks_may_be_joined(client):
    mark = "\ufeff".encode()
    content = b"".join(mark + jsonl([completion_line(i, prompt=ABC)]) for i in range(2))
    batch = wait_for(client, submit(client, content).id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 2)
    assert [entry["custom_id"] for entry in results(client, batch.output_file_id)] == ["line-0", "line-1"]
    batch = wait_for(client, submit(client, jsonl([completion_line(0, prompt=ABC)]).decode().encode("utf-16")).id)
    assert batch.status == "failed"
    assert [error.message for error in batch.errors.data] == ["the file is UTF-16; save it as UTF-8"]


def test_wrong_requests_are_errors_of_their_lines(client):
    good = completion_line(0, prompt=ABC)
    wrong = {
        "unsupported field": ({"prompt": "a", "colour": 1, "suffix": "b"}, "suffix"),
        "stream": ({"prompt": "a", "stream": True}, "stream"),
        "priority": ({"prompt": "a", "service_tier": "priority"}, "best-effort"),
        "too long": ({"prompt": "a", "max_tokens": 10_000}, "max_tokens"),
        "engine": ({"prompt": [BAD_OUTPUT]}, "not finite"),
    }
    batch = submit(client, [good, *(line(name, body) for name, (body, _) in wrong.items())])
    batch = wait_for(client, batch.id)
    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 6, "completed": 1, "failed": 5}
    assert [entry["custom_id"] for entry in results(client, batch.output_file_id)] == ["line-0"]
    errors = results(client, batch.error_file_id)
    assert [entry["custom_id"] for entry in errors] == list(wrong)
    for entry in errors:
        assert entry["error"] is None and entry["response"]["status_code"] in (400, 500)
        assert wrong[entry["custom_id"]][1] in entry["response"]["body"]["error"]["message"]


def test_a_line_that_no_retry_can_serve_is_an_error_and_a_priority_keeps_it_best_effort(client):
    """A deadline that is too short for the output alone is refused for good."""
    lines = [completion_line(0, prompt=[REJECT_WITHOUT_HINT]), completion_line(1, prompt=[5, 6])]
    lines[1]["body"] |= {"priority": -3, "slo": {"deadline_s": 60}}
    batch = wait_for(client, submit(client, lines).id)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    (failed,) = results(client, batch.error_file_id)
    assert failed["response"]["status_code"] == 429
    (done,) = results(client, batch.output_file_id)
    assert done["response"]["body"]["service_tier"] == "flex"


def test_batch_with_a_wrong_file_fails_and_names_the_lines(client):
    good = completion_line(1, prompt=ABC)
    content = (
        jsonl([good]) + b"no JSON\n" + jsonl([good, line("x", {}, "/v1/chat/completions"), line("y", {"model": "z"})])
    )
    batch = wait_for(client, submit(client, content).id)
    assert batch.status == "failed" and batch.failed_at is not None and batch.output_file_id is None
    assert [(error.line, error.code, error.param) for error in batch.errors.data] == [
        (2, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "mismatched_url", "url"),
        (5, "model_not_found", "body.model"),
    ]
    with pytest.raises(openai.ConflictError, match="failed"):
        client.batches.cancel(batch.id)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"endpoint": "/v1/moderations"}, "/v1/completions or /v1/chat/completions or /v1/responses or"),
        ({"completion_window": "soon"}, "24h"),
        ({"completion_window": "31d"}, "30d"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"input_file_id": None}, "input_file_id is missing"),
    ],
)
def test_wrong_batches_are_refused(server, client, change, message):
    body = {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"} | change
    answer = httpx.post(f"{server.url}/v1/batches", json=body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_input_file_must_be_there_and_stays_while_it_is_read(client):
    with pytest.raises(openai.NotFoundError, match="file-none"):
        client.batches.create(input_file_id="file-none", endpoint="/v1/completions", completion_window="24h")
    done = wait_for(client, submit(client, [completion_line(0, prompt=ABC)]).id)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.batches.create(input_file_id=done.output_file_id, endpoint="/v1/completions", completion_window="24h")
    running = submit(client, [line("slow", SLOW_LINE)])
    with pytest.raises(openai.ConflictError, match="is not finished"):
        client.files.delete(running.input_file_id)
    client.batches.cancel(running.id)
    wait_for(client, running.id)
    assert client.files.delete(running.input_file_id).deleted


def test_cancelled_batch_keeps_what_is_done(server, client):
    lines = [completion_line(0, prompt=ABC), *(line(f"slow-{i}", SLOW_LINE) for i in range(100))]
    batch = submit(client, lines)
    while wait_for(client, batch.id, ["in_progress"]).request_counts.completed < 1:
        pass
    cancelled = client.batches.cancel(batch.id)
    assert cancelled.status == "cancelling" and cancelled.cancelling_at is not None
    assert client.batches.cancel(batch.id).id == batch.id  # again is no error
    batch = wait_for(client, batch.id)
    assert batch.status == "cancelled" and batch.cancelled_at is not None
    assert batch.request_counts.model_dump() == {"total": 101, "completed": 1, "failed": 100}
    assert [entry["custom_id"] for entry in results(client, batch.output_file_id)] == ["line-0"]
    errors = results(client, batch.error_file_id)
    assert [entry["custom_id"] for entry in errors] == [f"slow-{i}" for i in range(100)]
    assert {entry["error"]["code"] for entry in errors} == {"batch_cancelled"} and errors[0]["response"] is None
    assert client.batches.cancel(batch.id).status == "cancelled"
    server.wait_for_metric(RUNNING, 0)
    with pytest.raises(openai.NotFoundError):
        client.batches.cancel("batch_none")


@pytest.mark.usefixtures("often")
def test_window_that_ends_leaves_what_is_done(start_server, monkeypatch):
    server = start_server().wait_until_ready()
    client = server.client()
    lines = [completion_line(0, prompt=ABC), *(line(f"slow-{i}", SLOW_LINE) for i in range(3))]
    batch = submit(client, lines)
    while wait_for(client, batch.id, ["in_progress"]).request_counts.completed < 1:
        pass
    monkeypatch.setattr(server.batches_database, "_clock", lambda: time.time() + 86_400)
    batch = wait_for(client, batch.id)
    assert batch.status == "expired" and batch.expired_at >= batch.expires_at
    assert batch.request_counts.model_dump() == {"total": 4, "completed": 1, "failed": 3}
    assert {entry["error"]["code"] for entry in results(client, batch.error_file_id)} == {"batch_expired"}


def test_batches_are_listed_in_pages(client):
    ids = [submit(client, [completion_line(0, prompt=ABC)]).id for _ in range(3)]
    pages = client.batches.list(limit=2)
    assert pages.has_more and [batch.id for batch in pages.data] == ids[:0:-1]
    assert [batch.id for batch in client.batches.list(limit=2, after=ids[2]).data] == [ids[1], ids[0]]
    with pytest.raises(openai.NotFoundError):
        client.batches.list(after="batch_none")
    for batch_id in ids:
        wait_for(client, batch_id)


def test_more_lines_than_are_allowed(start_server):
    client = start_server("--limit", "batch_max_lines=2").wait_until_ready().client()
    batch = wait_for(client, submit(client, [completion_line(i, prompt=ABC) for i in range(3)]).id)
    assert batch.status == "failed" and batch.errors.data[0].code == "too_many_requests"
    assert batch.errors.data[0].line == 3


def test_lines_in_work_are_bounded_and_best_effort(start_server, tmp_path, slow_step):
    slow_step(0.02)
    log = tmp_path / "work"
    server = start_server("--limit", "batch_concurrency=3", "--work-log", str(log)).wait_until_ready()
    batch = submit(server.client(), [line(f"{i}", SLOW_LINE | {"max_tokens": 8}) for i in range(12)])
    most = 0
    while server.client().batches.retrieve(batch.id).status not in ("finalizing", "completed"):
        most = max(most, server.metric(RUNNING))
    assert 1 <= most <= 3
    assert {entry.split()[0] for entry in log.read_text().splitlines()} == {"BE"}


@pytest.mark.usefixtures("often")
def test_late_batch_hurries_from_its_first_line_on(start_server, tmp_path, slow_step):
    slow_step(0.02)
    log = tmp_path / "work"
    server = start_server("--limit", "batch_concurrency=2", "--work-log", str(log)).wait_until_ready()
    client = server.client()
    lines = [completion_line(i, prompt=[SLOW, *prompt_of(0, i)], max_tokens=10) for i in range(80)]
    batch = wait_for(client, submit(client, lines, window="4s").id)
    escalated = [entry.split() for entry in log.read_text().splitlines() if entry.startswith("LS")]
    # The end of the window may meet lines on their way to the engine, booked or about to be.
    assert escalated and abs(batch.omniserve["escalated"] - len(escalated)) <= 2
    order = [(int(words[3]), int(words[4])) for words in escalated]
    assert order == sorted(order), "oldest first"
    calm = wait_for(client, submit(client, lines[:4], window="1h").id)
    assert calm.status == "completed" and calm.omniserve["escalated"] == 0


def test_death_of_the_engine_gives_lines_back(start_server, tmp_path, slow_step):
    place = ("--data-dir", str(tmp_path), "--limit", "engine_restarts=0")
    server = start_server(*place).wait_until_ready()
    client = server.client()
    batch = submit(client, [completion_line(i, prompt=[SLOW, *prompt_of(0, i)], max_tokens=60) for i in range(8)])
    server.wait_for_metric(RUNNING, 8)
    with pytest.raises(openai.APIError):
        client.completions.create(model="fake", prompt=[DIE])
    assert server.wait() == 1
    slow_step(0.001)
    client = start_server(*place).wait_until_ready().client()
    batch = wait_for(client, batch.id)
    assert batch.request_counts.model_dump() == {"total": 8, "completed": 8, "failed": 0}


def test_lines_go_on_when_the_engine_was_started_again(start_server, no_pause, slow_step):
    server = start_server("--limit", "engine_restarts=3").wait_until_ready()
    client = server.client()
    batch = submit(client, [completion_line(i, prompt=[SLOW, *prompt_of(0, i)], max_tokens=40) for i in range(8)])
    server.wait_for_metric(RUNNING, 8)
    with pytest.raises(openai.APIError):
        client.completions.create(model="fake", prompt=[DIE])
    slow_step(0.001)
    assert wait_for(client, batch.id).request_counts.completed == 8


def test_line_that_ends_the_engine_is_found_and_the_others_go_on(start_server, no_pause, slow_step, monkeypatch):
    slow_step(0.01)
    monkeypatch.setattr(lines_of_batches, "_RETRY_S", 0.1)
    server = start_server("--limit", "engine_restarts=3", "--limit", "batch_concurrency=4").wait_until_ready()
    client = server.client()
    lines = [completion_line(i, prompt=[SLOW, *prompt_of(0, i)], max_tokens=20) for i in range(9)]
    lines.insert(2, line("poison", {"prompt": [DIE]}))
    batch = wait_for(client, submit(client, lines).id)
    assert batch.request_counts.model_dump() == {"total": 10, "completed": 9, "failed": 1}
    (error,) = results(client, batch.error_file_id)
    assert error["custom_id"] == "poison" and error["response"]["body"]["error"]["code"] == "engine_stopped"


@pytest.mark.usefixtures("often")
def test_files_and_batches_belong_to_a_key(start_server, tmp_path):
    keys = [
        {"name": "ann", "key": "ann's", "requests_per_minute": 100},
        {"name": "bob", "key": "bob's", "tier": "flex"},
        {"name": "cem", "key": "cem's", "requests_per_minute": 1},
    ]
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    flags = ("--api-key-file", str(tmp_path / "keys.json"), "--limit", "batch_concurrency=2")
    server = start_server(*flags).wait_until_ready()
    nobody, ann, bob, cem = (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
        for key in ("none", "ann's", "bob's", "cem's")
    )
    for call in (nobody.files.list, nobody.batches.list, lambda: upload(nobody, b"x")):
        with pytest.raises(openai.AuthenticationError):
            call()
    batch = wait_for(ann, submit(ann, [completion_line(0, prompt=ABC)]).id)
    assert [file.id for file in ann.files.list()] == [batch.output_file_id, batch.input_file_id]
    assert [found.id for found in ann.batches.list()] == [batch.id]
    assert bob.files.list().data == bob.batches.list().data == []
    for call in (
        lambda: bob.batches.retrieve(batch.id),
        lambda: bob.batches.cancel(batch.id),
        lambda: bob.batches.list(after=batch.id),
        lambda: bob.files.retrieve(batch.output_file_id),
        lambda: bob.files.content(batch.output_file_id),
        lambda: bob.files.delete(batch.output_file_id),
        lambda: bob.files.list(after=batch.input_file_id),
        lambda: bob.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    with pytest.raises(openai.RateLimitError):
        for _ in range(9):
            upload(cem, b"x")
    slow = [line(f"{i}", SLOW_LINE) for i in range(9)]
    late = {client: submit(client, slow, window="2s") for client in (ann, bob)}
    escalated = {client: wait_for(client, batch.id).omniserve["escalated"] for client, batch in late.items()}
    assert escalated[ann] > 0 and escalated[bob] == 0, "bob's key is for best effort only"


def test_stop_gives_lines_back_at_once(start_server, tmp_path, slow_step):
    place = ("--data-dir", str(tmp_path))
    server = start_server(*place).wait_until_ready()
    batch = submit(server.client(), [completion_line(i, prompt=[SLOW, *ABC], max_tokens=40) for i in range(4)])
    server.wait_for_metric(RUNNING, 4)
    assert server.stop() == 0
    slow_step(0.001)
    client = start_server(*place).wait_until_ready().client()
    assert wait_for(client, batch.id).request_counts.completed == 4


@pytest.mark.slow
def test_two_servers_take_batches_and_one_of_them_runs_the_lines(start_server, tmp_path):
    log, place = tmp_path / "work", ("--data-dir", str(tmp_path / "data"), "--limit", "batch_concurrency=4")
    servers = [start_server(*place, "--work-log", str(log)).wait_until_ready() for _ in range(2)]
    clients = [server.client() for server in servers]
    lines = [completion_line(i, prompt=prompt_of(0, i), max_tokens=40) for i in range(300)]
    batch = submit(clients[1], lines)
    batch = wait_for(clients[1], batch.id)
    assert batch.request_counts.model_dump() == {"total": 300, "completed": 300, "failed": 0}
    work = log.read_text().splitlines()
    assert len(work) == len(set(work)) == 300
    by_server = [
        server.metric('omniserve_requests_total{finish_reason="length",service_class="BE"}') for server in servers
    ]
    assert by_server == [300, 0]
    assert [entry["custom_id"] for entry in results(clients[0], batch.output_file_id)] == [
        f"line-{i}" for i in range(300)
    ]

    slow = submit(clients[1], [line(f"{i}", SLOW_LINE) for i in range(9)])
    wait_for(clients[0], slow.id, ["in_progress"])
    servers[0].wait_for_metric(RUNNING, 4)
    clients[1].batches.cancel(slow.id)
    assert wait_for(clients[1], slow.id).request_counts.failed == 9
    servers[0].wait_for_metric(RUNNING, 0)


@pytest.mark.parametrize("how", slow_except((signal.SIGKILL,), [signal.SIGTERM, signal.SIGKILL]))
@pytest.mark.usefixtures("often")
def test_server_takes_over_from_one_that_ends(start_server, start_process, tmp_path, slow_step, how):
    slow_step(0.001)  # of the server here; those of the other one take as long as ever
    place = ("--data-dir", str(tmp_path), "--limit", "batch_concurrency=4")
    first = start_process(*place, own_group=True).wait_until_ready()
    client = start_server(*place).wait_until_ready().client()
    batch = submit(client, [completion_line(i, prompt=[SLOW, *prompt_of(0, i)], max_tokens=10) for i in range(12)])
    while client.batches.retrieve(batch.id).request_counts.completed < 4:
        time.sleep(0.02)
    if how == signal.SIGKILL:
        first.kill_group()
    else:
        assert first.stop(how) == 0
    batch = wait_for(client, batch.id)
    assert batch.request_counts.model_dump() == {"total": 12, "completed": 12, "failed": 0}


def test_batch_of_another_model_is_left_to_its_server(start_server, tmp_path):
    place = ("--data-dir", str(tmp_path))
    other = start_server(*place, "--name", "other").wait_until_ready().client()
    batch = submit(start_server(*place).wait_until_ready().client(), [completion_line(i, prompt=ABC) for i in range(9)])
    assert wait_for(other, batch.id).request_counts.completed == 9


def test_place_that_cannot_be_used(start_server, tmp_path):
    (tmp_path / "taken").write_text("a file")
    server = start_server("--data-dir", str(tmp_path / "taken"))
    assert server.wait() == 1
    assert any("cannot start" in entry and "another --data-dir" in entry for entry in server.log)

    damaged = tmp_path / "data"
    damaged.mkdir()
    (damaged / "omniserve.sqlite3").write_bytes(b"this is no database at all, but long enough to be one" * 99)
    server = start_server("--data-dir", str(damaged))
    assert server.wait() == 1
    assert any("the database is damaged" in entry for entry in server.log)


def test_default_place_that_cannot_be_used_leaves_the_rest_of_the_server(start_server, tmp_path):
    (tmp_path / "omniserve").write_text("a file")
    server = start_server(data_home=tmp_path).wait_until_ready()
    assert any("no files and batches" in entry for entry in server.log)
    client = server.client()
    assert client.completions.create(model="fake", prompt="a", max_tokens=1).choices
    for call in (client.files.list, client.batches.list, lambda: client.files.retrieve("file-x")):
        with pytest.raises(openai.InternalServerError, match="keeps no files") as caught:
            call()
        assert caught.value.status_code == 503


@pytest.mark.slow
def test_damaged_files_are_told_and_a_batch_goes_on_when_they_are_back(start_server, tmp_path):
    server = start_server("--data-dir", str(tmp_path)).wait_until_ready()
    client = server.client()
    content = jsonl([completion_line(0, prompt=ABC)])
    file_id = upload(client, content)
    place = tmp_path / "files" / file_id
    place.write_bytes(content[:-9])
    with pytest.raises(openai.InternalServerError, match="damaged or missing") as caught:
        client.files.content(file_id)
    assert caught.value.code == "file_damaged"
    batch = client.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h")
    deadline = time.monotonic() + PATIENCE_S
    while "damaged" not in str(client.batches.retrieve(batch.id).omniserve["problem"]):
        assert time.monotonic() < deadline
    place.write_bytes(content)
    batch = wait_for(client, batch.id)
    assert batch.status == "completed" and batch.omniserve["problem"] is None
    assert json.loads(client.files.content(batch.output_file_id).text)["custom_id"] == "line-0"

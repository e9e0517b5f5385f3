"""Several API processes on one port behave as one server."""

from __future__ import annotations

import asyncio
import concurrent.futures
import http.client
import json
import os
import signal
import time
from pathlib import Path

import httpx
import pytest
from fake_engine import REFUSE, REJECT, SILENT, SLOW, embedding_of
from running import wait_until
from starlette.responses import PlainTextResponse
from tokenizers_for_tests import byte_level_tokenizer

from omniserve.server.workers.forwarding import OWN_PATHS, TEXTS_PATHS, Forwarding

KEYS = [
    {"name": "a", "key": "sk-of-a-000000000000000000"},
    {"name": "few", "key": "sk-of-few-0000000000000000", "requests_per_minute": 5},
]


@pytest.fixture(scope="module")
def two(start_module_process):
    return start_module_process("--api-processes", "2").wait_until_ready()


def workers_of(server) -> list[int]:
    """Return the API workers' processes: of the server's children those that listen on its port."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    port = f":{httpx.URL(server.url).port:04X}"
    listening = {
        line.split()[9]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[1].endswith(port) and line.split()[3] == "0A"
    }

    def listens(child: str) -> bool:
        links = [os.readlink(entry) for entry in Path(f"/proc/{child}/fd").iterdir() if entry.is_symlink()]
        return any(f"socket:[{inode}]" in links for inode in listening)

    return [int(child) for child in children if listens(child)]


def ask(server, path: str = "/v1/completions", **fields):
    """Send a request over a connection of its own, which the kernel gives to one of the workers."""
    headers = fields.pop("headers", {})
    body = {"model": "fake", "prompt": "hello", "max_tokens": 5, **fields}
    return httpx.post(f"{server.url}{path}", json=body, timeout=60, headers=headers)


def running(server) -> int | None:
    """Return how many requests run; None where a worker that ends has taken the connection, and cut it."""
    try:
        return int(server.metric('omniserve_requests_running{service_class="LS"}'))
    except ConnectionResetError:
        return None


def test_both_workers_answer_and_the_metrics_are_the_sum(two):
    before = two.metric('omniserve_requests_total{finish_reason="length",service_class="LS"}')
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: ask(two), range(40)))
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["choices"][0]["text"] for answer in answers} == {"hellohe"}
    assert len(workers_of(two)) == 2
    count = two.metric('omniserve_requests_total{finish_reason="length",service_class="LS"}')
    assert count - before == 40
    assert two.metric('omniserve_ttft_seconds_count{service_class="LS"}') >= 40
    assert two.metric('omniserve_requests_queued{service_class="LS"}') == 0
    assert ask(two, max_tokens=-1).status_code == 400
    assert two.metric('omniserve_http_errors_total{code="invalid_value",status="400"}') == 1


def test_streams_are_whole(two):
    whole = ask(two, prompt="Grüße 日本", max_tokens=60).json()["choices"][0]["text"]
    for _ in range(6):
        with two.client() as client:
            parts = list(client.completions.create(model="fake", prompt="Grüße 日本", max_tokens=60, stream=True))
        assert "".join(part.choices[0].text for part in parts) == whole


@pytest.mark.slow
def test_what_clients_leave_is_aborted(two):
    aborted = 'omniserve_requests_total{finish_reason="abort",service_class="LS"}'
    before = two.metric(aborted)
    body = {"model": "fake", "prompt": [SLOW, 5], "max_tokens": 400, "stream": True}
    for _ in range(4):
        with httpx.stream("POST", f"{two.url}/v1/completions", json=body, timeout=60) as answer:
            next(answer.iter_lines())
    two.wait_until_free()
    two.wait_for_metric(aborted, before + 4)


def test_the_owner_answers_what_is_not_the_workers(two):
    client = two.client()
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.responses.create(model="fake", input="hello", max_output_tokens=16).output_text
    for _ in range(4):
        first = client.responses.create(model="fake", input="hello", max_output_tokens=16)
        assert client.responses.retrieve(first.id).id == first.id
    events = client.responses.create(model="fake", input="hello", max_output_tokens=16, stream=True)
    assert [event.type for event in events][-1] == "response.completed"
    assert httpx.get(f"{two.url}/openapi.json").json()["paths"]
    assert httpx.get(f"{two.url}/dashboard").status_code == 200
    assert httpx.head(f"{two.url}/health").status_code == 200
    answer = httpx.get(f"{two.url}/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert httpx.get(f"{two.url}/nowhere", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    assert httpx.get(f"{two.url}/health", headers={"Host": "elsewhere.example"}).status_code == 403
    assert len(httpx.get(f"{two.url}/health").headers.get_list("date")) == 1


def test_workers_embed_score_and_rank(two):
    def about(path: str, **body: object) -> httpx.Response:
        return httpx.post(f"{two.url}{path}", json={"model": "fake", **body}, timeout=60)

    texts = ["one", "two three", "one"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: about("/v1/embeddings", input=texts), range(16)))
    ids = [byte_level_tokenizer()(text).input_ids for text in texts]
    for answer in answers:
        vectors = [entry["embedding"] for entry in answer.json()["data"]]
        for vector, tokens in zip(vectors, ids, strict=True):
            wanted = embedding_of(tokens, "last")
            norm = sum(value * value for value in wanted) ** 0.5
            assert vector == pytest.approx([value / norm for value in wanted], abs=1e-6)
    scores = about("/v1/score", text_1="one", text_2=texts).json()["data"]
    assert [entry["score"] for entry in scores][::2] == pytest.approx([1, 1])
    ranking = about("/v1/rerank", query="one", documents=texts).json()["results"]
    assert {entry["index"] for entry in ranking[:2]} == {0, 2}
    assert about("/v1/embeddings", input=[]).status_code == 400
    assert two.metric('omniserve_requests_running{service_class="LS"}') == 0


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score", "/v1/rerank"])
def test_texts_go_to_the_owner_where_it_has_a_second_model(path):
    async def status(own_paths) -> int:
        app = Forwarding(PlainTextResponse("its own"), "/nobody/listens", "", own_paths)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://worker") as client:
            answer = await client.post(path, json={})
        await app.close()
        return answer.status_code

    assert asyncio.run(status(OWN_PATHS | TEXTS_PATHS)) == 200
    assert asyncio.run(status(OWN_PATHS)) == 503, "the owner, which is not there"


def test_dots_in_a_path_lead_nowhere(two):
    connection = http.client.HTTPConnection(httpx.URL(two.url).netloc.decode())
    connection.request("GET", "/v1/../health")
    assert connection.getresponse().status == 404, "as without workers"


def test_an_owner_that_does_not_answer_is_told():
    async def ask() -> httpx.Response:
        app = Forwarding(PlainTextResponse("its own"), "/nobody/listens", "")
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://worker") as client:
            return await client.get("/v1/models")

    answer = asyncio.run(ask())
    assert answer.status_code == 503 and "send the request again" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "1"


def test_two_servers_do_not_share_a_port(two, start_process):
    port = str(httpx.URL(two.url).port)
    server = start_process("--api-processes", "2", "--port", port)
    assert server.wait() == 1
    assert any("Address already in use" in line for line in server.log), server.log


@pytest.mark.slow
def test_a_batch_runs(two, tmp_path):
    client = two.client()
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": {"model": "fake", "prompt": "hello"}}
        for i in range(20)
    ]
    file = client.files.create(file=("lines.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", lambda: "the batch goes on")
    found = client.files.content(client.batches.retrieve(batch.id).output_file_id).text.splitlines()
    assert {json.loads(line)["custom_id"] for line in found} == set(map(str, range(20)))


@pytest.mark.slow
def test_refusals_of_engines_and_errors_of_requests_reach_clients(two):
    rejected = ask(two, prompt=[REJECT, 5])
    assert (rejected.status_code, rejected.headers["retry-after"]) == (429, "3")
    refused = ask(two, prompt=[REFUSE, 5])
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        400,
        "the fake engine does not like this prompt",
    )
    served = ask(two, prompt=[REJECT, 5], slo={"otherwise": "flex"}, service_tier="priority")
    assert served.status_code == 429  # the fake engine refuses it in each class
    timed_out = ask(two, prompt=[SILENT, 5], slo={"max_queue_s": 0.2})
    assert (timed_out.status_code, timed_out.json()["error"]["code"]) == (429, "queue_timeout")


@pytest.mark.slow
def test_a_killed_worker_takes_its_own_calls_with_it_and_is_started_again(two):
    client = two.client()
    before = workers_of(two)
    body = {"model": "fake", "prompt": [SILENT, 5], "max_tokens": 4, "stream": True}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        calls = [pool.submit(httpx.post, f"{two.url}/v1/completions", json=body, timeout=60) for _ in range(16)]
        two.wait_for_metric('omniserve_requests_running{service_class="LS"}', 16)
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: (running(two) or 16) < 16, lambda: "nothing was aborted")
        left = running(two)
        cut = [call for call in calls if call.done() and call.exception() is not None]
        wait_until(
            lambda: sum(call.done() and call.exception() is not None for call in calls) == 16 - left,
            lambda: f"{len(cut)} are cut, {left} run",
        )
        wait_until(lambda: len(workers_of(two)) == 2, lambda: f"there are {workers_of(two)}")
        assert client.completions.create(model="fake", prompt="hello", max_tokens=5).choices[0].text == "hellohe"
        for worker in workers_of(two):
            if worker in before:
                os.kill(worker, signal.SIGKILL)
    two.wait_for_metric('omniserve_requests_running{service_class="LS"}', 0)
    two.wait_for_metric('omniserve_requests_queued{service_class="LS"}', 0)
    wait_until(lambda: len(workers_of(two)) == 2, lambda: f"there are {workers_of(two)}")


@pytest.mark.slow
def test_rates_and_limits_are_of_all_workers_and_sigterm_lets_calls_end(start_process, tmp_path):
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps(KEYS))
    server = start_process(
        "--api-processes", "2", "--api-key-file", str(keys), "--limit", "max_queued_requests=3"
    ).wait_until_ready()
    few = {"Authorization": f"Bearer {KEYS[1]['key']}"}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        codes = sorted(pool.map(lambda i: ask(server, headers=few).status_code, range(16)))
    assert codes == [200] * 5 + [429] * 11
    assert ask(server).status_code == 401
    a = {"Authorization": f"Bearer {KEYS[0]['key']}"}
    body = {"model": "fake", "prompt": [SILENT, 5], "max_tokens": 4, "stream": True}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        calls = [
            pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60, headers=a) for _ in range(12)
        ]
        wait_until(lambda: sum(call.done() for call in calls) == 9, lambda: "too many wait")
        refused = [call.result() for call in calls if call.done()]
        assert {(each.status_code, each.json()["error"]["code"]) for each in refused} == {(429, "queue_full")}
        slow = pool.submit(ask, server, prompt=[SLOW, 5], max_tokens=10, headers=a, service_tier="flex")
        time.sleep(0.3)
        server.send_signal(signal.SIGTERM)
        assert slow.result().status_code == 200
        started_s = time.monotonic()
        assert server.wait() == 0
        assert time.monotonic() - started_s < 60
    assert not [line for line in server.log if "Traceback" in line], server.log


@pytest.mark.slow
def test_workers_that_hang_are_killed(start_process):
    server = start_process(
        "--api-processes", "2", "--limit", "engine_heartbeat_s=2", "--limit", "shutdown_timeout_s=1"
    ).wait_until_ready()
    first = workers_of(server)
    os.kill(first[0], signal.SIGSTOP)
    wait_until(lambda: len(workers_of(server)) == 2 and first[0] not in workers_of(server), lambda: "".join(server.log))
    assert any("gave no sign of life for 2 s" in line for line in server.log), server.log
    for worker in workers_of(server):
        os.kill(worker, signal.SIGSTOP)
    assert server.stop() == 0
    assert any("did not stop, and is killed" in line for line in server.log), server.log


@pytest.mark.slow
def test_a_dead_owner_ends_its_workers(start_process):
    server = start_process("--api-processes", "2").wait_until_ready()
    workers = workers_of(server)
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not any(Path(f"/proc/{worker}/stat").exists() for worker in workers), lambda: f"{workers} go on")

"""Engines leave and join while requests run; one that is stopped for longer than its heartbeat is taken out."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import threading

import httpx
import openai
import pytest
from batch_inputs import completion_line, results, submit, wait_for
from fake_engine import SILENT, SLOW
from running import wait_until
from test_fleet import calls, complete, engine_processes

from omniserve.server.engines import admin_cli

TWO = ("--replicas", "2", "--router", "round-robin")


@pytest.fixture
def two(start_server):
    return start_server(*TWO).wait_until_ready()


def ask(server, method, path="", status=200, **content):
    answer = httpx.request(method, f"{server.url}/admin/engines{path}", timeout=30, **content)
    assert answer.status_code == status, answer.text
    return answer.json()


def engines(server):
    return ask(server, "GET")["data"]


def test_engines_are_listed(two):
    complete(two, [5])
    found = engines(two)
    shown = [(each["id"], each["address"], each["state"]) for each in found]
    assert shown == [(0, "local:0", "up"), (1, "local:1", "up")]
    assert [each["calls"] for each in found] == [1, 0] and found[0]["num_requests"] == found[0]["restarts"] == 0


def test_a_drained_engine_gets_no_calls_until_it_is_resumed(two):
    assert ask(two, "POST", "/0/drain")["state"] == "draining"
    for _ in range(4):
        complete(two, [5])
    assert calls(two) == [0, 4]
    assert ask(two, "POST", "/1/drain", 409)["error"]["code"] == "last_engine"
    assert ask(two, "POST", "/0/resume")["state"] == "up"
    complete(two, [5])
    complete(two, [5])
    assert calls(two)[0] == 1


def test_a_removed_engine_ends_its_requests_first_and_its_place_can_be_taken_again(two):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, two, [SLOW, 7], max_tokens=20)
        wait_until(lambda: engines(two)[0]["num_requests"] == 1)
        assert ask(two, "DELETE", "/0")["state"] == "leaving"
        assert ask(two, "POST", "/0/resume", 409)["error"]["code"] == "engine_removed"
        assert ask(two, "POST", status=409)["error"]["code"] == "no_place"
        assert running.result().usage.completion_tokens == 20
    wait_until(lambda: [each["id"] for each in engines(two)] == [1])
    assert complete(two, [5]).usage.completion_tokens == 3
    assert ask(two, "DELETE", "/1", 409)["error"]["code"] == "last_engine"
    added = ask(two, "POST")
    assert (added["id"], added["address"]) == (2, "local:0")
    wait_until(lambda: [each["state"] for each in engines(two)] == ["up", "up"], lambda: str(engines(two)))
    for _ in range(2):
        complete(two, [5])
    assert [each["calls"] for each in engines(two)] == [2, 1]


def test_requests_of_an_engine_that_has_no_time_left_go_elsewhere_or_are_told(two):
    ended = []

    def wait_for_answer(prompt):
        try:
            ended.append(complete(two, prompt, max_tokens=400))
        except openai.APIError as error:
            ended.append(error)

    for i, prompt in enumerate(([SILENT], [5], [SLOW])):  # the first engine has the silent and the slow one
        threading.Thread(target=wait_for_answer, args=[prompt], daemon=True).start()
        wait_until(lambda i=i: sum(calls(two)) == i + 1)
    wait_until(lambda: two.metric('omniserve_itl_seconds_count{service_class="LS"}') > 402)
    wait_until(lambda: len(ended) == 1)
    ended.clear()
    ask(two, "DELETE", "/0?timeout_s=0")
    wait_until(lambda: len(engines(two)) == 1 and ended)
    (error,) = ended
    assert error.status_code is None or error.status_code == 503, error
    assert "engine 0 was removed" in str(error)
    assert engines(two)[0]["num_requests"] == 1, "the silent one is there now"


def test_lines_of_a_batch_are_run_again_on_the_engines_that_are_left(start_server, tmp_path):
    log = tmp_path / "work"
    two = start_server(*TWO, "--work-log", str(log)).wait_until_ready()
    lines = [completion_line(n, prompt=[SLOW, 5, n + 1], max_tokens=30) for n in range(20)]
    batch = submit(two.client(), lines)
    wait_until(lambda: log.exists() and log.read_text().count("BE") == 20)
    ask(two, "DELETE", "/0?timeout_s=0")
    ended = wait_for(two.client(), batch.id)
    assert ended.request_counts.completed == 20 and ended.error_file_id is None
    found = results(two.client(), ended.output_file_id)
    assert [entry["custom_id"] for entry in found] == [line["custom_id"] for line in lines]
    assert 20 < log.read_text().count("BE") <= 30


def test_what_is_wrong_is_told(two):
    assert "there are 0, 1" in ask(two, "POST", "/7/drain", 404)["error"]["message"]
    ask(two, "POST", "/x/drain", 404)
    ask(two, "DELETE", "/0?timeout_s=-1", 400)
    refusal = ask(two, "POST", status=403, json={"address": "tcp://10.0.0.2:7201"})
    assert "does not allow this address" in refusal["error"]["message"]


def test_only_admins_may(start_server, tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps([{"name": "a", "key": "ka", "admin": True}, {"name": "b", "key": "kb"}]))
    server = start_server(*TWO, "--api-key-file", str(keys)).wait_until_ready()
    for key, status in (("ka", 200), ("kb", 403)):
        headers = {"Authorization": f"Bearer {key}"}
        ask(server, "GET", "", status, headers=headers)
        for method, path in (("POST", "/0/drain"), ("POST", "/0/resume"), ("DELETE", "/0")):
            ask(server, method, path, status, headers=headers)


def test_the_command_line_does_the_same(two, capsys):
    def engines_command(*arguments):
        status = admin_cli.main(["--url", two.url, *arguments])
        return status, capsys.readouterr()

    status, shown = engines_command("list")
    rows = [line.split()[:3] for line in shown.out.splitlines()[1:]]
    assert status == 0 and rows == [["0", "local:0", "up"], ["1", "local:1", "up"]]
    assert engines_command("drain", "0")[0] == 0 and engines_command("resume", "0")[0] == 0
    status, shown = engines_command("remove", "1", "--wait")
    assert status == 0 and shown.out == "engine 1 has left\n"
    status, shown = engines_command("add", "--wait")
    assert status == 0 and "local:1" in shown.out and "up" in shown.out
    status, shown = engines_command("remove", "9")
    assert status == 1 and "there is no engine 9" in shown.err


@pytest.mark.slow
def test_an_engine_that_is_stopped_for_longer_than_its_heartbeat_is_taken_out_and_comes_back(start_process):
    limits = ("--limit", "engine_heartbeat_s=2", "--limit", "engine_restarts=3")
    both = start_process(*TWO, *limits).wait_until_ready()
    ended = []

    def wait_for_answer(prompt, **fields):
        try:
            ended.append(complete(both, prompt, **fields))
        except openai.APIError as error:
            ended.append(error)

    first, _ = engine_processes(both)
    # The first engine has these two, of which the slow one has tokens when it is stopped.
    threads = [threading.Thread(target=wait_for_answer, args=[[SLOW, 5]], kwargs={"max_tokens": 400}, daemon=True)]
    threads[0].start()
    wait_until(lambda: both.metric('omniserve_itl_seconds_count{service_class="LS"}') > 4)
    complete(both, [5])
    os.kill(first, signal.SIGSTOP)
    threads.append(threading.Thread(target=wait_for_answer, args=[[6, 7]], daemon=True))
    threads[1].start()
    for thread in threads:
        thread.join(60)
    told = [each for each in ended if isinstance(each, openai.APIError)]
    answers = [each for each in ended if not isinstance(each, openai.APIError)]
    assert len(told) == len(answers) == 1 and "no sign of life for 2 s, and was killed" in str(told[0])
    assert answers[0].usage.completion_tokens == 3
    wait_until(lambda: [each["state"] for each in engines(both)] == ["up", "up"], lambda: str(engines(both)))
    assert first not in engine_processes(both) and engines(both)[0]["restarts"] == 1
    before = calls(both)[0]
    complete(both, [5])
    complete(both, [5])
    assert calls(both)[0] == before + 1

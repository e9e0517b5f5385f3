"""The parts that benchmarks share: what they report is what happened."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import demo
from benchmarks.common import sources
from benchmarks.common.client import LoadRequest, RequestRecord, Wire, body_of, drive
from benchmarks.common.record import ROOT, environment, read_row, write_record
from benchmarks.common.server import Server, ServerFailed, ServerProcess
from benchmarks.common.summary import LatencySummary, summarize
from benchmarks.latency_model import trace_load
from omniserve.simulate.results import percentile
from tests.stub_server import TOKEN_GAP_S


def load(*prompts: str, tier: str = "priority", at_s: float = 0.0) -> list[LoadRequest]:
    return [LoadRequest(send_at_s=at_s, prompt=prompt, max_tokens=4, service_tier=tier) for prompt in prompts]


def send(
    stub: ThreadingHTTPServer, requests: Sequence[LoadRequest], cutoff_s: float = 60.0
) -> tuple[list[RequestRecord], float]:
    is_ls = lambda request: request.service_tier == "priority"  # noqa: E731
    server = Server(f"http://127.0.0.1:{stub.server_port}")
    return drive(server, requests, must_finish=is_ls, cutoff_s=cutoff_s, may_be_cut_off=True)


def test_client_times_the_tokens_it_gets(stub: ThreadingHTTPServer) -> None:
    (record,), _ = send(stub, load("hello", at_s=0.1))
    assert record.finished and record.error is None
    assert (record.num_prompt_tokens, record.num_output_tokens, len(record.token_times_s)) == (3, 4, 4)
    assert record.sent_s is not None and record.first_token_s is not None and record.tpot_s is not None
    # The stub's sleeps are lower bounds, and nothing here depends on how long they really take.
    assert record.sent_s >= 0.1 and record.first_token_s >= record.sent_s + TOKEN_GAP_S
    assert record.token_times_s == sorted(record.token_times_s)


def test_client_disconnects_what_is_not_waited_for(stub: ThreadingHTTPServer) -> None:
    records, end_s = send(stub, load("hello") + load("endless", tier="flex"))
    assert [record.finished for record in records] == [True, False]
    assert end_s < 60
    deadline = time.monotonic() + 30
    while stub.disconnects == 0 and time.monotonic() < deadline:  # type: ignore[attr-defined]
        time.sleep(0.01)
    assert stub.disconnects == 1  # type: ignore[attr-defined]


def test_client_stops_at_the_cutoff(stub: ThreadingHTTPServer) -> None:
    (record,), end_s = send(stub, load("endless"), cutoff_s=0.3)
    assert not record.finished and end_s >= 0.3


def test_client_reports_a_refusal(stub: ThreadingHTTPServer) -> None:
    with pytest.raises(ServerFailed, match=r"HTTP 400: .*no"):
        send(stub, load("bad"))


def test_another_server_is_sent_only_what_it_knows() -> None:
    (request,) = load("hello")
    request = dataclasses.replace(request, slo=(0.5, 0.1))
    ours = body_of(request, Wire())
    assert ours["service_tier"] == "priority" and ours["slo"] == {"ttft_s": 0.5, "tpot_s": 0.1}
    plain = body_of(request, Wire(omniserve_fields=False))
    assert plain == {key: ours[key] for key in ours.keys() - {"service_tier", "slo"}}
    (be,) = load("hello", tier="flex")
    vllm = Wire(omniserve_fields=False, priority_field=True, model="m")
    bodies = [body_of(r, vllm) for r in (request, be)]
    assert [body["priority"] for body in bodies] == [0, 1] and bodies[0]["model"] == "m"


@pytest.mark.parametrize("percent", [0, 1, 50, 90, 99, 100])
@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_percentile_is_that_of_numpy(percent: float, count: int) -> None:
    values = [random.Random(count).random() for _ in range(count)]
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-12)  # double rounding


def test_percentile_of_nothing_is_nan_and_101_is_an_error() -> None:
    assert math.isnan(percentile([], 50))
    with pytest.raises(ValueError, match="101"):
        percentile([1.0], 101)


def test_requests_that_never_started_count_with_their_waiting_time() -> None:
    served = RequestRecord(service_tier="priority", send_at_s=1.0, first_token_s=1.5, finished=True)
    starved = RequestRecord(service_tier="priority", send_at_s=1.0)
    summary = summarize([served, starved], end_s=11.0)
    assert (summary.num_requests, summary.num_started, summary.num_finished) == (2, 1, 1)
    assert summary.ttft_p50_s == pytest.approx((0.5 + 10.0) / 2)  # exact but for rounding
    assert math.isnan(summary.tpot_p50_s)


def test_record_without_git_still_tells_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_git = environment()
    monkeypatch.setenv("PATH", str(tmp_path))
    without = environment()
    assert without["git"] == {"commit": None, "dirty": None} and without["sources"] == with_git["sources"]


def test_record_keeps_of_paths_what_other_machines_know(tmp_path: Path) -> None:
    config = {
        "trace": tmp_path / "trace.csv",
        "arguments": ("--model", str(ROOT / ".cache" / "model"), "--url", "http://localhost/v1", 3, None),
        "record": "benchmarks/results/x.json",
    }
    write_record(tmp_path / "a", name="x", config=config, seed=7, results={})
    write_record(tmp_path / "b", name="x", config=config | {"trace": "/elsewhere/trace.csv"}, seed=7, results={})
    first, second = (read_row(tmp_path / name) for name in "ab")
    assert first["config"] == {
        "trace": "trace.csv",
        "arguments": ["--model", ".cache/model", "--url", "http://localhost/v1", 3, None],
        "record": "benchmarks/results/x.json",
    }
    assert first["workload_hash"] == second["workload_hash"]


def test_a_server_that_cannot_start_shows_its_log_and_its_modules_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_started", set())
    with (
        pytest.raises(ServerFailed, match="no-such-flag"),
        ServerProcess(["--no-such-flag"], tmp_path / "log") as server,
    ):
        server.wait_until_healthy(timeout_s=120)
    monkeypatch.setattr(sources, "sys", SimpleNamespace(modules={}))  # not what this process has imported
    monkeypatch.setattr(sources, "sources_of", set)  # their digests take a while
    assert sources.measured_sources() >= {
        "omniserve/server/__main__.py",
        "omniserve/server/generate.py",
        "omniserve/engine/engine.py",
    }
    sources._started.clear()
    assert not sources.measured_sources()


def test_demo_sends_the_same_ls_stream_with_and_without_be() -> None:
    settings = demo.parse_arguments(["--be-requests", "5", "--record", "x.json"])
    alone = demo.make_load(settings, 10.0, with_be=False)
    beside = demo.make_load(settings, 10.0, with_be=True)
    assert settings.record == Path("x.json")
    assert beside[: len(alone)] == alone and len(beside) == len(alone) + 5
    assert {request.service_tier for request in alone} == {"priority"}
    assert {request.service_tier for request in beside[len(alone) :]} == {"flex"}


def test_demo_tells_every_stage_and_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = demo.parse_arguments([])
    begun: list[tuple[str, float]] = []

    @contextmanager
    def no_server(*_: object) -> Iterator[object]:
        yield SimpleNamespace(metrics=lambda: {demo.HOST_TOKENS: 0.0})

    monkeypatch.setattr(demo, "warm_server", no_server)
    monkeypatch.setattr(demo, "drive", lambda *_, **__: ([], 1.0))
    for scheduler, start_s in (("omniserve", demo.FIRST_START_S), ("fcfs", demo.START_S)):
        demo.run_scheduler(settings, scheduler, lambda *stage: begun.append(stage), start_s=start_s)
    times = {"the server starts": demo.FIRST_START_S, "LS alone": 5.0, "LS + BE": 15.0}
    assert begun == [(f"omniserve: {stage}", seconds) for stage, seconds in times.items()] + [
        (f"fcfs: {stage}", seconds) for stage, seconds in (times | {"the server starts": demo.START_S}).items()
    ]


def test_demo_says_what_best_effort_work_costs() -> None:
    settings = demo.parse_arguments(["--be-requests", "5"])

    def phase(name: str, ttft_s: float, **counts: int) -> demo.Phase:
        ls = LatencySummary(
            **{"num_requests": 4, "num_started": 4, "num_finished": 4} | counts, ttft_p50_s=ttft_s, ttft_p99_s=ttft_s,
            tpot_p50_s=math.nan if counts else 0.008, tpot_p99_s=0.02,
        )  # fmt: skip
        return demo.Phase(
            scheduler="fcfs", name=name, duration_s=10.0, ls=ls, be_tokens=500.0, be_host_tokens=0.0, records=[]
        )

    text = demo.report([phase(demo.ALONE, 0.03), phase(demo.BESIDE, 9.0, num_started=1, num_finished=0)], settings)
    assert "fcfs: TTFT 30.0 -> >9000.0 ms, TPOT 8.0 -> - ms, 0 of 4 done; BE work got 50 tokens/s" in text
    assert "0 of 4 |  >9000.0" in text and "a pile of 5 from the start" in text


def test_a_trace_becomes_a_load_in_steps(tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = [(i * 0.5, rng.randint(1, 4000), rng.randint(1, 900)) for i in range(400)]
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "\n".join(",".join(map(str, row)) for row in rows))
    sizes = {"num_steps": 500, "vocab_size": 50, "max_prompt": 64, "max_output": 16, "mean_active": 4.0}
    load = trace_load(path, 1, **sizes)
    assert load == trace_load(path, 1, **sizes) != trace_load(path, 2, **sizes)
    assert [a.at_step for a in load] == sorted(a.at_step for a in load) and 0 < load[-1].at_step < 500
    prompts = [len(arrival.request.prompt_token_ids) for arrival in load]
    assert max(prompts) == 64 and min(prompts) >= 1 and len({a.request.service_class for a in load}) == 2
    path.write_text("arrival_s,input_tokens\n0,1\n")
    with pytest.raises(ValueError, match="missing: output_tokens"):
        trace_load(path, 1, **sizes)

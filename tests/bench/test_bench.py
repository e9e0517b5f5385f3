"""``omniserve bench``: what it sends, what it counts, and what it tells."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import statistics
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import httpx
import pytest

from omniserve.bench.cli import main
from omniserve.bench.client import Call, Seen, send
from omniserve.bench.load import Outcome, Shape, calls
from omniserve.bench.report import figures, is_good, percentile


class Handler(BaseHTTPRequestHandler):
    """Answers with as many events as tokens were asked for; with an error if the model is called so."""

    asked: ClassVar[list[dict]] = []
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body | {"path": self.path, "authorization": self.headers.get("authorization")})
        if body.get("model") == "busy":
            self.send_response(429)
            self.send_header("content-length", "4")
            self.end_headers()
            self.wfile.write(b"busy")
            return
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        num_prompt = len(body["prompt"]) if "prompt" in body else len(body["messages"][0]["content"].split())
        is_chat = "messages" in body
        if is_chat:
            self.event(choices=[{"delta": {"role": "assistant", "content": ""}}])
        for number in range(1, body["max_tokens"] + 1):
            choice = {"delta": {"content": "a"}} if is_chat else {"text": "a"}
            usage = {"prompt_tokens": num_prompt, "completion_tokens": number}
            self.event(choices=[choice], usage=usage | {"prompt_tokens_details": {"cached_tokens": 3}})
        if body.get("model") == "broken":
            self.event(error={"message": "it broke"})
        if body.get("model") != "short":
            self.wfile.write(b"data: [DONE]\n\n")

    def event(self, **fields: object) -> None:
        self.wfile.write(f": comment\ndata: {json.dumps(fields)}\n\n".encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def _nothing_asked() -> None:
    Handler.asked.clear()


def bench(url: str, *flags: str) -> int:
    small = "--num-prompts 5 --random-input-len 7 --random-output-len 4".split()
    return main(["serve", "--base-url", url, *small, *flags])


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_it_sends_what_the_flags_say_and_saves_what_it_found(url, endpoint, tmp_path, capsys):
    file = tmp_path / "result.json"
    flags = "--model m --api-key secret --service-tier priority --percentile-metrics ttft,tpot,e2el".split()
    more = ["--metric-percentiles", "50,90", "--goodput", "ttft:1e6", "tpot:1e6", "--result-filename", str(file)]
    assert bench(url, "--endpoint", endpoint, *flags, *more) == 0
    assert len(Handler.asked) == 5
    for body in Handler.asked:
        assert body["path"] == endpoint and body["authorization"] == "Bearer secret"
        assert (body["model"], body["service_tier"], body["max_tokens"], body["stream"]) == ("m", "priority", 4, True)
    found = json.loads(file.read_text())
    assert (found["completed"], found["failed"], found["errors"]) == (5, 0, [])
    assert (found["total_input_tokens"], found["total_output_tokens"], found["total_cached_tokens"]) == (35, 20, 15)
    assert found["good_share"] == 1 and found["request_goodput"] == found["request_throughput"]
    assert {"p50_ttft_ms", "p90_tpot_ms", "mean_e2el_ms", "median_ttft_ms", "std_tpot_ms"} <= found.keys()
    assert not {name for name in found if "itl" in name} and "secret" not in file.read_text()
    told = capsys.readouterr().out
    assert "completed" in told and str(file) in told


def test_best_effort_requests_run_beside_them(url, tmp_path):
    file = tmp_path / "result.json"
    more = "--best-effort 2 --best-effort-input-len 9 --best-effort-output-len 3 --request-rate 20".split()
    assert bench(url, *more, "--result-filename", str(file)) == 0
    beside = [body for body in Handler.asked if body.get("service_tier") == "flex"]
    assert len(beside) > 2 and {(len(body["prompt"]), body["max_tokens"]) for body in beside} == {(9, 3)}
    found = json.loads(file.read_text())
    assert found["completed"] == 5 and found["background_completed"] >= 2 and found["background_failed"] == 0
    assert found["background_token_throughput"] > 0


def test_best_effort_0_is_none(url):
    assert bench(url, "--best-effort", "0", "--model", "alone") == 0
    asked = [body for body in Handler.asked if body["model"] == "alone"]  # one of another test may come late
    assert len(asked) == 5 and not any("service_tier" in body for body in asked)


@pytest.mark.parametrize(
    ("model", "told"), [("busy", "HTTP 429: busy"), ("broken", "it broke"), ("short", "ended early")]
)
def test_failures_are_counted_and_told(url, model, told, capsys):
    assert bench(url, "--model", model, "--max-concurrency", "2") == 1
    out = capsys.readouterr().out
    assert told in out and "completed                                   0" in out


def test_a_server_that_is_not_there_is_told(capsys):
    assert bench("http://127.0.0.1:1") == 1
    assert "ConnectError" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        ["--goodput", "itl:5"], ["--percentile-metrics", "ttft,x"], ["--metric-percentiles", "101"],
        ["--num-prompts", "0"], ["--request-rate", "0"], ["--random-range-ratio", "1"], ["--random-vocab", "3"],
        ["--base-ulr", "x"],
    ],
)  # fmt: skip
def test_a_wrong_flag_is_one_line(url, flags, capsys):
    with pytest.raises(SystemExit) as end:
        bench(url, *flags)
    assert end.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1 and not Handler.asked


def test_arrivals_are_poissons_and_the_same_for_a_seed():
    shape = Shape(
        endpoint="/v1/completions", model=None, service_tier=None, input_len=10, output_len=4, range_ratio=0.5
    )

    def drawn(seed: int, rate: float) -> list[Call]:
        return [*itertools.islice(calls(shape, random.Random(seed), rate=rate), 2000)]

    some = drawn(1, 5.0)
    times = [call.send_at_s for call in some]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.1), "of an exponential distribution"
    assert some == drawn(1, 5.0) and some != drawn(2, 5.0)
    assert {call.send_at_s for call in drawn(1, math.inf)} == {0.0}
    lengths = {len(call.body["prompt"]) for call in some}
    assert lengths <= {*range(5, 16)} and len(lengths) > 8


def seen(*times: float, sent: float = 0.0, tokens: int | None = None, ended: bool = True) -> Seen:
    count = len(times) if tokens is None else tokens
    return Seen(
        sent_s=sent, token_times_s=list(times), num_prompt_tokens=10, num_output_tokens=count,
        ended_s=times[-1] if ended else None, error=None if ended else "it broke",
    )  # fmt: skip


def test_figures_are_those_of_complete_requests():
    some = [seen(1.0, 1.5, 2.0), seen(3.0, 5.0, sent=1.0, tokens=5), seen(0.5, ended=False), seen(4.0, sent=3.5)]
    outcome = Outcome(requests=some, seconds=10.0, background=[seen(1.0, 2.0), seen(3.0, ended=False)])
    found = figures(outcome, metrics=["ttft", "tpot", "itl"], percentiles=[100.0], goodput_s={"ttft": 1.0, "tpot": 0.5})
    assert (found["completed"], found["failed"]) == (3, 1)
    assert found["mean_ttft_ms"] == pytest.approx(1e3 * (1.0 + 2.0 + 0.5) / 3) and found["median_ttft_ms"] == 1000
    assert found["p100_tpot_ms"] == 500 and found["mean_tpot_ms"] == 500, "2 s for the 4 tokens behind the first"
    assert found["p100_itl_ms"] == 2000
    assert found["request_goodput"] == pytest.approx(0.2), "the one without a TPOT has met its objective"
    assert found["background_token_throughput"] == pytest.approx(1.2)
    assert not is_good(some[1], {"ttft": 1.0})


def test_percentiles_are_interpolated():
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0 and percentile([1.0, 2.0], 75) == 1.75
    assert percentile([5.0], 99) == 5.0 and math.isnan(percentile([], 50))


def test_a_record_can_be_read_while_its_request_runs(url):
    async def one() -> Seen:
        async with httpx.AsyncClient(base_url=url) as client:
            return await send(client, Call(endpoint="/v1/completions", body={"prompt": [1, 2], "max_tokens": 3}))

    done = asyncio.run(one())
    assert done.is_complete and len(done.token_times_s) == 3 and len(done.itl_s) == 2
    assert done.ttft_s <= done.e2el_s and done.num_prompt_tokens == 2

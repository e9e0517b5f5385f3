"""A trace of each request, seen from a real collector behind a real socket."""

from __future__ import annotations

import itertools
import signal
import socket
import sys
import time

import fake_engine
import httpx
import pytest
from otlp_receiver import receiving

from omniserve.core.request import add_stay
from omniserve.server.cli import parse_args
from omniserve.server.telemetry.traces import open_traces
from tests.quick import slow_except

SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50"}  # milliseconds


@pytest.fixture(scope="module")
def receiver():
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def traced(start_module_server, receiver):
    return start_module_server("--otlp-endpoint", receiver.url, **SOON).wait_until_ready()


def complete(server, name, *, headers=(), **body):
    headers = {"x-request-id": name, **dict(headers)}
    return httpx.post(f"{server.url}/v1/completions", json={"prompt": "ab"} | body, headers=headers, timeout=30)


def test_a_request_is_a_span_and_its_parts_are_spans_below_it(traced, receiver):
    before_ns = time.time_ns()
    answer = complete(traced, "one", prompt=[5, 6], max_tokens=5, slo={"ttft_s": 1000, "tpot_s": 1e-9}).json()
    root = receiver.root("one")
    assert (root.name, root.parent_id, root.service, root.is_error) == ("omniserve.request", "", "omniserve", False)
    assert before_ns <= root.start_ns < root.end_ns <= time.time_ns()
    assert root.attributes | {"omniserve.ttft_s": 0, "omniserve.tpot_s": 0} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "omniserve",
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": answer["usage"]["completion_tokens"],
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "omniserve.request_id": "one",
        "omniserve.service_class": "LS",
        "omniserve.host_tokens": 0,
        "omniserve.predicted_ttft_s": 2 * fake_engine.SECONDS_PER_TOKEN,
        "omniserve.ttft_s": 0,
        "omniserve.tpot_s": 0,
        "omniserve.slo.ttft_s": 1000,
        "omniserve.slo.tpot_s": 1e-9,
        "omniserve.slo.ttft_met": True,
        "omniserve.slo.tpot_met": False,
    }
    parts = {span.name: span for span in receiver.below(root)}
    assert set(parts) == {"queue", "prefill", "decode"}
    assert all(root.encloses(part) and part.trace_id == root.trace_id for part in parts.values())
    assert parts["queue"].end_ns == parts["prefill"].start_ns and parts["prefill"].end_ns == parts["decode"].start_ns
    # What this process saw came a little later than what the engine tells, and both are in the trace.
    ttft_ns = root.attributes["omniserve.ttft_s"] * 1e9
    assert 0 < parts["prefill"].end_ns - parts["queue"].start_ns <= ttft_ns <= root.end_ns - root.start_ns
    assert parts["decode"].end_ns - parts["decode"].start_ns >= 4 * 1e6, "4 steps of a millisecond, at least"


def test_every_choice_has_its_parts(traced, receiver):
    chat = {"messages": [{"role": "user", "content": "a"}], "n": 3, "max_tokens": 2, "service_tier": "flex"}
    headers = {"x-request-id": "chat"}
    assert httpx.post(f"{traced.url}/v1/chat/completions", json=chat, headers=headers, timeout=30).status_code == 200
    root = receiver.root("chat")
    assert root.attributes["gen_ai.operation.name"] == "chat"
    assert root.attributes["omniserve.service_class"] == "BE"
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"] * 3
    parts = sorted((span.attributes["omniserve.choice"], span.name) for span in receiver.below(root))
    assert parts == [(i, name) for i in range(3) for name in ("decode", "prefill", "queue")]


def test_the_callers_trace_goes_on(traced, receiver):
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    complete(traced, "child", headers={"traceparent": f"00-{trace_id}-{span_id}-01"}, max_tokens=2)
    root = receiver.root("child")
    assert (root.trace_id, root.parent_id) == (trace_id, span_id)
    complete(traced, "unsampled", headers={"traceparent": f"00-{trace_id}-{span_id}-00"}, max_tokens=2)
    complete(traced, "orphan", headers={"traceparent": "00-nonsense"}, max_tokens=2)
    root = receiver.root("orphan")
    assert root.parent_id == "" and root.trace_id != trace_id
    assert all(span.attributes.get("omniserve.request_id") != "unsampled" for span in receiver.spans)


@pytest.mark.parametrize(
    ("name", "body", "status", "kind", "message"),
    [
        ("bad", {"max_tokens": -1}, 400, "invalid_value", "max_tokens"),
        ("model", {"model": "other"}, 404, "model_not_found", "is not served here"),
        ("rejected", {"prompt": [fake_engine.REJECT]}, 429, "rate_limit_exceeded", "too many requests"),
        ("refused", {"prompt": [fake_engine.REFUSE]}, 400, "400", "does not like this prompt"),
        ("failed", {"prompt": [fake_engine.BAD_OUTPUT]}, 500, "500", "are not finite"),
    ],
)
def test_an_error_is_in_the_trace_with_its_reason(traced, receiver, name, body, status, kind, message):
    assert complete(traced, name, **body).status_code == status
    root = receiver.root(name)
    assert root.is_error and message in root.message
    assert (root.attributes["error.type"], root.attributes["http.response.status_code"]) == (kind, status)


def test_an_error_within_a_stream_is_in_the_trace(traced, receiver):
    assert "not finite" in complete(traced, "stream", prompt=[fake_engine.BAD_OUTPUT], stream=True).text
    root = receiver.root("stream")
    assert root.is_error and "not finite" in root.message and root.attributes["http.response.status_code"] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_in_the_trace(traced, receiver, stream):
    name = f"gone-{stream}"
    body = {"prompt": [fake_engine.SLOW, 1], "max_tokens": 400, "ignore_eos": True, "stream": stream}
    url, headers = f"{traced.url}/v1/completions", {"x-request-id": name}
    if stream:
        with httpx.stream("POST", url, json=body, headers=headers, timeout=30) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, headers=headers, timeout=20 * fake_engine.SLOW_STEP_S)
    root = receiver.root(name)
    assert root.is_error and root.attributes["error.type"] == "client_disconnected"
    assert root.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    parts = {span.name: span for span in receiver.below(root)}
    assert set(parts) == {"queue", "prefill", "decode"} and root.encloses(parts["decode"])


def test_a_stop_string_ends_the_decode(traced, receiver):
    assert complete(traced, "stop", prompt="abc", max_tokens=50, stop=["c"]).json()["choices"][0]["text"] == "ab"
    root = receiver.root("stop")
    assert not root.is_error and root.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    (decode,) = [span for span in receiver.below(root) if span.name == "decode"]
    assert root.encloses(decode)


def test_what_is_no_completion_has_no_trace(traced, receiver):
    for path in ("/v1/models", "/health", "/metrics"):
        httpx.get(f"{traced.url}{path}", headers={"x-request-id": f"other{path}"}, timeout=30)
    complete(traced, "last", max_tokens=1)
    receiver.root("last")
    assert not any(s.attributes.get("omniserve.request_id", "").startswith("other") for s in receiver.spans)
    assert receiver.paths == {"/v1/traces"}


def test_the_environment_switches_it_on_and_the_end_sends_what_is_left(start_server):
    with receiving() as receiver:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_SERVICE_NAME": "mine"}
        server = start_server("--api-key", "k", **environment, OTEL_BSP_SCHEDULE_DELAY="600000").wait_until_ready()
        for name, key in (("r0", "k"), ("r1", "k"), ("r2", "wrong")):
            complete(server, name, headers={"authorization": f"Bearer {key}"}, max_tokens=2)
        assert receiver.spans == []
        assert server.stop() == 0
        assert {span.attributes.get("omniserve.request_id") for span in receiver.spans} == {None, "r0", "r1", "r2"}
        refused = receiver.root("r2")
        assert refused.is_error and refused.attributes["error.type"] == "401" and refused.message == "Unauthorized"
        assert {span.service for span in receiver.spans} == {"mine"}


@pytest.mark.parametrize("answers", slow_except(("nobody listens",), ["nobody listens", "nobody answers"]))
def test_a_collector_that_is_gone_costs_no_request(start_server, monkeypatch, answers):
    monkeypatch.setattr("omniserve.server.telemetry.otlp._FLUSH_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if answers == "nobody listens":
            listener.close()
        server = start_server("--otlp-endpoint", f"http://127.0.0.1:{port}", **SOON).wait_until_ready()
        for i in range(20):
            assert complete(server, f"r{i}", max_tokens=2).status_code == 200
        assert server.stop(signal.SIGTERM) == 0
    assert not any("Traceback" in line for line in server.log)
    if answers == "nobody answers":
        assert any("did not take the last spans" in line for line in server.log)


def test_without_flag_and_environment_there_are_none(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    assert open_traces(None, model_name="m") is None
    assert parse_args(["--otlp-endpoint", "http://c:4318"])[0].otlp_endpoint == "http://c:4318"


@pytest.fixture
def no_sdk(monkeypatch):
    monkeypatch.delitem(sys.modules, "omniserve.server.telemetry.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)


def test_the_flag_without_the_package_says_what_to_install(no_sdk, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(["--otlp-endpoint", "http://127.0.0.1:4318"])
    assert caught.value.code == 2
    assert "--otlp-endpoint needs the OpenTelemetry SDK" in (message := capsys.readouterr().err)
    assert "pip install 'omniserve[otel]'" in message


def test_the_environment_without_the_package_is_a_warning(no_sdk, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    assert open_traces(None, model_name="m") is None
    assert "OTEL_EXPORTER_OTLP_ENDPOINT asks for traces" in caplog.text and "omniserve[otel]" in caplog.text


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "ftp://x", "http://", ""])
def test_an_endpoint_that_is_no_url_is_refused(url, capsys):
    with pytest.raises(SystemExit):
        parse_args([f"--otlp-endpoint={url}"])
    assert "--otlp-endpoint must be the URL of a collector" in capsys.readouterr().err


def test_stays_on_the_host_tier_are_bounded():
    stays = []
    for i in range(100):
        add_stay(stays, (10.0 * i, 10.0 * i + (9.0 if i == 40 else 1.0)))
    assert len(stays) == 64 and stays[0][0] == 0.0 and stays[-1] == (990.0, 991.0)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(stays))
    assert any(start <= 400.0 and end > 410.0 for start, end in stays), "the two nearest became one first"

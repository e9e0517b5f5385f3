"""What gateways and their clients send: ``priority``, objectives as headers, deadlines, a way out of a refusal."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fake_engine import REJECT, REJECT_LS, SECONDS_PER_TOKEN, SILENT
from prometheus_client.parser import text_string_to_metric_families

from omniserve.core.config import DEFAULT_CLASSES
from omniserve.core.request import SLO, ClassSpec, ServiceClass
from omniserve.core.stats import EngineStats, KVUsage, SchedulerStats
from omniserve.server.access.tiers import class_of_tier, prioritised_tier, tier_of_class
from omniserve.server.completions.protocol import CompletionRequest, SloFields, parse
from omniserve.server.errors import ApiError
from omniserve.server.fields import UnknownFields
from omniserve.server.header_fields import SLO_HEADERS, HeaderFields
from omniserve.server.telemetry.metrics import ServerMetrics
from omniserve.server.telemetry.vllm_metrics import Served

CLASSES = (
    ClassSpec(name="gold", kind="LS"),
    ClassSpec(name="silver", kind="LS"),
    ClassSpec(name="batch", kind="BE"),
    ClassSpec(name="idle", kind="BE"),
)


# -- priority --


@pytest.mark.parametrize(
    ("tier", "priority", "classes", "used"),
    [
        ("auto", 0, DEFAULT_CLASSES, "auto"),
        ("auto", 1, DEFAULT_CLASSES, "flex"),
        ("auto", 10**6, DEFAULT_CLASSES, "flex"),
        ("auto", -5, DEFAULT_CLASSES, "auto"),
        ("flex", -1, DEFAULT_CLASSES, "default"),
        ("flex", 3, DEFAULT_CLASSES, "flex"),
        ("auto", -1, CLASSES, "priority"),
        ("auto", 1, CLASSES, "flex"),
        ("auto", 2, CLASSES, "idle"),
        ("gold", 1, CLASSES, "default"),
    ],
)
def test_each_unit_of_a_priority_is_a_class(tier, priority, classes, used):
    assert prioritised_tier(tier, priority, classes) == used
    rank, before = (classes.index(class_of_tier(each, classes)) for each in (used, tier))
    assert (rank - before) * priority >= 0, "a priority above 0 never raises, one below 0 never lowers"


def test_lines_of_batches_stay_best_effort_whatever_their_priority():
    used = [prioritised_tier("flex", n, CLASSES, kind=ServiceClass.BE) for n in (-9, 0, 1, 9)]
    assert used == ["flex", "flex", "idle", "idle"]


def test_a_class_is_named_as_openai_names_it():
    assert [tier_of_class(spec, CLASSES) for spec in CLASSES] == ["priority", "default", "flex", "idle"]
    assert [tier_of_class(spec, DEFAULT_CLASSES) for spec in DEFAULT_CLASSES] == ["default", "flex"]


@pytest.fixture(scope="module")
def guarded(start_module_server, tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    file.write_text(json.dumps([{"name": "any", "key": "any"}, {"name": "free", "key": "free", "tier": "flex"}]))
    return start_module_server("--api-key-file", str(file)).wait_until_ready()


@pytest.mark.parametrize(
    ("key", "fields", "tier"),
    [
        ("any", {"priority": 7}, "flex"),
        ("any", {"priority": -1, "service_tier": "flex"}, "default"),
        ("any", {"priority": 0, "service_tier": "flex"}, "flex"),
        ("free", {"priority": -1}, "flex"),
    ],
)
def test_answer_names_the_tier_and_no_key_gets_more_than_its_highest(guarded, key, fields, tier):
    body = {"prompt": "a", "max_tokens": 1, **fields}
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(f"{guarded.url}/v1/completions", json=body, headers=headers).json()
    assert answer["service_tier"] == tier


# -- headers --


@pytest.mark.parametrize(
    ("headers", "slo"),
    [
        ({}, {}),
        ({"x-llm-d-slo-ttft-ms": "250", "x-slo-tpot-ms": "12.5"}, {"ttft_s": 0.25, "tpot_s": 0.0125}),
        ({"x-llm-d-slo-ttft-ms": "100", "x-slo-ttft-ms": "900"}, {"ttft_s": 0.1}),
        ({"x-llm-d-slo-ttft-ms": "0", "x-slo-ttft-ms": "900"}, {"ttft_s": 0.9}),
    ],
)
def test_headers_stand_for_objectives(headers, slo):
    assert HeaderFields.of(headers).slo == pytest.approx(slo)


@pytest.mark.parametrize("text", ["", "fast", "-1", "nan", "inf", "1e999", "5ms"])
@pytest.mark.parametrize("name", SLO_HEADERS)
def test_a_header_that_is_no_time_is_refused_by_its_name(name, text):
    with pytest.raises(ApiError, match=name) as caught:
        HeaderFields.of({name: text})
    assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize(
    ("slo", "ttft_s", "tpot_s"),
    [(None, 0.1, 0.2), ({"ttft_s": 3}, 3, 0.2), ({"ttft_s": None, "tpot_s": 4}, 0.1, 4), ({}, 0.1, 0.2)],
)
def test_what_the_body_says_counts(slo, ttft_s, tpot_s):
    body = json.dumps({"prompt": "a", "slo": slo}).encode()
    request = parse(CompletionRequest, body, UnknownFields(), headers=HeaderFields(slo={"ttft_s": 0.1, "tpot_s": 0.2}))
    assert request.slo is not None and (request.slo.ttft_s, request.slo.tpot_s) == (ttft_s, tpot_s)


def test_a_null_says_nothing_where_a_header_does():
    headers = HeaderFields("flex", {"ttft_s": 0.1}, "s1")
    body = json.dumps({"prompt": "a", "slo": None, "service_tier": None, "session_id": None}).encode()
    request = parse(CompletionRequest, body, UnknownFields(), headers=headers)
    assert (request.service_tier, request.session_id, request.slo.ttft_s) == ("flex", "s1", 0.1)


def test_a_header_gives_a_request_its_objective(server):
    """The fake engine predicts for requests with an objective for their first token, of which best effort has none."""
    body = {"prompt": [5, 6], "max_tokens": 1, "service_tier": "flex"}
    with server.http() as http:
        answers = [
            http.post("/v1/completions", json=body, headers={"x-llm-d-slo-ttft-ms": value}) for value in ("80", "soon")
        ]
    assert answers[0].headers["x-omniserve-predicted-ttft-ms"] == str(2 * SECONDS_PER_TOKEN * 1e3)
    assert answers[1].status_code == 400 and answers[1].json()["error"]["param"] == "x-llm-d-slo-ttft-ms"


# -- deadlines and what becomes of a refusal --


@pytest.mark.parametrize(
    ("slo", "objectives"),
    [
        ({}, SLO()),
        ({"ttft_s": 1}, SLO(ttft_s=1)),
        ({"deadline_s": 5}, None),
        ({"deadline_s": 5, "tpot_s": 2}, SLO(tpot_s=2)),
        ({"otherwise": "flex"}, None),
        ({"max_queue_s": 5}, None),
    ],
)
def test_a_deadline_alone_leaves_the_objectives_of_the_class(slo, objectives):
    assert SloFields.model_validate(slo).objectives == objectives


@pytest.mark.parametrize("slo", [{"deadline_s": 0}, {"max_queue_s": -1}, {"otherwise": "wait"}, {"deadline": 3}])
def test_wishes_that_are_wrong_are_refused_by_their_name(server, slo):
    with server.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "a", "slo": slo})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == f"slo.{next(iter(slo))}"


@pytest.mark.parametrize(("deadline_s", "met"), [(60, "true"), (1e-9, "false")])
def test_metrics_tell_which_deadlines_were_met(server, deadline_s, met):
    name = f'omniserve_slo_total{{met="{met}",objective="deadline",service_class="BE"}}'
    before = server.metric(name)
    body = {"prompt": [5, 6], "max_tokens": 3, "service_tier": "flex", "slo": {"deadline_s": deadline_s}}
    with server.http() as http:
        assert http.post("/v1/completions", json=body).status_code == 200
    assert server.metric(name) == before + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [[REJECT_LS, 7], [[5, 6], [REJECT_LS, 7], [8]]])
def test_a_refused_request_runs_as_best_effort_if_it_says_so(server, prompt, stream):
    counter = 'omniserve_requests_downgraded_total{service_class="LS"}'
    refused, before = 'omniserve_requests_rejected_total{service_class="LS"}', server.metric(counter)
    num_refused = server.metric(refused)
    body = {"prompt": prompt, "max_tokens": 2, "stream": stream, "return_token_ids": True}
    with server.http() as http:
        assert http.post("/v1/completions", json=body).status_code == 429
        answer = http.post("/v1/completions", json=body | {"slo": {"otherwise": "flex", "ttft_s": 0.1}})
    assert answer.status_code == 200, answer.text
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    answers = chunks if stream else [answer.json()]
    assert {each["service_tier"] for each in answers} == {"flex"}
    said: dict[int, list[int]] = {}
    for choice in (choice for each in answers for choice in each["choices"]):
        said.setdefault(choice["index"], []).extend(choice["token_ids"])
    prompts = prompt if isinstance(prompt[0], list) else [prompt]
    assert said == {index: (each * 2)[:2] for index, each in enumerate(prompts)}
    assert "x-omniserve-predicted-ttft-ms" not in answer.headers
    assert (server.metric(counter), server.metric(refused)) == (before + 1, num_refused + 1)
    server.wait_until_free()


def test_what_is_refused_as_best_effort_too_is_refused(server):
    with server.http() as http:
        answer = http.post("/v1/completions", json={"prompt": [REJECT], "slo": {"otherwise": "flex"}})
    assert answer.status_code == 429


def test_a_full_queue_is_a_reason_to_be_best_effort_too(start_server):
    server = start_server("--limit", "max_queued_requests=1").wait_until_ready()
    body = {"prompt": [SILENT], "max_tokens": 1, "slo": {"max_queue_s": 30}}
    with server.http() as http, ThreadPoolExecutor() as threads:
        waiting = threads.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
        server.wait_for_metric('omniserve_requests_queued{service_class="LS"}', 1)
        answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "slo": {"otherwise": "flex"}})
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 429
        server.close()
        waiting.exception()
    assert answer.status_code == 200 and answer.json()["service_tier"] == "flex"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waits_for_too_long_is_told_to_come_again(server, stream):
    name = 'omniserve_requests_total{finish_reason="timeout",service_class="LS"}'
    before = server.metric(name)
    slo = {"max_queue_s": 0.05}
    with server.http() as http:
        begun = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "stream": stream, "slo": slo})
        answer = http.post("/v1/completions", json={"prompt": [SILENT], "stream": stream, "slo": slo})
    assert begun.status_code == 200
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "queue_timeout"
    assert int(answer.headers["retry-after"]) >= 1
    assert server.metric(name) == before + 1
    server.wait_until_free()


# -- what gateways read --


def test_metrics_have_vllms_names_too(server):
    labels = 'model_name="fake"'
    with server.http() as http:
        for tier in ("default", "flex"):
            assert http.post("/v1/completions", json={"prompt": [5], "max_tokens": 3, "service_tier": tier}).is_success
        text = http.get("/metrics").text
    server.wait_until_free()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    kinds = {name.removeprefix("vllm:"): family.type for name, family in families.items() if name.startswith("vllm:")}
    assert kinds == {
        **dict.fromkeys(("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"), "gauge"),
        **dict.fromkeys(("gpu_cache_usage_perc", "cache_config_info"), "gauge"),
        **dict.fromkeys(("prefix_cache_queries", "prefix_cache_hits", "gpu_prefix_cache_queries"), "counter"),
        **dict.fromkeys(("gpu_prefix_cache_hits", "num_preemptions", "prompt_tokens"), "counter"),
        **dict.fromkeys(("generation_tokens", "request_success"), "counter"),
        **dict.fromkeys(("time_to_first_token_seconds", "inter_token_latency_seconds"), "histogram"),
        **dict.fromkeys(("time_per_output_token_seconds", "request_time_per_output_token_seconds"), "histogram"),
        "e2e_request_latency_seconds": "histogram",
    }
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert server.metric(f"vllm:{name}{{{labels}}}") == 0
    for ours, theirs in (
        ("ttft", "time_to_first_token"),
        ("e2e", "e2e_request_latency"),
        ("itl", "inter_token_latency"),
    ):
        count = server.metric(f'omniserve_{ours}_seconds_count{{service_class="LS"}}')
        assert server.metric(f"vllm:{theirs}_seconds_count{{{labels}}}") == count > 0
    info = families["vllm:cache_config_info"].samples[0]
    assert (info.value, info.labels) == (1, {"block_size": "16", "model_name": "fake", "num_gpu_blocks": "100"})


def test_gauges_for_gateways_are_of_latency_sensitive_requests():
    """Best-effort work gives way: a server that is full of it is not full for a gateway."""
    by_class = {"LS": 3, "BE": 60}
    scheduler = SchedulerStats(
        waiting=by_class, running=by_class, device_blocks_by_class=by_class, output_tokens=by_class,
        running_loras=("a", "b"), waiting_loras=("c",),
    )  # fmt: skip
    served = Served(model_name="m", latency_sensitive=["LS"])
    metrics = ServerMetrics(["LS", "BE"], served=served)
    stats = EngineStats(
        scheduler=scheduler, kv=KVUsage(device_total=100), block_size=16, max_loras=4, admittable_per_s={"LS": 2.5}
    )
    text = metrics.render(stats).decode()
    for line in (
        'vllm:num_requests_running{model_name="m"} 3.0',
        'vllm:num_requests_waiting{model_name="m"} 3.0',
        'vllm:kv_cache_usage_perc{model_name="m"} 0.03',
        'vllm:generation_tokens_total{model_name="m"} 63.0',
        'omniserve_admittable_requests_per_second{service_class="LS"} 2.5',
    ):
        assert line in text.splitlines()
    loras = 'max_lora="4",model_name="m",running_lora_adapters="a,b",waiting_lora_adapters="c"'
    assert f"vllm:lora_requests_info{{{loras}}}" in text
    assert "vllm:num_requests" not in metrics.render(None).decode(), "without an engine nothing is said of it"

"""What gateways and their clients send: vLLM's ``priority``, llm-d's objectives as headers."""

from __future__ import annotations

import json

import httpx
import pytest
from fake_engine import SECONDS_PER_TOKEN

from omniserve.core.config import DEFAULT_CLASSES
from omniserve.core.request import ClassSpec, ServiceClass
from omniserve.server.errors import ApiError
from omniserve.server.fields import UnknownFields
from omniserve.server.header_fields import SLO_HEADERS, HeaderFields
from omniserve.server.priorities import prioritised_tier, tier_of_class
from omniserve.server.protocol import CompletionRequest, class_of_tier, parse

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


def test_a_header_gives_a_request_its_objective(server):
    """The fake engine predicts for requests with an objective for their first token, of which best effort has none."""
    body = {"prompt": [5, 6], "max_tokens": 1, "service_tier": "flex"}
    with server.http() as http:
        answers = [
            http.post("/v1/completions", json=body, headers={"x-llm-d-slo-ttft-ms": value}) for value in ("80", "soon")
        ]
    assert answers[0].headers["x-omniserve-predicted-ttft-ms"] == str(2 * SECONDS_PER_TOKEN * 1e3)
    assert answers[1].status_code == 400 and answers[1].json()["error"]["param"] == "x-llm-d-slo-ttft-ms"

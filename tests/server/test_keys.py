"""API keys: who may call, as what, and how much in a minute."""

from __future__ import annotations

import hashlib
import json

import httpx
import openai
import pytest

from omniserve.core.request import ClassSpec
from omniserve.core.stats import EngineStats, SchedulerStats, TenantStats
from omniserve.server.access.keys import ApiKey, KeyRing, digest_of, read_key_file
from omniserve.server.access.limits import Caller
from omniserve.server.cli import parse_args
from omniserve.server.errors import ApiError
from omniserve.server.telemetry.engine_metrics import MOST_TENANTS, OTHER_TENANTS
from omniserve.server.telemetry.metrics import ServerMetrics

KEYS = [
    {"name": "owner", "key": "owner-key"},
    {"name": "free", "sha256": hashlib.sha256(b"free-key").hexdigest(), "tier": "flex"},
    {"name": "slow", "key": "slow-key", "requests_per_minute": 2},
    {"name": "heavy", "key": "heavy-key", "weight": 2.5},
    {"name": "short", "key": "short-key", "tokens_per_minute": 10},
    {"name": "letters", "key": "schlüssel-à"},
]


@pytest.fixture(scope="module")
def guarded(start_module_server, tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    file.write_text(json.dumps(KEYS))
    flags = "--api-key other-key --cors-origin https://a.example --limit max_body_mib=0.0625".split()
    return start_module_server("--api-key-file", str(file), *flags).wait_until_ready()


def client_of(server, key):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=30)


def complete(server, key, **fields):
    return client_of(server, key).completions.create(model="fake", **{"prompt": "a", "max_tokens": 2} | fields)


@pytest.mark.parametrize("key", ["owner-key", "free-key", "other-key"])
def test_holders_of_a_key_are_let_in(guarded, key):
    assert complete(guarded, key).usage.completion_tokens == 2
    assert [model.id for model in client_of(guarded, key).models.list()] == ["fake"]


def test_key_of_any_letters_is_taken_in_utf_8(guarded):
    def status(key: bytes) -> int:
        return httpx.get(f"{guarded.url}/v1/models", headers={"authorization": b"Bearer " + key}).status_code

    assert status("schlüssel-à".encode()) == 200
    assert status("schlüssel-à".encode("latin-1")) == status("schlüssel-á".encode()) == 401


@pytest.mark.parametrize("authorization", [None, "Bearer", "Bearer nobody", "Basic owner-key", "owner-key"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/v1/nothing", "/healthy"])
def test_others_are_not(guarded, path, authorization):
    headers = {} if authorization is None else {"authorization": authorization}
    response = httpx.request("POST" if "compl" in path else "GET", f"{guarded.url}{path}", headers=headers)
    assert response.status_code == 401
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"


def test_clients_see_an_authentication_error(guarded):
    with pytest.raises(openai.AuthenticationError, match="not known here"):
        complete(guarded, "nobody")


def test_health_and_metrics_are_free_unless_guarded(guarded, start_server):
    for path in ("/health", "/health/live", "/health/ready", "/metrics"):
        assert httpx.get(f"{guarded.url}{path}").status_code == 200
    other = start_server("--api-key", "k", "--guard-all").wait_until_ready()
    for path in ("/health", "/health/live", "/health/ready", "/metrics"):
        assert httpx.get(f"{other.url}{path}").status_code == 401
        assert httpx.get(f"{other.url}{path}", headers={"authorization": "Bearer k"}).status_code == 200


def test_refusals_are_counted(guarded):
    name = 'omniserve_http_errors_total{code="invalid_api_key",status="401"}'
    assert httpx.get(f"{guarded.url}/v1/models").status_code == 401  # so that the series is there
    before = guarded.metric(name)
    assert httpx.get(f"{guarded.url}/v1/models").status_code == 401
    assert guarded.metric(name) == before + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tier", ["auto", "priority", "LS", "flex", "BE"])
def test_class_of_a_key_is_the_highest_its_holder_gets(guarded, tier, stream):
    counters = [f'omniserve_requests_total{{finish_reason="length",service_class="{name}"}}' for name in ("LS", "BE")]
    before = [guarded.metric(name) for name in counters]
    answer = complete(guarded, "free-key", stream=stream, extra_body={"service_tier": tier})
    for part in answer if stream else [answer]:
        assert part.service_tier == (tier if tier in ("flex", "BE") else "flex")
    assert [guarded.metric(name) for name in counters] == [before[0], before[1] + 1]
    assert complete(guarded, "owner-key", extra_body={"service_tier": tier}).service_tier in (tier, "default")


def test_tier_header_lifts_nobody(guarded):
    headers = {"x-omniserve-service-tier": "priority"}
    assert complete(guarded, "free-key", extra_headers=headers).service_tier == "flex"
    assert complete(guarded, "owner-key", extra_headers=headers).service_tier == "priority"


def test_requests_a_minute(guarded):
    complete(guarded, "slow-key")
    headers = {"authorization": "Bearer slow-key"}
    assert httpx.post(f"{guarded.url}/tokenize", json={"prompt": "a"}, headers=headers).status_code == 200
    assert httpx.post(f"{guarded.url}/detokenize", json={"tokens": [5]}, headers=headers).status_code == 429
    with pytest.raises(openai.RateLimitError, match="'slow' has used up its 2 requests a minute") as caught:
        complete(guarded, "slow-key")
    assert caught.value.code == "rate_limit_exceeded"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 30
    complete(guarded, "owner-key")


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_a_minute(start_server, tmp_path, stream):
    file = tmp_path / "keys.yaml"
    file.write_text("- name: short\n  key: short-key\n  tokens_per_minute: 10\n")
    server = start_server("--api-key-file", str(file)).wait_until_ready()
    answer = complete(server, "short-key", prompt=[5] * 4, max_tokens=20, stream=stream)
    if stream:
        assert len(list(answer)) == 20
    with pytest.raises(openai.RateLimitError, match="10 tokens a minute") as caught:
        complete(server, "short-key")
    # 24 of 10 are used: in 84 s there is more than none.
    assert 60 < int(caught.value.response.headers["retry-after"]) <= 90


def test_body_that_is_too_large(guarded):
    with pytest.raises(openai.APIStatusError, match=r"0\.0625 MiB") as caught:
        complete(guarded, "owner-key", prompt="a" * 70_000)
    assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")


def test_pages_of_a_known_origin_may_call(guarded, server):
    def headers(url, origin):
        preflight = {"origin": origin, "access-control-request-method": "POST"}
        asked = httpx.options(f"{url}/v1/completions", headers=preflight).headers
        refused = httpx.get(f"{url}/v1/models", headers={"origin": origin}).headers
        return [h.get("access-control-allow-origin") for h in (asked, refused)]

    assert headers(guarded.url, "https://a.example") == ["https://a.example"] * 2
    assert headers(guarded.url, "https://b.example") == [None] * 2
    assert headers(server.url, "https://a.example") == [None] * 2


def test_listening_elsewhere_without_keys_is_warned_of(start_server):
    def warned(*flags):
        server = start_server(*flags).wait_until_ready()
        server.stop()
        return any("there are no API keys" in line for line in server.log)

    assert warned("--host", "0.0.0.0")
    assert not warned("--host", "0.0.0.0", "--api-key", "k")
    assert not warned("--host", "localhost")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "neither YAML nor JSON"),
        ("a: b", "must hold a list"),
        ("[]", "there is no key in it"),
        ("- name: a", "key 1: give either key or sha256"),
        ("- {name: a, key: secret, sha256: b}", "key 1: give either key or sha256"),
        ("- {name: a, sha256: secret}", "64 hexadecimal digits"),
        ("- {key: secret}", "key 1: name: Field required"),
        ("- {name: a, key: ' '}", "key 1: key: String should have at least 1 character"),
        ("- {name: a, key: secret}\n- {name: b, key: secret}", "the same key"),
        ("- {name: a, key: secret}\n- {name: a, key: secret2}", "the same name"),
        ("- {name: a, key: 123456}", "key 1: key: Input should be a valid string"),
        ("- {name: a, key: secret, colour: 1}", "colour"),
        ("- {name: a, key: secret, requests_per_minute: 0}", "greater than 0"),
        ("- {name: a, key: secret, tier: gold}", "key 'a': service_tier: must be one of"),
        ("- secret", "key 1: it: "),
    ],
)
def test_key_file_that_is_wrong(tmp_path, capsys, text, message):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(SystemExit) as caught:
        parse_args(["--model", "m", "--api-key-file", str(file)])
    assert caught.value.code == 2
    _usage, error = capsys.readouterr().err.split("error: ", 1)
    assert message in error
    assert "secret" not in error and "123456" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--api-key-file /no/such/file", "No such file"),
        ("--guard-all", "--guard-all needs keys"),
        ("--api-key=", "--api-key is empty"),
    ],
)
def test_flags_that_are_wrong(capsys, arguments, message):
    with pytest.raises(SystemExit):
        parse_args(["--model", "m", *arguments.split()])
    assert message in capsys.readouterr().err


def test_keys_are_not_shown(tmp_path):
    file = tmp_path / "keys"
    file.write_text("- {name: a, key: ' secret'}")
    options, _ = parse_args(["--model", "m", "--api-key-file", str(file)])
    assert options.keys.find(b"bearer  secret").name == "a"
    assert "secret" not in repr(options) and digest_of("secret").hex() not in repr(options)
    assert repr(digest_of("secret")) not in repr(read_key_file(file))


def test_ceiling_goes_by_priority_not_by_kind():
    classes = [ClassSpec(name=name, kind=kind) for name, kind in (("gold", "LS"), ("LS", "LS"), ("BE", "BE"))]
    key = ApiKey(name="k", sha256=digest_of("k"), tier="default")
    asked = ("priority", "gold", "default", "LS", "flex")
    assert [key.limited_tier(tier, classes) for tier in asked] == ["default", "default", "default", "LS", "flex"]
    with pytest.raises(ApiError, match="must be one of"):
        key.limited_tier("silver", classes)


def test_rates_refill_evenly_and_debts_are_waited_for():
    key = ApiKey(name="k", sha256=b"", requests_per_minute=2, tokens_per_minute=60)
    now_s = 0.0
    caller = Caller(key, clock=lambda: now_s)
    for _ in range(2):
        caller.admit()
    with pytest.raises(ApiError) as caught:
        caller.admit()
    assert (caught.value.status, caught.value.retry_after_s) == (429, pytest.approx(30))
    now_s = 29
    with pytest.raises(ApiError):
        caller.admit()
    now_s = 31
    caller.admit()
    caller.use_tokens(100)
    now_s = 61
    with pytest.raises(ApiError, match="60 tokens a minute") as caught:
        caller.admit()
    assert caught.value.retry_after_s == pytest.approx(11)  # 60 - 100 + 30 are there now, and one is needed
    now_s = 73
    caller.admit()
    now_s = 1e6
    for _ in range(2):
        caller.admit()
    with pytest.raises(ApiError):
        caller.admit()  # no more than a minute's are saved


def test_ring_needs_no_order():
    ring = KeyRing([ApiKey(name=name, sha256=digest_of(name)) for name in "abc"])
    assert [ring.find(b"Bearer " + name.encode()).name for name in "cab"] == list("cab")


def test_requests_are_of_their_key_and_have_its_weight(guarded):
    for key in ("heavy-key", "owner-key"):
        complete(guarded, key, prompt=[5, 6, 7], extra_body={"service_tier": "flex"})
    text = httpx.get(f"{guarded.url}/metrics").text
    for tenant, weight in (("heavy", 2.5), ("owner", 1.0)):
        label = f'{{service_class="BE",tenant="{tenant}"}}'
        assert f"omniserve_tenant_virtual_time{label} {weight}" in text
        assert f"omniserve_tenant_prompt_tokens_total{label} 3.0" in text


@pytest.mark.parametrize("weight", [0, -1, 1001, "2", float("nan")])
def test_a_weight_is_a_positive_number(tmp_path, weight):
    file = tmp_path / "keys.json"
    file.write_text(json.dumps([{"name": "a", "key": "a", "weight": weight}]))
    with pytest.raises(ValueError, match="key 1: weight"):
        read_key_file(file)


def test_metrics_have_few_labels_however_many_tenants_there_are():
    tenants = {f"t{number}": TenantStats(waiting=1, running=2, output_tokens=3) for number in range(200)}
    metrics = ServerMetrics(["BE"])
    stats = EngineStats(scheduler=SchedulerStats(tenants={"BE": dict(list(tenants.items())[:50])}))
    metrics.render(stats)
    text = metrics.render(EngineStats(scheduler=SchedulerStats(tenants={"BE": tenants}))).decode()
    lines = [line for line in text.splitlines() if line.startswith("omniserve_tenant_requests_waiting{")]
    assert len(lines) == MOST_TENANTS + 1
    assert f'tenant="{OTHER_TENANTS}"}} {200 - MOST_TENANTS}.0' in lines[-1]
    assert 'omniserve_tenant_requests_running{service_class="BE",tenant="t49"} 2.0' in text
    assert OTHER_TENANTS not in "".join(line for line in text.splitlines() if "virtual_time" in line)
    assert "omniserve_tenant" not in metrics.render(EngineStats()).decode()

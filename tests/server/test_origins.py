"""Web pages call a server without keys only if they are its own, or of an origin that was named; clients as ever."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from omniserve.server.access.origins import PageGuard, checked_origin, is_loopback
from omniserve.server.cli import parse_args

NAMED = "https://chat.example.org"


@pytest.fixture(scope="module")
def server(start_module_server):
    return start_module_server("--cors-origin", NAMED).wait_until_ready()


@pytest.fixture(scope="module")
def keyed_server(start_module_server):
    return start_module_server("--api-key", "secret").wait_until_ready()


def ask(guard_options, headers):
    """Return the status that a guard in front of an application which always answers 200 answers with."""
    statuses, refused = [], []

    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    guard = PageGuard(application, on_refused=refused.append, **guard_options)
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(guard({"type": "http", "method": "GET", "path": "/", "headers": raw}, None, send))
    (status,) = statuses
    assert [error.status for error in refused] == ([] if status == 200 else [status])
    return status


LOOPBACK = {"origins": (NAMED,), "on_loopback": True}
EVERYWHERE = {"origins": (NAMED,), "on_loopback": False}
ANY = {"origins": ("*",), "on_loopback": True}


@pytest.mark.parametrize(
    ("options", "host", "origin", "status"),
    [
        *[
            (LOOPBACK, host, None, 200)
            for host in (
                "127.0.0.1", "127.0.0.1:8000", "127.1.2.3:9", "localhost", "LOCALHOST:8000", "localhost.:80", "[::1]",
                "[::1]:8000", "[::ffff:127.0.0.1]:8000", "a.localhost:8000", "0.0.0.0:8000", "chat.example.org",
            )
        ],
        *[
            (LOOPBACK, host, None, 403)
            for host in (
                "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1",
                "notlocalhost", "", "[::2]:8000", "[::1", "localhost:x", "localhost@evil.example",
                "evil.example/localhost",
                "chat.example.org.evil.example",
            )
        ],
        (EVERYWHERE, "evil.example", None, 200),  # its names are not known
        (EVERYWHERE, "omniserve.internal:8000", "http://omniserve.internal:8000", 200),
        (EVERYWHERE, "chat.internal", "https://chat.internal", 200),  # a proxy has the certificate
        (EVERYWHERE, "chat.internal:443", "https://chat.internal", 200),
        (EVERYWHERE, "chat.internal", "http://chat.internal:8000", 403),
        (EVERYWHERE, "omniserve.internal:8000", "http://evil.example", 403),
        (EVERYWHERE, "omniserve.internal:8000", NAMED, 200),
        (LOOPBACK, "127.0.0.1:8000", "http://127.0.0.1:8000", 200),
        (LOOPBACK, "localhost:8000", "http://localhost:8000", 200),
        (LOOPBACK, "[::1]:8000", "http://[::1]:8000", 200),
        (LOOPBACK, "127.0.0.1:8000", NAMED, 200),
        (LOOPBACK, "evil.example:8000", "http://evil.example:8000", 403),  # a name that was made to lead here
        (LOOPBACK, "evil.example:8000", NAMED, 403),
        *[
            (LOOPBACK, "127.0.0.1:8000", origin, 403)
            for origin in (
                "http://evil.example", "null", "", "http://localhost:8000", "http://127.0.0.1:3000", "127.0.0.1:8000",
                "https://127.0.0.1:8000.evil.example", "http://evil.example/127.0.0.1:8000", "http://[::1",
                NAMED + ":8443",
                "http://chat.example.org", "http://x@127.0.0.1:8000",
            )
        ],
        (ANY, "evil.example:8000", "null", 200),
    ],
)  # fmt: skip
def test_whose_page_it_is(options, host, origin, status):
    headers = {"Host": host} | ({} if origin is None else {"Origin": origin})
    assert ask(options, headers) == status


def test_a_browser_says_whether_a_page_is_of_the_origin_that_it_calls():
    """Nothing else says so behind a proxy that writes a Host of its own."""
    same = {"Origin": "https://llm.internal", "Sec-Fetch-Site": "same-origin"}
    assert ask(LOOPBACK, {"Host": "127.0.0.1:8000", **same}) == 200
    assert ask(LOOPBACK, {"Host": "127.0.0.1:8000", **same, "Sec-Fetch-Site": "same-site"}) == 403
    assert ask(LOOPBACK, {"Host": "llm.internal", **same}) == 403


def test_a_client_without_host_is_no_browser():
    assert ask(LOOPBACK, {}) == 200


PAGES = [
    ("GET", "/v1/models", None),
    ("GET", "/health", None),
    ("GET", "/dashboard/data", None),
    ("GET", "/dashboard", None),
    ("GET", "/metrics", None),
    ("GET", "/openapi.json", None),
    ("HEAD", "/health", None),
    ("POST", "/v1/batches/batch_1/cancel", b""),
    ("POST", "/v1/completions", b'{"model": "fake", "prompt": "a", "max_tokens": 1}'),
    ("DELETE", "/v1/files/file-1", None),
    ("OPTIONS", "/v1/completions", None),
    ("GET", "/no/such/path", None),
]


@pytest.mark.parametrize(("method", "path", "body"), PAGES)
def test_foreign_pages_reach_nothing(server, method, path, body):
    plain = {"Content-Type": "text/plain", "Access-Control-Request-Method": "POST"}
    with server.http() as http:
        for headers, code in (
            ({"Origin": "http://evil.example"}, "origin_not_allowed"),
            ({"Origin": "null"}, "origin_not_allowed"),
            ({"Host": "evil.example"}, "host_not_allowed"),
            ({"Host": "evil.example", "Origin": "http://evil.example"}, "host_not_allowed"),
        ):
            answer = http.request(method, path, content=body, headers=plain | headers)
            assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
            assert answer.headers["x-request-id"]
            if method != "HEAD":
                error = answer.json()["error"]
                assert (error["code"], error["type"]) == (code, "permission_error")
                assert "--cors-origin" in error["message"]


def test_the_servers_own_page_and_clients_without_origin_are_served(server):
    own = {"Origin": server.url}
    with server.http() as http:
        for headers in ({}, own, {"Origin": NAMED}):
            answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers=headers)
            assert answer.status_code == 200
            assert http.get("/dashboard/data", headers=headers).status_code == 200
        assert http.post("/v1/batches/batch_1/cancel", headers=own).status_code == 404
    assert server.client().completions.create(model="fake", prompt="a", max_tokens=1).choices


def test_a_named_page_asks_first_and_reads_the_answer(server):
    asks = {"Origin": NAMED, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    with server.http() as http:
        answer = http.options("/v1/completions", headers=asks)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, NAMED)
        answer = http.get("/v1/models", headers={"Origin": NAMED})
        assert answer.headers["access-control-allow-origin"] == NAMED


def test_refusals_are_counted(server):
    name = 'omniserve_http_refused_total{reason="origin_not_allowed"}'
    with server.http() as http:
        http.get("/health", headers={"Origin": "http://evil.example"})
        assert "origin_not_allowed" in http.get("/metrics").text, name


def test_with_keys_the_key_decides(keyed_server):
    headers = {"Host": "llm.example", "Origin": "http://evil.example"}
    with keyed_server.http() as http:
        assert http.get("/v1/models", headers=headers).status_code == 401
        assert http.get("/v1/models", headers=headers | {"Authorization": "Bearer secret"}).status_code == 200


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("*", "*"),
        ("null", "null"),
        ("https://Chat.Example.org/", "https://chat.example.org"),
        ("https://chat.example.org:443", "https://chat.example.org"),
        ("http://127.0.0.1:3000", "http://127.0.0.1:3000"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
    ],
)
def test_origins_are_given_as_browsers_send_them(text, origin):
    assert checked_origin(text) == origin
    options, _ = parse_args(["--cors-origin", text])
    assert options.cors_origins == (origin,)


@pytest.mark.parametrize(
    "text", ["", "chat.example.org", "https://", "https://a/b", "https://a?b", "https://a:x", "//a"]
)
def test_what_no_browser_sends_is_no_origin(text, capsys):
    with pytest.raises(SystemExit):
        parse_args([f"--cors-origin={text}"])
    assert "--cors-origin must be an origin such as https://" in capsys.readouterr().err


def test_loopback_is_not_everywhere():
    assert [name for name in ("127.0.0.1", "::1", "localhost", "127.8.8.8") if not is_loopback(name)] == []
    assert [name for name in ("0.0.0.0", "::", "", "10.0.0.1", "example.org") if is_loopback(name)] == []


def test_heads_are_those_of_what_get_answers(server):
    with server.http() as http:
        for path in ("/health", "/health/ready", "/health/live", "/v1/models", "/v1/models/fake", "/metrics",
                     "/dashboard", "/dashboard/data", "/openapi.json", "/v1/batches", "/v1/files", "/"):  # fmt: skip
            head, got = http.head(path), http.get(path)
            assert (head.status_code, head.content) == (got.status_code, b""), path
            assert head.headers.get("content-type") == got.headers.get("content-type"), path
        assert http.head("/v1/completions").status_code == 405
        assert http.head("/nowhere").status_code == 404
        assert httpx.get(server.url, follow_redirects=True).url.path == "/dashboard"


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("POST", "/chat/completions", 404, "the API is under /v1: did you mean /v1/chat/completions?"),
        ("POST", "/completions", 404, "did you mean /v1/completions?"),
        ("GET", "/models", 404, "did you mean /v1/models?"),
        ("POST", "/v1/v1/chat/completions", 404, "did you mean /v1/chat/completions?"),
        ("POST", "/openai/v1/chat/completions", 404, "did you mean /v1/chat/completions?"),
        ("GET", "/v1/metrics", 404, "this is not under /v1: did you mean /metrics?"),
        ("POST", "/v1/tokenize", 404, "did you mean /tokenize?"),
        ("POST", "/v1/moderations", 404, "not found; see /openapi.json"),
        ("GET", "/favicon.ico", 404, "the API is under /v1, see /openapi.json"),
        ("GET", "/v1/chat/completions", 405, "method not allowed; it takes POST"),
    ],
)
def test_a_path_that_does_not_exist_leads_to_the_one_that_was_meant(server, method, path, status, says):
    with server.http() as http:
        answer = http.request(method, path)
        assert answer.status_code == status and says in answer.json()["error"]["message"]
        assert path.startswith("/v1/") <= ("the API is under /v1," not in answer.text)

"""How clients find a server and its model: HTTPS, a path that a proxy leaves in, several names."""

from __future__ import annotations

import contextlib
import ssl
import subprocess

import httpx
import openai
import pytest
from fake_engine import SLOW

from omniserve.server.cli import parse_args


@pytest.fixture
def certificate(tmp_path):
    """Return the files of a certificate of its own, for 127.0.0.1, and of its key."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=omniserve -addext subjectAltName=IP:127.0.0.1"
    )
    try:
        subprocess.run([*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl, which makes certificates, is not installed")
    return cert, key


def test_https(start_server, certificate):
    cert, key = certificate
    server = start_server("--ssl-certfile", str(cert), "--ssl-keyfile", str(key)).wait_until_ready()
    assert server.url.startswith("https://127.0.0.1:")
    trusting = httpx.Client(verify=ssl.create_default_context(cafile=str(cert)))
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=trusting)
    chunks = client.completions.create(model="fake", prompt="abc", max_tokens=20, stream=True)
    streamed = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert streamed == client.completions.create(model="fake", prompt="abc", max_tokens=20).choices[0].text != ""
    with pytest.raises(httpx.HTTPError):
        httpx.get(server.url.replace("https", "http"))
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{server.url}/health")


def test_https_refuses_connections_beyond_the_limit(start_server, certificate):
    cert, key = certificate
    files = ("--ssl-certfile", str(cert), "--ssl-keyfile", str(key))
    server = start_server(*files, "--limit", "max_connections=2").wait_until_ready()
    context = ssl.create_default_context(cafile=str(cert))
    body = {"model": "fake", "prompt": [SLOW], "max_tokens": 100, "stream": True}
    with contextlib.ExitStack() as streams, httpx.Client(verify=context) as third:
        for _ in range(2):
            client = streams.enter_context(httpx.Client(verify=context))
            assert streams.enter_context(client.stream("POST", f"{server.url}/v1/completions", json=body)).is_success
        refused = third.get(f"{server.url}/health")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
    assert httpx.get(f"{server.url}/health", verify=context).is_success


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (["--ssl-certfile", "none.pem"], "none.pem: No such file"),
        (["--ssl-certfile", "{cert}", "--ssl-keyfile", "{cert}"], "--ssl-keyfile"),
        (["--ssl-keyfile", "{key}"], "needs --ssl-certfile"),
        (["--ssl-certfile", "{cert}", "--ssl-keyfile", "{other}"], "--ssl-keyfile"),
        (["--root-path", "llm"], "--root-path must be a path such as /llm"),
        (["--root-path", "/llm/"], "--root-path must be a path such as /llm"),
    ],
)
def test_bad_ones_are_told_before_the_model_is_loaded(files, complaint, certificate, tmp_path, capsys):
    cert, key = certificate
    other = tmp_path / "other.pem"
    subprocess.run(["openssl", "genrsa", "-out", other, "2048"], check=True, capture_output=True)
    with pytest.raises(SystemExit):
        parse_args([text.format(cert=cert, key=key, other=other) for text in files])
    assert complaint in capsys.readouterr().err


def test_a_path_that_a_proxy_leaves_in(start_server):
    server = start_server("--root-path", "/llm").wait_until_ready()
    assert server.url.endswith("/llm")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    assert client.completions.create(model="fake", prompt="abc", max_tokens=5).usage.completion_tokens == 5
    bare = server.url.removesuffix("/llm")  # as from a proxy that cuts it off
    assert httpx.get(f"{bare}/v1/models").json() == httpx.get(f"{server.url}/v1/models").json()


def test_a_model_of_several_names(start_server):
    client = start_server("--name", "first", "other/name").wait_until_ready().client()
    assert [model.id for model in client.models.list()] == ["first", "other/name"]
    assert client.models.retrieve("other/name").id == "other/name"
    for name in ("first", "other/name"):
        assert client.completions.create(model=name, prompt="abc", max_tokens=5).model == name
    with pytest.raises(openai.NotFoundError, match=r"this server has 'first', 'other/name'"):
        client.completions.create(model="third", prompt="abc")


def test_the_model_may_stand_first(tmp_path):
    assert parse_args(["org/model"]) == parse_args(["--model", "org/model"])
    assert parse_args(["org/model", "--port", "5"]) == parse_args(["--port", "5", "--model", "org/model"])
    assert parse_args(["--served-model-name", "a", "b"])[0].model_names == ("a", "b")

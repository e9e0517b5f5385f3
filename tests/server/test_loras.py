"""LoRA adapters behind the API: their names, the calls that load and unload, who may, and an engine that comes back."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx
import openai
import pytest
from running import wait_until

from omniserve.server.cli import parse_args
from tests.server.attack.processes import engine_pid

KEYS = [{"name": "owner", "key": "owner-key", "admin": True}, {"name": "user", "key": "user-key"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three adapters and one that is none; what an adapter says is told by the length of its name."""
    for name in ("a", "bb", "ccc", "none"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
    for name in ("a", "bb", "ccc"):
        (tmp_path / "adapters" / name / "adapter_config.json").write_text('{"r": 4}')
    return tmp_path / "adapters"


def said(server, model: str, key: str = "") -> list[int]:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key or "none", max_retries=0, timeout=30)
    answer = client.completions.create(
        model=model, prompt=[10, 20], max_tokens=2, extra_body={"return_token_ids": True, "ignore_eos": True}
    )
    assert answer.model == model
    return answer.choices[0].token_ids


def post(server, what: str, key: str = "", **fields) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{server.url}/v1/{what}_lora_adapter", json=fields, headers=headers, timeout=30)


def names(server) -> list[str]:
    return [card["id"] for card in httpx.get(f"{server.url}/v1/models").json()["data"]]


def test_adapters_of_the_start_are_models_by_their_names(start_server, folder):
    server = start_server("--lora-modules", f"x={folder / 'a'}", "--lora-modules", f"y={folder / 'bb'}")
    assert said(server, "fake") == [10, 20]
    assert said(server, "x") == said(server, "fake:x") == [11, 21]
    assert said(server, "y") == [12, 22]
    assert names(server) == ["fake", "x", "y"]
    card = httpx.get(f"{server.url}/v1/models/x").json()
    assert (card["parent"], card["root"]) == ("fake", str(folder / "a"))
    with pytest.raises(openai.NotFoundError, match="'z' is not served here; this server has 'fake', 'x', 'y'"):
        said(server, "z")
    assert post(server, "load", lora_name="z", lora_path="ccc").status_code == 403, (
        "without --lora-dir there are no calls"
    )


def test_an_adapter_of_the_start_that_cannot_be_read_is_an_error(start_server, folder):
    (folder / "none" / "adapter_config.json").write_text('{"r": 4}')
    flags = "--lora-modules", f"x={folder / 'none'}", "--lora-modules", f"fake={folder / 'a'}"
    server = start_server(*flags)
    assert server.wait() == 1
    assert any("--lora-modules" in line and "base model" in line for line in server.log), server.log


def test_calls_load_replace_and_unload(start_server, folder):
    server = start_server("--lora-dir", str(folder))
    assert post(server, "load", lora_name="x", lora_path="a").text == "Success: LoRA adapter 'x' added successfully."
    assert said(server, "x") == [11, 21]
    refused = post(server, "load", lora_name="x", lora_path="bb")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
    assert post(server, "load", lora_name="x", lora_path=str(folder / "bb"), load_inplace=True).status_code == 200
    assert said(server, "x") == [12, 22]
    assert post(server, "unload", lora_name="x").status_code == 200
    assert post(server, "unload", lora_name="x").status_code == 404
    assert names(server) == ["fake"]
    with pytest.raises(openai.NotFoundError):
        said(server, "x")


@pytest.mark.parametrize("path", ["..", "../..", "/etc", "a/../../..", "none/nothing", "link", "a\0", "x" * 4000])
def test_nothing_outside_the_folders_is_looked_at(start_server, folder, path):
    (folder / "link").symlink_to("/etc")
    server = start_server("--lora-dir", str(folder))
    refused = post(server, "load", lora_name="x", lora_path=path)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path")


def test_what_the_engine_refuses_is_told_and_bad_names_are_refused(start_server, folder):
    server = start_server("--lora-dir", str(folder))
    refused = post(server, "load", lora_name="x", lora_path="none")
    assert refused.status_code == 400 and "finds no adapter" in refused.json()["error"]["message"]
    for name in ("fake", "fake:x", ""):
        assert post(server, "load", lora_name=name, lora_path="a").status_code == 400
    assert names(server) == ["fake"]


def test_only_keys_with_admin_load_and_unload(start_server, folder, tmp_path):
    (tmp_path / "keys.json").write_text(json.dumps(KEYS))
    server = start_server(
        "--lora-dir", str(folder), "--api-key-file", str(tmp_path / "keys.json"), "--api-key", "plain"
    )
    for what in ("load", "unload"):
        fields = {"lora_name": "x"} | ({"lora_path": "a"} if what == "load" else {})
        assert post(server, what, **fields).status_code == 401
        for key in ("user-key", "plain"):
            assert post(server, what, key, **fields).status_code == 403
    assert post(server, "load", "owner-key", lora_name="x", lora_path="a").status_code == 200
    assert said(server, "x", "user-key") == [11, 21]


def test_an_engine_that_comes_back_has_the_adapters_again(start_process, folder):
    server = start_process(
        *(f"--lora-modules={name}={folder / path}" for name, path in (("x", "a"), ("y", "a"), ("v", "ccc"))),
        "--lora-dir", str(folder), "--limit", "engine_restarts=3",
    ).wait_until_ready()  # fmt: skip
    post(server, "load", lora_name="z", lora_path="bb"), post(server, "load", lora_name="w", lora_path="ccc")
    post(server, "unload", lora_name="y")
    (folder / "ccc" / "adapter_config.json").unlink()
    os.kill(engine_pid(server), signal.SIGKILL)
    wait_until(lambda: httpx.get(f"{server.url}/health/ready").status_code == 503)
    wait_until(lambda: httpx.get(f"{server.url}/health/ready", timeout=30).status_code == 200)
    assert names(server) == ["fake", "x", "z"], "without what was unloaded, and what is gone from the disk"
    assert (said(server, "x"), said(server, "z")) == ([11, 21], [12, 22])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lora-modules x", "must be NAME=FOLDER"),
        ("--lora-modules x=/nowhere", "/nowhere/adapter_config.json: No such file"),
        ("--lora-dir /nowhere", "--lora-dir /nowhere is no folder"),
        ("--max-loras 256", "must be from 0 to 255"),
        ("--max-lora-rank 0", "must be from 1 to 1024"),
    ],
)
def test_bad_flags(capsys, flags, message):
    with pytest.raises(SystemExit):
        parse_args(flags.split())
    assert message in capsys.readouterr().err


def test_slots_and_rank_follow_from_the_flags(folder):
    def lora_of(*flags: str):
        return parse_args(flags)[1].config.lora

    (folder / "a" / "adapter_config.json").write_text('{"r": 4, "rank_pattern": {"q_proj": 40}}')
    given = ["--lora-modules", f"x={folder / 'a'}", "--lora-modules", f"y={folder / 'bb'}"]
    assert lora_of().max_loras == 0
    assert (lora_of(*given).max_loras, lora_of(*given).max_lora_rank) == (2, 40)
    assert lora_of("--lora-dir", str(folder)).max_loras == 8
    assert (lora_of("--lora-dir", str(folder), "--max-loras", "3", "--max-lora-rank", "64").sizes) == (3, 64)
    assert parse_args(given)[0].loras == {"x": str(folder / "a"), "y": str(folder / "bb")}

"""Ranks of other machines: processes that join an engine at its address."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omniserve import EngineConfig, ExecutionConfig, Request, SamplingParams
from omniserve.core.config import ParallelConfig
from omniserve.launch.loading import EngineLoader
from omniserve.parallel.cli import main
from tests.parallel.ranks import reference_of
from tests.parity.models import tiny_model

_PROCESS_S = 120.0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _start(port: int, secret: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "omniserve.rank", "--join", f"127.0.0.1:{port}", "--secret-file", str(secret)]
    return subprocess.Popen([*command, *more], stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_rank_joins_one_engine_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineLoader, "load_tokenizer", lambda self: None)
    secret, wrong, port = tmp_path / "secret", tmp_path / "wrong", _free_port()
    secret.write_text("the secret of this test")
    wrong.write_text("another secret of a test")
    tiny_model("llama").save_pretrained(tmp_path / "model")
    reference = reference_of("llama")
    config = EngineConfig(
        parallel=ParallelConfig(
            tensor_parallel_size=2, rank_listen=f"127.0.0.1:{port}", rank_secret_file=str(secret)
        ),
        execution=ExecutionConfig(compile=False), block_size=8, max_model_len=80, device_kv_bytes=1 << 20,
        host_kv_bytes=1 << 20,
    )  # fmt: skip
    loader = EngineLoader(
        model=str(tmp_path / "model"), dtype="float32", device="cpu", config=config, with_profile=False
    )
    refused, joined = _start(port, wrong, "--once"), _start(port, secret)
    try:
        for _ in range(2):
            with loader(lambda what: None) as engine:
                sampling = SamplingParams(max_tokens=24, ignore_eos=True)
                requests = [Request(prompt_token_ids=prompt, sampling=sampling) for prompt in reference.prompts[:3]]
                completions = engine.generate(requests)
            assert [tuple(each.token_ids) for each in completions] == reference.tokens[:3]
            if refused is not None:
                _, told = refused.communicate(timeout=_PROCESS_S)
                assert refused.returncode == 1 and ("secret" in told or "nobody" in told.lower()), told
                refused = None
        assert joined.poll() is None, "it waits for the next engine"
    finally:
        for process in (refused, joined):
            if process is not None:
                process.kill()
                process.communicate()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--join", "nowhere"], "HOST:PORT"),
        (["--join", "127.0.0.1:1"], "give --secret-file"),
        (["--join", "127.0.0.1:1", "--secret-file", "/does/not/exist"], "No such file"),
    ],
)
def test_bad_arguments_are_told_in_a_sentence(arguments: list[str], told: str, capsys: Any) -> None:
    assert main(arguments) == 2
    assert told in capsys.readouterr().err


def test_nobody_listens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret of this test")
    assert main(["--join", f"127.0.0.1:{_free_port()}", "--secret-file", str(secret), "--once"]) == 1
    assert "refused" in caplog.text

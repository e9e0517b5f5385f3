"""Every example runs as its documentation says, and shows what it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common.server import ServerProcess

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SHORT_EXAMPLES = ("any_decoder", "patch_and_generate", "offline_ls_and_be", "http_client", "own_scheduler")
TIMEOUT_S = 300  # a hang, not slowness: the slowest takes seconds


def run(name: str, *arguments: str) -> str:
    return run_python(str(EXAMPLES / f"{name}.py"), *arguments)


def run_python(*arguments: str) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_patch_and_generate_changes_no_token() -> None:
    output = run("patch_and_generate")
    assert "patched generates the same tokens: True" in output
    assert "unpatched generates the same tokens: True" in output


@pytest.mark.slow
def test_a_decoder_without_a_family_gets_its_own_tokens() -> None:
    assert "the same tokens as generate(): True" in run("any_decoder")


def test_offline_ls_and_be_uses_the_host_tier() -> None:
    output = run("offline_ls_and_be")
    assert output.count("LS, first token") == 4
    num_tokens, num_host_tokens = map(int, re.search(r"BE: (\d+) tokens, (\d+) of them", output).groups())
    assert num_tokens == 16 * 64
    assert 0 < num_host_tokens <= num_tokens


@pytest.mark.slow
def test_own_scheduler_decides_the_order() -> None:
    assert "finished in this order: short, middle, long" in run("own_scheduler")


@pytest.mark.slow
def test_http_client_gets_a_chat_answer_and_its_batch(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the server extra is not installed")
    with ServerProcess(["--execution", "compile=false"], tmp_path / "server.log") as server:
        server.wait_until_healthy()
        output = run("http_client", server.base_url)
    assert len(output.split("chat: ")[1].split("\nbatch, ")[0]) > 20
    assert output.count("batch, ") == 4


def test_readme_example_generates_both_texts() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (code,) = [block for block in blocks if "import omniserve" in block]
    first, second = run_python("-c", code).split("\n---\n")
    assert first.strip() and second.strip()


def test_no_example_is_left_out() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == {*SHORT_EXAMPLES, "train_builtin_model"}  # the training script is tested in test_builtin_model


@pytest.mark.parametrize("name", SHORT_EXAMPLES)
def test_examples_fit_a_screen(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60

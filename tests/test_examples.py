"""Every example runs as its documentation says, and shows what it promises."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.common.server import ServerProcess
from tests.quick import slow_except

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SHORT_EXAMPLES = ("any_decoder", "patch_and_generate", "offline_ls_and_be", "http_client", "own_scheduler")
TIMEOUT_S = 900  # a hang, not slowness: the slowest takes seconds


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


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be in the checkout; give this process its cores and torch its threads back, which an engine takes away."""
    monkeypatch.chdir(ROOT)
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


alone_or_here = pytest.mark.parametrize("alone", slow_except((False,), (False, True)), ids=["here", "in a process"])


@alone_or_here
@pytest.mark.usefixtures("at_home")
def test_offline_ls_and_be_uses_the_host_tier(alone: bool, capsys: pytest.CaptureFixture[str]) -> None:
    if alone:
        output = run("offline_ls_and_be")
    else:
        runpy.run_path(str(EXAMPLES / "offline_ls_and_be.py"), run_name="__main__")
        output = capsys.readouterr().out
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


@alone_or_here
@pytest.mark.usefixtures("at_home")
def test_readme_example_generates_both_texts(alone: bool, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (code,) = [block for block in blocks if "import omniserve" in block]
    if alone:
        output = run_python("-c", code)
    else:
        exec(code, {"__name__": "__main__"})
        output = capsys.readouterr().out
    first, second = output.split("\n---\n")
    assert first.strip() and second.strip()


def test_no_example_is_left_out() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == {*SHORT_EXAMPLES, "train_builtin_model"}  # the training script is tested in test_builtin_model


@pytest.mark.parametrize("name", SHORT_EXAMPLES)
def test_examples_fit_a_screen(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60

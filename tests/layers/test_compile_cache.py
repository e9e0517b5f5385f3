"""Compiled halves that one process keeps and the next one takes; here the next one is a second model."""

from __future__ import annotations

import threading
import time
from itertools import repeat
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from omniserve import patch
from omniserve.layers import compile_cache
from omniserve.layers.compile_cache import one_compiler
from omniserve.layers.compiled import CompiledHalf
from omniserve.layers.patched_model import PatchedModel
from tests.parity.models import MODELS, tiny_model
from tests.quick import slow_except


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where halves are kept, which is not there yet.

    What torch itself has compiled stays in its own cache, which all processes of tests share: compiling again takes
    little.
    """
    monkeypatch.setattr(compile_cache, "_folder", lambda: tmp_path / "halves")
    return tmp_path / "halves"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the halves of the usual model, which some process has compiled."""
    folder = tmp_path_factory.mktemp("kept") / "halves"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_cache, "_folder", lambda: folder)
        assert patched().find_compiled(else_compile=True)
    return folder


@pytest.fixture
def filled(folder: Path, kept: Path) -> Path:
    """The folder, with these halves."""
    copytree(kept, folder)
    return folder


def run(patched: PatchedModel, rows: int = 5) -> Tensor:
    positions_T = torch.arange(rows)
    with torch.inference_mode():
        rotary = repeat(patched.rotary(positions_T) or (None, None))
        return patched.run_layers(
            range(patched.num_layers), patched.embed(positions_T + 3, positions_T), rotary,
            lambda _, __, q_TNH, *___: q_TNH.flatten(1).contiguous(),
        )  # fmt: skip


def patched(name: str = "llama", **options: Any) -> PatchedModel:
    model: PreTrainedModel = patch(tiny_model(name), **options)
    found: PatchedModel = model.__dict__["omniserve"]
    return found


@pytest.fixture
def compiled_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    original = CompiledHalf._compile

    def noting(half: CompiledHalf, *arguments: Any) -> Any:
        names.append(half._name)
        return original(half, *arguments)

    monkeypatch.setattr(CompiledHalf, "_compile", noting)
    return names


@pytest.mark.parametrize("name", slow_except(("llama",), MODELS))
def test_the_next_process_takes_them_without_compiling(name: str, folder: Path, compiled_names: list[str]) -> None:
    first = patched(name)
    outputs = [run(first) for _ in range(2)]
    num_compiled, num_kept = len(compiled_names), len(list(folder.glob("*.json")))
    assert num_kept if not first.family._rows.carries else True, "nothing was kept"
    second = patched(name)
    outputs += [run(second), run(second, rows=5)]
    assert all(torch.equal(outputs[0], output) for output in outputs)
    assert len(compiled_names) - num_compiled <= num_compiled - num_kept, "a kept half was compiled again"


def test_they_run_uncompiled_until_another_process_has_compiled_them(folder: Path, compiled_names: list[str]) -> None:
    plain, deferred = patched(compile=False), patched()
    assert not deferred.find_compiled(else_compile=False)
    assert torch.equal(run(deferred), run(plain))
    assert not compiled_names
    assert not folder.exists()
    other = patched()
    assert not other.find_compiled(else_compile=False)
    assert other.find_compiled(else_compile=True), "what is not found can be compiled here"
    assert len(compiled_names) == 2
    assert torch.equal(run(deferred), run(plain)), "it looks only when it is told to"
    assert deferred.find_compiled(else_compile=False)
    assert torch.equal(run(deferred), run(other))
    assert len(compiled_names) == 2


def _changed_config(model: PreTrainedModel) -> None:
    model.config.rope_scaling_of_mine = 2.0


def _changed_layer(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.factor_of_mine = 2.0


def _hooked_layer(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [_changed_config, _changed_layer, _hooked_layer])
@pytest.mark.usefixtures("filled")
def test_a_model_that_differs_does_not_take_them(change: Any) -> None:
    assert patched().find_compiled(else_compile=False)
    model = tiny_model("llama")
    change(model)
    assert not patch(model).__dict__["omniserve"].find_compiled(else_compile=False)


@pytest.mark.parametrize("part", ["patched_model.source_digest", "compile_cache._code_digest"])
@pytest.mark.usefixtures("filled")
def test_other_code_does_not_take_them(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert patched().find_compiled(else_compile=False)
    monkeypatch.setattr(f"omniserve.layers.{part}", lambda *_: "other")
    assert not patched().find_compiled(else_compile=False)


def test_a_file_that_cannot_be_read_is_logged_and_made_anew(
    filled: Path, compiled_names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(patched())
    assert not compiled_names
    for path in filled.glob("*.json"):
        path.write_text("{")
    assert torch.equal(run(patched()), expected)
    assert "is not used" in caplog.text
    assert len(compiled_names) == 2
    assert patched().find_compiled(else_compile=False), "the files were written again"


def test_one_process_compiles_a_model_at_a_time(folder: Path) -> None:
    """Files that are locked by two openings of one process exclude each other as those of two processes do."""
    model, order, is_there = tiny_model("llama"), list[str](), threading.Event()

    def compile_too() -> None:
        is_there.set()
        with one_compiler(tiny_model("llama")):
            order.append("second")

    second = threading.Thread(target=compile_too)
    with one_compiler(model):
        second.start()
        is_there.wait()
        with one_compiler(tiny_model("opt")):
            order.append("another model")
        time.sleep(0.1)
        order.append("first")
    second.join()
    assert order == ["another model", "first", "second"]


def test_without_a_folder_to_write_to_each_process_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(compile_cache, "_folder", lambda: tmp_path / "file" / "halves")
    with one_compiler(tiny_model("llama")):
        assert "the compile cache has no lock" in caplog.text

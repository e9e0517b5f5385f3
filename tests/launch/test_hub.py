"""Revisions of models on Hugging Face's hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omniserve.launch.models import builtin_model_path
from omniserve.server.cli import parse_args


class Hub:
    """Has one repository with two revisions, the older of which has its weights in PyTorch's format alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, str]] = []

    def fetch(
        self, name: str, *, revision: str, ignore_patterns: list[str] | None = None, allow_patterns: Any = ()
    ) -> str:
        if (name, revision) not in (("owner/name", "new"), ("owner/name", "old")):
            raise OSError("404")
        self.asked.append((revision, "all" if ignore_patterns else ", ".join(allow_patterns)))
        folder = self.folder / revision
        folder.mkdir(exist_ok=True)
        for file in ("config.json", *(["model.safetensors"] if revision == "new" else [])):
            (folder / file).touch()
        return str(folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.fetch)
    return hub


def test_model_tokenizer_and_configs_are_of_the_revision(hub: Hub) -> None:
    options, loader = parse_args(["owner/name", "--revision", "new"])
    assert loader.model == options.tokenizer == str(hub.folder / "new")
    assert options.model_names == ("owner/name",) and hub.asked == [("new", "all")]


def test_weights_in_pytorchs_format_are_fetched_if_there_are_no_others(hub: Hub) -> None:
    _, loader = parse_args(["owner/name", "--revision", "old"])
    assert loader.model == str(hub.folder / "old") and hub.asked == [("old", "all"), ("old", "*.bin")]


def test_a_revision_that_is_not_there_ends_the_start_with_a_message(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_args(["owner/name", "--revision", "none"])
    assert "--model owner/name --revision none: it cannot be fetched from the hub: 404" in capsys.readouterr().err


@pytest.mark.parametrize("model", [None, builtin_model_path(), "tiny.gguf"])
def test_what_is_on_this_machine_has_no_revision(
    model: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.gguf").touch()
    with pytest.raises(SystemExit):
        parse_args([*(["--model", model] if model else []), "--revision", "v1"])
    assert "--revision v1" in capsys.readouterr().err

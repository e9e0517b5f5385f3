"""Tests of the objects that a prefill engine's flags make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omniserve.core.config import DiskKVConfig
from omniserve.prefill import cli


class _Asked(Exception):
    """Instead of loading a model."""


@pytest.fixture
def loaders(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments that loaders were made with; no loader loads anything."""
    made: list[dict[str, Any]] = []

    def loader(**settings: Any) -> Any:
        made.append(settings)
        raise _Asked

    monkeypatch.setattr(cli, "EngineLoader", loader)
    return made


@pytest.mark.parametrize(
    ("flags", "profile"),
    [([], (None, True)), (["--profile", "p.json"], (Path("p.json"), True)), (["--profile", "none"], (None, False))],
)
def test_a_prefill_engine_has_a_profile_of_its_own(
    loaders: list[dict[str, Any]], flags: list[str], profile: tuple[Path | None, bool], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of many characters")
    with pytest.raises(_Asked):
        cli.main(["--listen", "127.0.0.1:0", "--secret-file", str(secret), *flags])
    (settings,) = loaders
    assert (settings["profile"], settings["with_profile"]) == profile
    assert settings["config"].prefill.is_prefill_engine


def test_ray_gives_it_the_servers_flags_without_what_is_of_this_machine(
    loaders: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from omniserve.cluster import actors

    ended: list[int] = []
    monkeypatch.setattr(actors.os, "_exit", ended.append)
    monkeypatch.setattr(actors, "_PAUSE_S", 0.0)
    monkeypatch.setattr(actors.threading.Thread, "start", lambda thread: None)
    monkeypatch.setenv("OMNISERVE_PREFILL_SECRET", "")
    flags = "--port 8000 --block-size 32 --disk-kv-gib 1 --disk-kv-dir /somewhere --trace-steps steps.jsonl".split()
    for profile, with_profile in (("p.json", True), ("none", False)):
        actor = actors.PrefillEngine(b"secret", "127.0.0.1", 7101, [*flags, "--profile", profile])
        actor._serve()
        settings = loaders.pop()
        config = settings["config"]
        assert config.block_size == 32 and config.disk_kv == DiskKVConfig() and config.trace_steps is None
        assert (settings["profile"], settings["with_profile"]) == (None, with_profile)
    assert ended == [1, 1], "what fails ends its process, and Ray makes another one"

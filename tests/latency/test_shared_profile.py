"""Tests of the profile that the engines of one server measure once."""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from pathlib import Path

import pytest

from omniserve.latency.profile import Profile, path_in
from omniserve.latency.shared_profile import SharedProfile
from tests.latency.samples import make_profile


def shared(folder: Path, made: Profile, since_s: float | None = None) -> SharedProfile:
    return SharedProfile(folder, made.fingerprint, time.time() - 1 if since_s is None else since_s)


@pytest.fixture
def coarse() -> Profile:
    return dataclasses.replace(make_profile(), is_coarse=True)


def test_an_engine_finds_what_another_one_of_its_server_has_told(tmp_path: Path, coarse: Profile) -> None:
    mine, other = shared(tmp_path, coarse), shared(tmp_path, coarse)
    assert mine.find() is None
    other.tell(coarse)
    assert mine.find() == coarse
    refined = dataclasses.replace(coarse, is_coarse=False)
    other.tell(refined)
    assert mine.find() == refined


def test_a_kept_profile_comes_before_a_told_one(tmp_path: Path, coarse: Profile) -> None:
    mine, kept = shared(tmp_path, coarse), dataclasses.replace(coarse, is_coarse=False)
    mine.tell(coarse)
    kept.write(path_in(tmp_path, kept.fingerprint))
    assert mine.find() == kept


def test_what_an_earlier_server_told_and_what_holds_for_another_share_is_left_alone(
    tmp_path: Path, coarse: Profile
) -> None:
    shared(tmp_path, coarse).tell(coarse)
    assert shared(tmp_path, coarse, since_s=time.time() + 5).find() is None
    fingerprint = dataclasses.replace(coarse.fingerprint, device_threads=coarse.fingerprint.device_threads + 1)
    assert shared(tmp_path, dataclasses.replace(coarse, fingerprint=fingerprint)).find() is None


def test_one_measures_at_a_time_and_waits_only_so_long(tmp_path: Path, coarse: Profile) -> None:
    now_s = [0.0]
    first, second = (
        SharedProfile(tmp_path, coarse.fingerprint, 0.0, patience_s=9, clock=lambda: now_s[0]) for _ in "12"
    )
    assert first.begin() and first.begin() and not second.begin()
    now_s[0] = 8.0
    assert not second.begin()
    now_s[0] = 10.0
    assert second.begin(), "an engine that is never idle keeps no other one from measuring"
    second.end()
    first.end()
    assert second.begin() and not first.begin()
    second.end()


def test_a_lock_is_given_back_although_a_child_process_has_it_too(tmp_path: Path, coarse: Profile) -> None:
    first, second = shared(tmp_path, coarse), shared(tmp_path, coarse)
    assert first.begin()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        first.end()
        assert second.begin()
        second.end()
    finally:
        os.close(reading)
        os.close(writing)
        os.waitpid(child, 0)


def test_where_files_cannot_be_locked_each_engine_measures(
    tmp_path: Path, coarse: Profile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("omniserve.latency.shared_profile.fcntl.flock", refuse)
    mine = shared(tmp_path, coarse)
    assert mine.begin()
    mine.end()
    assert "No locks available" in caplog.text


def test_without_a_folder_to_write_to_each_engine_measures(
    tmp_path: Path, coarse: Profile, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    mine = shared(tmp_path / "file" / "profiles", coarse)
    assert mine.find() is None and mine.begin()
    mine.tell(coarse)
    mine.end()
    assert "do not take turns" in caplog.text and "measures its own latency profile" in caplog.text

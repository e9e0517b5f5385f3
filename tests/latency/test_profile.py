"""Profiles as files: what is written is read, and nothing that does not hold here is used."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from omniserve.latency import Profile, ProfileMismatch
from omniserve.latency.profile import Conditions, Fingerprint, default_folder, load_matching, path_in
from tests.latency.samples import FINGERPRINT, draw_steps, make_profile

PROFILE = make_profile(tuple(draw_steps(0, 10, lambda features: 0.01 + 1e-5 * features.rows)))
ANOTHER = dataclasses.replace(FINGERPRINT, model="another-model")


def different(value: object) -> object:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else f"{value}-other"


def test_a_profile_that_is_written_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "made" / "a.json"
    PROFILE.write(path)
    assert Profile.read(path) == PROFILE
    chunked = dataclasses.replace(PROFILE, shape=dataclasses.replace(PROFILE.shape, chunks=((8192, 3),)))
    chunked.write(path)
    assert Profile.read(path) == chunked
    written = json.loads(path.read_text())
    del written["shape"]["chunks"]  # as before there were any
    path.write_text(json.dumps(written))
    assert Profile.read(path) == PROFILE
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]


def test_conditions_are_kept_and_an_old_profile_has_none(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    calm = Conditions(spread=0.1, waited=0.02, others_cores=1.2, spare_cores=1)
    dataclasses.replace(PROFILE, conditions=calm).write(path)
    assert Profile.read(path).conditions == calm and not calm.disturbances()
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "conditions"}))
    assert Profile.read(path).conditions is None and not Profile.read(path).disturbances


@pytest.mark.parametrize(
    ("change", "says"),
    [({"spread": 0.9}, "90% longer"), ({"waited": 0.3}, "30% of the time"), ({"others_cores": 1.5}, "1.5 cores busy")],
)
def test_a_profile_says_what_disturbed_it(change: dict[str, float], says: str) -> None:
    calm = Conditions(spread=0.1, waited=0.02, others_cores=1.2, spare_cores=1)
    [disturbance] = dataclasses.replace(PROFILE, conditions=dataclasses.replace(calm, **change)).disturbances
    assert says in disturbance


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Fingerprint)])
def test_every_field_of_the_fingerprint_counts(name: str) -> None:
    other = dataclasses.replace(FINGERPRINT, **{name: different(getattr(FINGERPRINT, name))})
    assert other.key != FINGERPRINT.key
    with pytest.raises(ProfileMismatch, match=rf"{name}: .*omniserve\.profile"):
        PROFILE.require(other)
    assert PROFILE.require(FINGERPRINT) is PROFILE


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_truncated_file_is_refused(tmp_path: Path, share: float) -> None:
    path = tmp_path / "a.json"
    PROFILE.write(path)
    text = path.read_text()
    path.write_text(text[: int(share * len(text))])
    with pytest.raises(ValueError, match="no latency profile"):
        Profile.read(path)


@pytest.mark.parametrize(
    "change", [{"format": 0}, {"dense": None}, {"unheard_of": 1}, {"steps": [{"seconds": 1.0}]}, {"fingerprint": {}}]
)
def test_json_that_is_no_profile_of_this_format_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "a.json"
    PROFILE.write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match="no latency profile"):
        Profile.read(path)


def test_a_list_is_no_profile(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match="no latency profile"):
        Profile.read(path)


def test_the_folder_gives_the_profile_of_a_fingerprint_and_no_other(tmp_path: Path) -> None:
    assert load_matching(tmp_path / "absent", FINGERPRINT) is None
    PROFILE.write(path_in(tmp_path, FINGERPRINT))
    assert load_matching(tmp_path, FINGERPRINT) == PROFILE
    assert load_matching(tmp_path, ANOTHER) is None


def test_a_file_under_anothers_name_is_logged_and_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    PROFILE.write(path_in(tmp_path, ANOTHER))
    assert load_matching(tmp_path, ANOTHER) is None
    assert "not used" in caplog.text


def test_profiles_are_cached_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "omniserve" / "profiles"

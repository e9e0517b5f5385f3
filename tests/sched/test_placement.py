"""Tests of the prompts that go to a prefill engine."""

from __future__ import annotations

import pytest

from omniserve.core.request import ServiceClass
from omniserve.sched.sources.placement import PLACEMENTS, PrefillEngine, Prompt
from omniserve.sched.state import BE, LS


def _engine(number: int, *, ls: int = 0, be: int = 0, token_s: float | None = 0.001) -> PrefillEngine:
    return PrefillEngine(number=number, ls_tokens=ls, tokens=ls + be, token_s=token_s)


def _prompt(kind: ServiceClass = LS, *, num_tokens: int = 100, local_s: float | None = 1.0, **seconds: float) -> Prompt:
    return Prompt(kind=kind, num_tokens=num_tokens, local_s=local_s, **seconds)


def _chosen(name: str, prompt: Prompt, *engines: PrefillEngine) -> int | None:
    chosen = PLACEMENTS.get(name)(512).choose(prompt, engines)
    return None if chosen is None else chosen.number


def test_a_chat_goes_to_where_its_first_token_comes_sooner() -> None:
    busy, free = _engine(1, ls=500), _engine(2, ls=200, be=5000)
    assert _chosen("sooner", _prompt(local_s=0.31), busy, free) == 2  # (200 + 100) ms, whatever best effort waits there
    assert _chosen("sooner", _prompt(local_s=0.29), busy, free) is None
    assert _chosen("sooner", _prompt(local_s=None), busy, free) == 2
    assert _chosen("sooner", _prompt()) is None


def test_what_comes_after_the_kv_counts() -> None:
    assert _chosen("sooner", _prompt(local_s=0.5, rest_s=0.3), _engine(1, ls=50)) == 1
    assert _chosen("sooner", _prompt(local_s=0.5, rest_s=0.4), _engine(1, ls=50)) is None
    assert _chosen("sooner", _prompt(local_s=0.5, rest_s=0.6), _engine(1, token_s=None)) == 1  # nothing is known yet


def test_a_chat_goes_away_if_it_is_in_time_there() -> None:
    engine = _engine(1, ls=200)
    assert _chosen("in-time", _prompt(local_s=0.1, left_s=0.3), engine) == 1  # (200 + 100) ms
    assert _chosen("in-time", _prompt(local_s=0.1, left_s=0.29), engine) is None
    assert _chosen("in-time", _prompt(local_s=0.1, left_s=0.3, rest_s=0.01), engine) is None
    assert _chosen("in-time", _prompt(local_s=0.31, left_s=0.2), engine) == 1  # late, but less so
    assert _chosen("in-time", _prompt(local_s=0.31), engine) == 1  # without an objective: where it comes sooner
    assert _chosen("in-time", _prompt(local_s=0.29), engine) is None
    assert _chosen("in-time", _prompt(BE, local_s=None), _engine(1, be=1024)) is None


def test_an_engine_of_which_nothing_is_known_is_tried() -> None:
    assert _chosen("sooner", _prompt(local_s=0.001), _engine(1), _engine(2, token_s=None)) == 2


def test_batches_fill_engines_up_to_two_steps() -> None:
    full, free = _engine(1, be=1024), _engine(2, be=1023)
    assert _chosen("sooner", _prompt(BE, local_s=None), full, free) == 2
    assert _chosen("sooner", _prompt(BE, local_s=None), full) is None


@pytest.mark.parametrize("name", ["always", "disaggregated"])
@pytest.mark.parametrize("kind", [LS, BE])
def test_always_takes_the_engine_with_least_to_do(name: str, kind: ServiceClass) -> None:
    assert _chosen(name, _prompt(kind, local_s=0.0), _engine(1, be=9000), _engine(2, ls=8000)) == 2
    assert _chosen(name, _prompt(kind)) is None

"""Helpers of the tests themselves: pairwise options, rotation, references and builds that processes share."""

from __future__ import annotations

import os
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import builds, rotation
from tests.builds import built
from tests.pairwise import pairwise
from tests.parity.models import tiny_model
from tests.references import identity, kept
from tests.rotation import rotating


@pytest.mark.parametrize("sizes", [(1,), (4,), (2, 2), (4, 3, 2, 2), (7, 4, 3), (1, 5, 2)])
def test_any_two_values_are_together_once_in_fewer_rows_than_all_combinations(sizes: tuple[int, ...]) -> None:
    options = {f"o{place}": [f"{place}.{number}" for number in range(size)] for place, size in enumerate(sizes)}
    rows = pairwise(**options)
    assert rows == pairwise(**options)
    for one, other in combinations(options, 2):
        assert {(row[one], row[other]) for row in rows} == {(a, b) for a in options[one] for b in options[other]}
    assert all({row[name] for row in rows} == set(values) for name, values in options.items())
    largest = sorted(sizes)[-2:]
    assert len(rows) <= 1.5 * largest[0] * largest[-1]


def _quick(cases: list[Any]) -> set[str]:
    return {case for case in cases if isinstance(case, str)}


def test_each_commit_has_other_proofs_and_slow_runs_have_all(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"case {number}" for number in range(18)]
    found = []
    for commit in range(60):
        monkeypatch.setattr(rotation, "turn", lambda commit=commit: f"{commit:040x}")
        cases = rotating(names, 3)
        assert [case if isinstance(case, str) else case.values[0] for case in cases] == names
        assert all(isinstance(case, str) or [mark.name for mark in case.marks] == ["slow"] for case in cases)
        found.append(_quick(cases))
    assert all(len(quick) == 3 for quick in found) and set.union(*found) == set(names)


def test_without_a_repository_the_day_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rotation.turn.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert 1 <= int(rotation.turn()) <= 366
    rotation.turn.cache_clear()


def test_a_reference_is_computed_once_and_a_damaged_file_is_not_trusted(tmp_path: Path) -> None:
    calls: list[str] = []

    def compute() -> dict[str, Any]:
        calls.append("computed")
        return {"tokens": [(1, 2)], "logits": torch.arange(3.0)}

    for _ in range(2):
        values = kept(("one", 1), compute, tmp_path)
        assert values["tokens"] == [(1, 2)] and values["logits"].tolist() == [0, 1, 2]
    assert len(calls) == 1
    kept(("other", 1), compute, tmp_path)
    assert len(calls) == 2
    one, other = sorted(tmp_path.glob("*.pt"))
    data = bytearray(one.read_bytes())
    data[-9] ^= 1
    one.write_bytes(data)
    with pytest.warns(UserWarning, match="made anew: its bytes are not those"):
        _again(compute, tmp_path)
    other.write_bytes(one.read_bytes())
    with pytest.warns(UserWarning, match="made anew: it is about something else"):
        _again(compute, tmp_path)
    assert len(calls) == 4


def _again(compute: Any, folder: Path) -> None:
    for name in ("one", "other"):
        kept((name, 1), compute, folder)


def test_models_that_compute_something_else_have_another_identity() -> None:
    model = tiny_model("llama")
    first = identity(model)
    assert first == identity(tiny_model("llama")) != identity(tiny_model("llama", seed=1))
    assert identity(tiny_model("llama", attention_bias=True)) != first != identity(tiny_model("qwen2"))
    assert identity(tiny_model("llama", torch.bfloat16)) != first
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] += 1e-6
    assert identity(model) != first
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert identity(model) is None, "the hook may change what it computes"
    handle.remove()
    model.lm_head = type("Mine", (nn.Linear,), {})(48, 160)
    assert identity(model) is None, "code of nobody's package"


def test_a_program_is_compiled_anew_if_its_sources_or_options_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "FOLDER", tmp_path / "cache")
    header, source = tmp_path / "a.h", tmp_path / "a.cpp"
    header.write_text("int f();")
    source.write_text('#include "a.h"\nint f() { return 1; }')
    command = [os.environ.get("CXX", "c++"), "-c", source]
    first = built("a.o", command, [source, header])
    made = first.stat().st_mtime_ns
    assert built("a.o", command, [source, header]) == first and first.stat().st_mtime_ns == made
    assert built("a.o", [*command, "-DX"], [source, header]) != first
    header.write_text("long f();")
    with pytest.raises(AssertionError, match="error"):
        built("a.o", command, [source, header])

"""The ablations: each row is the policy without one mechanism that it has."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import ablate
from benchmarks.common.record import read_row
from benchmarks.coserving import flags_of
from omniserve.core.config import EngineConfig
from omniserve.sched import SCHEDULERS
from omniserve.sched.policy import known_options

POINTS = [(policy, point) for policy, ablation in ablate.ABLATIONS.items() for point in ablation.points]


@pytest.mark.parametrize(("policy", "point"), POINTS)
def test_each_row_switches_off_what_the_policy_has(policy: str, point: tuple[str, str]) -> None:
    _, (whole, *others) = ablate.rows_at(policy, point)
    names = [row.name for row in (whole, *others)]
    assert len(set(names)) == len(names) and whole.name == ablate.WHOLE and whole.case.system == policy
    fields = EngineConfig.__dataclass_fields__
    for mechanism in ablate.ABLATIONS[policy].mechanisms:
        options = {name: value for name, value in mechanism.off.items() if name not in fields}
        assert known_options(policy, options) == options, "the policy has all of them"
        case = next(row.case for row in others if row.name == mechanism.name)
        assert dict(whole.case.settings) | mechanism.off == dict(case.settings)
        if mechanism.off:
            assert flags_of(ablate.flags_of(policy, mechanism)), "the server takes them"


def test_rows_are_compared_with_the_whole_policy_under_the_same_conditions() -> None:
    rows = {row.name: row for row in ablate.rows_at("omniserve", ablate.ABLATIONS["omniserve"].points[0])[1]}
    noisy, drafted = (rows[f"{ablate.WHOLE}, {word}"] for word in (ablate.NOISY, ablate.DRAFTED))
    assert rows["seats by rate"].beside == ablate.WHOLE and rows["seats by rate"].case.noise == 0
    assert rows["correction of the model"].beside == noisy.name
    assert rows["correction of the model"].case.noise == noisy.case.noise > 0
    assert rows["drafts"].beside == drafted.name
    assert rows["drafts"].case.drafts_right == 0 < drafted.case.drafts_right


def test_a_load_of_documents_has_the_same_requests_and_some_prompts_begin_alike() -> None:
    rows = {row.name: row.case for row in ablate.rows_at("omniserve", ablate.ABLATIONS["omniserve"].points[0])[1]}
    without = rows["prompts that begin alike together"]
    plain, alike = (
        case.load.make(60.0, warm_up=0.0, seed=3)
        for case in (rows[ablate.WHOLE], rows[f"{ablate.WHOLE}, {ablate.ALIKE}"])
    )
    assert dict(without.settings)["be_prefix_order"] is False and without.load.make(60.0, warm_up=0.0, seed=3) == alike
    assert alike.latency_sensitive == plain.latency_sensitive
    assert [dataclasses.replace(r, hash_ids=()) for r in alike.best_effort] == list(plain.best_effort)
    firsts = [request.hash_ids[0] for request in alike.best_effort if request.hash_ids]
    assert 1 < len(set(firsts)) < len(firsts)
    assert all(len(r.hash_ids) * alike.hash_tokens <= r.input_tokens for r in alike.best_effort)


def test_all_policies_of_papers_can_be_ablated() -> None:
    papers = [name for name in SCHEDULERS.names() if name.endswith("-paper")]
    assert papers and set(papers) <= ablate.ABLATIONS.keys()


def test_a_policy_is_simulated_row_by_row_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    point = ablate.ABLATIONS["bros"].points[0]
    monkeypatch.setitem(ablate.ABLATIONS, "bros", dataclasses.replace(ablate.ABLATIONS["bros"], points=(point,)))
    record = tmp_path / "ablate.json"
    arguments = ["bros", "--minutes", "0.1", "--seeds", "2", "--jobs", "1", "--record", str(record)]
    assert ablate.main(arguments) == 0
    told = capsys.readouterr().out
    rows = read_row(record, "bros")["results"][" ".join(point)]["rows"]
    assert list(rows) == [row.name for row in ablate.rows_at("bros", point)[1]]
    assert all(len(seeds) == 2 for seeds in rows.values())
    assert all(name in told for name in rows)
    json.dumps(rows)


def test_what_cannot_be_ablated_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in ((["fcfs"], "of fcfs; there are omniserve"), (["--seeds", "0"], "1 or more")):
        with pytest.raises(SystemExit):
            ablate.parse_arguments(arguments)
        assert message in capsys.readouterr().err

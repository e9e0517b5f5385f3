"""The ablations: each row is the policy without one mechanism that it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import ablate
from benchmarks.common.record import read_row
from benchmarks.coserving import flags_of
from omniserve.core.config import EngineConfig
from omniserve.sched.policy import known_options


@pytest.mark.parametrize("policy", ablate.BASES)
def test_each_row_switches_off_what_the_policy_has(policy: str) -> None:
    _, (whole, *others) = ablate.cases_of(policy)
    names = [name for name, _ in (whole, *others)]
    assert len(set(names)) == len(names) and whole[0] == ablate.WHOLE
    fields = EngineConfig.__dataclass_fields__
    for mechanism in ablate.BASES[policy].mechanisms:
        options = {name: value for name, value in mechanism.off.items() if name not in fields}
        assert known_options(policy, options) == options, "the policy has all of them"
        case = dict(next(case for name, case in others if name == mechanism.name).settings)
        assert dict(whole[1].settings) | mechanism.off == case
        assert flags_of(ablate.flags_of(policy, mechanism)), "the server takes them"


def test_rows_are_compared_with_the_whole_policy_under_the_same_noise() -> None:
    beside = ablate.compared_with("conserve")
    assert beside["best step size"] == ablate.WHOLE
    assert beside["correction of the model"] == f"{ablate.WHOLE}, steps with a noise of {ablate.NOISE:g}"


def test_a_policy_is_simulated_row_by_row_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "ablate.json"
    arguments = ["bros", "--minutes", "0.1", "--seeds", "2", "--jobs", "2", "--record", str(record)]
    assert ablate.main(arguments) == 0
    told = capsys.readouterr().out
    rows = read_row(record, "bros")["results"]
    assert list(rows) == [name for name, _ in ablate.cases_of("bros")[1]]
    assert all(len(seeds) == 2 for seeds in rows.values())
    assert all(name in told for name in rows)
    json.dumps(rows)


def test_what_cannot_be_ablated_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in ((["fcfs"], "of fcfs; there are omniserve"), (["--seeds", "0"], "1 or more")):
        with pytest.raises(SystemExit):
            ablate.parse_arguments(arguments)
        assert message in capsys.readouterr().err

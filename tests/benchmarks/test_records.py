"""Records: rows by case and CPU kind, digests of the code that ran, and what is measured again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measurements, records, renew
from benchmarks.common import record as record_module
from benchmarks.common.record import ROOT, cpu_kind, environment, portable, read_row, read_rows, write_record
from benchmarks.common.sources import change_since, digest_of, reachable_from, sources_of
from benchmarks.measurements import MEASUREMENTS, RESULTS, Measurement, measurement_of, state_of

HERE = environment()


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch):
    """Have measurements made on a CPU with these features, without asking git each time."""

    def choose(*features: str) -> None:
        hardware = HERE["hardware"] | {"cpu_features": list(features)}
        monkeypatch.setattr(record_module, "environment", lambda: HERE | {"hardware": hardware})
        monkeypatch.setattr(renew, "environment", lambda: HERE | {"hardware": hardware})

    return choose


def test_a_row_replaces_the_one_of_its_case_and_cpu_kind_alone(tmp_path: Path, on) -> None:
    path = tmp_path / "new" / "x.json"
    for features, case, figure in (
        (("avx2",), "a", 1), (("avx2", "avx512f"), "a", 2), (("avx2",), "b", 3), (("avx2",), "a", 4),
    ):  # fmt: skip
        on(*features)
        write_record(path, name="x", case=case, config={"figure": figure}, seed=0, results={"figure": figure})
    found = [
        (row["case"], cpu_kind(row["environment"]["hardware"]), row["results"]["figure"]) for row in read_rows(path)
    ]
    assert found == [("a", "AVX-512", 2), ("a", "AVX2", 4), ("b", "AVX2", 3)]
    assert read_row(path, "a", "AVX-512")["results"] == {"figure": 2}
    with pytest.raises(ValueError, match="no row of a CPU with AMX of the case 'a'"):
        read_row(path, "a", "AMX")


def test_a_simulated_row_replaces_that_of_any_cpu_kind(tmp_path: Path, on) -> None:
    path = tmp_path / "reproduction.json"
    for feature in ("avx2", "avx512f"):
        on(feature)
        write_record(
            path, name="reproduction", case="apex-5-a10", config={"simulated": True}, seed=0, results={"by": feature}
        )
    assert [row["results"] for row in read_rows(path)] == [{"by": "avx512f"}]


def test_a_row_says_what_ran_where(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_record(path, name="x", config={"a": 1}, seed=7, results={"figure": 1.5}, raw={"samples": [1, 2]})
    (row,) = read_rows(path)
    found = row["environment"]
    assert (
        found["git"].keys() == {"commit", "dirty"} and "torch" in found["versions"] and found["hardware"]["cores"] >= 1
    )
    assert "omniserve/core/config.py" in found["sources"]  # imported by the program, and so by this process
    assert (row["seed"], row["config"], row["results"]) == (7, {"a": 1}, {"figure": 1.5})
    assert read_row(tmp_path / "x.raw.json")["results"] == {"samples": [1, 2]}
    ignored = subprocess.run(["git", "check-ignore", "-q", "x.raw.json"], cwd=RESULTS, check=False)
    assert ignored.returncode in (0, 128)  # 128: not a repository


def test_a_record_that_is_there_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_record(path, name="x", config={}, seed=0, results={"figure": 1})
    before = path.read_text()

    class Unwritable:
        def __str__(self) -> str:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_record(path, name="x", config={}, seed=0, results={"figure": Unwritable()})
    assert path.read_text() == before


def test_digests_know_code_from_words() -> None:
    plain = "def f(a):\n    return a + 1\n"
    worded = '"""Adds."""\n\n\ndef f(\n    a,\n):\n    """Add one."""\n    # a comment\n    return a + 1\n'
    assert digest_of("m.py", plain)[0] == digest_of("m.py", worded)[0]
    assert digest_of("m.py", plain)[0] != digest_of("m.py", plain.replace("1", "2"))[0]
    assert digest_of("k.cpp", "int a;  // one\n")[0] == digest_of("k.cpp", "int  a;\n")[0]
    assert digest_of("k.cpp", "int a;")[0] != digest_of("k.cpp", "int b;")[0]


def test_what_has_changed_since_is_counted_in_lines(tmp_path: Path) -> None:
    folder = tmp_path / "omniserve" / "kv"
    folder.mkdir(parents=True)
    for name, lines in (("same", 6), ("changed", 3), ("gone", 1)):
        (folder / f"{name}.py").write_text("".join(f"{name}_{i} = {i}\n" for i in range(lines)))
    sources = sources_of([f"omniserve/kv/{name}.py" for name in ("same", "changed", "gone")], tmp_path)
    whole = sources_of(["omniserve/kv/"], tmp_path)
    assert (
        change_since(sources, ["omniserve/"], tmp_path).share
        == 0
        == change_since(whole, ["omniserve/"], tmp_path).share
    )
    after = tmp_path / "after"
    (after / "omniserve" / "kv").mkdir(parents=True)
    (after / "omniserve/kv/same.py").write_text((folder / "same.py").read_text() + "# said better\n")
    (after / "omniserve/kv/changed.py").write_text("other = 1\n")
    change = change_since(sources, ["omniserve/"], after)
    assert change.changed == ("omniserve/kv/changed.py",) and change.gone == ("omniserve/kv/gone.py",)
    assert change.share == pytest.approx(0.4)
    assert change_since(sources, ["omniserve/ops/"], after).share == 1, "nothing is known of these sources"
    assert change_since(whole, ["omniserve/"], after).share == 1


def test_what_a_started_server_may_import_is_found() -> None:
    found = reachable_from("omniserve.server.__main__")
    assert {"omniserve.sched.scheduler", "omniserve.engine.stepping", "omniserve.core.config"} <= found
    assert "omniserve.simulate.run" not in found


@pytest.mark.parametrize("path", records.records(), ids=lambda path: path.stem)
def test_committed_records_are_small_whole_and_known(path: Path) -> None:
    assert path.stat().st_size < 1_250_000
    for row in read_rows(path):
        assert portable(row["config"]) == row["config"], "it names a place of the machine that it was made on"
        assert measurement_of(path.stem, row["case"]).command[0].startswith("benchmarks.")
        state_of(path.stem, row)


def test_commits_of_records_are_in_the_history() -> None:
    """A row of a branch that was rebased has to be measured again, or says no commit."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    try:
        is_whole = git("rev-parse", "--is-shallow-repository").strip() == "false"
    except (OSError, subprocess.CalledProcessError):
        is_whole = False
    if not is_whole:
        pytest.skip("needs the history of a git checkout")
    known = {*git("rev-list", "HEAD").split(), None}
    rows = [
        (path.stem, row["case"], row["environment"]["git"]["commit"])
        for path in records.records()
        for row in read_rows(path)
    ]
    assert not [row for row in rows if row[2] not in known]


def test_measurements_are_named_once_and_their_programs_exist() -> None:
    names = [(each.record, each.case) for each in MEASUREMENTS]
    assert len(names) == len(set(names))
    for each in MEASUREMENTS:
        module = ROOT / each.command[0].replace(".", "/")
        assert module.with_suffix(".py").exists() or (module / "__main__.py").exists(), each.command


@pytest.fixture
def due_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on) -> list[list[str]]:
    """Six measurements, of which one is fresh and one of another CPU kind; the commands that would run."""
    on("avx2")
    made = [
        Measurement(record="old", command=("benchmarks.old",), minutes=9),
        Measurement(record="fresh", command=("benchmarks.fresh",)),
        Measurement(record="elsewhere", command=("benchmarks.elsewhere",), kinds=("AMX",)),
        Measurement(
            record="beside", command=("benchmarks.beside", "--peer", "vllm=PEERS/vllm"), needs="vLLM", minutes=5
        ),
        Measurement(record="quick", command=("benchmarks.quick",), minutes=1),
    ]
    for module in (measurements, renew):
        monkeypatch.setattr(module, "MEASUREMENTS", tuple(made))
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    pages_of = {("old", "", "AVX2"): ["README.md"], ("reproduction", "apex-6", "AMX"): ["docs/reproduction.md"]}
    monkeypatch.setattr(renew, "quoted", lambda: pages_of)
    monkeypatch.setattr(renew.pages, "main", lambda arguments: 0)
    for name, case in (("old", ""), ("fresh", ""), ("reproduction", "apex-6")):
        write_record(path := tmp_path / f"{name}.json", name=name, case=case, config={}, seed=0, results={})
        if name != "fresh":
            path.write_text(path.read_text().replace('"omniserve/', '"omniserve/once/'))
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command[2:])
        return subprocess.CompletedProcess(command, int("quick" in command[2]))

    monkeypatch.setattr(renew.subprocess, "run", run)
    return commands


def test_old_rows_are_renewed_and_quoted_ones_first(due_records: list[list[str]], tmp_path: Path) -> None:
    assert renew.main(["--peers", "/peers"]) == 1, "one of them failed"
    assert due_records == [
        ["benchmarks.reproduction", "--only", "apex-6", "--record", str(tmp_path / "reproduction.json")],
        ["benchmarks.old", "--record", str(tmp_path / "old.json")],
        ["benchmarks.quick", "--record", str(tmp_path / "quick.json")],
        ["benchmarks.beside", "--peer", "vllm=/peers/vllm", "--record", str(tmp_path / "beside.json")],
    ]


def test_what_cannot_be_renewed_is_said(due_records: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert renew.main(["--list"]) == 0 and not due_records
    assert "beside: left out: it needs vLLM (--peers)" in capsys.readouterr().out
    assert renew.main(["--minutes", "3", "old"]) == 0 and not due_records
    assert "old: left out: 9 min, of which 3 are left" in capsys.readouterr().out


def test_records_are_json_that_others_can_read(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_record(path, name="x", config={}, seed=0, results={})
    record = json.loads(path.read_text())
    assert record["benchmark"] == "x" and record["rows"][0]["environment"] in record["environments"]

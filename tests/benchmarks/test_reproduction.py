"""The reproduction of the papers' figures: its loads, its list of experiments, its tables; one point of each kind."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import reproduction
from benchmarks.common.record import ROOT, read_rows
from benchmarks.pages import PAPERS, TEMPLATES, environment
from benchmarks.paper.cases import PAPER_ORDER, Case, Experiment, MachineSpec, both_orders, with_settings
from benchmarks.paper.loads import LoadSpec, lengths_named, random_rates
from benchmarks.paper.report import CELLS, Findings, TokenGaps, figures_of, names_of, negatives_first
from benchmarks.reproduction import EXPERIMENTS
from omniserve.core.plan import DeviceChunk, StepPlan
from omniserve.core.request import SLO
from omniserve.sched import SCHEDULERS, Forecast
from omniserve.sched.policy import known_options
from omniserve.simulate.results import ClassResult, RequestResult, Result, summarise
from omniserve.simulate.runner import StepRecord

SMALL = MachineSpec(model="smollm-135m", device="1xT4", hosts="1xXeon-4215")

# -- loads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "inputs", "outputs"),
    [
        ("longbench", 8952, 136),
        ("dailymail", 1964, 397),
        ("sharegpt", 248, 325),
        ("azure", 1155, 211),
        ("multinews", 6916, 394),
        ("burstgpt", 2747, 267),
        ("dureader", 21776, 166),
        ("vcsum", 18803, 337),
        ("mixed", (21776 + 6916 + 18803) / 3, (166 + 394 + 337) / 3),
        ("bros-lmsys", 90, 237),
        ("bros-rt", 223, 234),
        ("bros-be", 768, 80),
    ],
)
def test_generated_lengths_have_the_means_that_the_papers_print(name: str, inputs: float, outputs: float) -> None:
    rng = random.Random(1)
    draw = lengths_named(name)
    pairs = [draw(rng) for _ in range(20_000)]
    assert statistics.fmean(pair[0] for pair in pairs) == pytest.approx(inputs, rel=0.06)
    assert statistics.fmean(pair[1] for pair in pairs) == pytest.approx(outputs, rel=0.06)
    assert min(min(pair) for pair in pairs) >= 1


def test_lengths_come_from_a_trace_folder_where_it_has_them(tmp_path: Path) -> None:
    (tmp_path / "lengths").mkdir()
    (tmp_path / "lengths/sharegpt_v3_first_turn.csv").write_text("input_tokens,output_tokens\n7,9\n")
    rng = random.Random(0)
    assert lengths_named("sharegpt", tmp_path)(rng) == (7, 9)
    assert lengths_named("dailymail", tmp_path)(rng)[0] > 9  # the folder has none
    assert lengths_named("300:50")(rng) == (300, 50)
    with pytest.raises(ValueError, match="unknown lengths 'novels'; known: sharegpt"):
        lengths_named("novels")
    with pytest.raises(OSError, match="azure2023_conv"):
        lengths_named("azure", tmp_path)


def test_best_effort_arrivals_follow_the_trace_at_the_wanted_rate(tmp_path: Path) -> None:
    rows = "".join(f"{i},5,5\n" for i in range(1, 101))
    (tmp_path / "azure2023_conv.csv").write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    load = LoadSpec(be_rate=2.0).make(20.0, warm_up=0.25, seed=0, trace_dir=tmp_path)
    assert [request.arrival_s for request in load.best_effort] == [0.5 * i for i in range(1, 40)]
    assert load.warm_up_s == 5.0 and not load.latency_sensitive


def test_a_load_is_the_same_for_the_same_seed_and_classes_do_not_depend_on_each_other() -> None:
    both = LoadSpec(ls_rate=2.0, be_rate=1.0)
    assert both.make(60, warm_up=0, seed=3) == both.make(60, warm_up=0, seed=3)
    assert both.make(60, warm_up=0, seed=3) != both.make(60, warm_up=0, seed=4)
    alone = LoadSpec(ls_rate=2.0).make(60, warm_up=0, seed=3)
    assert alone.latency_sensitive == both.make(60, warm_up=0, seed=3).latency_sensitive and not alone.best_effort


def test_random_rates_change_every_interval_and_stay_in_their_range() -> None:
    times = random_rates(100, 800, 5.0, 200.0, random.Random(0))
    counts = [sum(begin <= time_s < begin + 5 for time_s in times) / 5 for begin in range(0, 200, 5)]
    assert times == sorted(times) and times[-1] < 200
    assert min(counts) < 250 and max(counts) > 650 and 80 < min(counts) and max(counts) < 880


# -- experiments ----------------------------------------------------------------------------------------------------


def test_every_experiment_names_what_exists_and_fits_its_machine() -> None:
    for name, experiment in EXPERIMENTS.items():
        assert experiment.cell in CELLS and experiment.says and name == experiment.name
        places = [(case.x, case.column) for case in experiment.cases]
        assert len(set(places)) == len(places), f"{name} has two cases in one cell"
        for case in experiment.cases:
            SCHEDULERS.get(case.system)
            machine = reproduction.make_machine(case.machine)
            assert machine.device_kv_bytes is not None and machine.device_kv_bytes > 0
            assert case.load.ls_rate or case.load.ls_rates or case.load.backlog or case.load.be_rate
            assert bool(machine.hosts) is not experiment.name.startswith("cpu-whole")


def test_a_papers_own_system_runs_with_its_own_kv_manager() -> None:
    managers = {"conserve": "incremental", "bros": "bidirectional"}
    ablations = ("conserve-65", "bros-13")
    seen = set()
    for name, experiment in EXPERIMENTS.items():
        for case in experiment.cases:
            if case.system in managers and name not in (*ablations, "bros-12-13b"):  # Fig. 12 is without it
                assert dict(case.settings)["kv"] == managers[case.system] and not case.variant
                seen.add(case.system)
    assert seen == managers.keys()
    for name in ablations:
        kinds = {dict(case.settings).get("kv") for case in EXPERIMENTS[name].cases if case.system in managers}
        assert managers[name.partition("-")[0]] in kinds and len(kinds) > 1


def test_llumnix_has_both_headrooms_wherever_it_runs() -> None:
    found: dict[tuple[str, str], list[object]] = {}
    for name, experiment in EXPERIMENTS.items():
        for case in experiment.cases:
            if case.system == "llumnix":
                found.setdefault((name, case.x), []).append(dict(case.settings).get("headroom_fraction"))
    assert len(found) > 10 and all(fractions == [None, 0.8] for fractions in found.values())


def test_memory_and_context_of_a_machine_can_differ_from_the_data_sheet() -> None:
    usual = reproduction.make_machine(MachineSpec(model="opt-13b", device="2xA100-80GB"))
    small = reproduction.make_machine(
        MachineSpec(model="opt-13b", device="2xA100-80GB", memory_gb=40, bandwidth_gb_per_s=1555, max_model_len=99)
    )
    near = reproduction.make_machine(replace(SMALL, hosts="2xXeon-4215"))
    far = reproduction.make_machine(replace(SMALL, hosts="2xXeon-4215", network_gb_per_s=0.1))
    assert far.hosts[0] == near.hosts[0] and far.hosts[1].move_byte_s > near.hosts[1].move_byte_s
    assert usual.device_kv_bytes is not None and small.device_kv_bytes is not None
    assert usual.device_kv_bytes - small.device_kv_bytes == pytest.approx(0.9 * 80e9, rel=1e-6)
    assert small.spec.max_model_len == 99 and not small.hosts


def test_on_a_decode_instance_prompts_take_no_time_and_decodes_what_they_take_elsewhere() -> None:
    spec = replace(SMALL, memory_gb=8.0)
    usual, instance = (
        reproduction.make_machine(replace(spec, prompts_come_computed=computed)) for computed in (False, True)
    )
    decodes, mixed = (Forecast(usual.device, usual.shape).step() for _ in range(2))
    for step in (decodes, mixed):
        step.add_decodes(8, 4000, 4008.0, samples=8)
        step.add_piggyback(4, 2, [1] * usual.shape.num_layers)
    mixed.add_chunk(0, 600, samples=1)
    alone_s = usual.device.step_s(decodes.features)
    assert instance.device.step_s(decodes.features) == instance.device.step_s(mixed.features) == alone_s
    assert usual.device.step_s(mixed.features) > alone_s
    assert instance.forecast is instance.device and instance.device_kv_bytes == usual.device_kv_bytes


def test_names_choose_experiments_by_how_they_begin() -> None:
    assert [e.name for e in reproduction.chosen(["bros-10-3", "bros-12"])] == ["bros-10-30b", "bros-12-13b"]
    assert reproduction.chosen([]) == list(EXPERIMENTS.values())
    with pytest.raises(ValueError, match=r"no experiment is named vllm\.\.\.; there are: omniserve"):
        reproduction.chosen(["vllm"])


def tiny(system: str, variant: str = "", **load: Any) -> Case:
    return Case(
        x="one", system=system, variant=variant, machine=SMALL,
        load=LoadSpec(ls_lengths="64:8", be_lengths="128:8", **load), slo=SLO(ttft_s=1.0, tpot_s=0.1),
    )  # fmt: skip


def test_both_orders_are_of_the_systems_named_and_differ_in_nothing_else() -> None:
    ours, paper = both_orders(tiny("omniserve", ls_rate=1.0))
    assert (ours.column, paper.column) == ("omniserve", "omniserve-paper")
    assert replace(paper, system=ours.system) == ours
    assert both_orders(tiny("neo", ls_rate=1.0)) == [tiny("neo", ls_rate=1.0)]
    _, paper = both_orders(tiny("neo", ls_rate=1.0), ("neo",))
    assert dict(paper.settings) == {"be_order": "prefill"} and paper.column == f"neo, {PAPER_ORDER}"


def test_a_changed_setting_is_there_once() -> None:
    case = replace(tiny("sarathi"), settings=(("max_num_batched_tokens", 512), ("admission", False)))
    changed = with_settings(case, "with", admission=True)
    assert (
        changed.settings == (("max_num_batched_tokens", 512), ("admission", True)) and changed.column == "sarathi, with"
    )


def test_bros_alone_has_neither_bidirectional_blocks_nor_replacement() -> None:
    for case in EXPERIMENTS["bros-12-13b"].cases:
        settings = dict(case.settings)
        if case.system == "bros":
            assert settings["kv"] == "paged" and settings["replace_ls"] is False
            assert known_options("bros", {"replace_ls": False}) == {"replace_ls": False}
        else:
            assert not {"kv", "replace_ls"} & settings.keys()


def test_cases_that_share_objectives_stay_together_and_others_run_apart() -> None:
    apart, shared = EXPERIMENTS["bros-12-13b"], EXPERIMENTS["conserve-6-14b"]
    for experiment, size in ((apart, 1), (shared, 4)):
        units = reproduction.units_of(experiment, minutes=1.0, seed=0, trace_dir=None)
        assert [len(unit.cases) for unit in units] == [size] * (len(experiment.cases) // size)
        assert [case for unit in units for case in unit.cases] == list(experiment.cases)


def test_objectives_of_a_scale_are_that_multiple_of_the_first_systems_p99() -> None:
    first, second = tiny("online-only", ls_rate=2.0), replace(tiny("sarathi", ls_rate=2.0, backlog=4), slo_scale=2.0)
    experiment = Experiment(
        name="a", figure="", says="", x_name="load", cell="scales", slo_from="online-only", cases=(first, second)
    )
    (unit,) = reproduction.units_of(experiment, minutes=0.2, seed=0, trace_dir=None)
    alone, shared = unit.run()
    assert shared["slo"]["ttft_s"] == 2 * alone["figures"]["ttft_p99_s"]
    assert shared["slo"]["tpot_s"] == 2 * alone["figures"]["tbt_p99_s"]


def test_a_run_writes_figures_to_the_record_and_keeps_other_experiments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experiments = {
        name: Experiment(
            name=name, figure=f"Figure {name}", says="twice", x_name="load", cell=cell, slo_from=first, cases=cases
        )
        for name, cell, first, cases in (
            (
                "a",
                "harvest",
                "online-only",
                (tiny("online-only", ls_rate=2.0), tiny("sarathi", ls_rate=2.0, backlog=4)),
            ),
            ("b", "co-serving", None, (tiny("omniserve", ls_rate=2.0, be_rate=1.0),)),
        )
    }
    monkeypatch.setattr(reproduction, "EXPERIMENTS", experiments)
    record = tmp_path / "record.json"
    for name in ("b", "a"):
        reproduction.main(["--only", name, "--minutes", "0.2", "--record", str(record), "--jobs", "1"])
    said = capsys.readouterr().out
    assert "Figure b (simulated)\npaper: twice\n| load | omniserve |" in said
    results = {row["case"]: row["results"] for row in read_rows(record)}
    assert set(results) == {"a", "b"}
    alone, shared = results["a"]["rows"]
    assert alone["slo"] == {"ttft_s": 1.0, "tpot_s": 0.1}
    assert shared["slo"] == {
        "ttft_s": alone["figures"]["ttft_p99_s"],
        "tpot_s": alone["figures"]["tbt_p99_s"],
    }  # its objective is the other's P99
    assert shared["figures"]["be_output_per_s"] > 0 and alone["figures"]["be_output_per_s"] == 0


# -- figures and tables ---------------------------------------------------------------------------------------------


def result_of(requests: list[RequestResult], slo: SLO) -> Result:
    def group(name: str) -> ClassResult:
        chosen = [request for request in requests if request.service_class == name]
        return summarise(chosen, slo, duration_s=10.0, output_tokens=50, prompt_tokens=70)

    return Result(
        duration_s=10.0, end_s=12.0, num_steps=3, classes={"LS": group("LS"), "BE": group("BE")}, host_share=0.25,
        host_tier_busy=0.5, host_steps_per_layer=1.0, accepted_drafts=0, rejected_drafts=0, warm_up_output_tokens=50,
        preemptions=0, swaps_out=0, swaps_in=0, num_too_long=0, wall_s=0.1, requests=tuple(requests),
    )  # fmt: skip


def ls_request(first_s: float | None, finished_s: float | None, *, rejected: bool = False) -> RequestResult:
    tokens = 11 if finished_s is not None else 0
    return RequestResult("LS", 0.0, 5, 11, first_s, finished_s, tokens, 0, rejected)


def test_figures_tell_rejected_and_unfinished_requests_apart() -> None:
    slo = SLO(ttft_s=1.0, tpot_s=0.1)
    requests = [
        ls_request(0.5, 1.1),
        ls_request(2.0, 2.5),
        ls_request(0.5, None),
        ls_request(None, None, rejected=True),
    ]
    figures = figures_of(result_of(requests, slo), slo)
    assert (figures["ls_requests"], figures["rejected"], figures["ls_unfinished"]) == (4, 1, 1)
    assert figures["attainment"] == 0.25 and figures["ttft_attainment"] == 0.5
    assert figures["admitted_ttft"] == pytest.approx(2 / 3)
    assert figures["normalized_s"] == pytest.approx((1.1 / 11 + 2.5 / 11) / 2)
    assert figures["tpot_max_s"] == pytest.approx(0.06)
    assert figures["be_finished_per_s"] == 0 and json.dumps(figures, allow_nan=False)


# -- the page -------------------------------------------------------------------------------------------------------


def record_of(**figures: tuple[float | None, ...]) -> dict[str, Any]:
    """Return two experiments, ``one`` and ``two``, each with x 1 and 2 in the columns p and q."""
    found = {}
    for name, shift in (("one", 0.0), ("two", 10.0)):
        rows = [
            {"x": x, "column": column, "figures": {"rate": None if rate is None else rate + shift}}
            for (x, column), rate in zip([("1", "p"), ("1", "q"), ("2", "p"), ("2", "q")], figures["rate"], strict=True)
        ]
        found[name] = {"x_name": "LS/s", "cell": "plain", "minutes": 3.0, "seed": 0, "rows": rows}
    return found


def render(experiments: dict[str, Any], template: str) -> str:
    findings = Findings(experiments, {name: "source" for name in experiments})
    return environment(**names_of(findings)).from_string(template).render()


@pytest.fixture
def plain_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.paper.report.markdown", lambda entry, legend: f"table {len(entry['rows'])}")


def test_a_page_takes_its_tables_and_numbers_from_the_record(plain_tables: None) -> None:
    template = (
        "{{ table('one') }} {{ table('two') }}\n{{ v('one', '1', 'q', 'rate') | n(1) }}; "
        "{{ ratio('one', '2', 'p', 'q', 'rate') | n(2) }}; {{ values('two', 'p', 'rate') | span }}; "
        "{{ ratios('one', 'p', 'q', 'rate') | mean | n(3) }}; {{ gains(['one', 'two'], 'p', 'q', 'rate') | span }}\n"
    )
    assert render(record_of(rate=(1.0, 2.0, 3.0, 4.0)), template) == (
        "table 4\n\n(source) table 4\n\n(source)\n2.0; 0.75; 11 to 13; 0.625; -1"
    )


def test_the_best_column_of_each_row_is_compared_with_another_experiments(plain_tables: None) -> None:
    asked = "{{ across_best('one', 'rate', 'two', 'p', 'rate') | join('; ') }}"
    assert render(record_of(rate=(1.0, 2.0, 5.0, 4.0)), asked) == f"{2 / 11}; {5 / 15}"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("table('three')", "no experiment three: run it with --only three"),
        ("v('one', '9', 'p', 'rate')", "one has no p at 9"),
        ("v('one', '1', 'p', 'speed')", "one, 1, p has no speed"),
        ("v('one', '2', 'q', 'rate')", "one, 2, q has no rate"),
        ("ratio('one', '1', 'p', 'q', 'rate')", "rate of q in one at 1 is 0"),
    ],
)
def test_a_page_that_asks_for_what_is_not_there_is_refused(asked: str, message: str, plain_tables: None) -> None:
    with pytest.raises(ValueError, match=message):
        render(record_of(rate=(1.0, 0.0, 3.0, None)), "{{ " + asked + " }}")


def test_the_page_has_a_table_of_each_experiment() -> None:
    experiments = {row["case"]: row["results"] for row in read_rows(ROOT / "benchmarks/results/reproduction.json")}
    assert experiments.keys() == EXPERIMENTS.keys()
    findings = Findings(experiments, {name: "" for name in experiments})
    environment(**names_of(findings), plots=lambda: "", newest=lambda *_: []).from_string(
        (TEMPLATES / PAPERS).read_text()
    ).render()
    assert findings.shown == experiments.keys()


def test_gaps_between_tokens_are_the_steps_with_ls_decodes_once_for_each() -> None:
    def step(start_s: float, seconds: float, *chunks: tuple[str, int, int]) -> StepRecord:
        rows = [
            DeviceChunk(request_id=name, token_ids=(1,) * count, start=start, block_ids=(), samples=True)
            for name, start, count in chunks
        ]
        return StepRecord(plan=StepPlan(step_id=0, chunks=tuple(rows)), start_s=start_s, seconds=seconds)

    gaps = TokenGaps(begin_s=1.0)
    gaps.note(step(0.0, 9.0, ("LS-0", 5, 1)))  # in the warm-up
    gaps.note(step(1.0, 7.0, ("BE-0", 5, 1), ("LS-1", 0, 1), ("LS-2", 0, 4)))  # no LS decode
    for second in range(49):
        gaps.note(step(2.0 + second, 0.1, ("LS-0", 5, 1), ("LS-1", 9, 1)))
    gaps.note(step(60.0, 0.5, ("LS-0", 5, 1), ("LS-2", 3, 1)))
    assert gaps.percentile(98) == 0.1 and gaps.percentile(99) == 0.5
    assert gaps.share_within(0.1) == 0.98 and gaps.share_within(0.5) == 1.0 and gaps.share_within(None) is None
    assert TokenGaps().percentile(99) is None and TokenGaps().share_within(1.0) is None


def test_claims_are_shown_by_their_verdict_what_does_not_hold_first() -> None:
    table = """
| claim | paper | simulated | |
|---|---|---|---|
| It is fast (Fig. 1): by day | 2 times | 3 times | holds |
| ... and by night | 2 times | 0.5 times | **does not hold** |
| It is small | 1 | | |
"""
    told = negatives_first(table)
    headings = [line for line in told.splitlines() if line.startswith("#")]
    assert headings == ["### Does not hold (1)", "### Holds (1)", "### Controls, and what cannot be told (1)"]
    assert "| It is fast ... and by night | 2 times | 0.5 times | **does not hold** |" in told
    assert told.count("| claim | paper | simulated | |") == 3

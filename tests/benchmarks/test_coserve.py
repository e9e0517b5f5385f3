"""The benchmark of policies: what it sends, what it counts, and which policies it calls the best."""

from __future__ import annotations

import json
import math
import random
import statistics
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks import coserve
from benchmarks.common.client import BE_TIER, LS_TIER, LoadRequest, RequestRecord, backlog, poisson_stream
from benchmarks.common.prefixes import PrefixStructure
from benchmarks.common.record import read_row, write_record
from benchmarks.common.summary import medians, summarize_co_serving
from benchmarks.coserve import frontier_of, pareto_optimal, plot
from benchmarks.coserving import Arrivals, TraceSlice, counters, flags_of, joined_records, plan_runs, rows_of
from omniserve.sched import SCHEDULERS
from omniserve.simulate.load import TraceRequest

# -- loads ----------------------------------------------------------------------------------------------------------


def test_a_slice_of_a_trace_is_moved_sped_up_and_cut_to_size() -> None:
    trace = [TraceRequest(float(i), 10 * (i + 1), i + 1) for i in range(100)]
    piece = TraceSlice(start_s=20, seconds=5, scale=4, length_scale=0.5, max_input=150, max_output=15)
    rows = piece.of(trace)
    assert [row.arrival_s for row in rows] == [0.25 * i for i in range(20)]  # 20 s in 5
    assert [row.input_tokens for row in rows] == [min(150, 5 * (i + 1)) for i in range(20, 40)]
    assert max(row.output_tokens for row in rows) == 15 and rows[0].output_tokens == 10  # round(10.5) is even
    tiny = TraceSlice(seconds=5, length_scale=0.001, max_input=9, max_output=9).of(trace)
    assert {(row.input_tokens, row.output_tokens) for row in tiny} == {(1, 1)}
    with pytest.raises(ValueError, match=r"no request .*\[200, 205\) s; its last is at 99 s"):
        TraceSlice(start_s=200, seconds=5, max_input=9, max_output=9).of(trace)
    with pytest.raises(ValueError, match="must be > 0"):
        TraceSlice(seconds=5, scale=0, max_input=9, max_output=9)


@pytest.mark.parametrize("process", ["poisson", "gamma", "square"])
def test_every_process_has_the_mean_rate_that_was_asked_for(process: str) -> None:
    arrivals = Arrivals(process=process)
    times = arrivals.times_s(5.0, 2000.0, random.Random(3))
    assert times == sorted(times) and 0 <= times[0] and times[-1] < 2000
    # 10,000 expected, with a standard deviation of 200 for gaps with a CV of 2; seeded, so it cannot fail by chance.
    assert abs(len(times) - 10_000) < 4 * 200
    assert arrivals.times_s(0.0, 2000.0, random.Random(3)) == []
    if process == "square":
        low = sum(time % 10 < 5 for time in times) / len(times)
        assert low == pytest.approx(0.1, abs=0.02)  # a fifth of the mean rate for half of the time


def _sent(*new: int) -> list[LoadRequest]:
    """Return requests, a second apart, whose prompts are so many tokens, each the number of its request."""
    return [
        LoadRequest(send_at_s=float(i), prompt=[1000 + i] * count, max_tokens=3, service_tier=LS_TIER)
        for i, count in enumerate(new)
    ]


def test_prompts_begin_with_one_of_so_many_fronts() -> None:
    structure, plain = PrefixStructure(fronts=3, front_tokens=20), _sent(*[2] * 40)
    sent = structure.put_before(plain, random.Random(5), vocab_size=100)
    assert sent == structure.put_before(plain, random.Random(5), vocab_size=100)
    fronts = {tuple(request.prompt[:20]) for request in sent}
    assert len(fronts) == 3 and all(0 < token < 100 for front in fronts for token in front)
    assert [request.prompt[20:] for request in sent] == [request.prompt for request in plain]
    assert [request.send_at_s for request in sent] == [request.send_at_s for request in plain]
    assert PrefixStructure().put_before(plain, random.Random(5), vocab_size=100) == plain


def test_a_turn_of_a_chat_begins_with_all_turns_before_it_and_chats_have_an_end() -> None:
    structure = PrefixStructure(fronts=2, front_tokens=4, chats=3, chat_tokens=30)
    sent = structure.put_before(_sent(*[2] * 60), random.Random(1), vocab_size=100)
    prompts = [tuple(request.prompt) for request in sent]
    assert max(len(prompt) + 3 for prompt in prompts) <= 30
    firsts = [i for i, prompt in enumerate(prompts) if len(prompt) == 6]
    assert {prompts[i][:4] for i in firsts} == {prompts[i][:4] for i in range(60)} and len(firsts) > 10
    for i, prompt in enumerate(prompts):
        if len(prompt) > 6:
            before = [j for j in range(i) if prompts[j] == prompt[:-5]]
            assert len(before) == 1, "the turn before, three tokens of an answer, two new ones"
    ends = {tuple(prompts[j]) for i in range(60) for j in range(i) if prompts[j] == prompts[i][:-5]}
    assert len(prompts) - len(ends) == len(firsts), "each chat has one last turn"


@pytest.mark.parametrize("wrong", [{"fronts": 2}, {"front_tokens": 5}, {"chats": -1}, {"chats": 2, "chat_tokens": 0}])
def test_structures_without_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"prefixes|fronts"):
        PrefixStructure(**wrong)


def test_an_unknown_process_is_refused() -> None:
    with pytest.raises(ValueError, match="one of poisson, gamma, square; got 'weibull'"):
        Arrivals(process="weibull")
    with pytest.raises(ValueError, match=r"in \[0, 1\]; got 2"):
        Arrivals(process="square", low_share=2)


def test_streams_and_backlogs_are_of_one_size_and_repeat() -> None:
    def stream(seed: int) -> Any:
        sizes = {"rate": 2.0, "seconds": 30.0, "prompt": 7, "output": 3, "vocab_size": 50}
        return poisson_stream(random.Random(seed), tier=LS_TIER, slo=(1.0, 0.1), **sizes)

    assert stream(1) == stream(1) != stream(2)
    assert {(len(r.prompt), r.max_tokens, r.service_tier, r.slo) for r in stream(1)} == {(7, 3, LS_TIER, (1.0, 0.1))}
    pile = backlog(random.Random(1), count=4, prompt=6, output=2, vocab_size=50)
    assert [(r.send_at_s, len(r.prompt), r.max_tokens, r.service_tier) for r in pile] == [(0.0, 6, 2, BE_TIER)] * 4
    assert all(1 <= token < 50 for request in (*pile, *stream(1)) for token in request.prompt)


def test_the_be_work_is_the_same_at_every_rate(tmp_path: Path) -> None:
    args = coserve.parse_arguments(["--rates", "1", "3", "--be-requests", "5", "--seconds", "30"])
    load, points = coserve.load_of(args)
    slow, fast = (load.requests(point, 7, load.slo(2.0)) for point in points)
    be = [[r for r in requests if r.service_tier == BE_TIER] for requests in (slow, fast)]
    assert be[0] == be[1] and len(be[0]) == 5 and len(slow) < len(fast)
    assert {r.slo for r in slow if r.service_tier == LS_TIER} == {(0.6, 0.12)}
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(f"{i / 2},{i + 1},4\n" for i in range(200)))
    arguments = ["--ls-trace", str(path), "--be-trace", str(path), "--trace-scale", "0.5", "2", "--seconds", "10"]
    load, points = coserve.load_of(coserve.parse_arguments(arguments))
    assert points == [0.5, 2.0] and [load.mean_rate(point) for point in points] == [1.0, 4.0]
    requests = load.requests(2.0, 7, load.slo(1.0))
    assert [sum(r.service_tier == tier for r in requests) for tier in (LS_TIER, BE_TIER)] == [40, 20]
    assert json.dumps(load, default=vars)  # a record can hold it


# -- figures --------------------------------------------------------------------------------------------------------


def ls(sent: float, first: float | None = None, last: float | None = None, **more: Any) -> RequestRecord:
    return RequestRecord(
        service_tier=LS_TIER, send_at_s=sent, first_token_s=first, last_token_s=last,
        num_output_tokens=11 if last is not None else 0, **{"finished": last is not None} | more,
    )  # fmt: skip


def be(*chunks: float, finished: bool = True, output: int = 10) -> RequestRecord:
    return RequestRecord(
        service_tier=BE_TIER, send_at_s=0.0, first_token_s=chunks[0] if chunks else None,
        last_token_s=chunks[-1] if chunks else None, token_times_s=list(chunks), num_prompt_tokens=90,
        num_output_tokens=output if finished else 0, finished=finished,
    )  # fmt: skip


def test_attainment_counts_admitted_requests_beside_best_effort_work() -> None:
    records = [
        be(1.0, 5.0), ls(0.0, 0.2, 0.7), ls(1.0, 1.4, 1.9), ls(2.0, 2.1, 4.1), ls(3.0, rejected=True),
        ls(6.0, 9.0, 20.0),
    ]  # fmt: skip
    result = summarize_co_serving(records, (0.3, 0.06), end_s=20.0)
    assert result["be_tokens_per_s"] == 20.0 and result["be_end_s"] == 5.0 and result["be_finished"] is True
    assert (result["ls_requests"], result["rejected"]) == (4, 1)  # the one at 6 s came after the BE work
    assert result["attained"] == pytest.approx(1 / 3) and result["attained_of_all"] == pytest.approx(1 / 4)
    assert result["ttft_attained"] == result["tpot_attained"] == pytest.approx(2 / 3)
    assert result["goodput_per_s"] == pytest.approx(1 / 4.1)
    looser = summarize_co_serving(records, (0.6, 0.12), end_s=20.0)
    assert looser["attained"] == pytest.approx(2 / 3)  # the same run, compared with other objectives


def test_best_effort_tokens_count_when_they_come() -> None:
    # 90 + 10 over four chunks by 4 s; 90 + as many a chunk of one that was cut off; one that never began.
    records = [be(1.0, 2.0, 3.0, 4.0), be(2.0, 6.0, finished=False), be(finished=False), ls(0.0, 0.1, 0.2)]
    result = summarize_co_serving(records, (1.0, 1.0), end_s=10.0, stream_s=2.5)
    assert result["be_finished"] is False and result["be_end_s"] == 10.0
    assert result["be_tokens_per_s"] == pytest.approx((100 + 95) / 10)
    assert result["be_tokens_per_s_beside_ls"] == pytest.approx((90 + 2 * 2.5 + 90 + 2.5) / 2.5)
    result = summarize_co_serving([be(2.0, 6.0, finished=False)], None, end_s=10.0)
    assert result["be_tokens_per_s"] == pytest.approx((90 + 2) / 10), "a token a chunk, if nothing tells more"
    # BE work that ends first: the window ends with it.
    result = summarize_co_serving([be(1.0, 2.0)], None, end_s=10.0, stream_s=8.0)
    assert result["be_tokens_per_s_beside_ls"] == result["be_tokens_per_s"] == pytest.approx(100 / 2)
    assert "attained" not in result


def test_who_was_cut_off_missed_and_waited_until_then() -> None:
    records = [ls(0.0, 0.1, 0.2), ls(0.0, 0.1), ls(2.0)]
    result = summarize_co_serving(records, (1.0, 1.0), end_s=10.0)
    assert result["attained"] == result["tpot_attained"] == pytest.approx(1 / 3)
    assert result["ttft_attained"] == pytest.approx(2 / 3) and result["ls_unfinished"] == 2
    assert result["ttft_p99_s"] == pytest.approx(0.1 + 0.98 * 7.9) and result["tpot_p50_s"] == pytest.approx(0.01)
    none = summarize_co_serving([ls(2.0)], (1.0, 1.0), end_s=10.0)
    assert none["attained"] == none["goodput_per_s"] == 0 and none["tpot_p50_s"] is None


def test_a_load_that_was_rejected_as_a_whole_attained_nothing() -> None:
    result = summarize_co_serving([ls(0.0, rejected=True), be(1.0, 2.0)], (1.0, 1.0), end_s=10.0)
    assert (result["rejected"], result["attained_of_all"]) == (1, 0.0) and "attained" not in result


def test_medians_leave_out_what_a_repeat_lacks() -> None:
    runs = [{"a": 1.0, "b": 2.0, "c": None, "ok": True}, {"a": 3.0, "c": 1.0, "ok": False}]
    assert medians(runs) == {"a": 2.0, "ok": False}


def test_counters_are_those_of_the_run() -> None:
    be_tokens, host = 'omniserve_output_tokens_total{service_class="BE"}', "omniserve_host_output_tokens_total"
    preempted, resumed = "omniserve_preempted_tokens_total", "omniserve_resumed_tokens_total"
    before = {host: 10.0, "omniserve_preemptions_total": 2.0, preempted: 100.0}
    after = {be_tokens: 200.0, host: 60.0, "omniserve_preemptions_total": 5.0, preempted: 400.0, resumed: 50.0}
    assert counters(before, after) == {
        "host_tokens": 50.0, "preemptions": 3.0, "swaps_out": 0.0, "swaps_in": 0.0, "recomputed_tokens": 250.0,
        "host_share": 0.25,
    }  # fmt: skip
    assert "host_share" not in counters(before, before)


# -- runs -----------------------------------------------------------------------------------------------------------


def test_a_policy_may_have_flags_of_the_server() -> None:
    assert flags_of("fcfs") == ["--scheduler", "fcfs"]
    assert flags_of("a.b:C,kv=incremental,guard-all,scheduler-option=checkpoint_kv=true") == [
        "--scheduler", "a.b:C", "--kv", "incremental", "--guard-all", "--scheduler-option", "checkpoint_kv=true",
    ]  # fmt: skip
    assert coserve.parse_arguments(["--policies", "bros,kv=paged"]).policies == ["bros,kv=paged"]
    with pytest.raises(SystemExit):
        coserve.parse_arguments(["--policies", "none-such,kv=incremental"])


def test_a_load_sets_what_is_not_given() -> None:
    args = coserve.parse_arguments(["--load", "memory", "--be-requests", "5", "--", "--execution", "compile=false"])
    assert args.be_requests == 5 and args.device_kv_gib < coserve.parse_arguments([]).device_kv_gib
    assert "conserve,kv=incremental" in args.policies and args.server_args == ["--execution", "compile=false"]
    with pytest.raises(SystemExit):
        coserve.parse_arguments(["--load", "none-such"])


def test_policies_alternate_and_only_those_that_read_objectives_run_for_each() -> None:
    runs = plan_runs(["a", "b"], [1.0, 2.0], [0.5, 1.0], 2, blind={"a"})
    assert [(run.policy, run.point, run.told_scale) for run in runs if run.repeat == 0] == [
        ("a", 1.0, 0.5), ("b", 1.0, 0.5), ("b", 1.0, 1.0), ("a", 2.0, 0.5), ("b", 2.0, 0.5), ("b", 2.0, 1.0)
    ]  # fmt: skip
    assert {run.scales for run in runs if run.policy == "a"} == {(0.5, 1.0)}
    assert all(run.scales == (run.told_scale,) for run in runs if run.policy == "b")
    assert next(run.policy for run in runs if run.repeat == 1) == "b"
    assert len(plan_runs(["a", "b"], [1.0, 2.0], [0.5, 1.0], 2, blind=set())) == 16


def test_every_registered_policy_runs_by_default() -> None:
    assert coserve.parse_arguments([]).policies == SCHEDULERS.names()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://x"], "--url and --name"),
        (["--priority-field"], "are for a server at --url"),
        (["--url", "http://x", "--name", "x", "--", "--guard-all"], "cannot be given to a server that is running"),
        (["--policies", "best"], "unknown scheduler 'best'"),
        (["--slo-scales", "0"], "must be > 0"),
    ],
)
def test_a_wrong_command_line_says_so(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        coserve.parse_arguments(arguments)
    assert message in capsys.readouterr().err


def run_of(policy: str, attained: float, be_rate: float, rate: float = 1.0, **more: Any) -> dict[str, Any]:
    summary = {
        "scale": 1.0, "attained_of_all": attained, "attained": attained, "ttft_attained": 1.0, "tpot_attained": 0.9,
        "ls_requests": 20, "rejected": 1, "ttft_p50_s": 0.1, "ttft_p99_s": 0.2, "tpot_p50_s": 0.02, "tpot_p99_s": 0.03,
        "goodput_per_s": 0.5, "be_tokens_per_s": 300.0, "be_tokens_per_s_beside_ls": be_rate, "be_finished": True,
    }  # fmt: skip
    return {"policy": policy, "rate": rate, "summaries": [summary | more]}


def test_pareto_optimal_is_what_nothing_beats_in_both() -> None:
    points = [(1.0, 100.0), (0.5, 300.0), (0.4, 300.0), (0.7, 200.0), (0.6, 150.0), (1.0, 100.0), (1.0, 99.0)]
    assert pareto_optimal(points) == [True, True, False, True, False, True, False]
    assert pareto_optimal([]) == []
    assert all(pareto_optimal([(i, 8 - i) for i in range(9)]))


def test_rows_are_medians_and_have_the_frontier_of_each_rate() -> None:
    runs = [
        run_of("a", 0.9, 100.0), run_of("b", 0.8, 90.0, be_finished=False, ls_unfinished=2), run_of("a", 1.0, 300.0),
        run_of("b", 0.8, 90.0), run_of("b", 0.5, 50.0, rate=2.0, host_share=0.25, host_tokens=12.0),
        {**run_of("c", 0, 0), "summaries": [{"scale": 1.0, "be_tokens_per_s": 700.0}]},
    ]  # fmt: skip
    rows, single = rows_of(runs)
    assert len(single) == 6 and len(rows) == 4
    assert rows[0]["attained"] == pytest.approx(statistics.median([0.9, 1.0]))
    assert [(row["policy"], best) for row, best in frontier_of(rows, 1.0, 1.0)] == [("a", True), ("b", False)]


def write(path: Path, runs: list[dict[str, Any]], **load: Any) -> Path:
    config = {"load": {"seconds": 20} | load}
    write_record(path, name="coserve", case="time", config=config, seed=0, results={"runs": runs})
    return path


def test_records_of_one_load_are_joined_and_of_two_refused(tmp_path: Path) -> None:
    ours = write(tmp_path / "ours.json", [run_of("a", 1.0, 1.0), run_of("b", 1.0, 1.0)])
    other = write(tmp_path / "other.json", [run_of("vLLM", 1.0, 1.0), run_of("a", 1.0, 1.0)])
    joined = joined_records([ours, other], "time")
    assert [run["policy"] for run in joined] == ["a (ours)", "b", "vLLM", "a (other)"]
    longer = write(tmp_path / "longer.json", [], seconds=30)
    with pytest.raises(ValueError, match="different loads; what differs: seconds"):
        joined_records([ours, longer], "time")
    with pytest.raises(ValueError, match="no row of the case 'memory'"):
        joined_records([ours], "memory")


def test_plots_are_drawn_from_rows(tmp_path: Path) -> None:
    runs = [run_of(name, a, b, rate) for rate in (1.0, 2.0) for name, a, b in (("a", 1.0, 9.0), ("b", 0.2, 99.0))]
    path = tmp_path / "new" / "plot.svg"
    plot(*rows_of(runs), path)
    assert path.read_text().count("<svg") == 1
    with pytest.raises(ValueError, match="nothing to draw"):
        plot(*rows_of([{**runs[0], "summaries": [{"scale": 1.0, "be_tokens_per_s": math.pi}]}]), path)


def test_any_server_of_the_api_can_be_measured(
    stub: ThreadingHTTPServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record, url = tmp_path / "stub.json", f"http://127.0.0.1:{stub.server_port}/v1"
    # A BE request takes 30 times the stub's sleep, at least: longer than LS requests come, however slow the machine is.
    load = ["--rates", "20", "--seconds", "0.5", "--be-requests", "3", "--ls-output", "3", "--be-output", "30"]
    written: list[dict[str, Any]] = []
    write = coserve.write_record
    monkeypatch.setattr(coserve, "write_record", lambda path, **row: (written.append(row), write(path, **row)))
    status = coserve.main(["--url", url, "--name", "stub", *load, "--slo-scales", "1", "1000", "--record", str(record)])
    assert status == 0
    runs = written[-1]["results"]["runs"]
    assert [(run["policy"], run["scales"]) for run in runs] == [("stub", (1.0, 1000.0))]  # it is told no objective
    requests = written[-1]["raw"]["runs"][0]["requests"]
    assert "requests" not in runs[0] and written[-1]["case"] == "time"
    assert all(request["finished"] for request in requests) and "token_times_s" not in requests[0]
    assert sum(request["service_tier"] == BE_TIER for request in requests) == 3
    loose = runs[0]["summaries"][1]
    assert loose["attained"] == 1.0 and loose["be_finished"] and "host_share" not in loose
    table = capsys.readouterr().out
    assert table.count("| stub") == 2
    assert coserve.main(["--report", str(record)]) == 0
    assert capsys.readouterr().out in table
    assert coserve.main(["--url", url, "--name", "stub", "--rates", "0", "--be-requests", "0"]) == 2
    assert "nothing to send" in capsys.readouterr().err


def test_a_server_that_fails_is_reported_and_the_status_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "gone.json"
    arguments = ["--url", "http://127.0.0.1:9", "--name", "gone", "--seconds", "0.1", "--record", str(record)]
    assert coserve.main(arguments) == 1
    assert "gone failed" in capsys.readouterr().err
    results = read_row(record, "time")["results"]
    assert results["runs"] == [] and "ConnectError" in results["failed"][0]["error"]

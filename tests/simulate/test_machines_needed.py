"""How many machines a load needs, and what they cost."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from omniserve.core.request import SLO, ServiceClass
from omniserve.simulate.cli import main
from omniserve.simulate.machines_needed import Offer, fewest, find_plan, keeps, met_deadlines, plan_table
from omniserve.simulate.results import RequestResult, Result, summarise

LS, BE = ServiceClass.LS, ServiceClass.BE
QUICK = ["--model", "llama-3.1-8b", "--minutes", "0.15", "--ls-lengths", "1000:8", "--be", "0"]


def result(*, attainment: float = 1.0, ls_tokens: float = 100.0, be_tokens: float = 300.0, requests=()) -> Result:
    """Return a simulation's result with these figures; tokens are outputs a second."""
    met = [RequestResult("LS", 0.0, 10, 1, 0.1, 0.1, 1) for _ in range(round(100 * attainment))]
    missed = [RequestResult("LS", 0.0, 10, 1, 9.0, 9.0, 1) for _ in range(100 - len(met))]
    rest = {"duration_s": 10.0, "prompt_tokens": 0}
    classes = {
        LS: summarise([*met, *missed], SLO(ttft_s=1.0), output_tokens=int(10 * ls_tokens), **rest),
        BE: summarise(requests, SLO(), output_tokens=int(10 * be_tokens), **rest),
    }
    return Result(
        duration_s=10.0, end_s=60.0, num_steps=1, classes=classes, host_share=0.0, host_tier_busy=0.0,
        host_steps_per_layer=0.0, accepted_drafts=0, rejected_drafts=0, warm_up_output_tokens=0, preemptions=0,
        swaps_out=0, swaps_in=0, num_too_long=0, wall_s=0.0, requests=tuple(requests),
    )  # fmt: skip


@pytest.mark.parametrize("needed", range(1, 65))
def test_the_fewest_are_found_with_few_tries(needed: int) -> None:
    tried: list[int] = []

    def keep(number: int) -> bool:
        tried.append(number)
        return number >= needed

    assert fewest(keep) == needed
    assert len(tried) <= 13 and max(tried) <= 2 * needed


def test_too_few_at_most_is_said_and_the_least_is_not_undercut() -> None:
    assert fewest(lambda number: False) is None
    assert fewest(lambda number: number >= 2, least=5) == 5


def test_deadlines_are_judged_once_they_are_over() -> None:
    def one(
        arrival_s: float, finished_s: float | None, deadline_s: float | None = 20.0, *, done: bool = True
    ) -> RequestResult:
        return RequestResult(
            "BE", arrival_s, 10, 5, finished_s, finished_s, 5 if done else 2, deadline_s=deadline_s
        )  # fmt: skip

    kept, late, open_still, without, never = one(0, 10), one(0, 30), one(50, None), one(0, None, None), one(0, None)
    assert met_deadlines(result(requests=[kept, late])) == 0.5
    assert met_deadlines(result(requests=[kept, open_still, without])) == 1.0
    assert met_deadlines(result(requests=[kept, never])) == 0.5
    assert math.isnan(met_deadlines(result()))
    assert keeps(result(), 0.95) and not keeps(result(attainment=0.9), 0.95)
    assert not keeps(result(requests=[late]), 0.95)


def test_best_effort_work_bears_what_it_needs_besides() -> None:
    """LS alone needs two machines, both together three, of 3.60 an hour."""

    def run(number: int, best_effort: bool) -> Result:
        return result(attainment=float(number >= (3 if best_effort else 2)))

    offer = Offer(kind="A10", per_hour=3.6)
    plan = find_plan(offer, run, 0.95, has_best_effort=True)
    assert plan is not None and (plan.machines, plan.for_latency_sensitive) == (3, 2)
    assert plan.per_hour == pytest.approx(10.8)
    assert plan.per_million(LS) == pytest.approx(7.2 / 3600 * 1e6 / 100)
    assert plan.per_million(BE) == pytest.approx(3.6 / 3600 * 1e6 / 300)
    assert plan.per_million_of_all == pytest.approx(10.8 / 3600 * 1e6 / 400)
    alone = find_plan(offer, run, 0.95, has_best_effort=False)
    assert alone is not None and alone.machines == alone.for_latency_sensitive == 3
    never = find_plan(offer, lambda number, best_effort: result(attainment=0.0), 0.95, has_best_effort=True)
    assert never is None
    table = plan_table([(Offer(kind="T4", per_hour=1.0), never), (offer, plan)]).splitlines()
    assert table[1].startswith("3 x A10") and table[2] == "T4: 64 are too few"


def test_the_command_line_searches_kinds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    arguments = [*QUICK, "--ls-rate", "12", "--slo", "1:0.2", "--router", "predicted", "--warm-up", "0"]
    assert main([*arguments, "--price", "A10=1", "--price", "A100-80GB=4", "--record", str(record)]) == 0
    title, heads, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("llama-3.1-8b, 12 LS requests/s, 0.15 simulated minutes; 95% within TTFT 1.0 s")
    assert heads.split()[:2] == ["machines", "an"]
    numbers = {row.split()[2]: int(row.split()[0]) for row in rows}
    assert numbers.keys() == {"A10", "A100-80GB"} and numbers["A10"] > numbers["A100-80GB"] >= 1
    costs = [float(row.split()[3]) for row in rows]
    assert costs == sorted(costs), "the cheapest first"
    assert record.exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--price", "A10=1", "--device", "A10"], "leave out --device"),
        (["--price", "A10=1", "--price", "A10=2"], "twice"),
        (["--price", "A10=1", "--ls-rate", "1,2"], "one rate"),
        (["--price", "A10=1", "--be-deadline", "60"], "raise --minutes"),
        (["--price", "A9000=1"], "A9000"),
    ],
)
def test_what_cannot_be_priced_is_refused(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, *flags]) == 2
    assert says in capsys.readouterr().err

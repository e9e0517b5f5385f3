"""The papers' own choices, each beside what the policy of the other name does: on a virtual clock."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest

from omniserve.core.plan import StepPlan
from omniserve.core.request import SLO, ClassSpec, ServiceClass
from omniserve.core.work import KVMove, MoveDirection
from omniserve.latency import BatchFeatures, ModelShape
from omniserve.latency.features import AlphaBeta
from omniserve.latency.linear import BROSModel
from omniserve.sched import SCHEDULERS, Forecast, bros
from omniserve.sched.options import BROSOptions, BROSPaperOptions, LayerPreemptionOptions
from omniserve.simulate import Load, SimulationConfig, simulate
from omniserve.simulate.load import TraceRequest
from omniserve.simulate.runner import StepRecord
from tests.engine_settings import flat_config
from tests.latency.samples import LAYERS
from tests.sched.benches import Clock, names
from tests.sched.predictor import LinearPredictor
from tests.simulate.machines import DIMS, machine

OMNISERVE = pytest.mark.parametrize("policy", ["omniserve", "omniserve-paper"])


def predicted_s(plan: StepPlan) -> float:
    assert plan.decision is not None and plan.decision.predicted_s is not None
    return plan.decision.predicted_s


# -- omniserve-paper ---------------------------------------------------------------------------------------------------


@OMNISERVE
def test_a_prompts_ttft_bounds_the_ls_prompts_behind_it_only_with_omniserve(policy: str) -> None:
    """The paper bounds LS prompts by the decoding objective alone (3.3.4)."""
    bench = Clock(policy=policy, predict={"key": 0.0, "sample": 0.0}, admission=False)
    bench.add("ls1", prompt=50, ttft=0.1)  # 55 ms by itself: of the 100 ms, 80 are for prompts
    bench.add("ls2", prompt=200)
    plan = bench.step()
    assert names(plan) == ["ls1", "ls2"]
    assert bench.tokens(plan)["LS"] == (75 if policy == "omniserve" else 250)


def counted(features: BatchFeatures) -> tuple[int, int, float, float]:
    """Return n, g, c_PA and c_DA."""
    return features.rows, features.decode_requests, features.prefill_load, features.decode_load


def test_prompts_count_in_decode_attention_and_among_the_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """3.3.3: c_PA of P and k; c_DA and g of D, P and k; n of the decodes and the rows that prompts have left."""
    bench = Clock(policy="omniserve-paper", max_num_batched_tokens=4)
    bench.add("ls1", prompt=4, output=50)
    bench.step()
    bench.add("ls2", prompt=9)
    bench.step()
    states = bench.requests.states
    assert states["ls1"].decodes and states["ls1"].num_computed_tokens == 5
    assert states["ls2"].num_computed_tokens == 3
    asked: list[BatchFeatures] = []
    assert bench.forecast is not None
    step_s = bench.forecast.predictor.step_s

    def spy(features: BatchFeatures) -> float:
        asked.append(copy.copy(features))
        return step_s(features)

    monkeypatch.setattr(bench.forecast.predictor, "step_s", spy)
    bench.add("ls3", prompt=3)
    # Rows 4 to 9 of ls2 and 1 to 3 of ls3; the next rows of all three see 6, 4 and 1 keys.
    c_pa, c_da = sum(range(4, 10)) + sum(range(1, 4)), (5 + 1) + (3 + 1) + (0 + 1)
    assert counted(asked[0]) == (6 + 3 + 1, 3, c_pa, c_da)
    assert asked[0].device_rows == 10 and asked[0].sampled_rows == 3


CLASSES = (
    ClassSpec(name="LS", kind=ServiceClass.LS, slo=SLO(tpot_s=0.040)),
    ClassSpec(name="BE", kind=ServiceClass.BE),
)


@OMNISERVE
def test_s_d_bounds_steps_without_ls_decodes_only_in_the_paper(policy: str) -> None:
    """S_d is a constant of the service (3.3.4)."""
    bench = Clock(policy=policy, classes=CLASSES, max_num_batched_tokens=256, predict={"key": 0.0, "sample": 0.0})
    bench.add("be", prompt=900)
    alone = bench.step()
    bench.add("ls", prompt=200, by_default=True)
    prompt = bench.step()
    assert alone.decision is not None and prompt.decision is not None
    if policy == "omniserve":
        assert [bench.tokens(alone), bench.tokens(prompt)] == [{"BE": 256}, {"LS": 200, "BE": 56}]
        return
    assert [bench.tokens(alone), bench.tokens(prompt)] == [{"BE": 35}, {"LS": 35}], "5 ms and 1 ms a row"
    assert alone.decision.bound_by == "tpot of class LS"
    bench.add("ls-fast", prompt=2, tpot=0.020)
    plan = bench.step()
    assert plan.decision is not None and (plan.decision.bound_by, plan.decision.bound_s) == ("tpot of ls-fast", 0.020)
    assert predicted_s(plan) <= 0.020, "its objective holds before it decodes"


# -- apex --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_key", [1e-5, 1.0])
@pytest.mark.parametrize("strategy", ["auto", "pipelined", "overlapped"])
def test_apex_takes_the_strategy_that_it_is_told_whatever_pays(strategy: str, host_key: float) -> None:
    bench = Clock(
        policy="apex", device_blocks=33, host_blocks=100, be_order="prefill", max_piggyback_seats=4,
        predict={"host_key": host_key}, min_host_per_device=0, strategy=strategy,
    )  # fmt: skip
    for i in range(6):
        bench.add(f"be{i}", prompt=40, output=60)
    plans = bench.run_until(lambda: len(bench.finished) == 6)
    pays = host_key < 1.0
    assert any(plan.pipelined for plan in plans) is (strategy == "pipelined" or (strategy == "auto" and pays))
    assert any(plan.joins for plan in plans) is (strategy == "overlapped" or (strategy == "auto" and not pays))
    if strategy == "pipelined":
        num_rows = {len(plan.pipelined) for plan in plans if plan.pipelined and plan.chunks}
        assert max(num_rows) == (4 if pays else 1), "as many as the host attends for in time"


def test_a_forced_second_sub_batch_keeps_the_tpot_of_others_and_runs_alone() -> None:
    bench = Clock(
        policy="apex", device_blocks=33, host_blocks=100, max_piggyback_seats=4, predict={"host_key": 1.0},
        strategy="pipelined", be_order="prefill",
    )  # fmt: skip
    for i in range(6):
        bench.add(f"be{i}", prompt=40, output=60)
    for _ in range(12):
        bench.step()
    bench.add("ls", output=200, tpot=0.012)
    pipelined = [plan for plan in (bench.step() for _ in range(20)) if plan.pipelined and plan.chunks]
    bounds_s = [plan.decision.bound_s if plan.decision is not None else None for plan in pipelined]
    bounded = [(plan, bound_s) for plan, bound_s in zip(pipelined, bounds_s, strict=True) if bound_s is not None]
    assert bounded and all(predicted_s(plan) <= bound_s + 1e-9 for plan, bound_s in bounded)
    residents = {state.request_id for state in bench.requests.residents.queue}
    for request_id in bench.requests.states.keys() - residents:
        bench.scheduler.abort(request_id, bench.now_s)
    plan = bench.step()
    assert not plan.chunks and len(plan.pipelined) == 4, "one for each seat"


# -- conserve-paper ----------------------------------------------------------------------------------------------------


def test_conserve_paper_is_conserve_with_the_papers_choices() -> None:
    kinds = [SCHEDULERS.get(name) for name in ("conserve", "conserve-paper")]
    ours, papers = [kind.options_type() for kind in kinds]
    assert isinstance(ours, LayerPreemptionOptions) and isinstance(papers, LayerPreemptionOptions)
    assert (ours.keep_halted, ours.safepoint_every, ours.latency_model) == (True, 1, "omniserve")
    assert (papers.keep_halted, papers.safepoint_every, papers.latency_model) == (False, 4, "conserve")
    with pytest.raises(ValueError, match="safepoint_every must be >= 1"):
        LayerPreemptionOptions(safepoint_every=0)
    assert plans_of("conserve") == plans_of("conserve-paper")


def plans_of(policy: str) -> list[str]:
    bench = Clock(policy=policy, predict={})
    for i in range(3):
        bench.add(f"be{i}", prompt=60)
        bench.add(f"ls{i}", prompt=30, tpot=0.040)
    return [repr(bench.step()) for _ in range(20)]


@pytest.mark.parametrize(
    ("policy", "options", "first_s"),
    [("conserve", {}, 1.0), ("conserve-paper", {}, 2.0), ("conserve-paper", {"safepoint_every": 2}, 1.0)],
)
def test_rows_leave_a_step_at_its_next_safepoint(policy: str, options: dict[str, Any], first_s: float) -> None:
    """Each of eight layers takes 0.5 s; a request comes after 0.6 s, and would be late behind the whole step."""
    classes = ClassSpec(name="LS", kind="LS", slo=SLO(ttft_s=3.0, tpot_s=20.0)), ClassSpec(name="BE", kind="BE")
    dims = dataclasses.replace(DIMS, num_layers=8)
    device = LinearPredictor(num_layers=8, base=0.0, row=4000 / 64, key=0.0, sample=0.0)
    steps: list[StepRecord] = []
    simulate(
        SimulationConfig(
            machine=dataclasses.replace(machine(), spec=dims.spec, device=device, forecast=device),
            engine=flat_config(
                {"scheduler": policy, "classes": classes, "max_num_batched_tokens": 64, "host_kv_bytes": 0}
                | {"block_size": 16, "device_kv_bytes": 100 * dims.spec.kv_block_bytes(16)}
                | {"latency_model": "omniserve"}  # exact: all sizes of steps have one throughput, and 64 tokens win
                | options
            ),
            load=Load(latency_sensitive=[TraceRequest(0.6, 4, 1)], best_effort=[TraceRequest(0.0, 64, 1)]),
            drain_s=math.inf,
            check=True,
        ),
        on_step=steps.append,
    )
    assert steps[0].seconds == pytest.approx(first_s)


# -- bros-paper --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "options", "sizes"),
    [
        ("bros", {}, [12, 12, 12, 12]),
        ("bros-paper", {}, [2, 4, 8, 12]),
        ("bros-paper", {"batch_limits_ls": False}, [12, 12, 12, 12]),
    ],
)
def test_b_curr_limits_ls_requests_in_the_paper(
    policy: str, options: dict[str, Any], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equation (7), and line 6 of Algorithm 1."""
    monkeypatch.setattr(bros, "BASE_BATCH_SIZE", 2)
    bench = Clock(policy=policy, **options)
    for i in range(12):
        bench.add(f"ls{i}", prompt=1)  # without objectives: no BE request takes its place
    bench.add("be", prompt=1)
    plans = [bench.step() for _ in range(5)]
    assert [bench.tokens(plan)["LS"] for plan in plans[:4]] == sizes
    assert bench.tokens(plans[4])["BE"] == 1, "B_curr leaves a place"


class WithSwaps(LinearPredictor):
    """A step whose swaps take longer than its rows takes as long as they do, 1 ms a byte."""

    def terms(self, features: BatchFeatures) -> tuple[float, ...]:
        *others, last = super().terms(features)
        ran_s = sum(others) + last
        return (*others, last + max(0.0, 1e-3 * features.swap_bytes - ran_s))


def evicted(policy: str, kv: str, *, block_ms: int) -> Clock:
    """A bench in which three BE requests gave way to an LS one, at least two with KV on the host alone.

    Now there is memory for them again. A block takes ``block_ms`` from the host.
    """
    predictor = WithSwaps(base=1.0, row=0.1, key=0.0, sample=0.0)
    predict = Forecast(predictor, ModelShape(num_layers=2, windows=((0, 2),)))
    bench = Clock(
        policy=policy, kv=kv, device_blocks=24, host_blocks=64, checkpoint_blocks=16, predict=predict,
        kv_block_bytes=block_ms, ls_reserve_blocks=0,
    )  # fmt: skip
    for i in range(3):
        bench.add(f"be{i}", prompt=16, output=200)
    for _ in range(4):
        bench.step()
    bench.add("ls-long", prompt=80, output=1)
    bench.run_until(lambda: "ls-long" in bench.finished)
    return bench


@pytest.mark.parametrize(
    ("kv", "policy", "block_ms", "num_back"),
    [
        ("tiered", "bros", 30, 3), ("tiered", "bros-paper", 30, 1), ("tiered", "bros-paper", 1, 3),
        # One keeps its blocks on the device; the first in line comes back ahead of its turn.
        ("incremental", "bros", 100, 2), ("incremental", "bros-paper", 100, 1), ("incremental", "bros-paper", 30, 2),
    ],
)  # fmt: skip
def test_as_much_comes_back_from_the_host_as_the_swap_term_leaves_time_for(
    kv: str, policy: str, block_ms: int, num_back: int
) -> None:
    """C = max(t_exec, t_swap) is within the residual time (4.1)."""
    bench = evicted(policy, kv, block_ms=block_ms)
    bench.add("ls", prompt=4, output=50, ttft=0.25)
    plan = bench.step()
    back = {move.request_id for move in plan.side_work(KVMove) if move.direction is MoveDirection.TO_DEVICE}
    assert len(back) == num_back


def test_the_papers_policies_have_the_papers_latency_models() -> None:
    made, ours = (SCHEDULERS.get(name).options_type() for name in ("bros-paper", "bros"))
    assert isinstance(made, BROSPaperOptions) and isinstance(ours, BROSOptions)
    assert (made.batch_limits_ls, made.swap_term, made.latency_model) == (True, True, "bros")
    assert (ours.batch_limits_ls, ours.swap_term, ours.latency_model) == (False, False, "omniserve")


def test_a_step_waits_for_swaps_that_take_longer_than_its_rows_by_the_model_of_bros() -> None:
    model = BROSModel((0.0, 0.0, 0.0, 0.0, 0.0, 0.010), LAYERS, AlphaBeta(0.001, 1e-6))
    step = Forecast(model, ModelShape(num_layers=LAYERS, windows=((0, LAYERS),))).step()
    step.add_chunk(20, 1, samples=1)
    assert step.seconds() == 0.010
    step.features.swap_bytes = 4_000
    assert step.seconds() == 0.010
    step.features.swap_bytes = 49_000
    assert step.seconds() == pytest.approx(0.050)

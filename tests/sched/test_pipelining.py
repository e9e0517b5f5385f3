"""Tests of ``neo`` and ``apex``, step by step."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

from omniserve.core.plan import Bound, PiggybackEntry, PiggybackJoin
from omniserve.latency import BatchFeatures, HostSpeed
from omniserve.latency.omniserve import OmniServeModel
from omniserve.sched.apex import APEXPolicy, HostWatch, LayerTimes, pipelining_pays
from tests.latency.samples import LAYERS, make_profile
from tests.sched.benches import Bench, Clock


def overfull(scheduler: str, **settings: Any) -> Clock:
    """A device that holds three of six BE requests; the others decode on the host tier."""
    settings = {"max_piggyback_seats": 4} | settings
    bench = Clock(policy=scheduler, device_blocks=33, host_blocks=100, be_order="prefill", **settings)
    for i in range(6):
        bench.add(f"be{i}", prompt=40, output=60)
    for _ in range(12):
        bench.step()
    return bench


def test_a_pipelined_token_passes_all_layers_in_one_step() -> None:
    bench = Bench("neo", device_blocks=33, host_blocks=100, max_piggyback_seats=4)
    for i in range(6):
        bench.add(f"be{i}", prompt=40, output=60)
    for _ in range(10):
        bench.step()
    plan, outputs = bench.step()
    rows = {row.request_id for row in plan.pipelined}
    assert rows and not plan.entries and not plan.joins
    assert rows <= {output.request_id for output in outputs if output.new_token_ids}
    assert rows.isdisjoint(chunk.request_id for chunk in plan.chunks)


def test_a_second_sub_batch_stays_out_if_it_lets_fewer_requests_advance() -> None:
    cheap, dear = (overfull("neo", predict={"wait": wait, "base": 20.0}) for wait in (0.5, 100.0))
    assert cheap.step().pipelined
    plan = dear.step()
    assert plan.chunks and not plan.pipelined


def test_a_second_sub_batch_keeps_the_tpot_of_others() -> None:
    bench = overfull("neo")
    assert bench.step().pipelined
    bench.add("ls", output=200, tpot=0.012)
    num_bounded = 0
    for _ in range(20):
        plan = bench.step()
        assert plan.decision is not None
        if plan.decision.bound_s is not None and plan.pipelined and plan.chunks:
            assert (plan.decision.predicted_s or 0) <= plan.decision.bound_s + 1e-9
            num_bounded += 1
    assert num_bounded > 10


def test_a_full_host_pool_with_more_residents_than_seats_stalls_nobody() -> None:
    """The youngest resident, which gives way, once had to have a seat for that."""
    bench = Bench("neo", device_blocks=24, host_blocks=24, max_piggyback_seats=2)
    for i in range(40):
        bench.add(f"be{i}", prompt=7, output=60)
    num_empty = longest = most_residents = 0
    kept_out: Counter[Bound] = Counter()
    for plan, _ in bench.steps_until(lambda: len(bench.finished) == 40):
        num_empty = num_empty + 1 if plan.is_empty else 0
        longest, most_residents = max(longest, num_empty), max(most_residents, len(bench.requests.residents.queue))
        assert plan.decision is not None
        kept_out.update(out.bound for out in plan.decision.left_out if out.work == "pipelined row")
    assert longest <= 1
    assert most_residents > 2, "everybody had a seat"
    assert kept_out.keys() == {Bound.HOST_MEMORY}, "nothing bounds the time"


def test_an_entry_without_host_blocks_is_kept_out_by_host_memory() -> None:
    bench = Bench("omniserve", device_blocks=24, host_blocks=24, max_piggyback_seats=8)
    for i in range(40):
        bench.add(f"be{i}", prompt=7, output=60)
    kept_out: Counter[Bound] = Counter()
    for plan, _ in bench.steps_until(lambda: len(bench.finished) == 40):
        assert plan.decision is not None
        kept_out.update(out.bound for out in plan.decision.left_out if out.work == "piggyback entry")
    assert kept_out.keys() == {Bound.HOST_MEMORY}, "each resident has a seat, and nothing bounds the time"


@pytest.mark.parametrize(
    ("host_per_device", "linear_over_attention", "pays"),
    [(1 / 7, 2.0, True), (1 / 8, 2.0, False), (1 / 5.9, 1.0, True), (1 / 6.1, 1.0, False), (1 / 9.2, 3.0, True)],
)
def test_inequality_6(host_per_device: float, linear_over_attention: float, pays: bool) -> None:
    """N_G / N_C < 2 T_glinear / T_gatt + 3 + T_gatt / T_glinear."""
    attention_s, num_device = 1e-3, 64
    linear_s = linear_over_attention * attention_s
    expected = 1 / host_per_device < 2 * linear_over_attention + 3 + 1 / linear_over_attention
    times = LayerTimes(linear_s, attention_s, 2 * linear_s + attention_s)
    host_rate = host_per_device * num_device / attention_s
    assert pipelining_pays(num_device, host_rate, times) is expected is pays


def test_apex_chooses_by_the_hosts_speed() -> None:
    fast, slow = (overfull("apex", predict={"host_key": key}, min_host_per_device=0) for key in (1e-5, 1.0))
    assert fast.step().pipelined
    plans = [slow.step() for _ in range(8)]
    assert not any(plan.pipelined for plan in plans)
    assert any(plan.joins for plan in plans)


def test_asynchronous_overlap_moves_one_cohort_layer_by_layer() -> None:
    bench = overfull("apex", predict={"host_key": 1.0}, min_host_per_device=0)
    steps = [(len(plan.entries), {join.layer for join in plan.joins}, len(plan.joins)) for plan in
             (bench.step() for _ in range(9))]  # fmt: skip
    for entries, layers, _ in steps:
        assert (entries > 0) + len(layers) <= 1, "a cohort is at one place"
    assert {layer for _, layers, _ in steps for layer in layers} == {0, 1}
    assert max(joins for _, _, joins in steps) == max(entries for entries, _, _ in steps) > 1


def cohorts(bench: Clock, *, steps: int) -> list[tuple[float, int, int]]:
    """Return (when, entries, device requests) of the steps with entries beside device requests."""
    found = []
    for _ in range(steps):
        began_s, plan = bench.now_s, bench.step()
        if plan.entries and plan.chunks:
            found.append((began_s, len(plan.entries), len(plan.chunks)))
    return found


def test_a_cohort_of_too_few_requests_waits_for_more_but_not_for_ever() -> None:
    many_seats = {"predict": {"host_key": 1.0}, "max_piggyback_seats": 64}
    bench = overfull("apex", max_cohort_wait_s=0.05, **many_seats)
    for _ in range(10):
        num_residents, plan = bench.requests.residents.num_at_token_boundary, bench.step()
        assert plan.decision is not None
        kept_out = [out.num_requests for out in plan.decision.left_out if out.bound is Bound.COHORT]
        if kept_out:
            break
    assert kept_out == [num_residents] and num_residents < 8 * len(plan.chunks) and not plan.entries
    began = [began_s for began_s, *_ in cohorts(bench, steps=60)]
    assert len(began) > 1
    assert all(later - earlier >= 0.05 for earlier, later in itertools.pairwise(began))
    impatient = overfull("apex", max_cohort_wait_s=0.0, **many_seats)
    assert len(cohorts(impatient, steps=60)) > 2 * len(began)


@pytest.mark.parametrize(("per_device", "waits"), [(0, False), (1, False), (8, True)])
def test_a_cohort_begins_at_once_if_it_has_so_many_requests_for_each_on_the_device(
    per_device: int, waits: bool
) -> None:
    bench = overfull(
        "apex", predict={"host_key": 1.0}, max_cohort_wait_s=1e9, min_host_per_device=per_device,
        max_piggyback_seats=64,
    )  # fmt: skip
    begun = cohorts(bench, steps=12)
    assert bool(begun) is not waits
    assert all(size >= per_device * num_device for _, size, num_device in begun)


def test_a_cohort_that_takes_every_seat_does_not_wait() -> None:
    bench = overfull("apex", predict={"host_key": 1.0}, max_cohort_wait_s=1e9, max_piggyback_seats=2)
    assert {size for _, size, _ in cohorts(bench, steps=12)} == {2}


def test_a_cohort_does_not_wait_for_a_device_that_has_nothing_to_do() -> None:
    bench = overfull("apex", predict={"host_key": 1.0}, max_cohort_wait_s=1e9, max_piggyback_seats=64)
    assert not cohorts(bench, steps=10)
    residents = [state.request_id for state in bench.requests.residents.queue]
    for request_id in bench.requests.states.keys() - residents:
        bench.scheduler.abort(request_id, bench.now_s)
    assert len(residents) > 2 and len(bench.step().entries) == len(residents)


def test_a_cohort_for_whose_rows_a_step_has_no_time_splits() -> None:
    bench = overfull("apex", predict={"host_key": 1.0}, min_host_per_device=0, swap_in_delay_s=1e9)
    assert bench.limits.config.max_piggyback_seats == 4
    bench.run_until(lambda: not any(state.away for state in bench.requests.residents.queue))
    bench.add("ls", prompt=4, output=300, tpot=0.012)
    sizes = set()
    for _ in range(60):
        plan = bench.step()
        assert plan.decision is not None
        if plan.decision.bound_s is not None and (plan.entries or plan.joins):
            assert (plan.decision.predicted_s or 0) <= plan.decision.bound_s + 1e-9
            sizes.add(len(plan.entries) or len(plan.joins))
    assert sizes and min(sizes) < 3


def make_host_fast(bench: Bench) -> None:
    policy = bench.scheduler.policy
    assert isinstance(policy, APEXPolicy) and policy.rows.watch is not None
    policy.rows.watch = HostWatch(HostSpeed(1e-9, 0.0, 1e-9, 1))


def test_a_partially_advanced_token_goes_on_from_its_layer() -> None:
    bench = overfull("apex", predict={"host_key": 1.0}, min_host_per_device=0)
    next(plan for plan in bench.steps_until(lambda: False) if plan.entries)
    # The host became fast: what is under way comes first, from where it is.
    make_host_fast(bench)
    rows = bench.step().pipelined
    assert rows and all(isinstance(row, PiggybackJoin) and row.layer == 0 for row in rows)
    assert all(isinstance(row, PiggybackEntry) for row in bench.step().pipelined)


def test_the_hosts_speed_is_learnt_only_while_it_works() -> None:
    watch = HostWatch(HostSpeed(per_key_s=1e-6, per_request_s=0.0, per_call_s=0.0, threads=1))
    watch.tick(0.0, is_busy=False)
    for i in range(1, 400):
        watch.note(1, 1000)
        watch.tick(2e-3 * i, is_busy=True)
    assert watch.factor == pytest.approx(2.0, rel=0.05)
    learnt = watch.factor
    watch.tick(1.0, is_busy=False)
    watch.note(1, 1000)
    watch.tick(9.0, is_busy=True)  # it was idle in between
    assert watch.factor == learnt
    assert watch.rate(8, 1000.0) == pytest.approx(1 / (learnt * 1e-3))


def test_waiting_for_the_host_is_what_the_first_sub_batch_does_not_hide() -> None:
    model = OmniServeModel(make_profile())
    waiting, dense = (model.term_names.index(name) for name in ("waiting for the host", "pipelined rows"))
    features = dict(pipelined_rows=4, pipelined_load=1000.0, pipelined_layers=float(LAYERS), host_works=True)
    alone = model.terms(BatchFeatures(**features))  # type: ignore[arg-type]
    host = HostSpeed.from_profile(make_profile())
    assert host is not None and alone[waiting] == pytest.approx(LAYERS * host(4, 1000.0))
    beside = model.terms(
        BatchFeatures(**features, prefill_requests=1, prefill_tokens=400, prefill_load=80200.0, dense_layers=LAYERS)  # type: ignore[arg-type]
    )
    assert beside[waiting] == 0 and beside[dense] == alone[dense] > 0


def test_a_hybrid_first_sub_batch_has_a_share_of_the_rows_that_begin_a_token() -> None:
    bench = overfull("apex", predict={"host_key": 1e-5}, min_host_per_device=0, hybrid_first_batch=True)
    plans = [bench.step() for _ in range(6)]
    assert all(plan.pipelined and plan.chunks for plan in plans)
    # The host has T_glinear + T_gatt for the first sub-batch, and T_glinear for the second; keys cost little here.
    assert {(len(plan.pipelined), len(plan.hybrid)) for plan in plans} == {(4, 2)}
    plain = overfull("apex", predict={"host_key": 1e-5}, min_host_per_device=0)
    assert not any(plain.step().hybrid for _ in range(6))


def test_tokens_on_their_way_are_in_the_second_sub_batch() -> None:
    bench = overfull("apex", predict={"host_key": 1.0}, min_host_per_device=0, hybrid_first_batch=True)
    next(plan for plan in bench.steps_until(lambda: False) if plan.entries)
    make_host_fast(bench)
    plan = bench.step()
    assert plan.pipelined and all(isinstance(row, PiggybackJoin) for row in plan.pipelined) and not plan.hybrid
    assert bench.step().hybrid


def test_without_device_rows_there_is_no_first_sub_batch() -> None:
    bench = overfull("apex", predict={"host_key": 1e-5}, min_host_per_device=0, hybrid_first_batch=True)
    assert bench.step().hybrid
    residents = {state.request_id for state in bench.requests.residents.queue}
    for request_id in bench.requests.states.keys() - residents:
        bench.scheduler.abort(request_id, bench.now_s)
    plan = bench.step()
    assert not plan.chunks and not plan.hybrid


def test_rows_of_a_hybrid_first_sub_batch_and_deferral_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        overfull("apex", hybrid_first_batch=True, defer_classes=True)


def test_the_dense_halves_of_hybrid_rows_are_those_of_the_first_sub_batch() -> None:
    model = OmniServeModel(make_profile())
    waiting, second = (model.term_names.index(name) for name in ("waiting for the host", "pipelined rows"))
    beside = dict(decode_requests=8, decode_load=800.0, dense_layers=float(LAYERS), host_works=True)
    host = dict(pipelined_rows=64, pipelined_load=64e6, pipelined_layers=float(LAYERS))
    plain, half, whole = (
        BatchFeatures(**beside, **host, hybrid_rows=rows)  # type: ignore[arg-type]
        for rows in (0, 32, 64)
    )
    assert [f.rows for f in (plain, half, whole)] == [8, 40, 72]
    assert model.terms(whole)[second] == 0 < model.terms(half)[second] < model.terms(plain)[second]
    # With half of the rows in either the host attends beside both; with all in one only beside the other's part.
    assert model.terms(half)[waiting] < model.terms(plain)[waiting] < model.terms(whole)[waiting]

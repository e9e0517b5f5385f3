"""Every policy, over random histories: each request gets exactly its tokens, and nothing leaks."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from omniserve.core.errors import RequestRejected
from omniserve.core.plan import Bound, StepOutput, StepPlan
from omniserve.core.request import SLO, FinishReason, Request, RequestOutput, SamplingParams, ServiceClass, Stay
from omniserve.core.work import KVMove, MoveDirection, TierDown
from omniserve.kv import KV_MANAGERS, Tier
from omniserve.kv.base import KVManager
from omniserve.kv.bidirectional import BidirectionalKVManager
from omniserve.kv.host_prefixes import PrefixPool
from omniserve.kv.two_tiers import TwoTierKVManager
from omniserve.latency import features_of
from omniserve.sched import SCHEDULERS, Forecast, Scheduler, policy_of
from omniserve.sched.admission import LARGEST_MARGIN
from omniserve.sched.state import RequestState
from tests.kv.free_blocks import free_block_ids
from tests.quick import slow_except
from tests.sched import hybrid, preemptible
from tests.sched.fake_device import VOCAB, FakeDevice, expected_tokens
from tests.sched.limits import BLOCK, make_limits
from tests.sched.predictor import forecast
from tests.sched.stepping import OverlappingStepping, Stepping

# What the policies that use the host tier must have come to, or their histories say nothing.
REACHED = {
    "omniserve": ("joins", "late_joins", "missed", "swaps_out", "swaps_in", "checkpoints"),
    "omniserve-paper": ("joins", "swaps_out", "swaps_in", "checkpoints"),
    "neo": ("pipelined", "swaps_out", "swaps_in"),
    "apex": ("joins", "late_joins", "missed", "swaps_out", "swaps_in"),
    "llumnix": ("joins", "late_joins", "missed", "swaps_out", "checkpoints"),
    "conserve": ("swaps_out", "swaps_in", "checkpoints"),
    "bros": ("swaps_out", "swaps_in", "checkpoints"),
}
REACHED_BELOW = ("came_back", "failed_returns", "read", "failed_disk_copies")
"""Counters that histories of prefixes on the host and on disk must have reached."""
WITH_ADMISSION = ("omniserve", "omniserve-paper", "neo", "apex")


def make(
    scheduler: str, kv_name: str, rng: random.Random, *, failure_rate: float = 0.0, halt_rate: float = 0.0,
    has_forecast: bool = False, has_states: bool = False, is_crowded: bool = False, has_prefixes: bool = False,
    **settings: Any,
):  # fmt: skip
    num_device_blocks = rng.randint(16, 40) if not is_crowded else rng.randint(16, 19)
    num_host_blocks = rng.choice([0, 12, 30, 80] if not is_crowded else [30, 80]) if kv_name != "paged" else 0
    caches: dict[str, Any] = {}
    if has_prefixes:
        caches = {"prefix_cache": True, "num_protected_blocks": num_device_blocks // 4}
        caches |= {"host_prefixes": True} if kv_name != "paged" else {}
        if (
            kv_name != "paged"
            and num_host_blocks
            and (num_slots := random.Random(num_device_blocks).choice([0, 5, 60]))
        ):
            from omniserve.kv.disk_prefixes import DiskPrefixes

            caches["disk"] = DiskPrefixes(num_slots)
    kv = KV_MANAGERS.get(kv_name)(
        num_device_blocks=num_device_blocks, num_host_blocks=num_host_blocks, block_size=BLOCK, **caches
    )
    drawn: dict[str, Any] = {
        "num_layers": rng.randint(1, 4),
        "max_model_len": 64,
        "max_num_batched_tokens": rng.choice([4, 16, 64]),
        "max_num_seqs": rng.choice([3, 16]),
        "num_host_slots": rng.choice([2, 8]) if num_host_blocks else 0,
        "max_piggyback_seats": rng.choice([1, 4]),
        "max_piggyback_rows": rng.choice([None, 2]),
        "ls_reserve_blocks": rng.choice([0, 3]),
        "checkpoint_blocks": rng.choice([0, 1, 4]),
        "be_order": "decode" if num_device_blocks % 2 else "prefill",
        "swap_in_delay_s": rng.choice([0.0, 0.02]),
        "offload_for_time": rng.random() < 0.5,
        "min_residence_s": rng.choice([0.0, 0.1]),
        "hybrid_first_batch": num_device_blocks % 3 > 0,
    }
    if num_device_blocks % 4 > 1:
        drawn["late_layers"] = drawn["num_layers"] - num_device_blocks % 2  # a GPU looks at all layers but the last one
    if is_crowded:
        drawn |= {"num_host_slots": 8, "max_num_batched_tokens": 64, "max_piggyback_rows": None, "ls_reserve_blocks": 3}
        drawn |= {"max_piggyback_seats": rng.choice([2, 4, 8]), "min_host_per_device": 0}
    if has_states:
        drawn["num_state_slots"] = 2 * drawn["max_num_seqs"] + drawn["num_host_slots"]
    limits = make_limits(scheduler, **(drawn | settings))
    device = FakeDevice(
        block_size=BLOCK,
        num_layers=limits.num_layers,
        max_tokens=limits.config.max_num_batched_tokens,
        rng=rng,
        failure_rate=failure_rate,
        halt_rate=halt_rate,
        has_disk="disk" in caches,
    )
    oracle = draw_forecast(rng, limits.num_layers) if has_forecast else None
    made = Scheduler(*policy_of(limits.config), limits=limits, kv=kv, forecast=oracle)
    device.abandoned = made.requests.moves.abandoned
    if isinstance(kv, BidirectionalKVManager):
        device.sharers = kv._device.sharers
    return made, device


def draw_forecast(rng: random.Random, num_layers: int) -> Forecast:
    return forecast(
        num_layers, base=rng.choice([0.5, 5.0]), row=rng.choice([0.1, 1.0]), key=rng.choice([0.001, 0.05]),
        shared=rng.choice([1.0, 2.0]), host_key=rng.choice([0.0001, 0.01]),
    )  # fmt: skip


def draw_slo(rng: random.Random) -> SLO:
    return SLO(ttft_s=rng.choice([None, 0.05, 0.5]), tpot_s=rng.choice([None, 0.01, 0.03]))


def draw_request(rng: random.Random, classes: Sequence[str] = ("LS", "BE", "BE")) -> Request:
    return Request(
        prompt_token_ids=[rng.randrange(1000) for _ in range(rng.randint(1, 30))],
        sampling=SamplingParams(max_tokens=rng.randint(1, 30), ignore_eos=True),
        service_class=rng.choice(classes),
    )


def run_history(
    scheduler: str, seed: int, *, kv: str = "tiered", failure_rate: float = 0.0, halt_rate: float = 0.0,
    tier_down: bool = False, down_at_return: bool = False, has_forecast: bool = False, overlaps: bool = False,
    has_states: bool = False, has_drafts: bool = False, is_crowded: bool = False, defers: bool = False,
    has_prefixes: bool = False, **settings: Any,
) -> dict[str, int]:  # fmt: skip
    rng = random.Random(seed)
    ends = random.Random(-1 - seed)  # of its own: who ends early changes nothing else
    guesses = random.Random(f"{seed} guesses")
    sched, device = make(
        scheduler, kv, rng, failure_rate=failure_rate, halt_rate=halt_rate, has_forecast=has_forecast,
        has_states=has_states, is_crowded=is_crowded, has_prefixes=has_prefixes,
        max_host_drafts=guesses.choice([0, 1, 3, 8]) if has_drafts else 0,
        **({"defer_classes": True, "classes": preemptible.CLASSES} if defers else {}), **settings,
    )  # fmt: skip
    num_failed = num_reused = num_reused_tokens = num_shared_on_host = 0

    def execute(plan: StepPlan) -> StepOutput:
        nonlocal num_failed
        result = device.execute(plan)
        sampled = [chunk.request_id for chunk in plan.chunks if chunk.request_id in result.tokens]
        if not overlaps or not sampled or ends.random() > 0.01:
            return result
        num_failed += 1
        victim = ends.choice(sampled)
        left = {request_id: token for request_id, token in result.tokens.items() if request_id != victim}
        return dataclasses.replace(result, tokens=left, failed={victim: "non-finite logits"})

    stepping = (OverlappingStepping if overlaps else Stepping)(sched, execute)

    def may_check_limit() -> bool:
        return not failure_rate and not device.is_down  # who fails to leave the device stays there, over any limit

    watch_returns(sched, may_check_limit)
    speed = rng.choice([0.01, 0.05, 0.5, 1.0])
    classes = [spec.name for spec in preemptible.CLASSES] if defers else ["LS", "BE", "BE"]
    requests = {f"r{i}": draw_request(rng, classes) for i in range(rng.randint(5, 30))}
    kinds = {spec.name: spec.kind for spec in sched.requests.limits.config.classes}
    if overlaps:
        requests = {request_id: with_stop_tokens(request, ends) for request_id, request in requests.items()}
    if has_drafts:
        requests = {request_id: with_prediction(request, guesses) for request_id, request in requests.items()}
    if has_prefixes:
        requests = {request_id: with_front(request, guesses) for request_id, request in requests.items()}
    arrivals = list(requests)
    down_at = rng.randint(5, 60) if tier_down else None
    got: dict[str, list[int]] = {request_id: [] for request_id in requests}
    reasons: dict[str, FinishReason] = {}
    stays: dict[str, list[Stay]] = {request_id: [] for request_id in requests}
    num_accepted = num_rejected_drafts = 0
    now_s = 0.0
    num_rejected = num_bounded = num_deferred = 0
    slos: dict[str, SLO] = {}
    announced: list[str] = []

    def slo_of(request_id: str) -> SLO:
        if request_id not in slos:
            slos[request_id] = draw_slo(rng) if has_forecast else SLO()
        return slos[request_id]

    def must_leave() -> frozenset[str]:
        """Let the next request come while a step runs."""
        if not arrivals or kinds[requests[arrivals[0]].service_class] is not ServiceClass.LS:
            return frozenset()
        announced.append(arrivals[0])
        slo, came_s = slo_of(arrivals[0]), now_s + rng.choice([0.0, 0.001, 0.01])
        return sched.policy.to_preempt(requests[arrivals[0]], slo, 0.0, came_s)

    device.must_leave = must_leave if defers else None
    for step in range(20_000):
        if arrivals and (arrivals[0] in announced or rng.random() < 0.5):
            request_id = arrivals.pop(0)
            slo = slo_of(request_id)
            try:
                sched.add(request_id, requests[request_id], slo, now_s, arrival_s=now_s - rng.choice([0.0, 0.01]))
            except RequestRejected as error:
                assert kinds[requests[request_id].service_class] is ServiceClass.LS and slo.ttft_s is not None
                assert error.predicted_ttft_s is not None and error.predicted_ttft_s > (1 - LARGEST_MARGIN) * slo.ttft_s
                num_rejected += 1
                del requests[request_id]
        if not arrivals and not sched.has_unfinished and stepping.is_idle:
            break
        if rng.random() < (0.05 if overlaps else 0.02):
            victim = rng.choice(list(requests))
            output = sched.abort(victim, now_s)
            if output is not None:
                reasons[victim] = FinishReason.ABORT
                assert output.num_output_tokens == len(got[victim])
            if output is not None and overlaps and not has_forecast and ends.random() < 0.5:
                new = with_stop_tokens(draw_request(ends), ends)
                with contextlib.suppress(ValueError):  # a copy or a host task still uses its KV
                    sched.add(victim, new, SLO(), now_s)
                    num_reused += 1
                    check_tokens(requests[victim], got[victim], reasons.pop(victim), about=(seed, victim))
                    num_reused_tokens += len(got[victim])
                    requests[victim], got[victim], stays[victim] = new, [], []
        events = device.poll(speed)
        if step == down_at and sched.requests.limits.num_host_slots:
            device.is_down = True
            events.append(TierDown())
        sched.notify(events)
        plan = sched.schedule(now_s)
        if may_check_limit():
            assert max(holding(sched).values()) <= sched.requests.limits.config.max_num_seqs, holding(sched)
        if plan.decision is not None:
            num_deferred += any(out.bound is Bound.DEFERRED for out in plan.decision.left_out)
        if has_forecast and SCHEDULERS.get(scheduler).predicts:
            num_bounded += check_decision(sched, plan)
        assert not any(chunk.num_drafts for chunk in plan.chunks if chunk.request_id in plan.preemptible)
        seconds = 0.005 if plan.decision is None or not plan.decision.predicted_s else plan.decision.predicted_s
        now_s, outputs = stepping.step(plan, now_s, seconds)
        if (
            down_at_return
            and down_at is None
            and any(m.direction is MoveDirection.TO_DEVICE for m in plan.side_work(KVMove))
        ):
            device.is_down, down_at = True, step + 1  # with the first copies to the device under way
        for output in outputs:
            got[output.request_id] += output.new_token_ids
            stays[output.request_id] += output.host_stays
            assert output.num_output_tokens == len(got[output.request_id])
            num_accepted += output.num_accepted_drafts
            num_rejected_drafts += output.num_rejected_drafts
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
                check_stays(output, stays[output.request_id], overlaps=overlaps)
        sched.check_integrity()
        for state in sched.requests.states.values():
            held, needed = sched.requests.kv.num_blocks(state.request_id), sched.requests.memory.blocks_for(state)
            if state.away is not None:  # drafts that are dropped on the way keep their blocks
                needed = -(-(state.num_tokens + sched.requests.limits.max_host_drafts) // BLOCK)
            assert held <= needed, f"{state.request_id} holds {held} blocks, {needed} would do"
        if has_prefixes and isinstance(kv_made := sched.requests.kv, TwoTierKVManager):
            pool = kv_made._tables.pools[Tier.HOST]
            assert isinstance(pool, PrefixPool)
            num_shared_on_host += any(num_users > 1 for num_users in pool._num_users.values())
        if step % 8 == 0:
            check_blocks_by_class(sched)
    else:
        pytest.fail(f"seed {seed}: not finished after 20,000 steps: {sched.stats()}")
    assert set(reasons) == set(requests)
    for request_id, request in requests.items():
        check_tokens(request, got[request_id], reasons[request_id], about=(seed, request_id))
    usage = sched.requests.kv.usage()
    assert usage.device_used == usage.host_used == 0
    if not has_prefixes:
        num_free = len(free_block_ids(sched.requests.kv, Tier.DEVICE))
        assert num_free == usage.device_total, "somebody who ended still keeps KV"
    stats = sched.stats()
    assert stats.layer_preemptions == device.num_halts
    assert stats.accepted_drafts + stats.rejected_drafts == device.num_drafts >= device.num_right_drafts
    assert stats.accepted_drafts <= device.num_right_drafts, "what came behind the end was output"
    assert sum(stats.output_tokens.values()) == sum(map(len, got.values())) + num_reused_tokens
    assert (stats.accepted_drafts, stats.rejected_drafts) == (num_accepted, num_rejected_drafts)
    shared_blocks = getattr(sched.requests.kv, "_device", None)
    return {"overtaken": getattr(stepping, "num_overtaken", 0), "pending": device.num_pending,
            "stopped": Counter(reasons.values())[FinishReason.STOP], "failed": num_failed, "reused": num_reused,
            "halts": device.num_halts, "deferred": num_deferred,
            "joins": device.num_joins, "late_joins": device.num_late_joins, "doomed": device.num_doomed,
            "missed": device.num_missed, "pipelined": device.num_pipelined, "hybrid": device.num_hybrid,
            "preemptions": stats.preemptions, "swaps_out": stats.swaps_out,
            "swaps_in": stats.swaps_in, "checkpoints": stats.checkpoints, "rejected": num_rejected,
            "bounded": num_bounded, "resumed": stats.resumed_tokens, "restored": device.num_restored,
            "relocated": device.num_relocated, "shared": getattr(shared_blocks, "num_shared_blocks", 0),
            "overwritten": getattr(shared_blocks, "num_overwritten_tokens", 0),
            "host_drafts": device.num_host_drafts, "dropped_drafts": device.num_dropped_drafts,
            "cached": sum(sched.requests.prefixes.num_cached_tokens.values()),
            "came_back": sum(sched.requests.prefixes_on_host.num_restored_tokens.values()),
            "shared_on_host": num_shared_on_host, "read": device.num_read_blocks,
            "failed_disk_copies": device.num_failed_disk_copies,
            "failed_returns": device.num_failed_returns, "right_drafts": device.num_right_drafts,
            "wrong_drafts": device.num_drafts - device.num_right_drafts}  # fmt: skip


def with_front(request: Request, rng: random.Random) -> Request:
    """Let most prompts begin with one of three longer texts, or with a part of it."""
    if rng.random() < 0.2:
        return request
    text = random.Random(rng.randrange(3)).choices(range(VOCAB), k=24)
    front = text[: rng.choice([9, 24, 24])]
    return dataclasses.replace(request, prompt_token_ids=[*front, *request.prompt_token_ids][:34])


def with_prediction(request: Request, rng: random.Random) -> Request:
    """Let most requests be decoded speculatively, by guesses that are right for a while and then wrong."""
    predicted = expected_tokens(tuple(request.prompt_token_ids), request.sampling.max_tokens)
    share = rng.choice([0.0, 0.05, 0.3])
    for index in range(len(predicted)):
        if rng.random() < share:
            predicted[index] = rng.choice([predicted[index - 1], rng.randrange(VOCAB)])
    return dataclasses.replace(request, predicted_token_ids=predicted, speculation=rng.random() < 0.9)


def with_stop_tokens(request: Request, rng: random.Random) -> Request:
    """Let about one in 30 of its tokens end a request."""
    stops = tuple(rng.sample(range(VOCAB), VOCAB // 30))
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, stop_token_ids=stops))


def check_tokens(request: Request, got: list[int], reason: FinishReason, *, about: object) -> None:
    """Verify a request's output: all of it, unless somebody ended it."""
    want = expected_tokens(tuple(request.prompt_token_ids), request.sampling.max_tokens)
    stops = [index for index, token in enumerate(want) if token in request.sampling.stop_token_ids]
    want = want[: stops[0] + 1] if stops else want
    if reason in (FinishReason.ABORT, FinishReason.ERROR):
        want = want[: len(got)]
    else:
        assert reason is (FinishReason.STOP if stops else FinishReason.LENGTH), about
    assert got == want, about


def holding(sched: Scheduler) -> Counter[ServiceClass]:
    """Return how many requests of each kind are on the device or on their way to it."""
    holding = Counter({kind: len(sched.requests.device[kind]) for kind in ServiceClass})
    moving = sched.requests.moves.under_way.values()
    holding.update(state.kind for state, move in moving if move.direction is MoveDirection.TO_DEVICE)
    return holding


def watch_returns(sched: Scheduler, may_check: Callable[[], bool]) -> None:
    """Verify that no BE request comes back to a device that is full of LS and BE requests, whoever comes after it."""

    def watched(begin: Callable[..., Any]) -> Callable[..., Any]:
        def begin_and_check(state: RequestState, *args: Any, **kwargs: Any) -> Any:
            begun = begin(state, *args, **kwargs)
            if begun and may_check() and state.kind is ServiceClass.BE:
                (move,) = (move for moved, move in sched.requests.moves.under_way.values() if moved is state)
                full = holding(sched).total() > sched.requests.limits.config.max_num_seqs
                assert not full or move.direction is MoveDirection.TO_HOST, holding(sched)
            return begun

        return begin_and_check

    for name in ("start", "start_restore"):
        setattr(sched.requests.moves, name, watched(getattr(sched.requests.moves, name)))


def check_stays(output: RequestOutput, stays: list[Stay], *, overlaps: bool) -> None:
    """Verify that a request that ended told all its stays on the host tier, one after the other.

    The first may begin as its first token is pending, if steps overlap.
    """
    times = output.times
    assert times is not None and times.finished_s is not None and times.host_since_s is None
    assert stays or not output.num_host_tokens, f"{output.request_id} decoded on the host without having been there"
    if stays:
        assert overlaps or times.first_token_s is not None, "it went there before it decoded"
        moments = [
            0.0 if overlaps else times.first_token_s or 0.0,
            *itertools.chain.from_iterable(stays),
            times.finished_s,
        ]
        assert moments == sorted(moments), (output.request_id, moments)


def check_blocks_by_class(sched: Scheduler) -> None:
    """Verify that the classes' blocks add up to those in use, but for shared ones and copies that nobody waits for."""
    usage, stats = sched.requests.kv.usage(), sched.stats()
    on_device, on_host = sum(stats.device_blocks_by_class.values()), sum(stats.host_blocks_by_class.values())
    sharers = (
        sched.requests.kv._device.sharers.values() if isinstance(sched.requests.kv, BidirectionalKVManager) else ()
    )
    in_use = usage.device_used + sum(sched.requests.kv.tier(be) is not None for _, be in sharers)
    assert on_device >= in_use if sched.requests.prefixes.is_on else on_device == in_use
    in_use = usage.host_used - num_given_up(sched.requests.kv)
    assert on_host >= in_use if sched.requests.prefixes.is_on else on_host == in_use


def num_given_up(kv: KVManager) -> int:
    """Return how many host blocks copies go to that nobody waits for any more."""
    if not isinstance(kv, TwoTierKVManager):
        return 0
    blocks = [move.dst_block_ids for move, _ in kv.moves._abandoned.values()]
    if isinstance(kv, BidirectionalKVManager):
        blocks += [tuple(flight.copies) for flight in kv._saved._flights.values() if not flight.is_wanted]
    checkpoints = kv._copies.checkpoints._checkpoints
    wanted = [checkpoint.flight for checkpoint in checkpoints.values()]
    blocks += [move.dst_block_ids for move in kv._copies.checkpoints._flights.values() if move not in wanted]
    return sum(map(len, blocks))


def check_decision(sched: Scheduler, plan: StepPlan) -> bool:
    """Check what policies with a forecast promise of a step; return whether its bound kept anything out."""
    decision = plan.decision
    assert decision is not None and sched.policy.forecast is not None
    assert decision.predicted_s is not None and decision.predicted_ls_s is not None
    kinds = {chunk.request_id: sched.requests.states[chunk.request_id].kind for chunk in plan.chunks}
    has_ls = ServiceClass.LS in kinds.values()
    has_be = ServiceClass.BE in kinds.values() or plan.entries or plan.joins
    # The prediction is of just this plan (what is unknown here is whether the tier was at work already).
    features = [features_of(plan, sched.policy.forecast.shape, host_works=works) for works in (False, True)]
    seconds = [sched.policy.forecast.predictor.step_s(f) if not plan.is_empty else 0.0 for f in features]
    assert any(abs(decision.predicted_s - s) < 1e-9 for s in seconds), (decision.predicted_s, seconds)
    if any(chunk.num_drafts for chunk in plan.chunks) and decision.bound_s is not None:
        assert decision.predicted_s <= decision.bound_s + 1e-9, "drafts beyond the bound"
    if has_ls and has_be and decision.bound_s is not None:
        assert decision.predicted_s <= decision.bound_s + 1e-9, "best-effort work beyond the bound"
    if has_be:
        for left_out in decision.left_out:
            if left_out.work == "LS prefill":
                # Piggyback rows are no device rows: they take none of the token budget.
                tokens = {Bound.TOKENS} if ServiceClass.BE not in kinds.values() else set()
                allowed = {Bound.MEMORY, Bound.REQUESTS, Bound.TIME} | tokens
                assert left_out.bound in allowed, "an LS prompt gave way to BE work"
                if left_out.bound is Bound.TIME:
                    assert decision.predicted_s <= (decision.bound_s or 0.0) + 1e-9
    return any(left_out.bound is Bound.TIME for left_out in decision.left_out)


@pytest.mark.parametrize("kv", slow_except(("tiered",), KV_MANAGERS.names()))
@pytest.mark.parametrize("scheduler", SCHEDULERS.names())
def test_every_request_gets_its_tokens_over_random_histories(scheduler: str, kv: str) -> None:
    totals = [run_history(scheduler, seed, kv=kv) for seed in range(60 if kv == "tiered" else 30)]
    wanted = ["preemptions"]
    if kv == "tiered":
        wanted += REACHED.get(scheduler, ())
    if kv == "incremental":
        wanted += ["checkpoints", "resumed", "restored"]
    if kv == "bidirectional":
        wanted += ["shared", "overwritten", "relocated", "checkpoints", "resumed", "restored"]
    for key in wanted:
        assert sum(t[key] for t in totals) > 0, f"the histories never reached {key}"


@pytest.mark.parametrize("kv", KV_MANAGERS.names())
@pytest.mark.parametrize("scheduler", slow_except(("omniserve", "sarathi", "conserve"), SCHEDULERS.names()))
def test_drafts_change_no_token_over_random_histories(scheduler: str, kv: str) -> None:
    totals = [
        run_history(
            scheduler, 6000 + seed, kv=kv, has_drafts=True, has_forecast=seed % 2 == 0, overlaps=seed % 3 == 0,
            failure_rate=0.1 * (seed % 5 == 0),
        )
        for seed in range(30)
    ]  # fmt: skip
    wanted = ["right_drafts", "wrong_drafts", "preemptions"]
    wanted += ["shared", "relocated"] if kv == "bidirectional" else []
    for key in wanted:
        assert sum(t[key] for t in totals) > 0, f"the histories never reached {key}"


@pytest.mark.parametrize("kv", [name for name in KV_MANAGERS.names() if name != "paged"])
@pytest.mark.parametrize("scheduler", slow_except(("omniserve",), ("omniserve", "llumnix", "apex")))
def test_drafts_on_the_host_tier_change_no_token_over_random_histories(scheduler: str, kv: str) -> None:
    totals = [
        run_history(
            scheduler, 16_000 + seed, kv=kv, has_drafts=True, is_crowded=True, has_forecast=seed % 2 == 0,
            overlaps=seed % 4 == 0, failure_rate=0.05 * (seed % 5 == 0), tier_down=seed % 7 == 0,
        )
        for seed in range(30)
    ]  # fmt: skip
    wanted = ["right_drafts", "wrong_drafts", "host_drafts", "late_joins", "missed", "preemptions"]
    wanted += ["dropped_drafts"] if scheduler != "apex" else []  # a cohort's seats are the same at every layer
    for key in wanted:
        assert sum(t[key] for t in totals) > 10, f"the histories hardly reached {key}: {totals}"


@pytest.mark.parametrize("scheduler", [name for name in SCHEDULERS.names() if name not in WITH_ADMISSION])
def test_a_forecast_and_objectives_lose_nothing(scheduler: str) -> None:
    totals = [run_history(scheduler, 4000 + seed, has_forecast=True) for seed in range(40)]
    assert sum(t["preemptions"] for t in totals) > 0
    assert sum(t["rejected"] for t in totals) == 0, "it has no admission control"


@pytest.mark.parametrize("scheduler", slow_except(("omniserve",), WITH_ADMISSION))
def test_bounded_steps_lose_nothing_and_keep_their_bounds(scheduler: str) -> None:
    totals = [run_history(scheduler, 3000 + seed, has_forecast=True) for seed in range(150)]
    for key in (*REACHED[scheduler], "preemptions", "rejected", "bounded"):
        if key != "checkpoints":
            assert sum(t[key] for t in totals) > 0, f"the histories never reached {key}"
    if scheduler == "apex":
        assert sum(t["pipelined"] for t in totals) > 0, "the inequality never held"
        assert sum(t["hybrid"] for t in totals) > 0, "the first sub-batch never had host rows"


@pytest.mark.parametrize("scheduler", slow_except(("omniserve", "llumnix", "vllm-priority"), SCHEDULERS.names()))
@pytest.mark.parametrize("kv", ["tiered", "paged", "incremental"])
def test_prefixes_change_no_token_over_random_histories(
    scheduler: str, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omniserve.sched.prefixes_on_host.LEAST_RESTORED_TOKENS", BLOCK)
    totals = [
        run_history(
            scheduler, 26_000 + seed, kv=kv, has_prefixes=True, has_forecast=seed % 2 == 0, overlaps=seed % 3 == 0,
            failure_rate=0.3 * (seed % 3 == 1), tier_down=seed % 7 == 0, has_drafts=seed % 4 == 0,
            is_crowded=seed % 4 == 1,
        )
        for seed in range(60)
    ]  # fmt: skip
    # Under the others too few are on the host at a time.
    shares = ("shared_on_host",) if kv != "paged" and scheduler in (*WITH_ADMISSION, "llumnix") else ()
    for key in ("cached", "preemptions", *(REACHED_BELOW if kv != "paged" else ()), *shares):
        assert sum(t[key] for t in totals) > 0, f"the histories never reached {key}"


@pytest.mark.parametrize("has_forecast", [False, True])
def test_a_hybrid_first_sub_batch_loses_nothing(has_forecast: bool) -> None:
    totals = [
        run_history(
            hybrid.NAME, 7000 + seed, has_forecast=has_forecast, failure_rate=0.1 * (seed % 2), overlaps=seed % 3 == 0,
            tier_down=seed % 5 == 0,
        )
        for seed in range(60)
    ]  # fmt: skip
    for key in ("hybrid", "preemptions", "swaps_out"):
        assert sum(t[key] for t in totals) > 0, f"the histories never reached {key}"


@pytest.mark.parametrize("scheduler", [preemptible.NAME, "conserve"])
def test_rows_that_leave_a_step_between_layers_lose_nothing(scheduler: str) -> None:
    totals = [
        run_history(scheduler, 4000 + seed, halt_rate=0.4, has_forecast=scheduler == "conserve" and seed % 2 == 0)
        for seed in range(60)
    ]
    for key in ("halts", "preemptions"):
        assert sum(t[key] for t in totals) > 0, f"the histories never reached {key}"


@pytest.mark.parametrize("kv", ["tiered", "incremental", "bidirectional"])
def test_rows_that_are_deferred_for_a_higher_class_lose_nothing(kv: str) -> None:
    totals = [
        run_history(
            preemptible.DEFERRING, 5000 + seed, kv=kv, halt_rate=0.4, has_forecast=True, defers=True,
            overlaps=seed % 3 == 0, failure_rate=0.1 * (seed % 5 == 0),
        )
        for seed in range(60)
    ]  # fmt: skip
    for key in ("halts", "deferred", "preemptions", "rejected"):
        assert sum(t[key] for t in totals) > 0, f"the histories never reached {key}"


@pytest.mark.parametrize("scheduler", REACHED)
@pytest.mark.parametrize("seed", slow_except(range(12), range(40)))
def test_failing_host_tasks_and_moves_lose_nothing(scheduler: str, seed: int) -> None:
    kv = ("incremental", "bidirectional", "tiered")[seed % 3]
    run_history(scheduler, 1000 + seed, kv=kv, failure_rate=0.1, has_forecast=seed % 2 == 0)


@pytest.mark.parametrize("scheduler", REACHED)
@pytest.mark.parametrize("seed", slow_except(range(12), range(40)))
def test_a_dead_host_tier_loses_nothing(scheduler: str, seed: int) -> None:
    kv = ("incremental", "bidirectional", "tiered")[seed % 3]
    run_history(scheduler, 2000 + seed, kv=kv, tier_down=True, has_forecast=seed % 2 == 0)


@pytest.mark.parametrize("scheduler", slow_except(("omniserve", "conserve"), SCHEDULERS.names()))
@pytest.mark.parametrize("trouble", ["failures", "death"])
def test_restores_that_fail_lose_nothing(scheduler: str, trouble: str) -> None:
    totals = [
        run_history(
            scheduler, 4000 + seed, kv=("incremental", "bidirectional")[seed % 2],
            failure_rate=0.3 * (trouble == "failures"), down_at_return=trouble == "death",
        )
        for seed in range(40)
    ]  # fmt: skip
    assert sum(t["failed_returns"] for t in totals) > 0

"""Every policy, over random histories: each request gets exactly its tokens, and nothing leaks."""

from __future__ import annotations

import random

import pytest

from omniserve.kv import KV_MANAGERS
from omniserve.plan import HostEvent, HostEventKind
from omniserve.request import SLO, FinishReason, Request, SamplingParams
from omniserve.sched import SCHEDULERS, SchedulerLimits
from tests.sched.fake_device import FakeDevice, expected_tokens

BLOCK = 4


def make(scheduler: str, rng: random.Random, *, failure_rate: float = 0.0):
    num_device_blocks = rng.randint(16, 40)
    num_host_blocks = rng.choice([0, 12, 30, 80])
    kv = KV_MANAGERS.get("tiered")(
        num_device_blocks=num_device_blocks, num_host_blocks=num_host_blocks, block_size=BLOCK
    )
    limits = SchedulerLimits(
        num_layers=rng.randint(1, 4),
        block_size=BLOCK,
        max_model_len=64,
        max_step_tokens=rng.choice([4, 16, 64]),
        max_num_requests=rng.choice([3, 16]),
        num_host_slots=rng.choice([2, 8]) if num_host_blocks else 0,
        max_piggyback_slots=rng.choice([1, 4]),
        max_piggyback_rows=rng.choice([None, 2]),
        ls_reserve_blocks=rng.choice([0, 3]),
        swap_in_delay_steps=rng.choice([0, 4]),
    )
    device = FakeDevice(
        block_size=BLOCK,
        num_layers=limits.num_layers,
        max_tokens=limits.max_step_tokens,
        rng=rng,
        failure_rate=failure_rate,
    )
    policy = SCHEDULERS.get(scheduler)(limits=limits, kv=kv)
    device.abandoned = policy.abandoned_moves
    return policy, device


def draw_request(rng: random.Random) -> Request:
    return Request(
        prompt_token_ids=[rng.randrange(1000) for _ in range(rng.randint(1, 30))],
        sampling=SamplingParams(max_tokens=rng.randint(1, 30), ignore_eos=True),
        service_class=rng.choice(["LS", "BE", "BE"]),
    )


def run_history(scheduler: str, seed: int, *, failure_rate: float = 0.0, tier_down: bool = False) -> dict[str, int]:
    rng = random.Random(seed)
    sched, device = make(scheduler, rng, failure_rate=failure_rate)
    speed = rng.choice([0.01, 0.05, 0.5, 1.0])
    requests = {f"r{i}": draw_request(rng) for i in range(rng.randint(5, 30))}
    arrivals = list(requests)
    down_at = rng.randint(5, 60) if tier_down else None
    got: dict[str, list[int]] = {request_id: [] for request_id in requests}
    reasons: dict[str, FinishReason] = {}
    now_s = 0.0
    for step in range(20_000):
        if arrivals and rng.random() < 0.5:
            request_id = arrivals.pop(0)
            sched.add(request_id, requests[request_id], SLO(), now_s)
        if not arrivals and not sched.has_unfinished:
            break
        if rng.random() < 0.02:
            victim = rng.choice(list(requests))
            output = sched.abort(victim, now_s)
            if output is not None:
                reasons[victim] = FinishReason.ABORT
        events = device.poll(speed)
        if step == down_at and sched.limits.num_host_slots:
            device.is_down = True
            events.append(HostEvent(kind=HostEventKind.TIER_DOWN))
        sched.notify(events)
        plan = sched.schedule(now_s)
        now_s += 0.005
        for output in sched.update(plan, device.execute(plan), now_s):
            got[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
        sched.check_integrity()
    else:
        pytest.fail(f"seed {seed}: not finished after 20,000 steps: {sched.stats()}")
    assert set(reasons) == set(requests)
    for request_id, request in requests.items():
        want = expected_tokens(tuple(request.prompt_token_ids), request.sampling.max_tokens)
        if reasons[request_id] is FinishReason.ABORT:
            want = want[: len(got[request_id])]
        assert got[request_id] == want, (seed, request_id)
    usage = sched.kv.usage()
    assert usage.device_used == usage.host_used == 0
    stats = sched.stats()
    return {"joins": device.num_joins, "preemptions": stats.preemptions, "swaps_out": stats.swaps_out,
            "swaps_in": stats.swaps_in}  # fmt: skip


@pytest.mark.parametrize("scheduler", SCHEDULERS.names())
def test_every_request_gets_its_tokens_over_random_histories(scheduler: str) -> None:
    totals = [run_history(scheduler, seed) for seed in range(60)]
    assert sum(t["preemptions"] for t in totals) > 0, "the histories never ran out of memory"
    if scheduler == "omniserve":
        for key in ("joins", "swaps_out", "swaps_in"):
            assert sum(t[key] for t in totals) > 0, f"the histories never reached {key}"


@pytest.mark.parametrize("seed", range(40))
def test_failing_host_tasks_and_moves_lose_nothing(seed: int) -> None:
    run_history("omniserve", 1000 + seed, failure_rate=0.1)


@pytest.mark.parametrize("seed", range(40))
def test_a_dead_host_tier_loses_nothing(seed: int) -> None:
    run_history("omniserve", 2000 + seed, tier_down=True)

"""Random histories on the real engine: real layers, real kernels, real host threads, poisoned memory.

A history draws arrivals, classes, pool sizes, chunk sizes, P, aborts, host delays and deaths. Whatever it was, each
request's fp32 greedy tokens must be those of Hugging Face's ``generate`` on the unpatched model.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from omniserve import (
    SLO,
    Engine,
    EngineConfig,
    FinishReason,
    Pooling,
    Request,
    RequestRejected,
    SamplingParams,
    TokenLogprob,
)
from omniserve.core.plan import PiggybackJoin, StepOutput, StepPlan
from omniserve.core.request import Arrival
from omniserve.core.work import HostEvent, KVMove, MoveDirection, SlotCopy
from omniserve.engine.fingerprint import fingerprint_of
from omniserve.kv import Tier
from omniserve.kv.bidirectional import BidirectionalKVManager
from omniserve.kv.host_prefixes import PrefixPool
from omniserve.kv.storage import parts_of_rows
from omniserve.kv.two_tiers import TwoTierKVManager
from omniserve.latency import ModelShape, Profile
from omniserve.latency.omniserve import OmniServeModel
from omniserve.parallel.group import RankGroup
from omniserve.runner.late_in_stages import StageResults
from omniserve.runner.late_results import LateJoins
from omniserve.runner.runner import LaunchedStep
from omniserve.sched import policy_of
from omniserve.sched.features.state_slots import StateSlots
from tests.engine_settings import flat_config
from tests.kv.free_blocks import free_block_ids
from tests.latency.samples import draw_steps, make_profile
from tests.parity.models import VOCAB_SIZE
from tests.parity.reference import NEAR_TIE, Reference

BLOCK = 8


@dataclass
class Tally:
    """Counts of what the histories reached; tests assert that nothing they are about was missed."""

    host_tokens: int = 0
    ls_host_tokens: int = 0
    piggyback_rows: int = 0
    prefilled_tokens: int = 0
    """Tokens whose KV has come from prefill engines."""
    in_stages: int = 0
    """Steps that began while another one was in a later stage."""
    hybrid_rows: int = 0
    late_joins: int = 0
    missed_joins: int = 0
    preemptions: int = 0
    swaps_out: int = 0
    swaps_in: int = 0
    failures: int = 0
    aborted: int = 0
    resumed_tokens: int = 0
    cached_tokens: int = 0
    sessions: int = 0
    """Steps while there were some."""
    restored_tokens: int = 0
    shared_on_host: int = 0
    """Steps with blocks on the host that several requests used."""
    disk_tokens: int = 0
    disk_failures: int = 0
    shared_blocks: int = 0
    relocated_blocks: int = 0
    overwritten_tokens: int = 0
    checkpoints: int = 0
    rejected: int = 0
    halted: int = 0
    planned: int = 0
    """Chunks that were planned to leave their step between two layers."""
    constant_decodes: int = 0
    constant_chunks: int = 0
    left_graphs: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    host_drafts: int = 0
    dropped_drafts: int = 0
    late_drafts: int = 0
    missed_drafts: int = 0
    network_tasks: int = 0
    network_moves: int = 0
    lost_hosts: int = 0
    embeddings: int = 0
    loras_left: int = 0
    """Adapters whose slot was given to another one."""
    finished: int = 0


def draw_config(rng: random.Random, engine_model: PreTrainedModel, scheduler: str, **fixed: object) -> EngineConfig:
    spec = engine_model.omniserve.spec
    block_bytes = spec.kv_block_bytes(BLOCK)
    settings: dict[str, Any] = {
        "scheduler": scheduler,
        "kv": rng.choice(["tiered", "tiered", "incremental", "bidirectional"]),
        "block_size": BLOCK,
        "max_model_len": 80,
        # The smallest pool holds one longest request (64 tokens) and a little.
        "device_kv_bytes": block_bytes * rng.choice([9, 12, 18, 30]),
        "host_kv_bytes": block_bytes * rng.choice([20, 60]),
        "max_num_batched_tokens": rng.choice([3, 16, 64]),
        "max_num_seqs": rng.choice([2, 8, 32]),
        "max_host_requests": rng.choice([2, 16]),
        "max_piggyback_seats": rng.choice([1, 4, 8]),
        "max_piggyback_rows": rng.choice([None, None, 5]),
        "ls_reserve_fraction": rng.choice([0.0, 0.1]),
        "swap_in_delay_s": rng.choice([0.0, 0.01]),
        "offload_for_time": rng.random() < 0.5,
        "min_residence_s": rng.choice([0.0, 0.02]),
        "be_order": rng.choice(["decode", "prefill"]),
        "slack": rng.choice(["step", "deadline"]),
        "checkpoint_kv": rng.choice([False, True]) and fixed.get("kv") != "paged",
        "host_threads": rng.choice([1, 2, 3]),
        "keep_halted": rng.choice([True, False]),
        "compile": False,
        "async_steps": False,
    }
    # Of a generator of its own, so that all else is drawn as it was without.
    settings["prefix_cache"] = random.Random(repr(settings)).choice([None, False])
    if spec.state_bytes:
        # At least half of the pool is for KV, so states of many requests ask for a pool that is never full.
        settings |= {"max_num_seqs": rng.choice([3, 8]), "max_host_requests": rng.choice([2, 6])}
        num_slots = 2 * settings["max_num_seqs"] + settings["max_host_requests"]
        states = num_slots * spec.state_bytes
        settings["device_kv_bytes"] = states + max(states, settings["device_kv_bytes"])
    return flat_config({**settings, **fixed})


def check_embedding(
    got: tuple[float, ...], hidden_TD: torch.Tensor, pooling: Pooling, tolerance: float = NEAR_TIE
) -> None:
    """Assert that it is what Hugging Face's last hidden states are when they are pooled, relative to the largest."""
    want = hidden_TD[-1] if pooling is Pooling.LAST else hidden_TD.mean(0)
    error = float((torch.tensor(got) - want).abs().max())
    assert error < tolerance * max(1.0, float(hidden_TD.abs().max())), (pooling, error)


def check_prompt_logprobs(
    got: list[TokenLogprob], prompt: tuple[int, ...], logprobs_TV: torch.Tensor, tolerance: float = NEAR_TIE
) -> None:
    """Assert that they are those of each token but the first, once, and Hugging Face's."""
    assert [entry.token_id for entry in got] == list(prompt[1:])
    for row, entry in enumerate(got):
        assert abs(entry.logprob - float(logprobs_TV[row, entry.token_id])) < tolerance, (row, entry)
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert torch.allclose(torch.tensor(values), logprobs_TV[row].topk(len(values)).values, atol=tolerance), row


def with_prediction(request: Request, tokens: tuple[int, ...], rng: random.Random) -> Request:
    """Return a request with a prediction of its tokens that is right for a while, then wrong or some tokens off."""
    predicted: list[int] = []
    share = rng.choice([0.0, 0.1, 0.4])
    for token in tokens:
        if rng.random() >= share:
            predicted.append(token)
        elif rng.random() < 0.7:
            predicted += [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 3))]
    return dataclasses.replace(
        request, predicted_token_ids=predicted, speculation=rng.choice([None, None, None, False])
    )


def made_up_profile(model: PreTrainedModel, config: EngineConfig) -> Profile:
    """Return a profile of a made-up machine: what it says need not be true.

    It has steps for latency models that are made of nothing else.
    """
    steps = ()
    if policy_of(config)[1].latency_model != "omniserve":
        steps = tuple(draw_steps(0, 40, OmniServeModel(make_profile()).step_s))
    return dataclasses.replace(
        make_profile(steps), fingerprint=fingerprint_of(model, config), shape=ModelShape.of(model.omniserve.spec)
    )


def poison(engine: Engine) -> None:
    """Fill blocks that nobody owns, and empty slots of shared ones, with NaN: who reads it shows it in its tokens.

    With several stages, steps in flight have not come to this rank yet: what they use is left out.
    """
    used: dict[Tier, set[int]] = {tier: set() for tier in Tier}
    used_states: set[int] = set()
    for plan in plans_in_stages(engine):
        for chunk in plan.chunks:
            used[Tier.DEVICE].update(chunk.block_ids)
        for entry in plan.entries:
            used[Tier.HOST].update(entry.block_ids)
        for move in plan.side_work(KVMove):
            for tier, ids in ((Tier.HOST, move.src_block_ids), (Tier.DEVICE, move.dst_block_ids)):
                used[tier if move.direction is MoveDirection.TO_DEVICE else _other(tier)].update(ids)
        for copy in plan.side_work(SlotCopy):
            used[Tier.DEVICE].update((copy.source_block, copy.target_block))
        used_states.update(row.state_slot for row in (*plan.chunks, *plan.entries, *plan.joins))
    storage = engine.runner._storage
    pools = [(Tier.DEVICE, storage.k_LBKSH), (Tier.DEVICE, storage.v_LBKSH)]
    if engine.host_tier is not None:
        pools.append((Tier.HOST, engine.host_tier.pool_LBK2SH))
        if (scales := engine.host_tier.scales_LBK2S) is not None:
            pools.append((Tier.HOST, scales))
    for tier, blocks_LB in pools:
        free_ids = [block for block in free_block_ids(engine.kv, tier) if block not in used[tier]]
        free = torch.tensor(free_ids, dtype=torch.long, device=blocks_LB.device)
        # int8 has no NaN, but scales have: beside the host's blocks, and, as all bits set, in the device's.
        blocks_LB[:, free] = torch.nan if blocks_LB.is_floating_point() else -1
    features = engine.scheduler.requests.features.on
    of_states = (feature._free for feature in features if isinstance(feature, StateSlots))
    free_slots = [slot for free in of_states for slot in free if slot not in used_states]
    free_states = torch.tensor(free_slots, dtype=torch.long)
    for states in engine.runner.states.pool.layers:
        for pool in states.values():
            pool[free_states.to(pool.device)] = torch.nan
    if isinstance(kv := engine.kv, BidirectionalKVManager):
        for block, (ls, be) in kv._device.sharers.items():
            if block in used[Tier.DEVICE]:
                continue
            empty = slice(kv._device.num_in_tail(ls), kv.block_size - kv._device.num_in_tail(be))
            for pool in (storage.k_LBKSH, storage.v_LBKSH):
                parts_of_rows(pool)[-1][:, block, :, empty] = torch.nan


def plans_in_stages(engine: Engine) -> list[StepPlan]:
    """Return the plans of the steps that are in the stages of a model; none if it has no stages."""
    stepper = engine._stepper
    return [flight.plan for flight in stepper._flights] if stepper._side_by_side else []


def _other(tier: Tier) -> Tier:
    return Tier.DEVICE if tier is Tier.HOST else Tier.HOST


def watch_late_joins(engine: Engine, tally: Tally, rng: random.Random) -> None:
    """Count late joins by whether they join.

    Some steps dwell at a layer, so that results come meanwhile; some look a moment before the newest results come.
    """
    tier = engine.host_tier
    if tier is None:
        return
    (late_joins,) = (each for each in engine.runner.strategies if isinstance(each, LateJoins))
    late_results = late_joins._results
    settle = late_results.settle

    def hide(is_early: bool) -> None:
        if isinstance(late_results, StageResults):
            poll = NothingNew.poll if is_early else tier.poll
            late_results._events = dataclasses.replace(late_results._events, poll=poll)
        else:
            late_results._tier = NothingNew() if is_early else tier

    class NothingNew:
        @staticmethod
        def poll() -> list[HostEvent]:
            return []

    def watched(joins: Sequence[PiggybackJoin], *, as_one: bool) -> list[bool]:
        if (is_early := rng.random() < 0.4) is False:
            tier.wait(0.002)
        hide(is_early)
        joined = settle(joins, as_one=as_one)
        if not isinstance(late_results, StageResults):  # else the joins of all stages are counted
            tally.late_joins += sum(here and not join.is_ready for join, here in zip(joins, joined, strict=True))
            tally.missed_joins += joined.count(False)
        return joined

    late_results.settle = watched  # type: ignore[method-assign]


def watch_received_joins(engine: Engine, tally: Tally) -> None:
    """Count the late joins that the device itself looks for, as it does with a mailbox, and those with drafts.

    Those of all stages are counted, too.
    """
    runner = engine.runner
    launch, collect = runner.launch, runner.collect
    doubtful: dict[int, tuple[int, set[str]]] = {}

    def launch_and_note(plan: StepPlan) -> LaunchedStep:
        step = launch(plan)
        if isinstance(step, LaunchedStep) and step.amend is not None:
            with_drafts = {join.request_id for join in plan.joins if join.draft_ids and not join.is_ready}
            doubtful[id(step)] = len(plan.doubtful), with_drafts
        return step

    def collect_and_count(step: LaunchedStep | StepPlan) -> StepOutput:
        output = collect(step)
        count, with_drafts = doubtful.pop(id(step), (0, set()))
        if isinstance(step, StepPlan):
            count = len(step.doubtful)
        if count > 0:
            tally.late_drafts += len(with_drafts - output.missed)
            tally.missed_drafts += len(with_drafts & output.missed)
            tally.missed_joins += len(output.missed)
            tally.late_joins += count - len(output.missed)
        return output

    runner.launch, runner.collect = launch_and_note, collect_and_count  # type: ignore[method-assign]


def watch_plans(engine: Engine, tally: Tally) -> None:
    """Count drafts on the host tier by whether they come to its last layer, and rows of hybrid sub-batches."""
    last = engine.spec.num_layers - 1

    def watch(plan: StepPlan, host_works: bool, seconds: float) -> None:
        at_end = sum(len(join.draft_ids) for join in plan.joins if join.layer == last)
        tally.host_drafts += at_end
        tally.hybrid_rows += len(plan.hybrid)
        tally.planned += sum(chunk.leaves_at > 0 for chunk in plan.chunks)
        tally.dropped_drafts += sum(len(entry.draft_ids) for entry in plan.entries) - at_end

    engine.on_step = watch


def run_history(
    model: PreTrainedModel,
    reference: Reference,
    seed: int,
    *,
    scheduler: str = "omniserve",
    faults: bool = False,
    deaths: bool = False,
    has_profile: bool | None = None,
    drafts: bool = False,
    most_requests: int = 16,
    tally: Tally | None = None,
    group: RankGroup | None = None,
    disturb: Callable[[random.Random], None] | None = None,
    **fixed: object,
) -> Tally:
    """Run one history to its end and compare every request.

    Args:
        drafts: Most requests are decoded speculatively, by guesses of which some are wrong.
        faults: Host attention is late, out of order and fails now and then.
        deaths: Host threads die, at last all of them.
        has_profile: There is a latency model; None: draw it.
        most_requests: Most requests that arrive.
        group: The other ranks; the model is then rank 0's part.
        disturb: Called before each step.
    """
    rng = random.Random(seed)
    asks = random.Random(-1 - seed)  # of its own: who asks for log-probabilities changes nothing else
    sessions = random.Random(-3 - seed)
    embeds = random.Random(-4 - seed)
    tally = tally if tally is not None else Tally()
    graphs = {"step_graphs": "auto" if seed % 2 else "off"}  # where there is a GPU; by itself, so that no draw moves
    config = draw_config(rng, model, scheduler, **(graphs | fixed))
    has_profile = rng.random() < 0.5 if has_profile is None else has_profile
    profile = made_up_profile(model, config) if has_profile else None
    with Engine(model, config, profile=profile, group=group) as engine:
        for name, folder in reference.folders.items():
            engine.load_lora(name, folder)
        tier = engine.host_tier
        halt_rate = rng.choice([0.02, 0.2])
        highest = config.classes[0].name
        classes = ["LS", "BE", "BE", "BE"] if highest == "LS" else [spec.name for spec in config.classes]
        arriving = Request(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1), service_class=highest)
        if engine.preemption is not None:
            engine.preemption.arrivals = lambda: [Arrival(arriving)] if rng.random() < halt_rate else []
        if faults and tier is not None:
            tier.inject(delay_s=rng.choice([0.0, 0.0005, 0.003]), shuffle_seed=rng.choice([None, seed]))
        watch_late_joins(engine, tally, random.Random(-2 - seed))
        watch_received_joins(engine, tally)
        watch_plans(engine, tally)
        deaths_left = engine.config.host_threads if deaths else 0
        arrivals = [rng.randrange(len(reference.prompts)) for _ in range(rng.randint(4, most_requests))]
        tpots = [None, 0.002, 0.05]
        if "defer_tokens" in config.scheduler_options:  # some have slack beside others
            tpots += [0.05, 10.0, 10.0]
        burst = rng.choice([0.1, 0.5, 1.0])
        which: dict[str, tuple[int, int]] = {}
        got: dict[str, list[int]] = {}
        reasons: dict[str, FinishReason] = {}
        scores: dict[str, list[TokenLogprob]] = {}
        poolings: dict[str, Pooling] = {}
        embeddings: dict[str, tuple[float, ...]] = {}
        for _ in range(200_000):
            while arrivals and rng.random() < burst:
                index = arrivals.pop()
                max_tokens = rng.randint(1, reference.max_tokens)
                request = Request(
                    prompt_token_ids=reference.prompts[index],
                    sampling=SamplingParams(
                        max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=asks.choice([None, 0, 3])
                    ),
                    service_class=rng.choice(classes),
                    slo=SLO(ttft_s=rng.choice([None, 0.01, 10.0]), tpot_s=rng.choice(tpots)),
                    lora=reference.loras[index],
                    session=sessions.choice(["", "a", "b"]),
                )
                if drafts:
                    request = with_prediction(request, reference.tokens[index], asks)
                if (pooling := embeds.choice([*Pooling, *[None] * 14])) is not None:
                    max_tokens = 0
                    sampling = SamplingParams(max_tokens=max_tokens, pooling=pooling)
                    request = dataclasses.replace(request, sampling=sampling)
                try:
                    request_id = engine.add(request)
                except RequestRejected:
                    tally.rejected += 1
                    continue
                which[request_id], got[request_id] = (index, max_tokens), []
                if pooling is not None:
                    poolings[request_id] = pooling
                if request.sampling.prompt_logprobs is not None:
                    scores[request_id] = []
            if not arrivals and not engine.has_unfinished:
                break
            if which and rng.random() < 0.01:
                victim = rng.choice(list(which))
                if engine.abort(victim):
                    reasons[victim] = FinishReason.ABORT
            if tier is not None and faults and rng.random() < 0.05:
                tier.inject(delay_s=rng.choice([0.0, 0.001]), shuffle_seed=rng.choice([None, seed]), fail_next=1)
            if tier is not None and deaths_left and rng.random() < 0.03:
                tier.inject(kill_threads=1)
                deaths_left -= 1
            if sessions.random() < 0.02:
                engine.clear_prefixes(sessions.choice([None, ["a"], ["b", "c"]]))
            poison(engine)
            if disturb is not None:
                disturb(asks)
            tally.in_stages += bool(plans_in_stages(engine))
            loras = engine.scheduler.requests.loras
            in_memory = set(loras.in_memory()) if loras is not None else set()
            for output in engine.step():
                got[output.request_id] += output.new_token_ids
                if output.prompt_logprobs:
                    scores[output.request_id] += output.prompt_logprobs
                if output.finish_reason is not None:
                    reasons[output.request_id] = output.finish_reason
                if output.embedding:
                    embeddings[output.request_id] = output.embedding
            engine.scheduler.check_integrity()
            if engine.kv.prefixes is not None and engine.kv.prefixes.sessions is not None:
                engine.kv.prefixes.sessions.check()
                tally.sessions += bool(engine.kv.prefixes.sessions.names)
            tally.loras_left += len(in_memory.difference(loras.in_memory())) if loras is not None else 0
            if isinstance(engine.kv, TwoTierKVManager):
                pool = engine.kv._tables.pools[Tier.HOST]
                users = pool._num_users.values() if isinstance(pool, PrefixPool) else ()
                tally.shared_on_host += any(num_users > 1 for num_users in users)
            if engine.last_plan_was_empty:
                engine.wait(0.01)
        else:
            raise AssertionError(f"seed {seed}: unfinished after all steps: {engine.stats()}")
        stats = engine.stats()
        tally.prefilled_tokens += sum(engine.stats().scheduler.loaded_from("prefilled").values())
        if tier is not None:
            for host in tier.hosts():
                tally.network_tasks += host.tasks_sent
                tally.network_moves += host.bytes_moved > 0
                tally.lost_hosts += host.times_lost
        if engine.runner.graphs is not None:
            tally.constant_decodes += engine.runner.graphs.num_decode_steps
            tally.constant_chunks += engine.runner.graphs.num_chunk_steps
            tally.left_graphs += getattr(engine.runner.graphs, "num_steps_left", 0)
        assert stats.kv.device_used == stats.kv.host_used == 0, stats
        if not engine.scheduler.requests.prefixes.is_on:
            num_free = len(free_block_ids(engine.kv, Tier.DEVICE))
            assert num_free == stats.kv.device_total, "somebody who ended keeps KV"
    assert set(reasons) == set(which), f"seed {seed}: {set(which) - set(reasons)} never ended"
    for request_id, (index, max_tokens) in which.items():
        want = list(reference.tokens[index][:max_tokens])
        if reasons[request_id] is FinishReason.ABORT:
            want = want[: len(got[request_id])]
            tally.aborted += 1
        else:
            assert reasons[request_id] is FinishReason.LENGTH, (seed, request_id, reasons[request_id])
            tally.finished += 1
        assert got[request_id] == want, f"seed {seed}, {request_id}, prompt {index}: {config}"
        if request_id in poolings and reasons[request_id] is not FinishReason.ABORT:
            check_embedding(embeddings[request_id], reference.hidden[index], poolings[request_id], reference.tolerance)
            tally.embeddings += 1
        if request_id in scores and want:
            check_prompt_logprobs(
                scores[request_id], reference.prompts[index], reference.prompt_logprobs[index], reference.tolerance
            )
    tally.host_tokens += stats.scheduler.host_output_tokens
    tally.ls_host_tokens += stats.scheduler.ls_host_output_tokens
    tally.piggyback_rows += stats.piggyback_rows
    tally.preemptions += stats.scheduler.preemptions
    tally.halted += stats.scheduler.layer_preemptions
    tally.resumed_tokens += stats.scheduler.resumed_tokens
    tally.cached_tokens += sum(stats.scheduler.cached_tokens.values())
    tally.restored_tokens += sum(stats.scheduler.restored_tokens.values())
    tally.disk_tokens += sum(stats.scheduler.loaded_from("disk").values())
    tally.disk_failures += stats.disk.failures
    if isinstance(engine.kv, BidirectionalKVManager):
        tally.shared_blocks += engine.kv._device.num_shared_blocks
        tally.relocated_blocks += engine.kv._device.num_relocated_blocks
        tally.overwritten_tokens += engine.kv._device.num_overwritten_tokens
    tally.checkpoints += stats.scheduler.checkpoints
    tally.accepted_drafts += stats.scheduler.accepted_drafts
    tally.rejected_drafts += stats.scheduler.rejected_drafts
    tally.swaps_out += stats.scheduler.swaps_out
    tally.swaps_in += stats.scheduler.swaps_in
    tally.failures += stats.host.failures
    return tally


def run_histories(
    model: PreTrainedModel,
    reference: Reference,
    seeds: range,
    *,
    reach: tuple[str, ...],
    rows: Sequence[Mapping[str, Any]] = ({},),
    **settings: Any,
) -> Tally:
    """Run histories, and then more until they have come to all that they are about.

    What a history comes to depends on how fast the machine's threads are, so more may be needed on one than on another.

    Args:
        seeds: Of those that are run in any case, or as many as there are rows; at most 160 are, or forty times as many
            as seeds: of 40 histories about 2 copy a block that two requests share.
        reach: Fields of Tally that must be above 0 in the end.
        rows: Settings that the histories take in turn, as ``tests.pairwise`` makes them.
        settings: See ``run_history``; a function of the seed where it should differ.
    """
    tally, num_least = Tally(), max(len(seeds), len(rows))
    for number in range(max(40 * len(seeds), 160)):
        if number >= num_least and all(getattr(tally, name) > 0 for name in reach):
            break
        seed = seeds.start + number
        drawn = {**settings, **rows[number % len(rows)]}
        drawn = {name: value(seed) if callable(value) else value for name, value in drawn.items()}
        run_history(model, reference, seed, tally=tally, **drawn)
    missed = [name for name in reach if getattr(tally, name) == 0]
    assert not missed, f"the histories never came to {', '.join(missed)}: {tally}"
    return tally

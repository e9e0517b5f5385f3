"""A random history of a scheduler on a fake device, and the hooks of those that watch it (``checkers.py``)."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from omniserve.core.config import LoRAConfig, ParallelConfig
from omniserve.core.errors import RequestRejected
from omniserve.core.lora import LoRA
from omniserve.core.plan import StepOutput, StepPlan
from omniserve.core.request import SLO, Request, RequestOutput, SamplingParams, ServiceClass
from omniserve.core.work import KVMove, MoveDirection, TierDown
from omniserve.kv import KV_MANAGERS
from omniserve.kv.base import KVManager
from omniserve.kv.bidirectional import BidirectionalKVManager
from omniserve.sched import Forecast, Scheduler, SchedulerLimits, policy_of
from omniserve.sched.stages import StagedScheduler
from tests.sched import preemptible
from tests.sched.fake_device import VOCAB, FakeDevice, expected_tokens
from tests.sched.limits import BLOCK, make_limits
from tests.sched.predictor import forecast
from tests.sched.stepping import OverlappingStepping, StagedStepping, Stepping

ADAPTERS = {
    name: LoRA(name=name, folder="", digest=digest) for name, digest in {"a": "A", "b": "B", "c": "C", "d": "A"}.items()
}
"""LoRA adapters by name; two have the same files."""
MOST_STEPS = 20_000
"""A request that has not ended by then starves."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a history has beside requests that come, decode and are aborted."""

    failure_rate: float = 0.0
    """Chance that a host task or a copy fails."""
    tier_down: bool = False
    """The host tier dies after a few steps."""
    down_at_return: bool = False
    """The host tier dies with the first copies to the device under way."""
    halt_rate: float = 0.0
    """Chance that preemptible rows leave a step between two layers."""
    has_forecast: bool = False
    """The policy predicts step times, and requests have objectives."""
    overlaps: bool = False
    """A step is launched while the one before it runs; requests have stop tokens, and some fail."""
    num_stages: int = 1
    """Stages of the model, with a step in flight each."""
    has_states: bool = False
    """The model has recurrent states."""
    has_drafts: bool = False
    """Most requests are decoded speculatively."""
    has_prefixes: bool = False
    """Most prompts begin alike, and there is a prefix cache: on the host, with two tiers, and on disk, for some."""
    is_crowded: bool = False
    """Device memory is short and host memory is not."""
    is_host_short: bool = False
    """Host memory is short, and a prefix cache is on disk, too."""
    has_kinds: bool = False
    """Some requests are for an embedding or for log-probabilities of their prompt, name a LoRA adapter, or wait for a
    short time only."""


class History:
    """A history that is drawn from a seed. Checkers watch it; ``reached`` counts what happened in it."""

    def __init__(self, scheduler: str, seed: int, kv: str, options: Options) -> None:
        self.scheduler, self.seed, self.options = scheduler, seed, options
        self.defers = scheduler == preemptible.DEFERRING
        self.rng = random.Random(seed)
        self._deadlines = random.Random(f"{seed} deadlines")
        self._ends = random.Random(-1 - seed)  # of its own: a request that ends early changes nothing else
        guesses = random.Random(f"{seed} guesses")
        self.kv = _make_kv(kv, self.rng, options)
        limits = self._draw_limits(guesses)
        self.oracle = _draw_forecast(self.rng, limits.num_layers) if options.has_forecast else None
        scheduler_type = StagedScheduler if options.num_stages > 1 else Scheduler
        self.sched = scheduler_type(*policy_of(limits.config), limits=limits, kv=self.kv, forecast=self.oracle)
        self.device = FakeDevice(
            block_size=BLOCK, num_layers=limits.num_layers, max_tokens=limits.config.max_num_batched_tokens,
            rng=self.rng, failure_rate=options.failure_rate, halt_rate=options.halt_rate,
            has_disk=self.kv.prefixes is not None and self.kv.prefixes.disk is not None,
        )  # fmt: skip
        self.device.abandoned = self.sched.requests.moves.abandoned
        self.device.must_leave = self._must_leave if self.defers else None
        if isinstance(self.kv, BidirectionalKVManager):
            self.device.sharers = self.kv._device.sharers
        self.stepping = self._make_stepping()
        self.kinds = {spec.name: spec.kind for spec in limits.config.classes}
        self._classes = ["GOLD", "GOLD", "SILVER", "SILVER", "BRONZE", "BE"] if self.defers else ["LS", "BE", "BE"]
        self.requests = {f"r{i}": self._draw_request(guesses) for i in range(self.rng.randint(5, 30))}
        self._give_tenants(random.Random(f"{seed} tenants"))
        self._give_kinds(random.Random(f"{seed} kinds"))
        self._arrivals = list(self.requests)
        self._speed = self.rng.choice([0.02, 0.1, 0.5, 1.0])
        self._down_at = self.rng.randint(5, 60) if options.tier_down else None
        self._slos: dict[str, SLO] = {}
        self._announced: list[str] = []
        self.now_s = 0.0
        self.reached: Counter[str] = Counter()
        self.checkers: list[Checker] = []

    def _make_stepping(self) -> Stepping:
        if self.options.num_stages > 1:
            return StagedStepping(self.sched, self._execute, self.options.num_stages)
        return (OverlappingStepping if self.options.overlaps else Stepping)(self.sched, self._execute)

    def run(self, checkers: Sequence[type[Checker]]) -> Counter[str]:
        """Run all requests to their ends under the eyes of those checkers which apply; return what was reached."""
        self.checkers = [each(self) for each in checkers if each.applies(self)]
        for step in range(MOST_STEPS):
            self._arrive()
            if not self._arrivals and not self.sched.has_unfinished and self.stepping.is_idle:
                break
            self._abort()
            self._notify(step)
            plan = self.sched.schedule(self.now_s)
            ended = self.sched.end_failed(self.now_s)
            for checker in self.checkers:
                checker.after_plan(plan)
            outputs = ended + self._step(plan, step)
            for checker in self.checkers:
                checker.after_results(step, outputs)
        else:
            pytest.fail(f"not finished after {MOST_STEPS} steps: {self.sched.stats()}")
        for checker in self.checkers:
            checker.at_end()
        self.reached["overtaken"] += getattr(self.stepping, "num_overtaken", 0)
        self.reached["in_stages"] += getattr(self.stepping, "num_in_stages", 0)
        return self.reached

    def _arrive(self) -> None:
        if not self._arrivals or (self._arrivals[0] not in self._announced and self.rng.random() < 0.5):
            return
        request_id = self._arrivals.pop(0)
        slo, arrival_s = self._slo_of(request_id), self.now_s - self.rng.choice([0.0, 0.01])
        try:
            request = self.requests[request_id]
            lora = None if request.lora is None else ADAPTERS[request.lora]
            self.sched.add(request_id, request, slo, self.now_s, arrival_s=arrival_s, lora=lora)
        except RequestRejected as error:
            for checker in self.checkers:
                checker.on_reject(self.requests[request_id], slo, error)
            self.reached["rejected"] += 1
            del self.requests[request_id]

    def _abort(self) -> None:
        if self.rng.random() > (0.05 if self.options.overlaps else 0.02):
            return
        victim = self.rng.choice(list(self.requests))
        output = self.sched.abort(victim, self.now_s)
        if output is None:
            return
        for checker in self.checkers:
            checker.on_abort(victim, output)
        if self.options.overlaps and self.oracle is None and self._ends.random() < 0.5:
            new = self._with_stop_tokens(_draw_request(self._ends, self._classes))
            with contextlib.suppress(ValueError):  # a copy or a host task still uses its KV
                self.sched.add(victim, new, SLO(), self.now_s)
                self.reached["reused"] += 1
                for checker in self.checkers:
                    checker.on_reuse(victim)
                self.requests[victim] = new

    def _notify(self, step: int) -> None:
        events = self.device.poll(self._speed)
        if step == self._down_at and self.sched.requests.limits.num_host_slots:
            self.device.is_down = True
            events.append(TierDown())
        self.sched.notify(events)

    def _step(self, plan: StepPlan, step: int) -> list[RequestOutput]:
        seconds = 0.005 if plan.decision is None or not plan.decision.predicted_s else plan.decision.predicted_s
        self.now_s, outputs = self.stepping.step(plan, self.now_s, seconds)
        returns = any(move.direction is MoveDirection.TO_DEVICE for move in plan.side_work(KVMove))
        if self.options.down_at_return and self._down_at is None and returns:
            self.device.is_down, self._down_at = True, step + 1
        return outputs

    def _execute(self, plan: StepPlan) -> StepOutput:
        result = self.device.execute(plan)
        sampled = [chunk.request_id for chunk in plan.chunks if chunk.request_id in result.tokens]
        if not self.options.overlaps or not sampled or self._ends.random() > 0.01:
            return result
        self.reached["failed"] += 1
        victim = self._ends.choice(sampled)
        left = {request_id: token for request_id, token in result.tokens.items() if request_id != victim}
        return dataclasses.replace(result, tokens=left, failed={victim: "non-finite logits"})

    def _must_leave(self) -> frozenset[str]:
        """Let the next request come while a step runs."""
        arrivals = self._arrivals
        if not arrivals or self.kinds[self.requests[arrivals[0]].service_class] is not ServiceClass.LS:
            return frozenset()
        self._announced.append(arrivals[0])
        slo, came_s = self._slo_of(arrivals[0]), self.now_s + self.rng.choice([0.0, 0.001, 0.01])
        return self.sched.policy.to_preempt(self.requests[arrivals[0]], slo, 0.0, came_s)

    def _slo_of(self, request_id: str) -> SLO:
        if request_id not in self._slos:
            ttft_s, tpot_s = self.rng.choice([None, 0.05, 0.5]), self.rng.choice([None, 0.01, 0.03])
            if self.defers:  # what waits for a higher class has slack
                is_highest = self.requests[request_id].service_class == preemptible.CLASSES[0].name
                ttft_s = self.rng.choice([0.02, 0.05, 0.1] if is_highest else [None, 0.5, 2.0])
            self._slos[request_id] = SLO(ttft_s=ttft_s, tpot_s=tpot_s) if self.oracle is not None else SLO()
        return self._slos[request_id]

    def _draw_request(self, guesses: random.Random) -> Request:
        request = _draw_request(self.rng, self._classes)
        if self.options.overlaps:
            request = self._with_stop_tokens(request)
        if self.options.has_drafts:
            request = _with_prediction(request, guesses)
        if self.seed % 3 == 0:
            request = _with_deadline(request, self._deadlines)
        num_fronts = 8 if self.options.is_host_short else 3
        return _with_front(request, num_fronts, guesses) if self.options.has_prefixes else request

    def _give_tenants(self, rng: random.Random) -> None:
        """Let the requests of some histories be of three tenants."""
        if rng.random() < 0.4:
            for request_id, request in self.requests.items():
                tenant, weight = rng.choice([("a", 1.0), ("b", 1.0), ("c", 2.0)])
                self.requests[request_id] = dataclasses.replace(request, tenant=tenant, weight=weight)

    def _give_kinds(self, rng: random.Random) -> None:
        """Let requests be of several kinds."""
        if not self.options.has_kinds:
            return
        for request_id, request in self.requests.items():
            sampling = request.sampling
            match rng.choice(["", "", "embedding", "scores", "prompt", "patience"]):
                case "embedding":
                    request = dataclasses.replace(request, speculation=None, predicted_token_ids=())
                    sampling = dataclasses.replace(sampling, max_tokens=0, pooling=rng.choice(["last", "mean", "mean"]))
                case "scores":
                    sampling = dataclasses.replace(sampling, prompt_logprobs=0)
                case "prompt":
                    sampling = dataclasses.replace(sampling, max_tokens=0, prompt_logprobs=0)
                case "patience":
                    request = dataclasses.replace(request, max_queue_s=rng.choice([0.03, 0.2]))
            adapter = rng.choice([None, *ADAPTERS]) if self.sched.requests.loras is not None else None
            self.requests[request_id] = dataclasses.replace(request, sampling=sampling, lora=adapter)

    def _with_stop_tokens(self, request: Request) -> Request:
        """Let about one in 30 of its tokens end a request."""
        stops = tuple(self._ends.sample(range(VOCAB), VOCAB // 30))
        return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, stop_token_ids=stops))

    def _draw_limits(self, guesses: random.Random) -> SchedulerLimits:
        rng, usage = self.rng, self.kv.usage()
        num_blocks = usage.device_total
        drawn: dict[str, Any] = {
            "num_layers": rng.randint(1, 5), "max_model_len": 64, "max_num_batched_tokens": rng.choice([4, 16, 64]),
            "max_num_seqs": rng.choice([3, 16]), "num_host_slots": rng.choice([2, 8]) if usage.host_total else 0,
            "max_piggyback_seats": rng.choice([1, 4]), "max_piggyback_rows": rng.choice([None, 2]),
            "ls_reserve_blocks": rng.choice([0, 3]), "checkpoint_blocks": rng.choice([0, 1, 4]),
            "be_order": "decode" if num_blocks % 2 else "prefill", "swap_in_delay_s": rng.choice([0.0, 0.02]),
            "offload_for_time": rng.random() < 0.5, "min_residence_s": rng.choice([0.0, 0.1]),
            "hybrid_first_batch": num_blocks % 3 > 0,
        }  # fmt: skip
        if self.options.is_crowded:
            drawn |= {"num_host_slots": 8, "max_num_batched_tokens": 64, "max_piggyback_rows": None}
            drawn |= {"max_piggyback_seats": rng.choice([2, 4, 8]), "ls_reserve_blocks": 3, "min_host_per_device": 0}
        if num_blocks % 4 > 1 or self.options.is_crowded:
            drawn["late_layers"] = drawn["num_layers"] - num_blocks % 2  # a GPU looks at all layers but the last one
        if self.options.num_stages > 1:
            drawn["parallel"] = ParallelConfig(pipeline_parallel_size=self.options.num_stages)
            drawn["strategy"] = "overlapped"
            if drawn.get("late_layers"):
                drawn["late_layers"] = drawn["num_layers"]  # of stages, the last layer may have late joins, too
        if self.options.has_states:
            drawn["num_state_slots"] = 2 * drawn["max_num_seqs"] + drawn["num_host_slots"]
        if self.options.has_drafts:
            drawn["max_host_drafts"] = guesses.choice([1, 3, 8] if self.options.is_crowded else [0, 1, 3, 8])
        if self.options.has_kinds and self.options.num_stages == 1:  # adapters by name need one rank
            drawn["lora"] = LoRAConfig(max_loras=1 + num_blocks % 3)
        drawn |= _without_some(random.Random(f"{self.seed} mechanisms"))
        if self.options.has_kinds:
            drawn["be_max_wait_s"] = guesses.choice([None, 0.02, 0.2])
        if self.defers:
            drawn |= {"defer_classes": True, "classes": preemptible.CLASSES, "max_num_batched_tokens": 64}
            drawn |= {"defer_tokens": ("off", "late", "always")[num_blocks % 3], "most_token_steps": 2 + num_blocks % 5}
        return make_limits(self.scheduler, **drawn)


class Checker:
    """Watches one property over a history: what a subclass needs of it, it overrides."""

    def __init__(self, history: History) -> None:
        self.history, self.sched, self.device = history, history.sched, history.device
        self.reached = history.reached

    @classmethod
    def applies(cls, history: History) -> bool:
        """Tell whether this history has what is watched."""
        return True

    def after_plan(self, plan: StepPlan) -> None:
        """The plan is made, and not run yet."""

    def after_results(self, step: int, outputs: Sequence[RequestOutput]) -> None:
        """The step has run, or is in flight; these are the outputs of the last one that ended."""

    def on_reject(self, request: Request, slo: SLO, error: RequestRejected) -> None:
        """A request was not admitted."""

    def on_abort(self, request_id: str, output: RequestOutput) -> None:
        """A request was aborted."""

    def on_reuse(self, request_id: str) -> None:
        """A new request is about to take the id of an aborted one."""

    def at_end(self) -> None:
        """All requests have ended."""


def _make_kv(name: str, rng: random.Random, options: Options) -> KVManager:
    manager = KV_MANAGERS.get(name)
    num_device_blocks = rng.randint(16, 19 if options.is_crowded or options.is_host_short else 40)
    host_sizes = [30, 80] if options.is_crowded else [12, 16] if options.is_host_short else [0, 12, 30, 80]
    num_host_blocks = rng.choice(host_sizes) if manager.abilities.moves else 0
    caches: dict[str, Any] = {}
    if options.has_prefixes:
        caches = {"prefix_cache": True, "num_protected_blocks": num_device_blocks // 4}
        caches |= {"host_prefixes": True} if manager.abilities.moves else {}
        if num_host_blocks and (num_slots := rng.choice([5, 60] if options.is_host_short else [0, 5, 60])):
            from omniserve.kv.disk_prefixes import DiskPrefixes

            caches["disk"] = DiskPrefixes(num_slots)
    sizes = {"num_device_blocks": num_device_blocks, "num_host_blocks": num_host_blocks, "block_size": BLOCK}
    return manager(**sizes, **caches)


MECHANISMS = (
    "headrooms", "newcomer_bound", "seat_objective", "partial_progress_first", "watch_host", "layer_preemption",
    "best_step_size", "replace_ls", "adapt_batch",
)  # fmt: skip
"""Options that switch a mechanism of a policy off."""


def _without_some(rng: random.Random) -> dict[str, bool]:
    """Switch each mechanism off in a quarter of the histories."""
    return {name: rng.random() >= 0.25 for name in MECHANISMS}


def _draw_forecast(rng: random.Random, num_layers: int) -> Forecast:
    return forecast(
        num_layers, base=rng.choice([0.5, 5.0]), row=rng.choice([0.1, 1.0]), key=rng.choice([0.001, 0.05]),
        shared=rng.choice([1.0, 2.0]), host_key=rng.choice([0.0001, 0.01]),
    )  # fmt: skip


def _draw_request(rng: random.Random, classes: Sequence[str]) -> Request:
    return Request(
        prompt_token_ids=[rng.randrange(1000) for _ in range(rng.randint(1, 30))],
        sampling=SamplingParams(max_tokens=rng.randint(1, 30), ignore_eos=True), service_class=rng.choice(classes),
    )  # fmt: skip


def _with_deadline(request: Request, rng: random.Random) -> Request:
    """Let a third of the requests have a deadline for the whole output: tight, feasible, or far away."""
    return dataclasses.replace(request, deadline_s=rng.choice([None, None, None, None, 0.2, 2.0, 100.0]))


def _with_front(request: Request, num_fronts: int, rng: random.Random) -> Request:
    """Let most prompts begin with one of a few longer texts, or with a part of it."""
    if rng.random() < 0.2:
        return request
    text = random.Random(rng.randrange(num_fronts)).choices(range(VOCAB), k=24)
    front = text[: rng.choice([9, 24, 24])]
    session = random.Random(sum(request.prompt_token_ids)).choice(["", "a", "b"])
    return dataclasses.replace(request, prompt_token_ids=[*front, *request.prompt_token_ids][:34], session=session)


def _with_prediction(request: Request, rng: random.Random) -> Request:
    """Let most requests be decoded speculatively, by guesses that are right for a while and then wrong."""
    predicted = expected_tokens(tuple(request.prompt_token_ids), request.sampling.max_tokens)
    share = rng.choice([0.0, 0.05, 0.3])
    for index in range(len(predicted)):
        if rng.random() < share:
            predicted[index] = rng.choice([predicted[index - 1], rng.randrange(VOCAB)])
    return dataclasses.replace(request, predicted_token_ids=predicted, speculation=rng.random() < 0.9)

"""A scheduler on a fake device with a virtual clock: ``Bench`` sets what a step takes, ``Clock`` predicts it."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from omniserve.core.lora import LoRA
from omniserve.core.plan import StepPlan
from omniserve.core.request import SLO, Request, RequestOutput, SamplingParams
from omniserve.core.work import KVMove
from omniserve.kv import KV_MANAGERS
from omniserve.kv.bidirectional import BidirectionalKVManager
from omniserve.sched import Forecast, Scheduler, policy_of
from tests.sched.fake_device import FakeDevice
from tests.sched.limits import BLOCK, make_limits
from tests.sched.predictor import forecast
from tests.sched.stepping import OverlappingStepping, Stepping


def names(plan: StepPlan) -> list[str]:
    return [chunk.request_id for chunk in plan.chunks]


def class_of(name: str) -> str:
    """Requests are named after their class: ``be``, ``ls3``, ``ls-long``."""
    match = re.match("[a-z]+", name)
    assert match is not None, name
    return match[0].upper()


class Machine:
    """The parts that both benches have; each has a ``step`` of its own."""

    def __init__(
        self, policy: str, *, kv: str, device_blocks: int, host_blocks: int, caches: dict[str, Any], seed: int = 0,
        predict: dict[str, float] | Forecast | None = None, overlaps: bool = False, settings: dict[str, Any],
    ) -> None:  # fmt: skip
        self.now_s = 0.0
        self.finished: set[str] = set()
        self.limits = make_limits(policy, **{"num_host_slots": 8 if host_blocks else 0} | settings)
        self.kv = KV_MANAGERS.get(kv)(
            num_device_blocks=device_blocks, num_host_blocks=host_blocks, block_size=BLOCK, **caches
        )
        self.forecast: Forecast | None = None
        if isinstance(predict, Forecast):
            self.forecast = predict
        elif predict is not None:
            self.forecast = forecast(self.limits.num_layers, **predict)
        self.scheduler = Scheduler(
            *policy_of(self.limits.config), limits=self.limits, kv=self.kv, forecast=self.forecast
        )  # fmt: skip
        self.requests = self.scheduler.requests
        self.device = FakeDevice(
            block_size=BLOCK, num_layers=self.limits.num_layers, max_tokens=self.limits.config.max_num_batched_tokens,
            rng=random.Random(seed),
        )  # fmt: skip
        self.device.abandoned = self.requests.moves.abandoned
        stepping = OverlappingStepping if overlaps else Stepping
        self.checks = True
        """Verify the integrity of everything after each step, which takes most of the time if many requests wait."""
        self._stepping = stepping(self.scheduler, self.device.execute)
        if isinstance(self.kv, BidirectionalKVManager):
            self.device.sharers = self.kv._device.sharers

    def add(
        self, name: str, *, prompt: int = 4, output: int = 100, ttft: float | None = None, tpot: float | None = None,
        waited: float = 0.0, scores_prompt: bool = False, salt: str | None = None, by_default: bool = False,
        deadline: float | None = None, max_queue: float | None = None,
        tenant: str = "", weight: float = 1.0, lora: str | None = None,
        pooling: str | None = None,
    ) -> float | None:  # fmt: skip
        """Add a request. With a prefix cache it shares its prompt with those of the same ``salt``; None: with none.

        ``by_default``: the objectives are its class's, not its own.
        """
        slo = SLO(ttft_s=ttft, tpot_s=tpot)
        request = Request(
            prompt_token_ids=[7] * prompt,
            cache_salt=name if salt is None else salt,
            sampling=SamplingParams(max_tokens=output, prompt_logprobs=0 if scores_prompt else None, pooling=pooling),
            service_class=class_of(name),
            slo=None if by_default else slo,
            deadline_s=deadline,
            max_queue_s=max_queue,
            tenant=tenant,
            weight=weight,
            lora=lora,
        )
        adapter = LoRA(name=lora, folder="", digest=lora) if lora is not None else None
        return self.scheduler.add(name, request, slo, self.now_s, arrival_s=self.now_s - waited, lora=adapter)

    def step(self) -> Any:
        raise NotImplementedError

    def steps_until(self, condition: Callable[[], object], most: int = 1000) -> Iterator[Any]:
        """Yield what each step returns, until the condition holds before one."""
        for _ in range(most):
            if condition():
                return
            yield self.step()
        assert condition(), f"not reached in {most} steps: {self.scheduler.stats()}"

    def run_until(self, condition: Callable[[], object], most: int = 1000) -> list[Any]:
        """Run steps until the condition holds; return what they returned."""
        return list(self.steps_until(condition, most))

    def _run(self, host_chance: float, seconds: Callable[[StepPlan], float]) -> tuple[StepPlan, list[RequestOutput]]:
        self.scheduler.notify(self.device.poll(host_chance))
        plan = self.scheduler.schedule(self.now_s)
        self.now_s, outputs = self._stepping.step(plan, self.now_s, seconds(plan))
        self.finished |= {output.request_id for output in outputs if output.finished}
        if self.checks:
            self.scheduler.check_integrity()
        return plan, outputs


class Bench(Machine):
    """A bench without a forecast; a step runs with all host work done before it, or part of it."""

    def __init__(
        self, policy: str, *, kv: str = "tiered", device_blocks: int = 8, host_blocks: int = 0, seed: int = 0,
        num_protected: int | None = None, host_prefixes: bool = False, **settings: Any,
    ) -> None:  # fmt: skip
        """``num_protected``: there is a prefix cache, which protects so many blocks.

        ``host_prefixes``: the cache goes on in host memory.
        """
        caches: dict[str, Any] = {}
        if num_protected is not None:
            caches = {"prefix_cache": True, "num_protected_blocks": num_protected}
            caches |= {"host_prefixes": True} if host_prefixes else {}
        super().__init__(
            policy, kv=kv, device_blocks=device_blocks, host_blocks=host_blocks, caches=caches, seed=seed,
            settings=settings,
        )  # fmt: skip

    def step(self, *, host_chance: float = 1.0, seconds: float = 0.01) -> tuple[StepPlan, list[RequestOutput]]:
        return self._run(host_chance, lambda plan: seconds)


class Clock(Machine):
    """Steps take just what the forecast says, or ``slower`` times that."""

    def __init__(
        self, *, device_blocks: int = 400, host_blocks: int = 0, predict: dict[str, float] | Forecast | None = None,
        slower: float = 1.0, policy: str = "omniserve", kv: str = "tiered", overlaps: bool = False,
        caches: dict[str, Any] | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        """``caches``: more arguments of the KV manager."""
        super().__init__(
            policy, kv=kv, device_blocks=device_blocks, host_blocks=host_blocks, caches=caches or {},
            predict=predict or {}, overlaps=overlaps, settings=settings,
        )  # fmt: skip
        self.slower = slower
        self.first_s: dict[str, float] = {}
        self.token_s: defaultdict[str, list[float]] = defaultdict(list)
        self.moves: list[tuple[float, str]] = []

    def step(self) -> StepPlan:
        plan, outputs = self._run(1.0, self._seconds)
        for output in outputs:
            self.first_s.setdefault(output.request_id, self.now_s)
            self.token_s[output.request_id] += [self.now_s] * len(output.new_token_ids)
        return plan

    def _seconds(self, plan: StepPlan) -> float:
        assert plan.decision is not None and plan.decision.predicted_s is not None
        self.moves += [(self.now_s, move.request_id) for move in plan.side_work(KVMove)]
        return self.slower * plan.decision.predicted_s or 0.001

    def tokens(self, plan: StepPlan) -> Counter[str]:
        """Return device tokens by class."""
        tokens: Counter[str] = Counter()
        for chunk in plan.chunks:
            tokens[class_of(chunk.request_id)] += len(chunk.token_ids)
        return tokens

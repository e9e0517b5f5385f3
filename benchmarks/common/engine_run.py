"""Engines in this process, without HTTP: EngineRun serves a load in real time, SteadyRun so many requests always."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import Counter, deque
from typing import Any

from omniserve import SLO, Engine, Request, RequestOutput, RequestRejected, SamplingParams
from omniserve.simulate import Load
from omniserve.simulate.load import TraceRequest
from omniserve.simulate.results import ClassResult, RequestResult, summarise

_NAP_S = 0.001
"""Longest sleep of a run that has nothing to do."""


def request(name: str, prompt: int, output: int, **more: Any) -> Request:
    """Return a request for exactly so many tokens; names that begin with ``ls`` are latency-sensitive.

    Its name is its id; prompts of different names differ, and have ids from ``[1, 500)``, which every model knows.
    """
    first = sum(name.encode())
    return Request(
        prompt_token_ids=[1 + (first + 7 * i) % 499 for i in range(prompt)],
        sampling=SamplingParams(max_tokens=output, ignore_eos=True),
        service_class="LS" if name.startswith("ls") else "BE", request_id=name, **more,
    )  # fmt: skip


class EngineRun:
    """Serves a load as ``simulate`` does on its clock: requests at their times, or best-effort ones from a pile.

    With ``load.backlog``, so many best-effort requests are kept unfinished until the load ends, or the pile does.
    Subclasses override ``add_due``, ``add`` and ``note`` where requests come for another reason, or more is to be
    measured.

    Args:
        engine: Without requests.
        load: What comes; without a duration, until all of it is done.
        seed: Seed of the prompts' tokens.
        slo: Objectives of LS requests, sent along; None: their class's.
    """

    def __init__(self, engine: Engine, load: Load, seed: int = 0, slo: SLO | None = None) -> None:
        self.engine, self.load, self._slo = engine, load, slo
        self.results: dict[str, RequestResult] = {}
        self.unfinished: Counter[str] = Counter()
        self.began_s = 0.0
        self._rng, self._num_requests = random.Random(seed), 0
        arrivals = [(row.arrival_s, self.request("LS", row)) for row in load.latency_sensitive]
        if not load.backlog:
            arrivals += [(row.arrival_s, self.request("BE", row)) for row in load.best_effort]
        self.upcoming = deque(sorted(arrivals, key=lambda arrival: arrival[0]))
        self._pile = iter(load.best_effort if load.backlog else ())

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.began_s

    def request(self, service_class: str, row: TraceRequest) -> Request:
        """Return a request of this size for random tokens."""
        self._num_requests += 1
        return Request(
            prompt_token_ids=self._rng.choices(range(1, self.engine.spec.vocab_size), k=row.input_tokens),
            sampling=SamplingParams(max_tokens=row.output_tokens, ignore_eos=True), service_class=service_class,
            slo=self._slo if service_class == "LS" else None, request_id=f"{service_class}-{self._num_requests}",
        )  # fmt: skip

    def run(self, drain_s: float = 60.0) -> None:
        """Serve the load, then for at most ``drain_s`` what LS requests are left, or if that is infinite, all requests.

        ``before`` and ``after`` are the engine's counters as the load began and ended.
        """
        duration_s = math.inf if self.load.duration_s is None else self.load.duration_s
        self.before = self.engine.stats()
        self.began_s = time.monotonic()
        while (now_s := self.now_s) < duration_s:
            self.add_due(now_s)
            if self.engine.has_unfinished:
                self.step()
            elif self.load.duration_s is None and not self.upcoming:
                break
            else:
                next_s = min(duration_s, self.upcoming[0][0] if self.upcoming else math.inf)
                time.sleep(max(0.0, min(_NAP_S, next_s - self.now_s)))
        self.after, self.seconds = self.engine.stats(), self.now_s
        self._add_arrived(duration_s)  # what came during the last step
        drained = ("LS", "BE") if drain_s == math.inf else ("LS",)
        while any(self.unfinished[name] for name in drained) and self.now_s < duration_s + drain_s:
            self.step()

    def add_due(self, now_s: float) -> None:
        """Add the requests that have come."""
        while self.unfinished["BE"] < self.load.backlog and (row := next(self._pile, None)) is not None:
            self.add(self.request("BE", row), now_s)
        self._add_arrived(now_s)

    def _add_arrived(self, now_s: float) -> None:
        while self.upcoming and self.upcoming[0][0] <= now_s:
            arrival_s, request = self.upcoming.popleft()
            self.add(request, arrival_s)

    def add(self, request: Request, arrival_s: float) -> None:
        """Add a request that came so many seconds after the beginning."""
        kind, max_tokens = request.service_class, request.sampling.max_tokens
        assert request.request_id is not None and max_tokens is not None
        result = RequestResult(kind, arrival_s, len(request.prompt_token_ids), max_tokens)
        self.results[request.request_id] = result
        try:
            self.engine.add(request, arrival_s=self.began_s + arrival_s)
            self.unfinished[kind] += 1
        except RequestRejected:
            result.rejected = True

    def step(self) -> None:
        """Make a step, and note what it brought."""
        for output in self.engine.step():
            self.note(output)
        if self.engine.last_plan_was_empty:
            time.sleep(0.001) if self.engine.host_tier is None else self.engine.wait(0.01)

    def note(self, output: RequestOutput) -> None:
        """Note a request's new tokens."""
        result, times = self.results[output.request_id], output.times
        assert times is not None
        if times.first_token_s is not None:
            result.first_token_s = times.first_token_s - self.began_s
        result.num_output_tokens, result.num_host_tokens = output.num_output_tokens, output.num_host_tokens
        if output.finished:
            assert times.finished_s is not None
            result.finished_s = times.finished_s - self.began_s
            self.unfinished[output.service_class] -= 1

    def grown(self, counter: str, service_class: str | None = None) -> float:
        """Return by how much one of the scheduler's counters grew while the load came."""
        before, after = getattr(self.before.scheduler, counter), getattr(self.after.scheduler, counter)
        return after - before if service_class is None else after.get(service_class, 0) - before.get(service_class, 0)

    def of_class(self, name: str, slo: SLO) -> ClassResult:
        """Return the figures of one class."""
        return summarise(
            [result for result in self.results.values() if result.service_class == name], slo,
            duration_s=self.load.duration_s or self.seconds,
            output_tokens=int(self.grown("output_tokens", name)), prompt_tokens=int(self.grown("prompt_tokens", name)),
        )  # fmt: skip


class SteadyRun:
    """An engine whose requests begin anew as they end: so many of each class are always there.

    Args:
        engine: Without requests.
        num_ls, num_be: Requests that decode.
        prompt: Tokens of a best-effort prompt.
    """

    def __init__(self, engine: Engine, *, num_ls: int, num_be: int, prompt: int) -> None:
        self.engine = engine
        self._prompts = {"be": prompt, "ls": 16}
        self._num_begun = 0
        for kind in ["be"] * num_be + ["ls"] * num_ls:
            self._begin(kind)
        while engine.stats().scheduler.waiting["BE"] or engine.stats().scheduler.host_output_tokens < num_be:
            self._step()

    def _begin(self, kind: str) -> None:
        self.engine.add(request(f"{kind}{self._num_begun}", self._prompts[kind], 1500))
        self._num_begun += 1

    def _step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                self._begin(output.request_id[:2])

    def window(self, seconds: float) -> dict[str, float]:
        """Serve for some seconds; return what the host tier brought, and the time of a step in seconds."""
        engine = self.engine
        before, began_s = engine.stats(), time.perf_counter()
        steps_s: list[float] = []
        step_began_s = began_s
        while (took_s := step_began_s - began_s) < seconds:
            self._step()
            ended_s = time.perf_counter()
            steps_s.append(ended_s - step_began_s)
            step_began_s = ended_s
        after = engine.stats()
        host_tokens = after.scheduler.host_output_tokens - before.scheduler.host_output_tokens
        steps = after.scheduler.host_token_steps - before.scheduler.host_token_steps
        steps_s.sort()
        return {
            "steps_per_layer": steps / max(1, host_tokens) / engine.spec.num_layers,
            "host_tokens_per_s": host_tokens / took_s,
            "be_tokens_per_s": (after.scheduler.output_tokens["BE"] - before.scheduler.output_tokens["BE"]) / took_s,
            "ls_tokens_per_s": (after.scheduler.output_tokens["LS"] - before.scheduler.output_tokens["LS"]) / took_s,
            "rows_per_step": (after.piggyback_rows - before.piggyback_rows) / (after.steps - before.steps),
            "step_p50_s": statistics.median(steps_s), "step_p99_s": steps_s[int(0.99 * len(steps_s))],
        }  # fmt: skip

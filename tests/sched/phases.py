"""A machine that is slow and fast by turns, its latency model, which learns from it, and random histories of load."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field

from omniserve.core.errors import RequestRejected
from omniserve.core.plan import StepPlan
from omniserve.core.request import SLO, ClassSpec
from omniserve.latency import CorrectedModel, features_of
from tests.sched.benches import Machine
from tests.sched.predictor import LinearPredictor, forecast

DEFAULT_TTFT_S = 0.5
MAX_TOKENS = 256
CLASSES = (ClassSpec(name="LS", kind="LS", slo=SLO(ttft_s=DEFAULT_TTFT_S)), ClassSpec(name="BE", kind="BE"))


@dataclass(frozen=True)
class Arrival:
    """A request of a history."""

    at_s: float
    name: str
    prompt: int
    output: int
    ttft_s: float | None
    by_default: bool


@dataclass
class History:
    """Arrivals and phases of the machine."""

    arrivals: list[Arrival]
    phases: list[tuple[float, float]]
    """(when it ends, how many times as long steps take until then)."""
    end_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.end_s = self.phases[-1][0]

    @classmethod
    def draw(cls, rng: random.Random) -> History:
        """Draw phases of 1 to 6 s, each with a load of its own: a pause, few requests, or more than can be served."""
        now_s, phases, arrivals, number = 0.0, [], [], 0
        for _ in range(rng.randint(3, 7)):
            begin_s, now_s = now_s, now_s + rng.uniform(1, 6)
            phases.append((now_s, rng.choice([1.0, 1.0, 1.0, 2.0, 6.0, 12.0])))
            rate = rng.choice([0.0, 1.0, 4.0, 10.0, 30.0])
            at_s = begin_s
            while rate and (at_s := at_s + rng.expovariate(rate)) < now_s:
                number += 1
                is_ls = rng.random() < 0.8
                arrivals.append(
                    Arrival(
                        at_s,
                        f"{'ls' if is_ls else 'be'}{number}",
                        rng.choice([4, 20, 60, 150, 600]),
                        rng.randint(1, 8),
                        rng.choice([DEFAULT_TTFT_S, 0.2, 2.0]) if is_ls else None,
                        by_default=rng.random() < 0.6,
                    )
                )
        return cls([_with_default(each) for each in arrivals], phases)


def _with_default(arrival: Arrival) -> Arrival:
    is_ls = arrival.ttft_s is not None
    return dataclasses.replace(arrival, ttft_s=DEFAULT_TTFT_S) if arrival.by_default and is_ls else arrival


class PhasedMachine(Machine):
    """A fake device whose steps take what a linear model says, times what the phase says.

    Args:
        is_coarse: The profile is a coarse one.
        profile_error: The profile says that steps take so many times what they take on the machine at normal speed.
    """

    def __init__(
        self, *, is_coarse: bool = False, profile_error: float = 1.0, device_blocks: int = 2000, **settings: object
    ) -> None:
        profile = LinearPredictor(base=5 * profile_error, row=profile_error, key=0.01 * profile_error)
        self.learning = CorrectedModel(profile, is_coarse=is_coarse)
        self.true = LinearPredictor()
        super().__init__(
            "omniserve", kv="tiered", device_blocks=device_blocks, host_blocks=0, caches={},
            predict=dataclasses.replace(forecast(), predictor=self.learning),
            settings={"max_num_batched_tokens": MAX_TOKENS, "classes": CLASSES, **settings},
        )  # fmt: skip
        self.slower = 1.0
        self.first_s: dict[str, float] = {}

    def alone_s(self, prompt: int) -> float:
        """Return what a prompt takes alone at normal speed."""
        step, left, total_s = self.forecast.step(), prompt, 0.0
        step._predictor = self.true
        while left:
            count = min(left, MAX_TOKENS)
            chunk = step.copy()
            chunk.add_chunk(prompt - left, count, samples=int(count == left))
            total_s, left = total_s + chunk.seconds(), left - count
        return total_s

    def step(self) -> StepPlan:
        plan, outputs = self._run(1.0, self._seconds)
        for output in outputs:
            self.first_s.setdefault(output.request_id, self.now_s)
        if not plan.is_empty:
            seconds = self._seconds(plan)
            self.learning.observe(features_of(plan, self.forecast.shape), seconds, self.now_s)
        return plan

    def _seconds(self, plan: StepPlan) -> float:
        return self.slower * self.true.step_s(features_of(plan, self.forecast.shape)) or 0.001

    def send(self, arrival: Arrival) -> None:
        """Add a request of a history."""
        self.add(
            arrival.name, prompt=arrival.prompt, output=arrival.output, ttft=arrival.ttft_s,
            waited=self.now_s - arrival.at_s, by_default=arrival.by_default,
        )  # fmt: skip

    def run(self, history: History) -> tuple[int, int, list[tuple[Arrival, RequestRejected, bool]]]:
        """Run a history; return how many LS requests had a first token in it, how many of these in time, and refusals.

        A refusal comes with whether there was no other LS request.
        """
        upcoming, refusals, sent = list(history.arrivals), [], []
        while self.now_s < history.end_s:
            self.slower = next(slower for end_s, slower in history.phases if self.now_s < end_s)
            while upcoming and upcoming[0].at_s <= self.now_s:
                arrival = upcoming.pop(0)
                is_idle = not any(name.startswith("ls") for name in self.requests.states)
                try:
                    self.send(arrival)
                except RequestRejected as error:
                    refusals.append((arrival, error, is_idle))
                else:
                    sent.append(arrival)
            if self.scheduler.has_unfinished:
                self.step()
            else:
                self.now_s = min(upcoming[0].at_s if upcoming else history.end_s, history.end_s)
        times = [(self.first_s[a.name] - a.at_s, a.ttft_s) for a in sent if a.ttft_s and a.name in self.first_s]
        return len(times), sum(taken_s <= ttft_s for taken_s, ttft_s in times), refusals

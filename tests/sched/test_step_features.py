"""A step feature of one's own: one new file, and one line that registers it. CONTRIBUTING.md walks through this one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from omniserve.core.plan import StepOutput
from omniserve.core.request import Request
from omniserve.sched import features
from omniserve.sched.features import STEP_FEATURES, StepFeatureEntry
from omniserve.sched.features.base import FeatureContext, Row, StepFeature
from omniserve.sched.state import Phase, RequestState
from omniserve.sched.step_cost import StepCost
from tests.sched.benches import Clock
from tests.sched.limits import make_limits

SIZE = 3


@dataclasses.dataclass
class Portions:
    """What the feature knows of a request."""

    sizes: list[int] = dataclasses.field(default_factory=list)


class SmallPortions(StepFeature):
    """Has prompts with the salt "small" computed in chunks of three tokens."""

    def __init__(self, context: FeatureContext) -> None:
        self.moves: list[tuple[str, Phase]] = []

    def chunk_size(self, state: RequestState, tokens_left: int, cost: StepCost | None, bound_s: float) -> int | None:
        if not is_small(state.request) or tokens_left < SIZE:
            return None
        return min(SIZE, state.num_tokens - state.num_computed_tokens)

    def on_computed(
        self, state: RequestState, row: Row, output: StepOutput, expect_token: Callable[[RequestState], None]
    ) -> None:
        if is_small(state.request):
            state.fact(Portions).sizes.append(state.num_computed_tokens)

    def on_phase(self, state: RequestState, phase: Phase) -> None:
        self.moves.append((state.request_id, phase))


def is_small(request: Request) -> bool:
    return request.cache_salt == "small"


@pytest.fixture(autouse=True)
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = StepFeatureEntry(
        lambda: SmallPortions, lambda context: False, lambda context, request: is_small(request)
    )  # fmt: skip
    monkeypatch.setattr(features, "STEP_FEATURES", [*STEP_FEATURES, entry])


def test_a_feature_comes_with_the_first_request_that_wants_it() -> None:
    bench = Clock()
    bench.add("ls-large", prompt=10, output=2)
    bench.step()
    assert bench.requests.features.on == [], "nobody has asked for it yet"
    bench.add("ls-small", prompt=10, output=2, salt="small")
    sizes = []
    state = bench.requests.states["ls-small"]
    while bench.scheduler.has_unfinished:
        chunks = {chunk.request_id: len(chunk.token_ids) for chunk in bench.step().chunks}
        sizes.append(chunks.get("ls-small", 0))
    (feature,) = bench.requests.features.on
    assert isinstance(feature, SmallPortions)
    assert sizes == [3, 3, 3, 1, 1] and state.fact(Portions).sizes == [3, 6, 9, 10, 11]
    assert ("ls-small", Phase.FINISHED) in feature.moves and feature.moves[0][0] == "ls-large"
    assert bench.finished == {"ls-large", "ls-small"}


def test_limits_say_which_requests_have_drafts() -> None:
    bench = Clock()
    bench.add("ls", prompt=4, output=2)
    assert not bench.requests.features.on, "an engine none of whose requests has drafts does not have the feature"
    wants = Request(prompt_token_ids=[1], speculation=True)
    plain = Request(prompt_token_ids=[1])
    assert [make_limits().is_speculative(request) for request in (plain, wants)] == [False, True]
    assert not make_limits(num_state_slots=4).is_speculative(wants), "states cannot go back to the last right draft"

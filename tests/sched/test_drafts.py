"""Tests of drafts: the drafter, what is learned of it, for which requests it drafts how much, and the rows of a
step."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from omniserve.core.plan import DeviceChunk, PiggybackEntry, PiggybackJoin
from omniserve.core.request import SLO, Request, SamplingParams, ServiceClass
from omniserve.core.work import MoveDirection
from omniserve.kv import KV_MANAGERS, Tier
from omniserve.sched import Scheduler, policy_of
from omniserve.sched.fairness import ClassAccounts
from omniserve.sched.features.base import OpenStep
from omniserve.sched.features.draft_rows import MAX_DRAFTS_WITHOUT_FORECAST, with_drafts
from omniserve.sched.features.drafter import Drafter, PromptLookup
from omniserve.sched.features.drafts import Drafts
from omniserve.sched.features.host_draft_rows import with_host_drafts
from omniserve.sched.features.speculation import MAX_DRAFTS, Speculation, speculation_of
from omniserve.sched.host_rows import AwayToken, HostRows
from omniserve.sched.seats import num_seats
from omniserve.sched.state import RequestState
from tests.sched.limits import BLOCK, make_limits
from tests.sched.predictor import forecast


def newest_run(text: list[int], end: int) -> int:
    """Return what ``PromptLookup`` has to find, by looking at everything."""
    for n in (4, 3, 2):
        for behind in range(end - 1, n - 1, -1) if end >= n else ():
            if text[behind - n : behind] == text[end - n : end]:
                return behind
    return -1


@pytest.mark.parametrize("vocabulary", [3, 20, 60])
def test_the_longest_and_newest_run_goes_on_as_it_did(vocabulary: int) -> None:
    rng = random.Random(vocabulary)
    text = [rng.randrange(vocabulary) for _ in range(700)]
    drafter, num_found, num_missed = PromptLookup(0), 0, 0
    for end in range(1, len(text) + 1):
        source = newest_run(text, end)
        drafts = drafter.draft(text, end, 5)
        want = list(text[:end])
        for _ in range(5):
            want.append(want[source + len(want) - end])
        if source < 0:
            assert drafts == []
        elif drafts == want[end:]:
            num_found += 1
        else:
            num_missed += 1  # one of its places in a table was given to another run since
    assert num_found > 50 and num_missed < 0.15 * num_found


def test_a_long_prompt_is_indexed_in_parts() -> None:
    prompt = [*range(10, 9000), 10, 11]
    drafter = PromptLookup(len(prompt))
    text = [*prompt, 8000, 8001]
    drafts = [drafter.draft(text, len(text), 3) for _ in range(6)]
    assert drafts[0] == [] and drafts[-1] == [8002, 8003, 8004]


def test_a_text_that_repeats_itself_is_continued_past_its_end() -> None:
    assert PromptLookup(0).draft([1, 2, 3, 1, 2], 5, 7) == [3, 1, 2, 3, 1, 2, 3]
    assert PromptLookup(0).draft([5, 5, 5], 3, 4) == [5, 5, 5, 5]


def test_a_prediction_is_followed_and_found_again() -> None:
    predicted = [*range(100, 140)]
    drafter, text = PromptLookup(2, predicted), [1, 2]
    assert drafter.draft([*text, 100], 3, 3) == [101, 102, 103]
    text += [100, 101, 7]  # it differs in one token
    assert drafter.draft(text, 5, 3) == []
    text += [103, 104]
    assert drafter.draft(text, 7, 3) == [105, 106, 107]
    text += [120, 121]  # it leaves some out
    assert drafter.draft(text, 9, 3) == [122, 123, 124]
    text += [8, 9, 10, 104, 105]  # it goes back
    assert drafter.draft(text, 14, 3) == [106, 107, 108]
    text += [139 - i for i in range(3)] + [138, 139]
    assert drafter.draft(text, 19, 3) == [], "nothing is predicted behind the end"


def test_the_text_itself_is_used_where_the_prediction_says_nothing() -> None:
    drafter = PromptLookup(4, [50, 51])
    assert drafter.draft([1, 2, 3, 4, 1, 2], 6, 3) == [3, 4, 1]


class _Fixed(Drafter):
    """Always guesses the same."""

    def __init__(self, *guess: int) -> None:
        self.guess = guess
        self.num_asked = 0

    def draft(self, token_ids: object, end: int, most: int) -> list[int]:
        self.num_asked += 1
        return list(self.guess[:most])


def test_guesses_that_fail_are_no_longer_computed_until_they_would_have_been_right() -> None:
    speculation, text = Speculation(_Fixed(*range(1, 20))), [0]
    num_rows = 0
    for _ in range(200):
        num_rows += len(drafts := speculation.draft(text, len(text), speculation.num_likely))
        if drafts:
            speculation.learn(len(drafts), 0)
        text.append(77)
    assert num_rows <= 3 and speculation.chance < 0.01
    for _ in range(6):
        assert speculation.draft(text, len(text), 8) == [] or speculation.chance >= 0.3
        text.append(1)
    assert speculation.draft(text, len(text), 8) != []


def test_drafts_that_are_right_become_more() -> None:
    speculation, text = Speculation(_Fixed(*range(1, 20))), [0]
    counts = []
    for _ in range(12):
        drafts = speculation.draft(text, len(text), speculation.num_likely)
        counts.append(len(drafts))
        speculation.learn(len(drafts), len(drafts))
        text += [*drafts, 0]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == MAX_DRAFTS
    assert speculation.expected(4) == pytest.approx(sum(speculation.chance**i for i in range(1, 5)))
    assert speculation.draft(text, len(text), 0) == []


def test_a_drafter_that_knows_nothing_is_asked_seldom_until_it_does() -> None:
    drafter = _Fixed()
    speculation, text = Speculation(drafter), [0]
    for _ in range(16 + 100):
        assert speculation.draft(text, len(text), 8) == []
        text.append(1)
    assert 16 + 100 // 4 <= drafter.num_asked <= 18 + 100 // 4
    drafter.guess = (1,) * 8
    num_asked = drafter.num_asked
    found = []
    for _ in range(10):
        found.append(bool(speculation.draft(text, len(text), 8)))
        text.append(1)
    assert sum(found) >= 7 and found == sorted(found), "four tokens later at most, and from then on at each"
    assert drafter.num_asked - num_asked == sum(found)


def test_what_follows_a_pending_token_is_known_by_two_guesses() -> None:
    assert Speculation(_Fixed(1, 2)).knows_next([0], 1)
    assert not Speculation(_Fixed(1)).knows_next([0], 1)


def test_nothing_waits_for_drafts_that_a_step_has_just_declined() -> None:
    speculation, text = Speculation(_Fixed(1, 1)), [1] * 40
    speculation.decline(10)
    assert [speculation.knows_next(text, end) for end in (10, 25, 26)] == [False, False, True]
    state = decoding("a")
    assert Step(state).drafts(costs=(0.0, 5.0)) == [0]
    found = speculation_of(state)
    assert found is not None and not found.knows_next(state.token_ids, state.num_tokens)


# -- rows of a step ----------------------------------------------------------------------------------------------------


def decoding(name: str, num_tokens: int = 5, *, max_tokens: int = 40, guess: tuple[int, ...] = ()) -> RequestState:
    request = Request(prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=max_tokens))
    state = RequestState(
        request_id=name, request=request, slo=SLO(), kind=ServiceClass.LS, priority_key=(0, math.inf, 0),
        account=ClassAccounts().of("", 1.0), arrival_s=0.0, token_ids=[1, 2, 3],
    )  # fmt: skip
    state.token_ids += [1] * (num_tokens - 3)
    state.num_computed_tokens = num_tokens - 1
    state.facts[Speculation] = speculation = Speculation(_Fixed(*(guess or range(20))))
    speculation.learn(400, 400)  # it is always right
    return state


class Step:
    """A step of decodes under a made-up forecast: ``base`` ms, and ``row`` ms a row."""

    def __init__(self, *states: RequestState, kv: str = "tiered", blocks: int = 20) -> None:
        self.states = states
        self.kv = KV_MANAGERS.get(kv)(num_device_blocks=blocks, num_host_blocks=8, block_size=BLOCK)
        self.chunks = []
        for state in states:
            table = self.kv.allocate(state.request_id, state.num_tokens)
            assert table is not None
            start = state.num_computed_tokens
            chunk = {"request_id": state.request_id, "start": start, "block_ids": table}
            self.chunks.append(DeviceChunk(token_ids=(1,), samples=True, **chunk))  # type: ignore[arg-type]

    def drafts(self, *, costs: tuple[float, float] | None = None, bound_s: float = 10.0, **more: object) -> list[int]:
        """Return how many drafts each request gets."""
        cost = None
        if costs is not None:
            cost = forecast(2, base=costs[0], row=costs[1], key=0.0).step()
            for chunk in self.chunks:
                cost.add_chunk(chunk.start, 1, samples=1)
        settings = {"tokens_left": 100, "max_model_len": 1000} | more
        found = with_drafts(self.chunks, self.states, self.kv, cost=cost, bound_s=bound_s, **settings)  # type: ignore[arg-type]
        for request_id, chunk in found.items():
            assert chunk.request_id == request_id and len(chunk.drafts) == chunk.num_drafts > 0
            assert len(chunk.block_ids) * BLOCK >= chunk.start + len(chunk.token_ids)
        self.kv.check_integrity()
        if cost is not None:
            assert cost.seconds() <= bound_s or not found
        return [found[s.request_id].num_drafts if s.request_id in found else 0 for s in self.states]


def test_a_row_that_costs_little_is_drafted_and_one_that_costs_a_step_is_not() -> None:
    assert Step(decoding("a")).drafts(costs=(5.0, 0.01)) == [8]
    assert Step(decoding("a")).drafts(costs=(0.0, 5.0)) == [0]


def test_without_a_forecast_drafts_are_few() -> None:
    assert Step(decoding("a"), decoding("b")).drafts() == [MAX_DRAFTS_WITHOUT_FORECAST] * 2


def test_drafts_keep_the_bound_and_a_step_beyond_it_gets_none() -> None:
    one_row_s = forecast(2, base=5.0, row=0.5, key=0.0).step().seconds_with(4, 1, samples=1)
    assert Step(decoding("a")).drafts(costs=(5.0, 0.5), bound_s=0.99 * one_row_s) == [0]
    (few,) = Step(decoding("a")).drafts(costs=(5.0, 0.5), bound_s=one_row_s + 0.0021)
    assert 0 < few < 8


def test_drafts_fit_the_token_budget_and_the_length() -> None:
    assert Step(decoding("a"), decoding("b")).drafts(tokens_left=5) == [4, 1]
    assert Step(decoding("a"), decoding("b")).drafts(tokens_left=0) == [0, 0]
    assert Step(decoding("a", max_tokens=5)).drafts() == [2], "three more tokens, of which one is certain"
    assert Step(decoding("a", max_tokens=3)).drafts() == [0], "the next token is the last"
    assert Step(decoding("a")).drafts(max_model_len=7) == [1]
    step = Step(decoding("a"), decoding("b"))
    step.chunks[0] = dataclasses.replace(step.chunks[0], is_preemptible=True)
    assert step.drafts() == [0, 4]


@pytest.mark.parametrize("kv", KV_MANAGERS.names())
def test_drafts_take_free_blocks_only(kv: str) -> None:
    step = Step(decoding("a", 5), decoding("b", 5), kv=kv, blocks=4)
    assert step.drafts() == [3, 3], "what their last blocks have room for"
    step = Step(decoding("a", 4), decoding("b", 4), kv=kv, blocks=3)
    assert step.drafts() == [4, 0]
    for state in step.states:
        step.kv.trim(state.request_id, 4)
    assert step.kv.num_free(Tier.DEVICE) == 1
    step.kv.check_integrity()


@pytest.mark.parametrize("kv", ["incremental", "bidirectional"])
def test_drafts_take_nothing_from_evicted_requests(kv: str) -> None:
    step = Step(decoding("a", 4), kv=kv, blocks=3)
    assert step.kv.allocate("evicted", 8) is not None
    step.kv.evictions.evict("evicted", 8)  # type: ignore[union-attr]
    assert step.kv.num_free(Tier.DEVICE) == 2 and step.drafts() == [0]
    assert step.kv.evictions.num_kept_tokens("evicted", Tier.DEVICE) == 8  # type: ignore[union-attr]


def test_drafts_do_not_grow_into_a_shared_block() -> None:
    ls = decoding("ls", 5)
    kv = KV_MANAGERS.get("bidirectional")(num_device_blocks=3, num_host_blocks=8, block_size=8)
    kv.sharing.declare("be", ServiceClass.BE)  # type: ignore[union-attr]
    assert kv.allocate("be", 18) is not None and kv.allocate("ls", 5) is not None, "it moves in beside the other"
    assert kv.allocate_lookahead("ls", 6) is None and kv.sharing.take_relocations() == ()  # type: ignore[union-attr]
    assert kv.allocate_lookahead("ls", 5) == kv.allocate("ls", 5)
    assert ls.num_tokens == 5
    kv.check_integrity()


@pytest.mark.parametrize("request_fields", [{"speculation": False}, {"states": 8}, {}])
def test_who_has_a_drafter(request_fields: dict[str, object]) -> None:
    fields = dict(request_fields)
    limits = make_limits("sarathi", num_state_slots=fields.pop("states", 0))
    kv = KV_MANAGERS.get("paged")(num_device_blocks=20, num_host_blocks=0, block_size=BLOCK)
    scheduler = Scheduler(*policy_of(limits.config), limits=limits, kv=kv)
    request = Request(prompt_token_ids=[1], **{"speculation": True, **fields})  # type: ignore[arg-type]
    scheduler.add("a", request, SLO(), 0.0)
    assert (speculation_of(scheduler.requests.states["a"]) is not None) == (not request_fields)
    assert any(isinstance(feature, Drafts) for feature in scheduler.requests.features.on) == (not request_fields)


# -- rows on the host tier ---------------------------------------------------------------------------------------------


class HostStep:
    """A step with a token that enters, and one that joins with drafts at a layer, under a made-up forecast."""

    def __init__(self, *, layer: int = 1, num_away: int = 4, host_blocks: int = 8) -> None:
        self.kv = KV_MANAGERS.get("tiered")(num_device_blocks=8, num_host_blocks=host_blocks, block_size=BLOCK)
        self.entering, self.away = decoding("entering"), decoding("away")
        self.away.away = AwayToken(position=4, layer=layer, draft_ids=tuple(range(num_away)))
        for state in (self.entering, self.away):
            assert self.kv.allocate(state.request_id, state.num_tokens) is not None
            move = self.kv.moves.start(state.request_id, MoveDirection.TO_HOST)  # type: ignore[union-attr]
            self.kv.moves.finish(move.move_id, succeeded=True)  # type: ignore[union-attr]
        blocks = self.kv.allocate("entering", 5)
        assert blocks is not None
        place = {"position": 4, "slot": 0, "epoch": 1}
        self.entry = PiggybackEntry(request_id="entering", token_id=1, block_ids=blocks, **place)
        self.join = PiggybackJoin(request_id="away", layer=layer, **place)

    def drafts(
        self, most: int = 8, *, costs: tuple[float, float] | None = None, most_drafts: int = 8, bound_s: float = 10.0,
        reserve_blocks: int = 0, most_rows: int = 100, host_keys: tuple[float, float] = (0.0, 0.0),
    ) -> tuple[int, int]:  # fmt: skip
        """Return how many drafts enter, and how many join; ``most`` is the seats.

        ``costs`` are milliseconds of a step and of a row, ``host_keys`` those of the host for a key, and for a draft's.
        """
        cost = None
        if costs is not None:
            key_ms, draft_key_ms = host_keys
            cost = forecast(2, key_ms, draft_key_ms, base=costs[0], row=costs[1], key=0.0).step()
            cost.add_piggyback(1, 1, [self.join.layer == layer for layer in range(2)])
        states = {"entering": self.entering, "away": self.away}
        limits = make_limits(
            "sarathi", max_piggyback_seats=most, num_layers=2, max_host_drafts=most_drafts, max_model_len=1000
        )
        step = OpenStep(
            chunks={}, host_rows=HostRows(entries=[self.entry], joins=[self.join], max_rows=most_rows), states=states,
            cost=cost, bound_s=bound_s, tokens_left=100, reserve_host_blocks=reserve_blocks,
        )  # fmt: skip
        rows = with_host_drafts(step, self.kv, limits)
        (entry,), (join,) = rows.entries, rows.joins
        assert self.away.away is not None
        assert join.draft_ids == self.away.away.draft_ids[: len(join.draft_ids)], "the first ones, in their order"
        assert len(entry.block_ids) * BLOCK >= entry.position + entry.num_rows
        assert num_seats([entry], [join], most) <= most and entry.num_rows + join.num_rows <= most_rows
        if cost is not None:
            assert cost.features.piggyback_rows == entry.num_rows + join.num_rows
            assert cost.features.seats == num_seats([entry], [join], most)
            assert cost.features.sampled_rows == join.num_rows * (join.layer == 1)
        self.kv.check_integrity()
        return len(entry.draft_ids), len(join.draft_ids)


def test_drafts_have_the_seats_that_certain_rows_leave() -> None:
    assert HostStep().drafts(most=8) == (4, 4), "as many as without a forecast; those that entered"
    assert HostStep().drafts(most=4) == (3, 3)
    assert HostStep().drafts(most=1) == (0, 0), "a token finds its seat, its drafts are dropped"
    assert sum(HostStep().drafts(most=8, most_rows=5)) == 3


def test_a_device_whose_host_tier_takes_no_drafts_lets_none_enter() -> None:
    assert HostStep(num_away=0).drafts(most_drafts=0) == (0, 0)
    assert HostStep(num_away=0).drafts(most_drafts=2) == (2, 0)


def test_seats_for_drafts_are_as_many_as_bring_most() -> None:
    assert HostStep().drafts(costs=(5.0, 0.01)) == (7, 4)
    step = HostStep()
    for state in (step.entering, step.away):
        speculation = speculation_of(state)
        assert speculation is not None
        for _ in range(40):
            speculation.learn(2, 1)
    assert step.drafts(costs=(0.0, 5.0)) == (0, 0), "a draft costs as much as a token, and is right half of the time"
    assert HostStep().drafts(costs=(5.0, 0.01), bound_s=0.0) == (0, 0)


def test_drafts_cost_the_time_of_host_threads_that_have_none_left() -> None:
    costs = (5.0, 0.01)
    assert HostStep().drafts(costs=costs, host_keys=(0.1, 0.1)) == (7, 4), "the host is ready before the step is over"
    assert HostStep().drafts(costs=costs, host_keys=(10.0, 0.0)) == (7, 4), "drafts see what is read anyhow"
    entering, joining = HostStep().drafts(costs=costs, host_keys=(10.0, 10.0))
    assert entering == 0, "each draft takes the host as long as a token"
    assert joining == 4, "at the last layer there is nothing left to attend to"


def test_drafts_leave_residents_their_host_blocks() -> None:
    in_last_block = -5 % BLOCK
    assert HostStep(host_blocks=4).drafts(costs=(5.0, 0.01))[0] == in_last_block
    assert HostStep(host_blocks=8).drafts(costs=(5.0, 0.01), reserve_blocks=4)[0] == in_last_block
    assert HostStep(host_blocks=8).drafts(costs=(5.0, 0.01), reserve_blocks=3)[0] == 7

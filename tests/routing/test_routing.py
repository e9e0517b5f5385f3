"""Routers and the books that they read: what each chooses, and that the books come out even."""

from __future__ import annotations

import random

import pytest

from omniserve.core.load import PROMPT_SIZES, EngineLoad
from omniserve.core.request import ServiceClass
from omniserve.routing.books import Call, EngineBooks, interpolated
from omniserve.routing.prefixes import BLOCK, SentPrefixes, block_hashes
from omniserve.routing.routers import ROUTERS

LS, BE = ServiceClass.LS, ServiceClass.BE


def call(kind=LS, *, tokens=100, begin=0, ttft_s=1.0, max_tokens=10, salt=""):
    prompt = list(range(begin, begin + tokens))
    return Call(kind=kind, service_class=str(kind), prompts=[prompt], ttft_s=ttft_s, max_tokens=max_tokens, salt=salt)


def engines(count=3, cache_tokens=10_000):
    return [EngineBooks(number, cache_tokens) for number in range(count)]


def send(books, each):
    """Send a call, and return what ends it."""
    sent = books.expect(each)
    books.send(each, sent)
    return sent


def forecast(seconds_per_token, busy_s=0.0, num_taken=0, be_tokens=0):
    ttfts = [busy_s + seconds_per_token * size for size in PROMPT_SIZES]
    return EngineLoad(num_taken=num_taken, ttft_s={"LS": ttfts}, be_tokens=be_tokens)


@pytest.mark.parametrize("name", ROUTERS)
def test_every_engine_is_in_the_order_once_and_idle_engines_all_get_calls(name):
    router, books = ROUTERS[name](), engines()
    used = set()
    for i in range(6):
        each = call(begin=1000 * i)
        order = router.order(each, books)
        assert sorted(engine.number for engine in order) == [0, 1, 2]
        used.add(order[0].number)
        send(order[0], each)
    assert used == {0, 1, 2}


@pytest.mark.parametrize("seed", range(20))
def test_books_come_out_even(seed):
    """After any history of calls, refusals, loads and ends an engine without calls has nothing in its books."""
    rng, books, open_calls, sent = random.Random(seed), engines(1, 640)[0], [], 0
    for step in range(200):
        if rng.random() < 0.5:
            each = call(rng.choice([LS, BE]), tokens=rng.randrange(1, 300), begin=rng.randrange(3) * 7)
            open_calls.append(send(books, each))
            sent += 1
        elif open_calls:
            books.end(open_calls.pop(rng.randrange(len(open_calls))))
        if rng.random() < 0.3:
            books.hear(forecast(0.001, num_taken=rng.randrange(sent + 1)), float(step))
        assert all(count >= 0 for count in (*books.num_requests.values(), *books.num_tokens.values()))
    for each in open_calls:
        books.end(each)
    books.hear(forecast(0.001, num_taken=sent), 1000.0)
    assert set(books.num_requests.values()) == set(books.num_tokens.values()) == {0}
    assert books.ttft_s(call(begin=5000), 0) == pytest.approx(0.1)  # nothing is on its way
    assert books.num_routed == sent


def test_cached_tokens_are_whole_blocks_of_what_was_sent_under_the_same_salt():
    books = engines(1)[0]
    send(books, call(tokens=3 * BLOCK + 5))
    assert books.num_cached(call(tokens=3 * BLOCK + 5)) == 3 * BLOCK
    assert books.num_cached(call(tokens=2 * BLOCK)) == BLOCK  # the last token is computed in any case
    assert books.num_cached(call(tokens=3 * BLOCK + 5, salt="other")) == 0
    assert books.num_cached(call(tokens=3 * BLOCK, begin=1)) == 0


def test_the_least_recently_used_prompt_is_forgotten_first_from_its_end():
    prefixes = SentPrefixes(4 * BLOCK)
    first, second = (block_hashes(list(range(begin, begin + 3 * BLOCK + 1)), "") for begin in (0, 1000))
    prefixes.add(first)
    prefixes.add(second)
    assert prefixes.num_cached(second) == 3 * BLOCK
    assert prefixes.num_cached(first) == BLOCK


@pytest.mark.parametrize("num_tokens", [1, 200, 256, 1000, 5000, 16384, 40000])
def test_forecasts_between_the_sizes_are_interpolated_and_go_on_beyond(num_tokens):
    assert interpolated([2.0 * size + 1 for size in PROMPT_SIZES], num_tokens) == pytest.approx(2.0 * num_tokens + 1)


def test_what_was_sent_since_the_forecast_counts_until_the_engine_has_taken_it():
    books = engines(1)[0]
    books.hear(forecast(0.001), 0.0)
    send(books, call(tokens=500))
    assert books.ttft_s(call(tokens=100, begin=9000), 0) == pytest.approx(0.6)
    books.hear(forecast(0.001, num_taken=0), 0.1)
    assert books.ttft_s(call(tokens=100, begin=9000), 0) == pytest.approx(0.6)
    books.hear(forecast(0.001, busy_s=0.5, num_taken=1), 0.2)
    assert books.ttft_s(call(tokens=100, begin=9000), 0) == pytest.approx(0.6)


def test_predicted_prefers_the_cache_only_where_the_objective_is_kept():
    router, books = ROUTERS["predicted"](), engines(2)
    long = call(tokens=40 * BLOCK)
    books[0].end(send(books[0], long))
    for each in books:
        each.hear(forecast(0.0001, num_taken=1), 0.0)
    assert router.order(long, books)[0].number == 0
    books[0].hear(forecast(0.0001, busy_s=0.9, num_taken=1), 0.1)  # of an objective of 1 s
    assert router.order(long, books)[0].number == 1


def test_predicted_sends_best_effort_work_where_it_gets_on():
    router, books = ROUTERS["predicted"](), engines(2)
    for each in books:
        send(each, call(BE, tokens=1000))
        each.hear(forecast(0.001), 0.0)
    books[0].hear(forecast(0.001, be_tokens=5000), 1.0)  # its step had a prompt
    assert router.order(call(BE, begin=7000), books)[0].number == 0 and books[0].be_rate is None
    books[0].hear(forecast(0.001, be_tokens=5100), 10.0)
    books[1].hear(forecast(0.001, be_tokens=10_000), 10.0)
    assert router.order(call(BE, begin=7000), books)[0].number == 1
    for i in range(30):
        send(books[1], call(BE, tokens=1000, begin=10_000 * i))
    assert router.order(call(BE, begin=7000), books)[0].number == 0


def test_without_a_forecast_the_least_loaded_engine_is_first():
    router, books = ROUTERS["predicted"](), engines(2)
    books[1].hear(forecast(0.001), 0.0)  # the other has not said anything yet
    send(books[1], call(tokens=500))
    assert router.order(call(), books)[0].number == 0


def test_a_started_engine_has_nothing_of_what_it_had():
    books = engines(1)[0]
    books.hear(forecast(0.001), 0.0)
    send(books, call(tokens=3 * BLOCK + 1))
    books.forget()
    assert books.load is None and books.num_cached(call(tokens=3 * BLOCK + 1)) == 0 and books.be_rate is None


def test_a_call_that_is_not_sent_after_all_leaves_nothing():
    books = engines(1)[0]
    for i in range(50):
        books.end(books.expect(call(begin=1000 * i)))
    books.end(send(books, call()))
    books.hear(forecast(0.001, num_taken=1), 0.0)
    assert books.ttft_s(call(begin=90_000), 0) == pytest.approx(0.1) and books.num_routed == 1


@pytest.mark.parametrize("seed", range(10))
def test_of_a_prompt_the_later_blocks_leave_first(seed):
    """So whatever was sent, what is there of a prompt is all up to some block, which a search by halves finds."""
    rng = random.Random(seed)
    prefixes = SentPrefixes(rng.randrange(1, 40) * BLOCK)
    for _ in range(300):
        shared = [rng.randrange(3) for _ in range(rng.randrange(8) * BLOCK)]
        prompt = [rng.randrange(2)] * (rng.randrange(6) * BLOCK) + shared[: rng.randrange(1, 9 * BLOCK)] + [7]
        hashes = block_hashes(prompt, "")
        there = [each in prefixes._blocks for each in hashes]
        assert there == sorted(there, reverse=True)
        assert prefixes.num_cached(hashes) == sum(there) * BLOCK
        prefixes.add(hashes)

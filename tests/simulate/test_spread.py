"""Spread: steps that are drawn as measured ones lay around their predictions."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from omniserve.simulate.spread import BLOCK, NEIGHBOURS, Spread


class First(random.Random):
    """Blocks begin at the first step."""

    def randrange(self, *args: int, **kwargs: int) -> int:
        return 0


def test_the_very_steps_drawn_in_their_order_take_what_they_took() -> None:
    rng = random.Random(1)
    predicted = [rng.uniform(0.02, 0.2) for _ in range(BLOCK)]
    measured = [seconds * rng.lognormvariate(0.0, 0.2) for seconds in predicted]
    draw = Spread(predicted, measured).draws(First())
    assert [seconds * draw(seconds) for seconds in predicted] == pytest.approx(measured)


def test_short_steps_spread_as_short_ones_did_and_long_as_long() -> None:
    # An interruption of 10 ms in every fourth step: half of a step of 20 ms, a twentieth of one of 200.
    predicted = [0.02 if i % 2 else 0.2 for i in range(400)]
    measured = [seconds + (0.01 if i // 2 % 4 == 0 else 0.0) for i, seconds in enumerate(predicted)]
    draw = Spread(predicted, measured).draws(random.Random(2))
    short = [draw(0.02) for _ in range(2000)]
    assert {round(ratio, 6) for ratio in short} == {1.0, 1.5}
    assert statistics.mean(short) == pytest.approx(1.125, abs=0.02)
    assert {round(draw(0.2), 6) for _ in range(2000)} == {1.0, 1.05}
    # What nobody measured is like what comes nearest to it.
    assert {round(draw(3.0), 6) for _ in range(2000)} == {1.0, 1.05}
    assert {round(draw(0.001), 6) for _ in range(2000)} == {1.0, 1.5}


def test_slow_spells_last() -> None:
    slow = [i // 100 % 2 == 1 for i in range(1000)]
    draw = Spread([0.1] * 1000, [0.1 * (1.5 if is_slow else 1.0) for is_slow in slow]).draws(random.Random(3))
    drawn = [draw(0.1) > 1.2 for _ in range(50 * BLOCK)]
    changes = sum(a != b for a, b in itertools.pairwise(drawn))
    assert 0.3 < statistics.mean(drawn) < 0.7
    assert changes < 2 * len(drawn) / BLOCK  # drawn one by one, every second step would be another


def test_few_steps_are_all_neighbours() -> None:
    spread = Spread([0.1, 0.2, 0.3], [0.1, 0.4, 0.9])
    draw = spread.draws(random.Random(4))
    assert {round(draw(0.1), 6) for _ in range(200)} == {1.0, 2.0, 3.0}
    assert (spread.percentile(0), spread.percentile(50)) == (pytest.approx(1.0), pytest.approx(2.0))
    assert NEIGHBOURS > 3


@pytest.mark.parametrize(
    ("predicted", "measured", "message"),
    [
        ([], [], "at least one step"),
        ([0.1, 0.0], [0.1, 0.1], "more than 0 seconds, got 0"),
        ([0.1], [-1.0], "more than 0 seconds, got -1"),
    ],
)
def test_steps_without_time_are_refused(predicted: list[float], measured: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spread(predicted, measured)

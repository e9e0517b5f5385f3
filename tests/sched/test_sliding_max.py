"""SlidingMax against a list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omniserve.sched.tier_moves import SlidingMax


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(0, 9)), min_size=1, max_size=60), st.floats(0.1, 5.0))
def test_it_is_the_largest_of_the_window(pushes: list[tuple[float, int]], window_s: float) -> None:
    now_s, seen, peak = 0.0, [], SlidingMax(window_s)
    for pause_s, value in pushes:
        now_s += pause_s
        seen.append((now_s, value))
        assert peak.push(now_s, value) == max(v for at_s, v in seen if at_s >= now_s - window_s)

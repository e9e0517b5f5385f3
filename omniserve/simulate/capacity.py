"""Capacity: the highest LS rate that meets the objectives, and what comes with it."""

from __future__ import annotations

from collections.abc import Callable

_TOLERANCE = 0.05  # of the rate
_MOST_DOUBLINGS = 16


def highest_rate(meets: Callable[[float], bool], start: float, *, least: float) -> float:
    """Return the highest rate (to within 5 %) that meets the objectives; 0 if none from ``least`` on does.

    Args:
        meets: Whether a rate does; it is taken to fail above the first rate that fails.
        start: A rate to begin at, > 0.
        least: Lower rates are not tried: they bring too few requests to judge by.

    Raises:
        ValueError: Every rate up to 65,536 times ``start`` meets them: the load is not what was meant.
    """
    low, high = 0.0, start
    if meets(start):
        for _ in range(_MOST_DOUBLINGS):
            low, high = high, 2 * high
            if not meets(high):
                break
        else:
            raise ValueError(f"even {high:g} requests a second meet the objectives: begin with a higher rate")
    else:
        while high / 2 >= least:
            if meets(high / 2):
                low = high / 2
                break
            high /= 2
    while low > 0 and high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        if meets(middle):
            low = middle
        else:
            high = middle
    return low

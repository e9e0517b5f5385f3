"""Combinations of options in which any two values are together once: few, where all combinations would be many."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, product
from typing import Any


def pairwise(**options: Sequence[Any]) -> list[dict[str, Any]]:
    """Return rows, each with a value of every option; each pair of values of two options is in at least one row.

    The rows are found greedily, and are the same whenever the options are.
    """
    if len(options) == 1:
        return [{name: value} for name, values in options.items() for value in values]
    pairs = combinations(range(len(options)), 2)
    values = list(options.values())
    missing = {((a, x), (b, y)) for a, b in pairs for x in range(len(values[a])) for y in range(len(values[b]))}
    rows = []
    while missing:
        row = dict(min(missing))
        for place in set(range(len(values))) - row.keys():
            candidates = [(place, number) for number in range(len(values[place]))]
            row |= [max(candidates, key=partial(_num_new, missing, row))]
        missing -= {*combinations(sorted(row.items()), 2)}
        rows.append({name: values[place][row[place]] for place, name in enumerate(options)})
    return rows


def _num_new(missing: set[Any], row: dict[int, int], one: tuple[int, int]) -> int:
    return sum(tuple(sorted((one, other))) in missing for other in row.items())


def drawn_pairwise(options: Mapping[str, Sequence[Any]], rng: random.Random) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield rows without end, the next ones with many new pairs, and how many pairs are left after each.

    Args:
        options: Values of each option.
        rng: Draws 60 rows, of which the one with most new pairs is next.
    """
    left = {((a, x), (b, y)) for a, b in combinations(options, 2) for x, y in product(options[a], options[b])}
    while True:
        drawn = [{name: rng.choice(values) for name, values in options.items()} for _ in range(60)]
        pairs = [set(combinations(each.items(), 2)) for each in drawn]
        best = max(range(len(drawn)), key=lambda index: len(pairs[index] & left))
        left -= pairs[best]
        yield drawn[best], len(left)

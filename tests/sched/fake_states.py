"""Recurrent states made of tuples: a layer's state of a request is all tokens that have passed it."""

from __future__ import annotations

from collections.abc import Sequence


class FakeStates:
    """States between the attentions of a model: segment ``l`` lies before attention ``l``, the last one behind all."""

    def __init__(self, num_layers: int) -> None:
        self._last = num_layers
        self._passed: dict[tuple[int, int], tuple[int, ...]] = {}

    def advance(self, slot: int, first: int, last: int | None, position: int, tokens: Sequence[int]) -> None:
        """Let tokens of one request pass the segments ``first .. last`` (None: to the end); at position 0 it begins."""
        if slot < 0:
            return
        for segment in range(first, (self._last if last is None else last) + 1):
            before = self._passed.get((slot, segment), ()) if position else ()
            assert len(before) == position, (
                f"state {slot} has {len(before)} tokens in segment {segment}, not {position}"
            )
            self._passed[slot, segment] = (*before, *tokens)

    def check(self, slot: int, context: tuple[int, ...]) -> None:
        """Verify that all states of a request are those of its context."""
        if slot >= 0:
            for segment in range(self._last + 1):
                assert self._passed[slot, segment] == context, (slot, segment)

"""Drafter: guesses the tokens that follow a request's text. PromptLookup finds them in the text itself.

Paper: "Prompt Lookup Decoding" (Saxena 2023), "LLMA" (Yang et al. 2023). Nothing here needs torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence

from omniserve.core.request import Request

_LONGEST, _SHORTEST = 4, 2
"""Lengths of the token runs that are looked up, tokens."""
_MOST_INDEXED = 2048
"""Most tokens that one call indexes: one or two milliseconds."""
_PLACES = 4
"""Hash-table slots for each token that a table has the size for."""
_MOST_SKIPPED = 64
"""Most tokens of a prediction that the output is taken to have left out, before all of it is searched."""


class Drafter(ABC):
    """Guesses how one request goes on."""

    @abstractmethod
    def draft(self, token_ids: Sequence[int], end: int, most: int) -> list[int]:
        """Return guesses of the tokens that follow ``token_ids[:end]``, in order, at most ``most``; it may be none.

        ``token_ids`` are the prompt's and the output's. Those before ``end`` never change from call to call, and
        ``end`` does not fall.
        """


def prompt_lookup(request_id: str, request: Request) -> Drafter:
    """Return the drafter that requests have as a rule."""
    return PromptLookup(len(request.prompt_token_ids), request.predicted_token_ids)


class PromptLookup(Drafter):
    """Finds the last tokens in the request's earlier text, or in a prediction of its output, and what follows there.

    A prediction is followed from its first token on, as long as the output is the same. Where they differ it is found
    again by the output's last tokens. What it does not tell comes from the longest run of 4 to 2 last tokens that the
    text has had before, the most recent one.

    Args:
        num_prompt_tokens: The output begins behind them.
        prediction: Token ids of what the output is expected to be, about.
    """

    def __init__(self, num_prompt_tokens: int, prediction: Sequence[int] = ()) -> None:
        self._text = _Index()
        self._prediction = list(prediction)
        self._predicted = _Index()
        self._next = 0
        """Index in the prediction of the token that is expected next; -1: the output has left it."""
        self._num_followed = num_prompt_tokens
        """Number of tokens of the text, from its start, that were compared with the prediction."""

    def draft(self, token_ids: Sequence[int], end: int, most: int) -> list[int]:
        if self._prediction:
            self._follow(token_ids, end)
            if 0 <= self._next < len(self._prediction):
                return self._prediction[self._next : self._next + most]
        self._text.extend(token_ids, end - 1)
        return _copied(token_ids, end, self._text.find(token_ids, end, token_ids), most)

    def _follow(self, token_ids: Sequence[int], end: int) -> None:
        """Find the place in the prediction where the output is."""
        first, self._num_followed = self._num_followed, end
        for position in range(first, end):
            if 0 <= self._next < len(self._prediction) and self._prediction[self._next] == token_ids[position]:
                self._next += 1
            else:
                self._next = self._found_again(token_ids, position + 1)

    def _found_again(self, token_ids: Sequence[int], end: int) -> int:
        """Return the index of what follows the output's last tokens in the prediction; -1 if they are not in it."""
        wanted = list(token_ids[max(0, end - _SHORTEST) : end])
        near = max(0, self._next)
        for index in range(near, min(near + _MOST_SKIPPED, len(self._prediction) - len(wanted) + 1)):
            if self._prediction[index : index + len(wanted)] == wanted:
                return index + len(wanted)
        self._predicted.extend(self._prediction, len(self._prediction))
        return self._predicted.find(token_ids, end, self._prediction)


def _copied(token_ids: Sequence[int], end: int, source: int, most: int) -> list[int]:
    """Return what follows if the text goes on as it did from ``source`` on; -1: nothing is known."""
    if source < 0:
        return []
    drafts = list(token_ids[source : min(end, source + most)])
    while len(drafts) < most:  # the text repeats itself: what follows its end is what was drafted before
        drafts.append(drafts[len(drafts) - (end - source)])
    return drafts


class _Index:
    """An index of the latest place of each run of 2 to 4 tokens.

    There is a table for each length, in which a later run may displace another. A table has 4 to 8 places a token,
    of 4 bytes each, and what it gives is compared with the text. To index a token takes constant time on average:
    tables grow by doubling.
    """

    def __init__(self) -> None:
        self._num_tokens = 0
        self._most_tokens = 0
        """Tokens that the tables have the size for, a power of two."""
        self._tables: dict[int, array[int]] = {}

    def extend(self, token_ids: Sequence[int], end: int) -> None:
        """Index the runs in ``token_ids[:end]``, or some thousands more of them than before."""
        begin, end = self._num_tokens, min(end, self._num_tokens + _MOST_INDEXED)
        if end <= begin:
            return
        self._num_tokens = end
        if end > self._most_tokens:
            begin, self._most_tokens = 0, max(256, 1 << (end - 1).bit_length())
            self._tables = {n: array("i", [-1]) * (_PLACES * self._most_tokens) for n in range(_SHORTEST, _LONGEST + 1)}
        mask = _PLACES * self._most_tokens - 1
        for n, table in self._tables.items():
            first = max(0, begin - n + 1)  # of the runs that end behind what was indexed before
            if end - first == n:
                table[hash(tuple(token_ids[first:end])) & mask] = end
                continue
            tokens = token_ids[first:end]
            runs = zip(*(tokens[i:] for i in range(n)), strict=False)
            for behind, hashed in enumerate(map(hash, runs), start=first + n):
                table[hashed & mask] = behind

    def find(self, token_ids: Sequence[int], end: int, indexed: Sequence[int]) -> int:
        """Return the index in ``indexed``, the text of the index, behind the last tokens of ``token_ids[:end]``.

        -1: its last two tokens are not there, as far as the tables know.
        """
        mask = _PLACES * self._most_tokens - 1
        for n in range(min(_LONGEST, end), _SHORTEST - 1, -1) if self._tables else ():
            wanted = token_ids[end - n : end]
            found = self._tables[n][hash(tuple(wanted)) & mask]
            if found >= 0 and indexed[found - n : found] == wanted:
                return found
        return -1

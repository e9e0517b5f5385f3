"""Token ids to text as they come: no half characters, no half stop strings, constant work per token."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from omniserve.core.request import FinishReason

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A UTF-8 character has at most four bytes and a token at least one, so the last four tokens tell whether the
# text ends inside a character.
_MAX_CHARACTER_BYTES = 4

Decode = Callable[[list[int]], str]
_special_ids: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()


class Detokenizer:
    """Incremental decoding of one output, with a tokenizer of ``transformers`` and stop strings.

    The pushes and the flush joined equal ``tokenizer.decode(all_ids, skip_special_tokens=...)`` without its clean-up of
    spaces, cut before the first stop string. Of several stop strings the one that is complete first wins, and of those
    the longest; hence the text does not depend on how the tokens are split over pushes. One exception: a SentencePiece
    tokenizer decodes a run of byte tokens as a whole, so bytes that make the run invalid UTF-8 cannot take back the
    characters that were already returned.

    A stop string that is complete with one of the first ``min_tokens`` tokens does not count. With ``include_stop`` the
    one that ends the text is its end. Special tokens that are ``shown`` are text, whatever ``skip_special_tokens``
    says.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        shown: Collection[int] = (),
    ) -> None:
        # Those that are left out do not come to it.
        self._decode = _decode_function(tokenizer, skip_special_tokens and not shown)
        self._skipped = special_token_ids(tokenizer).difference(shown) if skip_special_tokens else frozenset()
        # _window[:_num_read] is the context that was decoded (and pushed) before, _window[_num_read:] is new. Both
        # begin where a character begins.
        self._window: list[int] = []
        self._num_read = 0
        self._read_text = ""
        self._stop = StopMatcher(stop, include_stop=include_stop) if stop else None
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text; what is pushed afterwards is ignored."""
        return None if self._stop is None else self._stop.found

    def advance(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None
    ) -> tuple[str, FinishReason | None, int]:
        """Add a step's tokens; return the new text that is certain, why it ends, and after how many of them.

        It ends for ``STOP`` at a stop string, of which the tokens up to the one that completes it are counted. A
        ``finish_reason`` means that no token follows.
        """
        if self._stop is None or len(token_ids) < 2:
            text, count = self.push(token_ids), len(token_ids)
        else:
            text, count = "", 0
            while count < len(token_ids) and self.stopped is None:
                text += self.push(token_ids[count : count + 1])
                count += 1
        if finish_reason is not None:
            text += self.flush()
        return text, finish_reason if self.stopped is None else FinishReason.STOP, count

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the new text that is certain."""
        self._num_tokens += len(token_ids)
        self._window.extend(i for i in token_ids if i not in self._skipped)
        if len(self._window) == self._num_read:
            return ""
        tail = self._window[-_MAX_CHARACTER_BYTES:]
        if len(self._window) - self._num_read > _MAX_CHARACTER_BYTES and self._decode(tail).endswith(_REPLACEMENT):
            return ""  # inside a character; looking at the tail only keeps a long run of broken bytes linear
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._read_text):
            return ""
        new_text = text[len(self._read_text) :]
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        self._read_text = self._decode(self._window)
        return self._cut(new_text)

    def flush(self) -> str:
        """Return the text that was held back; no token may follow."""
        rest = self._decode(self._window)[len(self._read_text) :]
        self._window, self._num_read, self._read_text = [], 0, ""
        return self._cut(rest) if self._stop is None else self._cut(rest) + self._stop.flush()

    def _cut(self, text: str) -> str:
        if self._stop is None:
            return text
        return self._stop.push(text, may_end=self._num_tokens > self._min_tokens)


class StopMatcher:
    """Cut a text that comes in pieces before the first stop string in it, or behind it."""

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False) -> None:
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop))
        self._include_stop = include_stop
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Add text; return what can no longer be part of a stop string.

        Without ``may_end``, one that ends in this text does not count.
        """
        if self.found is not None:
            return ""
        num_held = len(self._held)
        text = self._held + text
        # One that ends in what was held would have been found before, or did not count.
        first = [(stop, text.find(stop, max(0, num_held - len(stop) + 1))) for stop in self._stop] if may_end else []
        matches = [(at + len(stop), at, stop) for stop, at in first if at >= 0]
        if matches:
            end, start, self.found = min(matches)
            self._held = ""
            return text[: end if self._include_stop else start]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Return the end of the text that was held back: it was not a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0


def _decode_function(tokenizer: Any, skip_special_tokens: bool) -> Decode:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # the Rust tokenizer itself: a third of the time of tokenizer.decode()
        return lambda ids: backend.decode(ids, skip_special_tokens=skip_special_tokens)
    return lambda ids: tokenizer.decode(
        ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def special_token_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids that decode(skip_special_tokens=True) leaves out (kept: collecting them takes milliseconds)."""
    if tokenizer not in _special_ids:
        if getattr(tokenizer, "backend_tokenizer", None) is not None:
            ids = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        else:
            ids = frozenset(tokenizer.all_special_ids)
        _special_ids[tokenizer] = ids
    return _special_ids[tokenizer]

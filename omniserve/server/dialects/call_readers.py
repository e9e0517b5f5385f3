"""Calls that are told while they are written: a name once it is certain, then the arguments piece by piece."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from omniserve.server.dialects.base import CallReader, ParsedCall, Piece, RawCall, Schemas
from omniserve.server.dialects.json_text import Brackets, value_of

# What is longer has no head: it is looked for from its begin, each time that there is more.
_MAX_HEAD = 1000
_STRING = r'"(?:[^"\\]|\\.)*+"'
_SIMPLE_MEMBER = rf"\s*+{_STRING}\s*+:\s*+(?:{_STRING}|[-+.\w]++)\s*+"
_MEMBERS = rf"(?P<members>(?:{_SIMPLE_MEMBER},)*+)"
_ARGUMENTS = r'\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)'
_NEXT = re.compile(rf"(?:\s*+,{_SIMPLE_MEMBER})*+\s*+\}}\s*+,\s*+\{{{_MEMBERS}{_ARGUMENTS}")


class Head(NamedTuple):
    """What is written of a call before its arguments."""

    name: str
    end: int
    """The place where their object begins."""
    call_id: str | None = None


FindHead = Callable[[str, int], Head | None]
"""Finds the head of a call in a text, from a place on: where the text begins, or behind the arguments of a call."""


class JsonReader:
    """Understands calls whose arguments are JSON."""

    def __init__(self, find_head: FindHead, tools: Schemas) -> None:
        self._find_head = find_head
        self._tools = tools
        self._head: Head | None = None
        """The head of the call whose arguments are being read."""
        self._brackets = Brackets()
        self.at = 0

    def read(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while (head := self._head or self._next_head(text)) is not None:
            self._head, begins = head, self.at == head.end
            end = self._brackets.end(text, head.end)
            begin, self.at = self.at, len(text) if end is None else end
            pieces.append(Piece(head.name, text[begin : self.at], head.call_id, begins, end is not None))
            if end is None:
                break
            self._head = None
        return [piece for piece in pieces if piece.arguments]

    def _next_head(self, text: str) -> Head | None:
        """Return the head of the next call if there is one for certain."""
        head = self._find_head(text, self.at) if len(text) - self.at <= _MAX_HEAD else None
        if head is None or head.name not in self._tools:
            return None
        self._brackets, self.at = Brackets(), head.end
        return head


def named_heads(
    before: str, name_word: str = "name", get_id: Callable[[str], str | None] = lambda written: None
) -> FindHead:
    """Return what finds heads of objects of a name and arguments, the first behind what a pattern says.

    Args:
        before: The pattern, up to the first object's bracket.
        name_word: What an object calls the name.
        get_id: Returns the id of a call of what an object calls ``id``, if it is before the arguments.
    """
    first = re.compile(rf"{before}{_MEMBERS}{_ARGUMENTS}")

    def find(text: str, at: int) -> Head | None:
        match = (_NEXT if at else first).match(text, at)
        if match is None:
            return None
        try:
            members = value_of("{" + match["members"].rstrip().removesuffix(",") + "}")
        except ValueError:
            return None
        name, written_id = members.get(name_word), members.get("id")
        if not isinstance(name, str):
            return None
        return Head(name, match.end(), get_id(written_id) if isinstance(written_id, str) else None)

    return find


class CallTeller:
    """Tells the calls of an answer: in pieces as a reader understands them, then what is missing of them.

    Args:
        new_id: Returns an id for a call that the model gave none.
        several: There may be more than one call; else only the first is told.
    """

    def __init__(self, new_id: Callable[[], str], *, several: bool) -> None:
        self._new_id = new_id
        self._several = several
        self._reader: CallReader | None = None
        self._open: ParsedCall | None = None
        """The first piece of the last call while its arguments are not complete."""
        self._arguments: list[str] = []
        """What has been told of these."""
        self.num_read = 0
        """Number of calls that the reader has understood, of the last perhaps only a begin."""
        self.num_calls = 0
        """Number of calls so far; of one, there may be only a begin yet."""

    def begin(self, reader: CallReader | None) -> None:
        """Begin to tell what is between two marks; without a reader, as a whole."""
        self._reader, self.num_read = reader, 0

    def read(self, text: str, text_before: int) -> list[ParsedCall]:
        """Return what the reader understands, by now, of a text and a number of characters before it."""
        calls: list[ParsedCall] = []
        for piece in () if self._reader is None else self._reader.read(text):
            if piece.begins:
                if self.num_read and not self._several:
                    break
                self.num_read += 1
                self._open = self._new_call(RawCall(piece.name, piece.arguments, piece.call_id), text_before)
                self._arguments = []
            if self._open is None:
                break
            calls.append(replace(self._open, arguments=piece.arguments, begins=piece.begins, ends=piece.ends))
            self._arguments.append(piece.arguments)
            if piece.ends:
                self._open = None
        return calls

    def end(self, found: Sequence[RawCall], text_before: int) -> list[ParsedCall]:
        """Return what has not been told of the calls between two marks; of none, if not all there are calls.

        A call whose arguments are not complete then has no last piece.
        """
        found = found if self._several else found[:1]
        calls = [self._new_call(call, text_before) for call in found[self.num_read :]]
        if self._open is not None and len(found) >= self.num_read:
            whole, told = found[self.num_read - 1].arguments, "".join(self._arguments)
            if whole.startswith(told):
                calls.insert(0, replace(self._open, arguments=whole[len(told) :], begins=False))
        self._open = None
        return calls

    def rest(self, text: str) -> str:
        """Return what follows, in a text that is not all calls, those that were told."""
        return text if self._reader is None else text[self._reader.at :]

    def _new_call(self, call: RawCall, text_before: int) -> ParsedCall:
        call_id = self._new_id() if call.call_id is None else call.call_id
        self.num_calls += 1
        return ParsedCall(self.num_calls - 1, call_id, call.name, call.arguments, text_before)

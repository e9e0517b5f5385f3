"""The contract of dialects: how a model writes calls of tools and marks its thinking; a parser, and grammars, of that.

A ``Dialect`` is the whole of it. Most have two parts that do not know each other: a ``CallForm`` and a ``Thinking``.
"""

from __future__ import annotations

import abc
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from omniserve.server.dialects.grammar_text import SpecialTokens
from omniserve.server.dialects.json_text import ends_in_string

Schemas = Mapping[str, Mapping[str, Any]]
"""Schemas of the arguments, by the names of the tools."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call, or a piece of one that is told while it is written."""

    index: int
    """The call's index among those of the answer."""
    call_id: str
    name: str
    arguments: str
    """The text of a JSON object, or a piece of it; where the model writes JSON, as the model wrote it."""
    text_before: int = 0
    """Number of characters of the answer's text that are before the call."""
    begins: bool = True
    """No piece of the call is before this."""
    ends: bool = True
    """The arguments are complete; in no piece of a call that is broken or cut off."""


def joined(calls: Sequence[ParsedCall]) -> list[ParsedCall]:
    """Return calls with those pieces as one that follow one another."""
    groups: list[list[ParsedCall]] = []
    for call in calls:
        if call.begins or not groups:
            groups.append([])
        groups[-1].append(call)
    return [
        pieces[0]
        if len(pieces) == 1
        else replace(pieces[0], arguments="".join([piece.arguments for piece in pieces]), ends=pieces[-1].ends)
        for pieces in groups
    ]


class Said(NamedTuple):
    """What a text says: each part as far as it is certain by now."""

    reasoning: str = ""
    text: str = ""
    calls: Sequence[ParsedCall] = ()


@dataclass(frozen=True, slots=True)
class Opening:
    """The begin of an answer, which the prompt has written."""

    prefill: str = ""
    """The end of the prompt that belongs to the answer, such as ``<think>``."""
    may_think: bool = True
    """False: the prompt says that the model does not think."""
    budget: int | None = None
    """Most tokens of thinking, which then ends as if the model had ended it; None: any number."""


class AnswerParser(Protocol):
    """Tells reasoning and calls from the text of one answer, which comes in pieces of any size."""

    @property
    def num_calls(self) -> int:
        """Number of calls so far; of one, there may be only a begin yet."""

    @property
    def is_thinking(self) -> bool:
        """True while the text is reasoning."""

    @property
    def may_think(self) -> bool:
        """True while the text is reasoning or may still become that."""

    @property
    def is_over(self) -> bool:
        """True once there can be no further call and no text; what is pushed afterwards is ignored."""

    def push(self, text: str) -> Said:
        """Add text; return what is certain by now."""

    def flush(self) -> Said:
        """Return what was held back, once no text follows; a call that lacks only its end is one."""


class Dialect(abc.ABC):
    """A model's way to write its answers."""

    knows_tools: bool
    """True: the dialect has a form for calls."""
    thinks: bool
    """True: the dialect has marks for thinking."""
    marks: Sequence[str]
    """The texts in which special tokens may stand that have to be seen."""

    @property
    @abc.abstractmethod
    def without_calls(self) -> Dialect:
        """The dialect of answers to chats without tools; the same object each time."""

    @abc.abstractmethod
    def opening(self, prompt: str, continued: str | None = None) -> Opening:
        """Return the begin of the answer to a prompt.

        Args:
            prompt: The text that the chat template wrote.
            continued: The content of the last message, which the answer continues; None: it begins a message.
        """

    @abc.abstractmethod
    def parser(self, tools: Schemas, *, opening: Opening, several: bool = True, streams: bool = False) -> AnswerParser:
        """Return a parser of one answer.

        Args:
            tools: The tools that are offered.
            opening: How the answer begins.
            several: There may be more than one call; else the text ends with the first.
            streams: A call is told in pieces from where it is certain that it is one, so before it is known that its
                arguments are whole; else calls are told as a whole.
        """

    @abc.abstractmethod
    def calls_grammar(
        self,
        schemas: Schemas,
        *,
        free_text: bool,
        several: bool,
        otherwise: str | None = None,
        special: SpecialTokens,
        opening: Opening,
    ) -> str:
        """Return the grammar of an answer that calls tools, each with arguments of its schema.

        Args:
            schemas: Of the tools that may be called, as ``enforceable`` returns them.
            free_text: There may be text around the calls, and no call at all; else there is at least one, and nothing
                else.
            several: There may be more than one call; with free text there may in any case.
            otherwise: An expression of an answer without calls; None: there is at least one call, or free text.
            special: The tokenizer's special tokens.
            opening: How the answer begins.

        Raises:
            UnsupportedSchema: Calls cannot keep a schema in the form in which they are written.
        """

    @abc.abstractmethod
    def value_grammar(self, value: str, *, special: SpecialTokens, opening: Opening) -> str:
        """Return the grammar of an answer whose text is of an expression; the other arguments as above."""

    @abc.abstractmethod
    def text_grammar(self, *, special: SpecialTokens, opening: Opening) -> str:
        """Return the grammar of any answer, of which ``opening`` bounds the thinking."""


class RawCall(NamedTuple):
    """What is written for a call."""

    name: str
    arguments: str
    """The text of a JSON object."""
    call_id: str | None = None
    """The id that the model gave it."""


class Piece(NamedTuple):
    """What a reader has understood of a call."""

    name: str
    arguments: str
    """The next piece of the text of the JSON object."""
    call_id: str | None = None
    """The id that the model gave it."""
    begins: bool = False
    """The piece is the call's first."""
    ends: bool = False
    """The object is complete."""


class CallReader(Protocol):
    """Understands calls while they are written.

    Its pieces are a begin of what ``CallForm.calls`` returns of the same text, once that is whole.
    """

    at: int
    """The place in the text behind what has been understood."""

    def read(self, text: str) -> Sequence[Piece]:
        """Return what has become certain.

        Args:
            text: All text behind the call's first mark so far, without what ends it.
        """


class Finder(Protocol):
    """Finds the end of what may be a call."""

    def find(self, text: str) -> tuple[int, int] | None:
        """Return the ends of the call without and with its last mark; None while these are missing.

        Args:
            text: All text behind the call's first mark so far.
        """


class MarkFinder:
    """Finds a mark at which a form of calls says that they end."""

    def __init__(self, form: CallForm, mark: str) -> None:
        self._form = form
        self._mark = mark
        self._seen = 0

    def find(self, text: str) -> tuple[int, int] | None:
        while (at := text.find(self._mark, self._seen)) >= 0:
            if self._form.may_end(text[:at]):
                return at, at + len(self._mark)
            self._seen = at + 1
        self._seen = max(self._seen, len(text) - len(self._mark) + 1)
        return None


@dataclass(frozen=True, slots=True)
class Group:
    """What is written around and between calls that follow one another."""

    begin: str
    separator: str
    end: str = ""


class CallForm(abc.ABC):
    """A way to write calls: a mark, what is called with which arguments, and an end."""

    begins: Sequence[str]
    """The marks a call may begin with."""
    end: str = ""
    """The mark that a call ends with, for forms that have one."""
    opening: str = ""
    """What may be before the first of several calls."""
    closing: str = ""
    """What may be behind a call."""
    only_at_start = False
    """A call begins where the answer begins, behind a call, or behind ``opening``: its mark is common in texts."""
    more_marks: Sequence[str] = ()
    """Other texts in which special tokens may stand."""
    group: Group
    """What a grammar writes around calls; it begins with ``opening`` or one of ``begins``."""

    @staticmethod
    @abc.abstractmethod
    def is_of(template: str) -> bool:
        """Return whether a chat template writes calls in this form; no other form may say so of the same template."""

    def finder(self, begin: str) -> Finder:
        """Return what finds the end of a call that began with this mark."""
        return MarkFinder(self, self.end)

    def may_end(self, body: str) -> bool:
        """Return whether a call may end behind this text, which its last mark follows."""
        return not ends_in_string(body)

    @abc.abstractmethod
    def calls(self, begin: str, body: str, tools: Schemas) -> Sequence[RawCall]:
        """Return the calls, most often one, that are written between two marks.

        Raises:
            ValueError: What is written is no call.
        """

    def reader(self, begin: str, tools: Schemas) -> CallReader | None:
        """Return what understands a call that began with this mark as it is written; None: it is told as a whole."""
        return None

    def new_id(self) -> str:
        """Return an id for a call that the model gave none."""
        return f"call_{uuid.uuid4().hex[:24]}"

    @abc.abstractmethod
    def rules(self, rule: str, name: str, schema: Mapping[str, Any], special: SpecialTokens) -> list[str]:
        """Return rules of a grammar; the one of this name is a call, without what ``group`` has.

        Raises:
            UnsupportedSchema: A part of the schema cannot be enforced in this form.
        """

    @property
    def marks(self) -> Sequence[str]:
        """The texts in which special tokens may stand that have to be seen."""
        own = (*self.begins, self.end, self.opening, self.closing, self.group.begin, self.group.end, *self.more_marks)
        return [mark for mark in own if mark]


def num_begun(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the begin of a mark."""
    return max((n for n in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:n])), default=0)

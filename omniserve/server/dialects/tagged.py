"""Dialects of marks: thinking between two tags, then text with calls in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from omniserve.server.dialects.base import (
    CallForm,
    Dialect,
    Finder,
    Opening,
    ParsedCall,
    RawCall,
    Said,
    Schemas,
    num_begun,
)
from omniserve.server.dialects.call_readers import CallTeller
from omniserve.server.dialects.grammar_text import SpecialTokens
from omniserve.server.dialects.thinking import Thinking, ThinkingParser

_CLOSERS = " \t\n\r})]"
"""What may be missing or too much at the end of a call that is told."""


class TaggedDialect(Dialect):
    """A dialect of a form for thinking and one for calls, either of which may be missing."""

    def __init__(self, thinking: Thinking | None, calls: CallForm | None) -> None:
        self.thinking = thinking
        self.calls = calls
        self.knows_tools = calls is not None
        self.thinks = thinking is not None
        self.marks = [*(() if thinking is None else thinking.marks), *(() if calls is None else calls.marks)]

    @cached_property
    def without_calls(self) -> TaggedDialect:
        """The dialect of answers to chats without tools; the same object each time."""
        return TaggedDialect(self.thinking, None)

    def opening(self, prompt: str, continued: str | None = None) -> Opening:
        return Opening() if self.thinking is None else self.thinking.opening(prompt, continued)

    def parser(self, tools: Schemas, *, opening: Opening, several: bool = True, streams: bool = False) -> TaggedParser:
        calls = ToolCallParser(self.calls, tools, several=several, streams=streams) if self.calls and tools else None
        return TaggedParser(self.thinking, calls, opening)

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
        form = self.calls
        assert form is not None, "tools are refused where no form of calls is known"
        calls = " | ".join(f"call_{i}" for i in range(len(schemas)))
        rules = [f"call: {calls}"]
        for i, (name, schema) in enumerate(schemas.items()):
            rules += form.rules(f"call_{i}", name, schema, special)
        group = form.group
        end = f" {special.spell(group.end)}" if group.end else ""
        more = f" ({special.spell(group.separator)} call)*" if several or free_text else ""
        rules.append(f"calls: call{more}{end}")
        if otherwise is not None:
            rules += [f"answer: {special.spell(group.begin)} calls | value", f"value: {otherwise}"]
        elif not free_text:
            rules.append(f"answer: {special.spell(group.begin)} calls")
        elif form.only_at_start:
            rules += [f"answer: {special.spell(group.begin)} calls | {special.other_text('OTHER')}"]
            rules += special.not_begun("OTHER", *form.begins)
            if (thinks := self._may_begin_with(opening)) is not None:
                rules += [f"plain: {special.spell(group.begin)} calls | {special.other_text('PLAIN')}"]
                rules += special.not_begun("PLAIN", thinks, of="OTHER")
        else:
            rules += [f"answer: (begin calls)* {special.skipped}TEXT", *special.up_to("begin", group.begin)]
            if (thinks := self._may_begin_with(opening)) is not None:
                rules += [f"plain: plain_begin calls answer | {special.other_text('PLAIN')}"]
                rules += special.bounded("plain_begin", group.begin, before="PLAIN")
                rules += special.not_begun("PLAIN", thinks)
        return self._behind_thinking(rules, special, opening)

    def value_grammar(self, value: str, *, special: SpecialTokens, opening: Opening) -> str:
        return self._behind_thinking([f"answer: {value}"], special, opening)

    def text_grammar(self, *, special: SpecialTokens, opening: Opening) -> str:
        rules = [f"answer: {special.any_text}"]
        if (thinks := self._may_begin_with(opening)) is not None:
            rules += [f"plain: {special.text_not_begun('PLAIN', thinks)}", *special.not_begun("PLAIN", thinks)]
        return self._behind_thinking(rules, special, opening)

    def _may_begin_with(self, opening: Opening) -> str | None:
        """Return the mark with which the answer begins to think, and so no text may begin; None: it cannot."""
        return self.thinking.begin if self.thinking and opening.may_think and not opening.prefill else None

    def _behind_thinking(self, rules: list[str], special: SpecialTokens, opening: Opening) -> str:
        """Return a grammar; a rule ``plain``, if there is one, is of an answer without thinking."""
        start = "start: answer"
        if self.thinking is not None and opening.may_think:
            plain = "plain" if any(rule.startswith("plain:") for rule in rules) else "answer"
            start = f"start: {self.thinking.start(special, opening, plain)}"
            rules = [*rules, *special.bounded("thought", self.thinking.end, most_tokens=opening.budget)]
            rules += self.thinking.answer_rules(special)
        return "\n".join([start, *rules, *special.shared_rules])


class TaggedParser:
    """The parser of a ``TaggedDialect``."""

    def __init__(self, thinking: Thinking | None, calls: ToolCallParser | None, opening: Opening) -> None:
        self._thinking = None if thinking is None else ThinkingParser(thinking)
        # What is between the marks of an answer is told from them as thinking is.
        self._answer = ThinkingParser(thinking.answer) if thinking is not None and thinking.answer else None
        self._calls = calls
        if self._thinking is not None:
            self._thinking.push(opening.prefill)

    @property
    def num_calls(self) -> int:
        """Number of calls so far; of one, there may be only a begin yet."""
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def is_thinking(self) -> bool:
        """True while the text is reasoning."""
        return self._thinking is not None and self._thinking.is_inside

    @property
    def may_think(self) -> bool:
        """True while the text is reasoning or may still become that."""
        return self._thinking is not None and self._thinking.may_be_inside

    @property
    def is_over(self) -> bool:
        """True once there can be no further call and no text; what is pushed afterwards is ignored."""
        return self._calls is not None and self._calls.is_over

    def push(self, text: str) -> Said:
        """Add text; return what is certain by now."""
        reasoning = ""
        if self._thinking is not None:
            reasoning, text = self._thinking.push(text)
        if self._answer is not None:
            text = "".join(self._answer.push(text))
        if self._calls is None:
            return Said(reasoning, text)
        return Said(reasoning, *self._calls.push(text))

    def flush(self) -> Said:
        """Return what was held back, once no text follows; a call that lacks only its end is one."""
        reasoning = text = ""
        if self._thinking is not None:
            reasoning, text = self._thinking.flush()
        if self._answer is not None:
            text = "".join((*self._answer.push(text), *self._answer.flush()))
        if self._calls is None:
            return Said(reasoning, text)
        before, calls = self._calls.push(text)
        rest, last_calls = self._calls.flush()
        return Said(reasoning, before + rest, [*calls, *last_calls])


class ToolCallParser:
    """Separates the calls in one text from the rest of it.

    What looks like a call and is none stays text: what cannot be read as one, or calls a tool that is not offered.
    White space before a call, and at the end after one, belongs to neither. A call that is told in pieces stays one,
    whatever follows its begin.

    Args:
        form: How calls are written.
        tools: The tools that are offered.
        several: There may be more than one call; else the text ends with the first.
        streams: As of ``Dialect.parser``.
    """

    def __init__(self, form: CallForm, tools: Schemas, *, several: bool = True, streams: bool = False) -> None:
        self._form = form
        self._tools = tools
        self._several = several
        self._streams = streams
        self._held = ""
        """Text that is not told yet; of a call that is being read, what is behind its first mark."""
        self._lead = ""
        """White space and marks before that."""
        self._begin = ""
        """The mark of the call that is being read; empty outside of calls."""
        self._finder: Finder | None = None
        self._is_behind_call = False
        """What follows a call may close a group of them."""
        self._has_text = False
        """There is text since the last call."""
        self._num_characters = 0
        """Number of characters of text so far."""
        self._teller = CallTeller(form.new_id, several=several)

    @property
    def num_calls(self) -> int:
        """Number of calls so far; of one, there may be only a begin yet."""
        return self._teller.num_calls

    @property
    def is_over(self) -> bool:
        """True once there can be no further call and no text; what is pushed afterwards is ignored."""
        return self.num_calls > 0 and not self._several and not self._begin

    def push(self, text: str) -> tuple[str, list[ParsedCall]]:
        """Add text; return what is certain by now to be text, and the calls."""
        if self.is_over:
            return "", []
        self._held += text
        texts: list[str] = []
        calls: list[ParsedCall] = []
        while self._read_call(texts, calls) if self._begin else self._read_text(texts):
            pass
        return "".join(texts), calls

    def flush(self) -> tuple[str, list[ParsedCall]]:
        """Return what was held back, once no text follows; a call that lacks only its end is one."""
        held, self._held = self._held, ""
        if not self._begin:
            return ("" if self.num_calls and not held.strip() else held), []
        calls, found = self._read_certain(held), self._found(held)
        begin, self._begin = self._begin, ""
        if not found and not self._teller.num_read:
            return f"{self._lead}{begin}{held}", []
        return "", [*calls, *self._teller.end(found, self._num_characters)]

    def _read_text(self, texts: list[str]) -> bool:
        """Read up to the next call; return False if there is none so far."""
        form = self._form
        if self._is_behind_call and form.closing:
            rest = self._held.lstrip()
            if rest.startswith(form.closing):
                self._held = rest[len(form.closing) :]
                return True
            if form.closing.startswith(rest):
                return False
        at = 0
        while (found := self._next_begin(at)) is not None:
            at, begin = found
            text, has_opening = self._without_lead(self._held[:at])
            if not form.only_at_start or has_opening or not (self._has_text or text):
                self._tell(texts, text)
                self._lead = self._held[len(text) : at]
                self._held = self._held[at + len(begin) :]
                self._begin, self._finder = begin, form.finder(begin)
                self._teller.begin(form.reader(begin, self._tools) if self._streams else None)
                return True
            at += 1
        certain = self._held[: len(self._held) - self._num_held()]
        self._held = self._held[len(certain) :]
        self._tell(texts, certain)
        return False

    def _read_call(self, texts: list[str], calls: list[ParsedCall]) -> bool:
        """Read up to the end of the call; return False if it is missing."""
        assert self._finder is not None
        if (found := self._finder.find(self._held)) is None:
            calls += self._read_certain(self._held)
            return False
        body, raw, self._held = self._held[: found[0]], self._held[: found[1]], self._held[found[1] :]
        calls += self._teller.read(body, self._num_characters)
        whole = self._found(body)
        if whole or self._teller.num_read:
            calls += self._teller.end(whole, self._num_characters)
            self._has_text, self._is_behind_call = False, True
            if not whole and (rest := self._teller.rest(body)).strip(_CLOSERS):
                self._tell(texts, rest)
        else:
            self._tell(texts, f"{self._lead}{self._begin}{raw}")
        self._begin = ""
        if self.is_over:
            self._held = ""
        return True

    def _read_certain(self, held: str) -> list[ParsedCall]:
        """Return what the reader understands of a text that may end with a part of the call's last mark."""
        return self._teller.read(held[: len(held) - num_begun(held, self._form.end)], self._num_characters)

    def _tell(self, texts: list[str], text: str) -> None:
        texts.append(text)
        self._num_characters += len(text)
        if text.strip():
            self._has_text, self._is_behind_call = True, False

    def _found(self, body: str) -> Sequence[RawCall]:
        """Return the calls of what is between two marks; none if it is not understood as a whole."""
        try:
            found = self._form.calls(self._begin, body, self._tools)
        except ValueError:
            return []
        if any(call.name not in self._tools for call in found):
            return []
        return found

    def _next_begin(self, at: int) -> tuple[int, str] | None:
        found = [(place, begin) for begin in self._form.begins if (place := self._held.find(begin, at)) >= 0]
        return min(found, default=None)

    def _without_lead(self, text: str) -> tuple[str, bool]:
        """Return a text without what may stand before a call, and whether that has an opening mark."""
        text = text.rstrip()
        if self._form.opening and text.endswith(self._form.opening):
            return text[: -len(self._form.opening)].rstrip(), True
        return text, False

    def _num_held(self) -> int:
        """Return how many characters at the end may belong to a call."""
        marks = [*self._form.begins, self._form.opening] if self._form.opening else self._form.begins
        length = max(num_begun(self._held, mark) for mark in marks)
        text, _ = self._without_lead(self._held[: len(self._held) - length])
        return len(self._held) - len(text)

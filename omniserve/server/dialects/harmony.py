"""Harmony, the dialect of gpt-oss: an answer is messages, each with a channel and perhaps a recipient.

::

    <|channel|>analysis<|message|>The user wants ...<|end|><|start|>assistant<|channel|>commentary to=functions.weather
    <|constrain|>json<|message|>{"city": "Köln"}<|call|>

What is said on the channel ``analysis`` is thinking. A message to a function is a call. All else is text. The model
ends at ``<|call|>`` and ``<|return|>``, so that there is one call in an answer.
"""

from __future__ import annotations

import re
import uuid

from omniserve.sampling.grammar import json_value
from omniserve.server.dialects.base import Dialect, Opening, RawCall, Said, Schemas, num_begun
from omniserve.server.dialects.call_readers import CallTeller, Head, JsonReader
from omniserve.server.dialects.grammar_text import SpecialTokens
from omniserve.server.dialects.json_text import object_text

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_ASSISTANT = f"{_START}assistant"
_HEADERS = (_CHANNEL, _MESSAGE, _START, "to=")
"""What the head of a message may begin with."""
_NEXT = f"<|end|>{_ASSISTANT}"
_OBJECT = re.compile(r"\s*(?=\{)")


class Harmony(Dialect):
    """The dialect of gpt-oss."""

    knows_tools = thinks = True
    marks = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, "<|end|>", "<|call|>", "<|return|>")

    @staticmethod
    def is_of(template: str) -> bool:
        """Return whether a chat template is of this dialect."""
        return _CHANNEL in template and _MESSAGE in template

    @property
    def without_calls(self) -> Harmony:
        """The dialect of answers to chats without tools: a call would be text."""
        return self

    def opening(self, prompt: str, continued: str | None = None) -> Opening:
        _, _, begun = prompt.rpartition(_ASSISTANT)
        return Opening("" if any(end in begun for end in _ENDS) else begun)

    def parser(self, tools: Schemas, *, opening: Opening, several: bool = True, streams: bool = False) -> HarmonyParser:
        parser = HarmonyParser(tools, several=several, streams=streams)
        parser.begin(opening.prefill)
        return parser

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
        rules = [f"answer: {' | '.join(f'call_{i}' for i in range(len(schemas)))}"]
        for i, (name, schema) in enumerate(schemas.items()):
            head = special.spell(f"{_CHANNEL}commentary to=functions.{name} {_CONSTRAIN}json{_MESSAGE}")
            rules += [f"call_{i}: {head} args_{i}", f"args_{i}: {json_value(schema)}"]
        if otherwise is not None:
            rules[0] += f" | {special.spell(f'{_CHANNEL}final{_MESSAGE}')} value"
            rules.append(f"value: {otherwise}")
            return self._behind_thinking(rules, special, opening, "value")
        if free_text:
            rules[0] += f" | {special.spell(f'{_CHANNEL}final{_MESSAGE}')} {special.skipped}TEXT"
            rules[0] += f" | {special.spell(f'{_CHANNEL}commentary{_MESSAGE}')} preamble answer"
            rules += special.up_to("preamble", _NEXT)
        return self._behind_thinking(rules, special, opening, f"{special.skipped}TEXT" if free_text else None)

    def value_grammar(self, value: str, *, special: SpecialTokens, opening: Opening) -> str:
        final = special.spell(f"{_CHANNEL}final{_MESSAGE}")
        return self._behind_thinking([f"answer: {final} value", f"value: {value}"], special, opening, "value")

    def text_grammar(self, *, special: SpecialTokens, opening: Opening) -> str:
        rules = [f'answer: {special.spell(_CHANNEL)} ("final" | "commentary") {special.any_text}']
        return self._behind_thinking(rules, special, opening, special.any_text)

    def _behind_thinking(self, rules: list[str], special: SpecialTokens, opening: Opening, text: str | None) -> str:
        """Return a grammar; ``text`` is an expression of what follows a prompt that ends inside of a text."""
        head, message, _ = opening.prefill.rpartition(_MESSAGE)
        if message and _channel(head) == "analysis":
            start = "thought answer"
        elif message:
            start = text or "TEXT"
        else:
            start = f"{special.spell(f'{_CHANNEL}analysis{_MESSAGE}')} thought answer | answer"
        rules = [*rules, *special.bounded("thought", _NEXT, most_tokens=opening.budget)]
        return "\n".join([f"start: {start}", *rules, *special.shared_rules])


class HarmonyParser:
    """The parser of one answer.

    Args:
        tools: The tools that are offered.
        several: There may be more than one call; else the text ends with the first.
        streams: As of ``Dialect.parser``.
    """

    def __init__(self, tools: Schemas, *, several: bool, streams: bool) -> None:
        self._tools = tools
        self._several = several
        self._streams = streams
        self._held = ""
        self._seen = 0
        """Characters of what is held in which no message ends."""
        self._head: str | None = None
        """The head of the message that is being read; None while its end is missing."""
        self._told: dict[str, bool] = {}
        """True for ``reasoning`` or ``text`` once a message was of it: a line end then separates the next."""
        self._is_new = True
        self._num_characters = 0
        """Number of characters of text so far."""
        self._teller = CallTeller(_new_id, several=True)  # a message is a call

    @property
    def num_calls(self) -> int:
        """Number of calls so far; of one, there may be only a begin yet."""
        return self._teller.num_calls

    @property
    def is_thinking(self) -> bool:
        """True while the text is reasoning."""
        return self._kind == "reasoning"

    @property
    def may_think(self) -> bool:
        """True while the text is reasoning or may still become that."""
        return self._head is None or _channel(self._head) not in ("", "final")

    @property
    def is_over(self) -> bool:
        """True once there can be no further call and no text; what is pushed afterwards is ignored."""
        return self.num_calls > 0 and not self._several and self._kind != "call"

    def begin(self, prefill: str) -> None:
        """Take the begin of the answer that the prompt has written; nothing of it is told."""
        self.push(prefill)
        self._told.clear()
        self._num_characters = 0

    def push(self, text: str) -> Said:
        """Add text; return what is certain by now."""
        if self.is_over:
            return Said()
        self._held += text
        said: list[Said] = []
        while self._read_head(said) if self._head is None else self._read_body(said):
            pass
        return _joined(said)

    def flush(self) -> Said:
        """Return what was held back, once no text follows; a call that lacks only its end is one."""
        if self.is_over:
            return Said()
        held, self._held = self._held, ""
        if self._head is None:
            return Said(text="" if held.strip() == "" or held.lstrip().startswith("<|") else held)
        said: list[Said] = []
        self._end_message(said, held)
        return _joined(said)

    @property
    def _kind(self) -> str:
        head = self._head
        if head is None:
            return "head"
        if (name := _recipient(head)) is not None:
            return "call" if name in self._tools else "other"
        return "reasoning" if _channel(head) == "analysis" else "text"

    def _read_head(self, said: list[Said]) -> bool:
        """Read the head of a message; return False if its end is missing."""
        stripped = self._held.lstrip()
        if not any(stripped.startswith(mark) or mark.startswith(stripped) for mark in (*_HEADERS, *_ENDS)):
            self._head = ""  # text without a head
            return True
        for end in ("<|end|>", "<|call|>", "<|return|>"):
            if stripped.startswith(end):
                self._held = stripped[len(end) :]
                return True
        at = self._held.find(_MESSAGE)
        if at < 0:
            return False
        self._head, self._held = self._held[:at], self._held[at + len(_MESSAGE) :]
        self._is_new = True
        self._teller.begin(self._reader(self._head) if self._kind == "call" else None)
        return True

    def _reader(self, head: str) -> JsonReader | None:
        """Return what understands the call that a message is, whose head this is."""
        name = _recipient(head) or ""

        def find_head(text: str, at: int) -> Head | None:
            match = None if at else _OBJECT.match(text)
            return None if match is None else Head(name, match.end())

        return JsonReader(find_head, self._tools) if self._streams else None

    def _read_body(self, said: list[Said]) -> bool:
        """Read what a message says; return False if its end is missing."""
        found = [(at, end) for end in _ENDS if (at := self._held.find(end, self._seen)) >= 0]
        self._seen = 0
        if found:
            at, end = min(found)
            body, rest = self._held[:at], self._held[at if end == _START else at + len(end) :]
            self._held = ""
            self._end_message(said, body)
            self._held = "" if self.is_over else rest
            return not self.is_over
        certain = self._held[: len(self._held) - max(num_begun(self._held, end) for end in _ENDS)]
        if self._kind in ("reasoning", "text"):
            self._held = self._held[len(certain) :]
            self._tell(said, self._kind, certain)
        elif calls := self._teller.read(certain, self._num_characters):
            said.append(Said(calls=calls))
        self._seen = max(0, len(self._held) - max(map(len, _ENDS)))
        return False

    def _end_message(self, said: list[Said], body: str) -> None:
        kind, head = self._kind, self._head or ""
        self._head = None
        if kind in ("reasoning", "text"):
            self._tell(said, kind, body)
        elif kind == "call":
            calls = self._teller.read(body, self._num_characters)
            arguments = object_text(body or "{}")
            found = [] if arguments is None else [RawCall(_recipient(head) or "", arguments)]
            if not found and not self._teller.num_read:
                self._tell(said, "text", f"{head}{_MESSAGE}{body}")
            said.append(Said(calls=[*calls, *self._teller.end(found, self._num_characters)]))
        else:
            self._is_new = True
            self._tell(said, "text", f"{head}{_MESSAGE}{body}")
        self._is_new = True

    def _tell(self, said: list[Said], kind: str, text: str) -> None:
        if not text:
            return
        if self._is_new and self._told.get(kind):
            text = f"\n{text}"
        self._is_new, self._told[kind] = False, True
        self._num_characters += len(text) if kind == "text" else 0
        said.append(Said(reasoning=text) if kind == "reasoning" else Said(text=text))


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _joined(said: list[Said]) -> Said:
    calls = [call for one in said for call in one.calls]
    return Said("".join(one.reasoning for one in said), "".join(one.text for one in said), calls)


def _channel(head: str) -> str:
    match = re.search(r"<\|channel\|>\s*(\w+)(?![\s\S]*<\|channel\|>)", head)
    return "" if match is None else match[1]


def _recipient(head: str) -> str | None:
    """Return the name of the function that a message is for; None: it is for the user."""
    match = re.search(r"\bto=([^\s<]+)", head)
    if match is None or match[1] in ("user", "assistant"):
        return None
    return match[1].removeprefix("functions.")

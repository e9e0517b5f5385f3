"""A chat template: in which form it reads the contents of messages, and the text that it makes of a chat."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from omniserve.server.dialects.json_text import dumps
from omniserve.server.errors import ApiError

Message = Mapping[str, Any]

_OWN_OPTIONS = ("add_generation_prompt", "continue_final_message", "documents")
"""Options of ``apply_chat_template`` that are no variables of the template."""
_MOST_CHARACTERS = 32 << 20
"""Longest text that a template may write: as long as the largest body by default."""
_OTHER_ROLES = ("system", "assistant", "tool")


class Form(Enum):
    """The form in which a template reads the content of a role's messages."""

    STRING = "a string"
    PARTS = "a list of parts"
    HIDDEN = "not at all"


class _TooLong(Exception):
    """A template writes more than any model reads."""


class ChatTemplate:
    """A chat template of a tokenizer.

    Args:
        tokenizer: A tokenizer of ``transformers``.
        source: The template's own text.
    """

    def __init__(self, tokenizer: Any, source: str) -> None:
        self._tokenizer = tokenizer
        self.source = source
        self.problem: str | None = None
        """The reason why no chat can be written with the template, as far as that is known; see ``look``."""
        self.takes_late_system = False
        """Messages of the system behind a user's are written in their places, as far as that is known."""
        self.takes_user_after_tool = False
        """A user's message may follow the results of tools, as far as that is known."""

    @cached_property
    def forms(self) -> Mapping[str, Form]:
        """The form in which the content of each role is read, found by writing small chats.

        A role that the template cannot write at all is taken for one like the user's: the template says itself what it
        misses.
        """
        of_users = self._form("user") or Form.STRING
        return {"user": of_users} | {role: self._form(role) or of_users for role in _OTHER_ROLES}

    def look(self) -> None:
        """Find out how the template reads chats, and what is wrong with it if it can write none."""
        try:
            self._compile()
        except TemplateError as error:
            self.problem = f"this model's chat template cannot be read: {error}; give another one with --chat-template"
            return
        if self.forms["user"] is Form.HIDDEN:
            self.problem = (
                "this model's chat template leaves out what users say, both as a string and as a list of parts of the "
                "type 'text'; give another one with --chat-template"
            )
            return
        answer: Message = {"role": "assistant", "content": _in_form("", self.forms["assistant"])}
        result: Message = {"role": "tool", "content": _in_form("a", self.forms["tool"])}
        result = {**result, "name": "f", "tool_call_id": _CALL["id"]}
        self.takes_late_system = self._takes_last("system")
        self.takes_user_after_tool = self._takes_last("user", {**answer, "tool_calls": [_CALL]}, result)

    @property
    def hidden_roles(self) -> list[str]:
        """Roles whose contents the template leaves out."""
        return [role for role, form in self.forms.items() if form is Form.HIDDEN]

    def write(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> str:
        """Return the text of a chat.

        Args:
            messages: As templates take them, their contents as strings.
            tools: As templates take them.
            options: More keyword arguments of ``apply_chat_template``, variables of the template among them.

        Raises:
            ApiError: The template refuses the chat, fails on it, writes too much, or leaves out a message's text.
        """
        if self.problem is not None:
            raise ApiError(self.problem, param="messages", code="no_chat_template")
        if options.get("documents") and not self._reads_documents:
            raise ApiError(
                "this model's chat template does not read documents; put their texts into the messages",
                param="documents",
                code="unsupported_parameter",
            )
        if any(isinstance(arguments, str) for arguments in _arguments_in(messages)) and not self._takes_text_arguments:
            messages = [_with_object_arguments(message) for message in messages]
        if any(isinstance(arguments, dict) for arguments in _arguments_in(messages)) and self._needs_text_arguments:
            messages = [_with_text_arguments(message) for message in messages]
        converted = [self._converted(message) for message in messages]
        try:
            return self._write(converted, tools, options)
        except Exception as error:  # a template is a program, and may fail in any way
            param = self._cause(converted, tools, options)
            what = "messages" if param == "messages" else f"{param} of this request"
            if isinstance(error, _TooLong):
                said = f"makes more than {_MOST_CHARACTERS} characters of the {what}; send less"
            elif isinstance(error, TemplateError):
                said = f"refuses the {what}: {error}"
            else:
                said = f"fails on the {what}: {type(error).__name__}: {error}"
            raise ApiError(f"the model's chat template {said}", param=param) from None

    @property
    def _reads_documents(self) -> bool:
        return re.search(r"\bdocuments\b", self.source) is not None

    @cached_property
    def _takes_text_arguments(self) -> bool:
        """True if the arguments of a call may be a text; some templates go through the items of an object."""
        return self._takes_arguments("probe")

    @cached_property
    def _needs_text_arguments(self) -> bool:
        """True if the arguments of a call may be a text, and no object; some templates append them to a text."""
        return self._takes_text_arguments and not self._takes_arguments({"probe": 1})

    def _takes_arguments(self, arguments: Any) -> bool:
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}
        answer: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        chat: list[Message] = [{"role": "user", "content": "a"}, answer]
        try:
            return "probe" in self._write([self._converted(message) for message in chat], (), {})
        except Exception:  # a template is a program, and may fail in any way
            return False

    def _converted(self, message: Message) -> Message:
        form = self.forms.get(message["role"], self.forms["user"])
        if form is Form.HIDDEN and message["content"]:
            raise ApiError(
                f"this model's chat template leaves out the content of messages of the role {message['role']!r}; "
                "write it into a message of the role 'user'",
                param="messages",
            )
        return {**message, "content": _in_form(message["content"], form)}

    def _cause(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> str:
        """Return the field without which the chat could have been written; the messages if it is none of the others."""
        fewer: list[tuple[str, Sequence[Mapping[str, Any]], Mapping[str, Any]]] = []
        own = {name: value for name, value in options.items() if name in _OWN_OPTIONS}
        if len(own) < len(options):
            fewer.append(("chat_template_kwargs", tools, own))
        for name in ("documents", "continue_final_message"):
            if options.get(name):
                fewer.append((name, tools, {**options, name: None}))
        if tools:
            fewer.append(("tools", (), options))
        for field, fewer_tools, fewer_options in fewer:
            try:
                self._write(messages, fewer_tools, fewer_options)
            except Exception:  # as above
                continue
            return field
        return "messages"

    def _write(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> str:
        self._compile()
        text: str = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            chat_template=self.source,
            tokenize=False,
            **options,
        )
        return text

    def _takes_last(self, role: str, *before: Message) -> bool:
        """Return whether a message of a role may follow a user's and these, and is written behind them."""
        asked: Message = {"role": "user", "content": _in_form(_ASKED, self.forms["user"])}
        last: Message = {"role": role, "content": _in_form(_MARK, self.forms[role])}
        try:
            text = self._write([asked, *before, last], (), {})
        except Exception:  # as in ``write``: this chat is none that the template takes
            return False
        return text.rfind(_ASKED) < text.find(_MARK)

    def _compile(self) -> None:
        """Have transformers compile the template, which it keeps, and bound what it writes.

        Raises:
            TemplateError: It is no template.
        """
        from transformers.utils.chat_template_utils import _compile_jinja_template

        _compile_jinja_template(self.source).environment.concat = _concat

    def _form(self, role: str) -> Form | None:
        """Return the form in which a role's content is read; None: the template writes no chat with such a role."""
        was_written = False
        for form in (Form.STRING, Form.PARTS):
            for messages, tools in _probes(role, form):
                try:
                    text = self._write(messages, tools, {"add_generation_prompt": True})
                except Exception:  # as in ``write``: this chat is none that the template takes
                    continue
                if _shows(text, form):
                    return form
                was_written = True
        return Form.HIDDEN if was_written else None


def _arguments_in(messages: Sequence[Message]) -> Iterator[Any]:
    return (call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ()))


def _with_object_arguments(message: Message) -> Message:
    """Return a message in which arguments of calls that are a text are an object that has it."""
    return _with_arguments(message, lambda given: {"arguments": given} if isinstance(given, str) else given)


def _with_text_arguments(message: Message) -> Message:
    """Return a message in which arguments of calls that are an object are its JSON."""
    return _with_arguments(message, lambda given: given if isinstance(given, str) else dumps(given))


def _with_arguments(message: Message, convert: Callable[[Any], Any]) -> Message:
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    functions = [function | {"arguments": convert(function["arguments"])} for function in functions]
    pairs = zip(message["tool_calls"], functions, strict=True)
    return {**message, "tool_calls": [call | {"function": function} for call, function in pairs]}


def _concat(pieces: Iterable[str]) -> str:
    """Join what a template writes, as Jinja's own ``concat`` does, up to a bound."""
    text = io.StringIO()
    for piece in pieces:
        text.write(piece)
        if text.tell() > _MOST_CHARACTERS:
            raise _TooLong
    return text.getvalue()


_MARK = "omniserve0probe"
_ASKED = "omniserve0asked"
_TOOL = {"type": "function", "function": {"name": "f", "description": "a", "parameters": {"type": "object"}}}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}


def _in_form(text: str, form: Form) -> Any:
    # One part if the text is empty, too: some templates look at the first one's type.
    return [{"type": "text", "text": text}] if form is Form.PARTS else text


def _probes(role: str, form: Form) -> Iterator[tuple[list[Message], list[Mapping[str, Any]]]]:
    """Yield chats in which one message of a role has the mark as its content, in a form, and tools to them.

    Templates may refuse a chat without a system's message, or with one; the others' contents may be in the other form.
    """
    for others in (form, Form.PARTS if form is Form.STRING else Form.STRING):

        def message(which: str, text: str, others: Form = others, **more: Any) -> Message:
            return {"role": which, "content": _in_form(text, form if text == _MARK else others), **more}

        asked, answered, told = message("user", "a"), message("assistant", "b"), message("system", "c")
        marked = message(role, _MARK)
        chats: Mapping[str, list[list[Message]]] = {
            "user": [[marked], [told, marked], [marked, answered, asked]],
            "system": [[marked, asked], [marked, asked, answered, asked]],
            "assistant": [[asked, marked, asked], [told, asked, marked, asked]],
        }
        if role != "tool":
            yield from ((chat, []) for chat in chats[role])
            continue
        called = message("assistant", "", tool_calls=[_CALL])
        answer = message("tool", _MARK, name="f", tool_call_id=_CALL["id"])
        for begin in ([asked], [told, asked]):
            for end in ([], [message("assistant", "b"), asked]):
                yield [*begin, called, answer, *end], [_TOOL]
                yield [*begin, called, answer, *end], []


def _shows(text: str, form: Form) -> bool:
    """Return whether a text has the mark as such, and not as part of what Python or JSON writes for a list."""
    if form is Form.STRING:
        return _MARK in text
    quoted = (f"{quote}text{quote}:{space}{quote}{_MARK}" for quote in "'\"" for space in ("", " "))
    return text.count(_MARK) > sum(text.count(part) for part in quoted)

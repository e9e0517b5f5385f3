"""The tokenizer as the server uses it: prompts to ids, chats to ids, single tokens to text and bytes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from jinja2 import TemplateError

from omniserve.sampling.detokenizer import Detokenizer, special_token_ids
from omniserve.server.errors import ApiError
from omniserve.server.tool_calls import CALL_BEGIN, CALL_END, SpecialTokens

T = TypeVar("T")

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# So many characters or tokens take under a millisecond; longer texts must not hold up the tokens of other requests.
_MAX_INLINE = 4096


class TextCodec:
    """A tokenizer of ``transformers``, wrapped."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # One thread, because the tokenizer may change its padding settings while it encodes.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self.token_text = lru_cache(maxsize=65536)(self._token_text)
        self.token_bytes = lru_cache(maxsize=65536)(self._token_bytes)

    @property
    def has_chat_template(self) -> bool:
        """True if the model takes chats."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return a text's token ids."""
        return await self._run(len(text), self._encode, text, add_special_tokens)

    async def encode_chat(
        self, messages: Sequence[dict[str, Any]], *, tools: Sequence[dict[str, Any]] = (), options: Mapping[str, Any],
        add_special_tokens: bool = False,
    ) -> list[int]:  # fmt: skip
        """Return the token ids of a chat, whose messages and tools are as chat templates take them.

        Args:
            messages: At least one.
            tools: Shown to the model.
            options: More keyword arguments of ``apply_chat_template``; see ``TemplateFields``.
            add_special_tokens: The tokenizer adds some to what the template writes.

        Raises:
            ApiError: The model has no chat template, or none for tools, or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise ApiError(
                "this model has no chat template, so it cannot tell messages apart; write the chat as one prompt and "
                "send it to /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        if tools and not self._knows_tools:
            raise ApiError(
                "this model's chat template has no tools in a form that is known here (Hermes' and Qwen's "
                f"{CALL_BEGIN}); remove tools and describe them in the messages",
                param="tools",
                code="unsupported_parameter",
            )
        if options.get("documents") and not self._reads_documents:
            raise ApiError(
                "this model's chat template does not read documents; put their texts into the messages",
                param="documents",
                code="unsupported_parameter",
            )
        if any(isinstance(arguments, str) for arguments in _arguments_in(messages)) and not self._takes_text_arguments:
            messages = [_with_object_arguments(message) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, **options
            )
        except TemplateError as error:
            raise ApiError(f"the model's chat template refuses the messages: {error}", param="messages") from None
        except ValueError as error:
            if not options.get("continue_final_message"):
                raise
            message = f"the model's chat template cannot write a last message that goes on: {error}"
            raise ApiError(message, param="continue_final_message") from None
        return await self.encode(text, add_special_tokens=add_special_tokens)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return await self._run(len(token_ids), self._decode, token_ids)

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return ``token_text`` of each."""
        return await self._run(len(token_ids), lambda: [self._token_text(i) for i in token_ids])

    def detokenizer(
        self, stop: Sequence[str], *, skip_special_tokens: bool = True, min_tokens: int = 0, include_stop: bool = False,
        shown: Collection[int] = (),
    ) -> Detokenizer:  # fmt: skip
        """Return a detokenizer for one output; see ``Detokenizer``."""
        return Detokenizer(
            self._tokenizer, tuple(stop), skip_special_tokens, min_tokens=min_tokens, include_stop=include_stop,
            shown=shown,
        )  # fmt: skip

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """The tokenizer's special tokens."""
        ids = special_token_ids(self._tokenizer)
        begin, end = (
            next((i for i in ids if self._tokenizer.convert_ids_to_tokens(i) == tag), None)
            for tag in (CALL_BEGIN, CALL_END)
        )
        return SpecialTokens(begin, end, tuple(sorted(ids - {begin, end})))

    async def _run(self, size: int, work: Callable[..., T], *args: Any) -> T:
        """Do ``work`` on ``size`` characters or tokens: in this thread if they are few, else in the tokenizer's."""
        if size <= _MAX_INLINE:
            return work(*args)
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)

    def _decode(self, token_ids: Sequence[int]) -> str:
        ids = list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids

    def _token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for in the middle of a text."""
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:  # the model's vocabulary is padded beyond the tokenizer's
            return b""
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        text = self._decode_one(token_id)
        if "\N{REPLACEMENT CHARACTER}" in text and all(c in _BYTE_OF for c in piece):
            return bytes(_BYTE_OF[c] for c in piece)
        return text.encode()

    def _token_text(self, token_id: int) -> str:
        """Return a token's text, or its bytes as OpenAI writes them if they are not whole characters."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _decode_one(self, token_id: int) -> str:
        # Behind another token, because some decoders strip the first token's space.
        anchor, text = self._anchor
        return self._tokenizer.decode([*anchor, token_id], skip_special_tokens=False)[len(text) :]

    @cached_property
    def _knows_tools(self) -> bool:
        template = self._tokenizer.chat_template
        if isinstance(template, dict):  # several, by name; transformers takes this one for tools
            template = template.get("tool_use", "")
        # Some write XML between the same tags.
        return "tools" in template and CALL_BEGIN in template and "<function=" not in template

    @cached_property
    def _reads_documents(self) -> bool:
        template = self._tokenizer.chat_template
        texts = template.values() if isinstance(template, dict) else [template]
        return any(re.search(r"\bdocuments\b", text) for text in texts)

    @cached_property
    def _takes_text_arguments(self) -> bool:
        """True if the arguments of a call may be a text; some templates go through the items of an object."""
        text = "probe"
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": text}}
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            return text in self._tokenizer.apply_chat_template(chat, tokenize=False)
        except Exception:  # a template is a program, and may fail in any way
            return False

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        ids = self._encode("a", False)
        return ids, self._tokenizer.decode(ids, skip_special_tokens=False)


def _arguments_in(messages: Sequence[dict[str, Any]]) -> Iterator[Any]:
    return (call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ()))


def _with_object_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in which arguments of calls that are a text are an object that has it."""
    if not any(isinstance(arguments, str) for arguments in _arguments_in([message])):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        if isinstance(function["arguments"], str):
            function = function | {"arguments": {"arguments": function["arguments"]}}
        calls.append(call | {"function": function})
    return message | {"tool_calls": calls}


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's map of printable characters to bytes, which byte-level tokenizers write their pieces in."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()

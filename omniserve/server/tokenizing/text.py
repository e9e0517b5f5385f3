"""The tokenizer as the server uses it: prompts to ids, chats to ids, single tokens to text and bytes."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from omniserve.sampling.detokenizer import Detokenizer, special_token_ids
from omniserve.server import dialects
from omniserve.server.dialects.base import Dialect
from omniserve.server.dialects.grammar_text import SpecialTokens, special_tokens
from omniserve.server.errors import ApiError
from omniserve.server.tokenizing.byte_alphabet import BYTE_OF, BYTE_TOKEN
from omniserve.server.tokenizing.chat_template import ChatTemplate
from omniserve.server.tokenizing.lanes import Lane
from omniserve.server.tokenizing.token_bound import TokenBound

logger = logging.getLogger(__name__)

# So many characters or tokens take under a millisecond; longer texts must not hold up the tokens of other requests.
_MAX_INLINE = 1024
# Longer texts of latency-sensitive requests must not hold up the shorter ones.
_MAX_SHORT = 1 << 16
# The variable, not a field of messages that has its name.
_READS_TOOLS = re.compile(r"""(?<![.'"\w])tools(?!['"\w])""")
# Seconds that a template may take for a chat. Most take under a millisecond.
_TEMPLATE_LIMIT_S = 10.0


Encodable: TypeAlias = str | tuple[str, str]
"""A text, or two that the tokenizer puts together."""


class TooManyTokens(Exception):
    """A text has more tokens than it may have.

    Args:
        num_tokens: The number of its tokens.
        is_exact: False: at least so many; the text was not encoded.
    """

    def __init__(self, num_tokens: int, *, is_exact: bool) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens
        self.is_exact = is_exact


class TextCodec:
    """A tokenizer of ``transformers``, wrapped.

    Threads beside the event loop do what may take long: one for texts of best-effort requests, so that those of
    latency-sensitive ones never wait for these, and two for the latter, so that short texts do not wait for long ones.

    Args:
        tokenizer: A tokenizer of ``transformers``; nothing else uses it.
        chat_template: The name of one of its chat templates, or a file with another one; None: its own.
        tool_call_parser, reasoning_parser: How the model writes calls and marks thinking; see ``dialects.choose``.

    Raises:
        ValueError: There is no such template or parser.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        *,
        tool_call_parser: str = dialects.AUTO,
        reasoning_parser: str = dialects.AUTO,
    ) -> None:
        self._tokenizer = tokenizer
        self._backend = _backend_of(tokenizer)
        """The tokenizer's part that is not Python, whose calls let other threads run. Several threads use it, so its
        settings are made here, once. None: it has no such part, or adds something to it."""
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = tokenizer.split_special_tokens
        self._bound = TokenBound(self._backend)
        self._short_lane = self._long_lane = self._best_effort_lane = Lane("text-be")
        if self._backend is not None:  # other tokenizers may keep something from call to call: one thread has them all
            self._short_lane, self._long_lane = Lane("text-ls"), Lane("long-text-ls")
        self.token_text = lru_cache(maxsize=65536)(self._token_text)
        self.token_bytes = lru_cache(maxsize=65536)(self._token_bytes)
        self._cutter = lru_cache(maxsize=4)(self._make_cutter)
        sources = _template_sources(tokenizer, chat_template)
        templates = {source: ChatTemplate(tokenizer, source) for source in sources.values()}
        self._templates = {name: templates[source] for name, source in sources.items()}
        """Templates by name: ``default``, and for chats with tools ``tool_use``, if there is one; others are not
        used."""
        choose = functools.partial(dialects.choose, calls=tool_call_parser, thinking=reasoning_parser)
        choose("")  # a name may be wrong where there is no template
        self._dialects = {template: choose(template.source) for template in templates.values()}
        self._special_tokens: dict[Dialect, SpecialTokens] = {}

    @property
    def has_chat_template(self) -> bool:
        """True if the model takes chats without tools."""
        template = self._templates.get("default")
        return template is not None and template.problem is None

    @property
    def thinks(self) -> bool:
        """True if it is known how answers to all chats mark reasoning."""
        used = [self._dialects[one] for name, one in self._templates.items() if name in ("default", "tool_use")]
        return bool(used) and all(dialect.thinks for dialect in used)

    def takes_late_system(self, *, with_tools: bool) -> bool:
        """Return whether chats may have messages of the system behind a user's.

        Raises:
            ApiError: The model has no chat template.
        """
        return self._template(with_tools=with_tools).takes_late_system

    def takes_user_after_tool(self, *, with_tools: bool) -> bool:
        """Return whether a user's message may follow the results of tools.

        Raises:
            ApiError: The model has no chat template.
        """
        return self._template(with_tools=with_tools).takes_user_after_tool

    async def look_at_templates(self) -> None:
        """Find out how the chat templates read messages; tell of what they cannot write."""
        for name, template in self._templates.items():
            if name not in ("default", "tool_use"):
                continue
            try:
                await self._best_effort_lane.run(template.look, limit_s=_TEMPLATE_LIMIT_S)
            except TimeoutError:
                template.problem = (
                    f"this model's chat template took more than {_TEMPLATE_LIMIT_S:g} s for a short chat; give another "
                    "one with --chat-template"
                )
            if template.problem is not None:
                logger.warning("chats are refused: %s", template.problem)
            elif template.hidden_roles:
                logger.warning(
                    "the chat template leaves out the content of messages of the role %s: chats with such are refused",
                    " and ".join(map(repr, template.hidden_roles)),
                )
        if self._templates and "default" not in self._templates:
            logger.warning("chats%s are refused: %s", self._but_with_tools, self._no_default)

    async def encode(
        self, text: str, *, add_special_tokens: bool, is_urgent: bool = False, most: int | None = None
    ) -> list[int]:
        """Return a text's token ids; see ``encode_all``."""
        (ids,) = await self.encode_all([text], add_special_tokens=add_special_tokens, is_urgent=is_urgent, most=most)
        return ids

    async def encode_all(
        self,
        texts: Sequence[Encodable],
        *,
        add_special_tokens: bool,
        is_urgent: bool = False,
        most: int | None = None,
        cut_to: int | None = None,
    ) -> list[list[int]]:
        """Return the token ids of texts.

        Args:
            texts: Any number, or pairs of texts, which the tokenizer puts together.
            add_special_tokens: The tokenizer puts those of the model around each text.
            is_urgent: Goes before all texts that are not.
            most: Most tokens of a text.
            cut_to: Longer texts lose their ends, so that they have so many tokens, special ones included.

        Raises:
            TooManyTokens: A text has more than ``most``. If that is certain before it is encoded, it is not.
        """
        if len(texts) == 1:  # at once, whatever waits; of many texts, each takes less time than to look at all
            self._check_bound(texts[0], most)
        size = sum(len(text) if isinstance(text, str) else len(text[0]) + len(text[1]) for text in texts)
        if size <= _MAX_INLINE:
            return self._encode_all(texts, add_special_tokens, most, cut_to)
        return await self._lane(size, is_urgent).run(self._encode_all, texts, add_special_tokens, most, cut_to)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any],
        add_special_tokens: bool = False,
        is_urgent: bool = False,
        most: int | None = None,
    ) -> list[int]:
        """Return the token ids of a chat.

        Args:
            messages: At least one, as chat templates take them, with contents as strings.
            tools: As chat templates take them.
            options: More keyword arguments of ``apply_chat_template``, such as ``add_generation_prompt``.
            add_special_tokens: The tokenizer adds some to what the template writes.
            is_urgent: Goes before all texts that are not.
            most: Most tokens.

        Raises:
            ApiError: As ``write_chat``.
            TooManyTokens: As ``encode_all``.
        """
        text = await self.write_chat(messages, tools=tools, options=options, is_urgent=is_urgent)
        return await self.encode(text, add_special_tokens=add_special_tokens, is_urgent=is_urgent, most=most)

    async def write_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any],
        is_urgent: bool = False,
    ) -> str:
        """Return the text of a chat; the arguments are those of ``encode_chat``.

        Raises:
            ApiError: The model has no chat template, or none for tools, or the template does not take the chat.
        """
        template = self._template(with_tools=bool(tools))
        if tools and not self._knows_tools:
            raise ApiError(
                "this model's chat template has no tools, or calls in a form that is not known here; remove tools and "
                "describe them in the messages, or have the server started with --tool-call-parser",
                param="tools",
                code="unsupported_parameter",
            )
        lane = self._lane(sum(len(message["content"]) for message in messages), is_urgent)
        try:
            return await lane.run(
                lambda: template.write(messages, tools=tools, options=options), limit_s=_TEMPLATE_LIMIT_S
            )
        except TimeoutError:
            raise ApiError(
                f"the model's chat template took more than {_TEMPLATE_LIMIT_S:g} s for the messages; send fewer",
                param="messages",
            ) from None

    def dialect(self, *, with_tools: bool) -> Dialect:
        """Return the dialect of answers to chats with or without tools.

        Raises:
            ApiError: The model has no chat template.
        """
        dialect = self._dialects[self._template(with_tools=with_tools)]
        return dialect if with_tools else dialect.without_calls

    async def decode(self, token_ids: Sequence[int], *, is_urgent: bool = False) -> str:
        """Return the text of token ids, special tokens included; ``is_urgent`` as in ``encode_all``."""
        if len(token_ids) <= _MAX_INLINE:
            return self._decode(token_ids)
        return await self._lane(len(token_ids), is_urgent).run(self._decode, token_ids)

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return ``token_text`` of each."""
        if len(token_ids) <= _MAX_INLINE:
            return [self._token_text(i) for i in token_ids]
        return await self._best_effort_lane.run(lambda: [self._token_text(i) for i in token_ids])

    def detokenizer(
        self,
        stop: Sequence[str],
        *,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        include_stop: bool = False,
        shown: Collection[int] = (),
    ) -> Detokenizer:
        """Return a detokenizer for one output; see ``Detokenizer``."""
        return Detokenizer(
            self._tokenizer,
            tuple(stop),
            skip_special_tokens,
            min_tokens=min_tokens,
            include_stop=include_stop,
            shown=shown,
        )

    def special_tokens(self, dialect: Dialect) -> SpecialTokens:
        """Return the tokenizer's special tokens as a dialect needs them."""
        if dialect not in self._special_tokens:
            texts = {i: self._tokenizer.convert_ids_to_tokens(i) for i in special_token_ids(self._tokenizer)}
            self._special_tokens[dialect] = special_tokens(texts, dialect.marks)
        return self._special_tokens[dialect]

    def _lane(self, size: int, is_urgent: bool) -> Lane:
        if not is_urgent:
            return self._best_effort_lane
        return self._short_lane if size <= _MAX_SHORT else self._long_lane

    def _check_bound(self, text: Encodable, most: int | None) -> None:
        parts = (text,) if isinstance(text, str) else text
        if most is not None and any(self._bound.exceeds(part, most) for part in parts):
            raise TooManyTokens(most + 1, is_exact=False)

    def _encode_all(
        self, texts: Sequence[Encodable], add_special_tokens: bool, most: int | None, cut_to: int | None
    ) -> list[list[int]]:
        found = [self._encode(text, add_special_tokens, most) for text in texts]
        if cut_to is None:
            return found
        return [
            ids if len(ids) <= cut_to else self._cut(text, add_special_tokens, cut_to)
            for text, ids in zip(texts, found, strict=True)
        ]

    def _cut(self, text: Encodable, add_special_tokens: bool, cut_to: int) -> list[int]:
        """Return the first tokens of a text that has more than ``cut_to``, with the special ones around them."""
        if self._backend is None:
            parts = (text,) if isinstance(text, str) else text
            ids: list[int] = self._tokenizer(
                *parts, add_special_tokens=add_special_tokens, truncation=True, max_length=cut_to, verbose=False
            ).input_ids
            return ids
        if isinstance(text, tuple):
            (of_pair,) = self._cutter(cut_to).encode_batch([text], add_special_tokens=add_special_tokens)
            return list(of_pair.ids)
        (found,) = self._backend.encode_batch([text], add_special_tokens=False)
        found.truncate(max(cut_to - self._backend.num_special_tokens_to_add(False) * add_special_tokens, 0))
        return list(self._backend.post_process(found, None, add_special_tokens).ids)

    def _make_cutter(self, cut_to: int) -> Any:
        """Return a tokenizer that cuts the longer text of a pair first; other threads use the one that does not cut."""
        cutter = type(self._backend).from_str(self._backend.to_str())
        cutter.enable_truncation(cut_to, strategy="longest_first")
        return cutter

    def _encode(self, text: Encodable, add_special_tokens: bool, most: int | None) -> list[int]:
        self._check_bound(text, most)
        found: Any
        if self._backend is None:
            parts = (text,) if isinstance(text, str) else text
            found = self._tokenizer(*parts, add_special_tokens=add_special_tokens, verbose=False).input_ids
        else:
            # The call for a batch lets other threads run, that for a text does not. Fast: without places in the text.
            (found,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if most is not None and len(found) > most:
            raise TooManyTokens(len(found), is_exact=True)
        ids: list[int] = found if self._backend is None else found.ids
        return ids

    def _decode(self, token_ids: Sequence[int]) -> str:
        ids = list(token_ids)
        if self._backend is not None:
            # As above.
            return str(self._backend.decode_batch([ids], skip_special_tokens=False)[0])
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for in the middle of a text."""
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:  # the model's vocabulary is padded beyond the tokenizer's
            return b""
        if match := BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        text = self._decode_one(token_id)
        if "\N{REPLACEMENT CHARACTER}" in text and all(c in BYTE_OF for c in piece):
            return bytes(BYTE_OF[c] for c in piece)
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

    def _template(self, *, with_tools: bool) -> ChatTemplate:
        """Return the template of chats with or without tools.

        Raises:
            ApiError: There is none.
        """
        if not self._templates:
            raise ApiError(
                "this model has no chat template, so it cannot tell messages apart; write the chat as one prompt and "
                "send it to /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        template = self._templates.get("tool_use") if with_tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise ApiError(self._no_default, param="messages", code="no_chat_template")
        return template

    @property
    def _no_default(self) -> str:
        names = ", ".join(map(repr, self._templates))
        return (
            f"this model has chat templates by name ({names}), and none is named 'default'; the server has to be "
            "started with the name of the one to use, or with a file, as --chat-template"
        )

    @property
    def _but_with_tools(self) -> str:
        return " without tools" if "tool_use" in self._templates else ""

    @cached_property
    def _knows_tools(self) -> bool:
        template = self._template(with_tools=True)
        return self._dialects[template].knows_tools and _READS_TOOLS.search(template.source) is not None

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        ids = self._encode("a", False, None)
        return ids, self._tokenizer.decode(ids, skip_special_tokens=False)


def _backend_of(tokenizer: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    methods = ("__call__", "_encode_plus", "decode", "_decode")
    is_plain = all(getattr(type(tokenizer), m, None) is getattr(PreTrainedTokenizerFast, m) for m in methods)
    return tokenizer.backend_tokenizer if is_plain else None


def _template_sources(tokenizer: Any, chosen: str | None) -> dict[str, str]:
    """Return the text of each chat template by its name; of one that was chosen, as ``default`` alone.

    Raises:
        ValueError: It is neither the name of one nor a file that can be read.
    """
    own = getattr(tokenizer, "chat_template", None) or {}
    named: dict[str, str] = own if isinstance(own, dict) else {"default": own}
    if chosen is None:
        return named
    if chosen in named:
        return {"default": named[chosen]}
    try:
        return {"default": Path(chosen).read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        names = f"; the model's own are {', '.join(map(repr, named))}" if named else "; the model has none of its own"
        raise ValueError(f"--chat-template {chosen}: it is no file that can be read ({error}){names}") from None

"""Checks the body of a request: the result is a model of its fields, or an error that names the field.

A field is honoured if the request's model has it. All others that OpenAI's and vLLM's APIs document are in
``NOT_HONOURED``, with what becomes of them. What neither documents is dropped or refused (``UnknownFields``).
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, model_validator
from pydantic_core import from_json

from omniserve.server.errors import ApiError

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)

IGNORED_FIELDS_HEADER = "x-omniserve-ignored-fields"
_MAX_NAMED = 16
_MAX_NAME = 80
_MAX_WARNINGS = 1000
_UTF8_MARK = b"\xef\xbb\xbf"


class StrictModel(BaseModel):
    """Base of what clients send: no value is converted, and a null is an absent field.

    Fields that a model does not have are taken, so that ``validate`` can tell what becomes of each.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    fates: ClassVar[Mapping[str, Fate]] = {}
    """What becomes of fields that the model does not have, where that is not as in ``NOT_HONOURED``."""

    _ignored_fields: tuple[str, ...] = PrivateAttr(())

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Paths of fields that the client sent and that were dropped, though they ask for something."""
        return self._ignored_fields

    def note_ignored(self, paths: Iterable[str]) -> None:
        """Note more fields that were dropped, though they ask for something."""
        self._ignored_fields = tuple(dict.fromkeys((*self._ignored_fields, *paths)))

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        return without_nulls(fields)


@dataclass(frozen=True, slots=True)
class Fate:
    """The treatment of a documented field that a request's model does not have."""

    harmless: tuple[Any, ...] | None = None
    """Values that ask for nothing and are dropped; None: any value."""
    advice: str | None = None
    """The reason why other values are refused, and what to do; None: they are dropped, and a header of the answer names
    the field."""

    def lets_pass(self, value: Any) -> bool:
        """Return whether a value asks for nothing."""
        return self.harmless is None or any(
            value == item and isinstance(value, bool) == isinstance(item, bool) for item in self.harmless
        )


def _refused(advice: str, *harmless: Any) -> Fate:
    return Fate(harmless, advice)


_NO_EFFECT = Fate()
_DROPPED = Fate(())
_USE_TOOLS = "{name} is not supported; use tools and tool_choice"
_USE_FORMAT = "{name} is not supported; give a JSON schema as response_format"
_REMOVE = "{name} is not supported; remove it"
_CHATS_ONLY = "{name} is a field of chats; send the request to /v1/chat/completions, or remove it"
_COMPLETIONS_ONLY = "{name} is a field of completions; send the request to /v1/completions, or remove it"

NOT_HONOURED: Mapping[str, Fate] = {
    # OpenAI's.
    "audio": _refused("audio output is not supported; remove {name}"),
    "best_of": _refused(_COMPLETIONS_ONLY, 1),
    "echo": _refused(_COMPLETIONS_ONLY, False),
    "function_call": _refused(_USE_TOOLS, "none", "auto"),
    "functions": _refused(_USE_TOOLS, []),
    "messages": _refused(_CHATS_ONLY),
    "modalities": _refused("only text is supported; remove {name}", ["text"]),
    "moderation": _refused(_REMOVE),
    "parallel_tool_calls": _NO_EFFECT,
    "prompt": _refused(_COMPLETIONS_ONLY),
    "prompt_cache_options": _DROPPED,
    "reasoning_effort": _NO_EFFECT,
    "store": _refused("answers are not stored; remove {name} or set it to false", False),
    "suffix": _refused("insertion is not supported; remove {name}", ""),
    "tool_choice": _refused(_CHATS_ONLY, "none", "auto"),
    "tools": _refused(_CHATS_ONLY, []),
    "top_logprobs": _refused("{name} is a field of chats; completions have a number as logprobs", 0),
    "verbosity": _NO_EFFECT,
    "web_search_options": _refused("web search is not supported; remove {name}"),
    # vLLM's.
    "add_generation_prompt": _refused(_CHATS_ONLY, True),
    "allowed_token_ids": _refused("{name} is not supported; ban tokens with logit_bias, or give a response_format", []),
    "bad_words": _refused("{name} is not supported; ban tokens with logit_bias", []),
    "chat_template": _refused("the model's own chat template is used; remove {name}, or render the chat yourself"),
    "chat_template_kwargs": _refused(_CHATS_ONLY, {}),
    "continue_final_message": _refused(_CHATS_ONLY, False),
    "documents": _refused(_CHATS_ONLY, []),
    "early_stopping": _refused(_REMOVE, False),
    "ec_transfer_params": _refused(_REMOVE, {}),
    "guided_choice": _refused(_USE_FORMAT, []),
    "guided_decoding_backend": _NO_EFFECT,
    "guided_grammar": _refused(_USE_FORMAT, ""),
    "guided_json": _refused(_USE_FORMAT),
    "guided_regex": _refused(_USE_FORMAT, ""),
    "guided_whitespace_pattern": _refused(_REMOVE, ""),
    "include_reasoning": _refused(_CHATS_ONLY, True),
    "kv_transfer_params": _refused(_REMOVE, {}),
    "length_penalty": _refused("{name} belongs to beam search, which is not supported; remove it", 1),
    "logprob_token_ids": _refused("{name} is not supported; ask for the likeliest tokens: logprobs, top_logprobs"),
    "media_io_kwargs": _NO_EFFECT,  # there are no media
    "mm_processor_kwargs": _NO_EFFECT,
    "prompt_embeds": _refused("{name} is not supported; send text or token ids as prompt"),
    "prompt_logprobs": _refused("{name} is not supported; use echo and logprobs of /v1/completions"),
    "repetition_detection": _refused(_REMOVE, {}),
    "request_id": _DROPPED,
    "return_mm_kwargs": _NO_EFFECT,
    "return_prompt_text": _refused("{name} is not supported; see /tokenize and /detokenize", False),
    "return_token_offsets": _NO_EFFECT,  # vLLM ignores it, too, where text is generated
    "routed_experts_prompt_start": _refused(_REMOVE, 0),
    "spaces_between_special_tokens": _refused(_REMOVE, True),
    "stream_interval": _DROPPED,
    "structured_outputs": _refused(_USE_FORMAT, {}),
    "thinking_token_budget": _refused(_CHATS_ONLY, -1),
    "truncate_prompt_tokens": _refused("prompts are not truncated; remove {name} and send a shorter one"),
    "truncation_side": _NO_EFFECT,  # of truncate_prompt_tokens
    "use_beam_search": _refused("beam search is not supported; remove {name}", False),
    "vllm_xargs": _refused(_REMOVE, {}),
    "watermarking": _refused(_REMOVE, False),
    # What servers and their clients write into messages and around tools, for others to read.
    "messages.annotations": _NO_EFFECT,
    "messages.audio": _DROPPED,
    "messages.cache_control": _NO_EFFECT,
    "messages.content.annotations": _NO_EFFECT,
    "messages.content.cache_control": _NO_EFFECT,
    "messages.content.data": _NO_EFFECT,
    "messages.content.extras": _NO_EFFECT,
    "messages.content.id": _NO_EFFECT,
    "messages.content.index": _NO_EFFECT,
    "messages.content.logprobs": _NO_EFFECT,
    "messages.content.signature": _NO_EFFECT,
    "messages.content.summary": _NO_EFFECT,
    "messages.id": _NO_EFFECT,
    "messages.images": Fate(([],)),
    "messages.parsed": _NO_EFFECT,
    "messages.provider_specific_fields": _NO_EFFECT,
    "messages.reasoning_details": _NO_EFFECT,
    "messages.thinking_blocks": _NO_EFFECT,
    "messages.tool_calls.function.parsed_arguments": _NO_EFFECT,
    "messages.tool_calls.index": _NO_EFFECT,
    "messages.tool_calls.provider_specific_fields": _NO_EFFECT,
    "prediction.content.cache_control": _NO_EFFECT,
    "tools.cache_control": _NO_EFFECT,
    "tools.defer_loading": Fate((False,)),
    "tools.function.cache_control": _NO_EFFECT,
    "tools.function.defer_loading": Fate((False,)),
}
"""Documented fields -> what becomes of them in requests whose model does not have them.

A path has no indices: ``messages.audio`` is that of any message.
"""


class UnknownFields:
    """The treatment of fields that no API documents: they are dropped, with one warning a name, or refused."""

    def __init__(self, *, refuse: bool = False) -> None:
        self.refuse = refuse
        self._warned: set[str] = set()

    def warn(self, name: str, hint: str = "") -> None:
        """Log that a field was dropped, unless that was said before."""
        if name not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(name)
            logger.warning("the field %r of a request has no effect here%s; this is said once", name, hint)


def read_fields(body: bytes) -> dict[str, Any]:
    """Return the fields of a request's body, without nulls.

    Raises:
        ApiError: It is no JSON object.
    """
    try:
        fields = read_json(body)
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(f"the body must be a JSON object, got {_short(fields)}", code="invalid_json")
    return without_nulls(fields)


def read_json(text: bytes) -> Any:
    """Return what a JSON text says; byte order marks before it are skipped.

    Raises:
        ValueError: It is not JSON, or not UTF-8.
    """
    if (encoding := other_encoding(text)) is not None:
        raise ValueError(f"the text is {encoding}; send UTF-8")
    # Unlike Python's own: a limit to nesting (200), so that nothing behind it runs out of stack, and no half surrogate
    # pairs, which no tokenizer takes.
    return from_json(without_marks(text))


def other_encoding(text: bytes) -> str | None:
    """Return the name of the encoding of a JSON text, such as UTF-16; None if that is UTF-8, as far as can be told."""
    # An object or an array begins with two ASCII characters, or one and the end.
    if len(text) < 2:
        return None
    encoding = json.detect_encoding(text[:4]).upper()
    return None if encoding.startswith("UTF-8") else encoding[: len("UTF-16")]


def without_marks(text: bytes) -> bytes:
    """Return UTF-8 text without white space and byte order marks at its beginning."""
    while (rest := text.lstrip()).startswith(_UTF8_MARK):
        text = rest[len(_UTF8_MARK) :]
    return text


def without_nulls(fields: Any) -> Any:
    """Return an object's fields without those that are null, which ask for nothing; what is no object, as it is."""
    return {name: value for name, value in fields.items() if value is not None} if isinstance(fields, dict) else fields


def validate(kind: type[M], fields: dict[str, Any], unknown: UnknownFields) -> M:
    """Return the fields as a model of this kind.

    Raises:
        ApiError: One is missing, ill-typed, out of range, not supported, or unknown where that is refused.
    """
    try:
        model = kind.model_validate(fields)
    except ValidationError as error:
        raise _field_error(kind, error) from None
    if isinstance(model, StrictModel):
        ignored: list[str] = []
        for location, value in _take_extra(model, ()):
            path = ".".join(map(str, location))
            name = ".".join(str(part) for part in location if not isinstance(part, int))
            fate = model.fates.get(name) or NOT_HONOURED.get(name)
            if fate is not None and fate.lets_pass(value):
                continue
            if fate is not None and fate.advice is not None:
                raise ApiError(fate.advice.format(name=path), param=path, code="unsupported_parameter")
            if fate is None and unknown.refuse:
                raise _unknown_field(kind, location)
            unknown.warn(_short_name(location), "" if fate is not None else _hint(kind, location))
            ignored.append(_short_name(location))
        model._ignored_fields = tuple(dict.fromkeys(ignored))
    return model


def ignored_header(model: StrictModel) -> dict[str, str]:
    """Return the header that names the fields that were dropped from a request; empty if there are none."""
    names = model.ignored_fields
    if not names:
        return {}
    more = [f"and {len(names) - _MAX_NAMED} more"] if len(names) > _MAX_NAMED else []
    return {IGNORED_FIELDS_HEADER: ", ".join([*(quote(name, safe="") or '""' for name in names[:_MAX_NAMED]), *more])}


def _take_extra(model: StrictModel, at: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Remove the fields that a model and those in it do not have; yield the path and value of each."""
    extra = model.__pydantic_extra__
    while extra:
        name = next(iter(extra))
        yield (*at, name), extra.pop(name)
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, StrictModel):
            yield from _take_extra(value, (*at, name))
        elif isinstance(value, list) and value and isinstance(value[0], StrictModel):
            for i, item in enumerate(value):
                yield from _take_extra(item, (*at, name, i))


def _short_name(location: tuple[str | int, ...]) -> str:
    """Return the path of a field without indices, shortened: a log and a header hold it."""
    name = ".".join(part for part in location if isinstance(part, str))
    return name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 3] + "..."


def _hint(kind: type[BaseModel], location: tuple[str | int, ...]) -> str:
    if len(location) != 1:
        return ""
    close = difflib.get_close_matches(str(location[0])[:_MAX_NAME], kind.model_fields, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _unknown_field(kind: type[BaseModel], location: tuple[str | int, ...]) -> ApiError:
    path = ".".join(map(str, location))
    hint = _hint(kind, location)
    if len(location) == 1 and not hint:
        hint = f"; known fields: {', '.join(kind.model_fields)}"
    return ApiError(f"unknown field {path!r}: remove it{hint}", param=path, code="unknown_parameter")


def _field_error(kind: type[BaseModel], error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    location, message = first["loc"], first["msg"].removeprefix("Value error, ")
    path = ".".join(map(str, location))
    if first["type"] == "missing":
        return ApiError(f"{path} is missing", param=path, code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return _unknown_field(kind, location)
    if not location:  # of several fields together
        return ApiError(message, code="invalid_value")
    return ApiError(f"{path}: {message}; got {_short(first['input'])}", param=path, code="invalid_value")


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."

"""Reads a request to /v1/responses, with what it refers to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from omniserve.server.answer_shape import MAX_INLINE_BODY
from omniserve.server.errors import ApiError
from omniserve.server.fields import read_fields, validate
from omniserve.server.header_fields import NO_HEADERS, HeaderFields
from omniserve.server.prompts import num_chat_tokens
from omniserve.server.responses.chat import ResponsesRequest, chat_of
from omniserve.server.responses.fields import CreateResponse, ResponseFields
from omniserve.server.responses.items import MAX_ITEMS, Item, ItemMessage, ItemReference, read_item
from omniserve.server.service import Service
from omniserve.server.tokenizing.text import TooManyTokens

T = TypeVar("T")


async def read_request(
    service: Service,
    body: bytes,
    *,
    caller: str | None = None,
    headers: HeaderFields = NO_HEADERS,
    default_model: str | None = None,
) -> ResponsesRequest:
    """Return the chat that the body of a request asks for.

    The arguments are those of ``AnswerShape.read``, and ``default_model`` is the model of a body that names none.

    Raises:
        ApiError: As ``protocol.parse``, or a response or an item that it refers to is not here.
    """

    async def beside(work: Callable[[], T]) -> T:
        return work() if len(body) <= MAX_INLINE_BODY else await asyncio.to_thread(work)

    def read() -> tuple[dict[str, Any], ResponseFields]:
        raw = read_fields(body)
        headers.add_to(raw)
        if default_model is not None:
            raw.setdefault("model", default_model)
        return raw, validate(CreateResponse, raw, service.unknown_fields)

    raw, asked = await beside(read)

    def chat(items: Sequence[Item]) -> ResponsesRequest:
        defaults, unknown = service.defaults.fields, service.unknown_fields
        return chat_of(asked, raw, items, caller=caller, defaults=defaults, unknown=unknown)

    items = await _conversation(service, asked, caller)
    request = await beside(lambda: chat(items))
    if asked.truncation == "auto":
        request = await _truncated(service, request, items, chat)
    if service.responses is None and asked.store and "store" in asked.model_fields_set:
        request._ignored_fields = (*request.ignored_fields, "store")
    return request


async def _conversation(service: Service, asked: ResponseFields, caller: str | None) -> list[Item]:
    """Return all items of the chat. References in the input are replaced by what they refer to, there, too."""
    references = [item.id for item in asked.input if isinstance(item, ItemReference)]
    for param, is_asked in (
        ("previous_response_id", asked.previous_response_id is not None),
        ("background", asked.background),
        ("input", bool(references)),
    ):
        if is_asked and service.responses is None:
            message = "this server stores no responses; send all items of the conversation as input"
            raise ApiError(message, param=param, code="unsupported_parameter")
    if asked.background and not asked.store:
        raise ApiError("background needs store, as its answer is read later", param="store", code="invalid_value")
    if service.responses is None:
        return list(asked.input)
    if references:
        found = await service.responses.items(references, caller)
        asked.input = [read_item(found[item.id]) if isinstance(item, ItemReference) else item for item in asked.input]
    if asked.previous_response_id is None:
        return list(asked.input)
    before = await service.responses.conversation(asked.previous_response_id, caller, most=MAX_ITEMS)
    return [*map(read_item, before), *asked.input]


async def _truncated(
    service: Service,
    request: ResponsesRequest,
    items: Sequence[Item],
    chat: Callable[[Sequence[Item]], ResponsesRequest],
) -> ResponsesRequest:
    """Return a request without its oldest turns, as few of them as it takes to fit the model, if that is possible.

    A turn begins with a message of the user. What is before the first, and the last one, stay.
    """
    starts = [i for i, item in enumerate(items) if isinstance(item, ItemMessage) and item.role == "user"]
    room = service.info.limits.max_tokens - (request.output_limit or 1)

    async def fits(asked: ResponsesRequest) -> bool:
        try:
            return await num_chat_tokens(service.codec, asked, most=room) <= room
        except TooManyTokens:
            return False

    if len(starts) < 2 or await fits(request):
        return request
    fewest, most = 1, len(starts) - 1
    while fewest < most:
        middle = (fewest + most) // 2
        if await fits(chat([*items[: starts[0]], *items[starts[middle] :]])):
            most = middle
        else:
            fewest = middle + 1
    return chat([*items[: starts[0]], *items[starts[most] :]])

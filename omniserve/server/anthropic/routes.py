"""Anthropic's paths beside /v1/messages: the tokens of a prompt, and the models in its shape."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from omniserve.core.logs import request_id
from omniserve.server.access.limits import take_body
from omniserve.server.answer_shape import MAX_INLINE_BODY
from omniserve.server.anthropic.chat import MessagesRequest, read_conversation
from omniserve.server.anthropic.errors import REQUEST_ID_HEADER
from omniserve.server.anthropic.fields import Conversation
from omniserve.server.anthropic.openapi import InputTokens, MessagesError
from omniserve.server.errors import ContextExceeded
from omniserve.server.fields import ignored_header
from omniserve.server.openapi import answers, takes
from omniserve.server.prompts import num_chat_tokens
from omniserve.server.service import Service
from omniserve.server.tokenizing.text import TooManyTokens


def router(service: Service) -> APIRouter:
    """Return the route of /v1/messages/count_tokens."""
    routes = APIRouter()

    @routes.post(
        "/v1/messages/count_tokens",
        openapi_extra=takes(Conversation),
        responses=answers(InputTokens, 400, 404, 408, 413, 429, 529, error=MessagesError),
    )
    async def count_tokens(http: Request) -> Response:
        async with take_body(http, service.bodies) as body:
            if len(body) <= MAX_INLINE_BODY:
                request = read_conversation(service, body)
            else:
                request = await asyncio.to_thread(read_conversation, service, body)
            service.check_model(request.model)
            count = await _count(service, request)
        headers = ignored_header(request)
        if (name := request_id.get()) is not None:
            headers[REQUEST_ID_HEADER] = name
        return JSONResponse({"input_tokens": count}, headers=headers)

    return routes


async def _count(service: Service, request: MessagesRequest) -> int:
    """Return the number of tokens that a chat's prompt has."""
    most = service.most_countable_tokens
    try:
        return await num_chat_tokens(service.codec, request, most=most)
    except TooManyTokens as error:
        raise ContextExceeded(
            f"these messages have more than {most} tokens, far more than a request may have; send parts of them",
            num_tokens=error.num_tokens,
            max_tokens=service.info.limits.max_tokens,
            param="messages",
        ) from None


def model_list(cards: Sequence[Mapping[str, Any]], max_tokens: int) -> dict[str, Any]:
    """Return Anthropic's page of models, all on one.

    Args:
        cards: The models as OpenAI's API has them.
        max_tokens: Most tokens of a prompt and its output.
    """
    models = [model(card, max_tokens) for card in cards]
    return {"data": models, "has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}


def model(card: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """Return Anthropic's object of a model; the arguments are those of ``model_list``."""
    created = datetime.datetime.fromtimestamp(card["created"], datetime.UTC)
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": max_tokens,
        "max_tokens": max_tokens,
    }

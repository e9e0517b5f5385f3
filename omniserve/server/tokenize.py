"""/tokenize and /detokenize: the model's tokenizer behind HTTP, with vLLM's fields."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import JSONResponse, Response

from omniserve.server.answer_models import Text, Tokens
from omniserve.server.limits import take_body
from omniserve.server.messages import MAX_MESSAGES, Message
from omniserve.server.openapi import answers, takes
from omniserve.server.protocol import read_fields, validate
from omniserve.server.service import Service

_ERRORS = (400, 404, 408, 413, 429, 503)
_STRICT = ConfigDict(extra="forbid", strict=True)


class TokenizeRequest(BaseModel):
    """Body of /tokenize: a text, or messages for the chat template."""

    model_config = _STRICT

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    """None: to a text, as /v1/completions does, but not to messages, as their template writes them."""
    add_generation_prompt: bool = True
    """Field of requests with messages only."""
    return_token_strs: bool = False

    @model_validator(mode="before")
    @classmethod
    def _either(cls, fields: Any) -> Any:
        if isinstance(fields, dict):
            if ("prompt" in fields) == ("messages" in fields):
                raise ValueError("give prompt or messages, one of them")
            if "messages" in fields and fields.get("add_special_tokens"):
                raise ValueError("add_special_tokens is for prompt: with messages the chat template writes them")
            if "prompt" in fields and "add_generation_prompt" in fields:
                raise ValueError("add_generation_prompt is for messages; remove it")
        return fields


class DetokenizeRequest(BaseModel):
    """Body of /detokenize."""

    model_config = _STRICT

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


def router(service: Service) -> APIRouter:
    """Return the two routes."""
    routes = APIRouter()

    @routes.post("/tokenize", openapi_extra=takes(TokenizeRequest), responses=answers(Tokens, *_ERRORS))
    async def tokenize(http: Request) -> Response:
        async with take_body(http, service.bodies) as body:
            request = validate(TokenizeRequest, read_fields(body))
            service.check_model(request.model)
            if request.messages is not None:
                messages = [message.for_template() for message in request.messages]
                tokens = await service.codec.encode_chat(messages, add_generation_prompt=request.add_generation_prompt)
            else:
                assert request.prompt is not None
                special = request.add_special_tokens is not False
                tokens = await service.codec.encode(request.prompt, add_special_tokens=special)
        pieces = await service.codec.token_texts(tokens) if request.return_token_strs else None
        answer = {
            "count": len(tokens),
            "max_model_len": service.info.limits.max_tokens,
            "tokens": tokens,
            "token_strs": pieces,
        }
        return JSONResponse(answer)

    @routes.post("/detokenize", openapi_extra=takes(DetokenizeRequest), responses=answers(Text, *_ERRORS))
    async def detokenize(http: Request) -> Response:
        async with take_body(http, service.bodies) as body:
            request = validate(DetokenizeRequest, read_fields(body))
            service.check_model(request.model)
            service.check_token_ids(request.tokens, "the token id {} is unknown:", param="tokens")
            return JSONResponse({"prompt": await service.codec.decode(request.tokens)})

    return routes

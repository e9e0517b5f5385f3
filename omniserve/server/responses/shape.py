"""The answer to /v1/responses: items, as one object or as events."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from typing import Any

from omniserve.core.request import TokenLogprob
from omniserve.server.answer_shape import AnswerShape, finite
from omniserve.server.batches.database import StorageError
from omniserve.server.choice import Delta
from omniserve.server.completions.protocol import GenerationRequest
from omniserve.server.errors import ApiError
from omniserve.server.header_fields import NO_HEADERS, HeaderFields
from omniserve.server.jobs import Usage
from omniserve.server.responses.chat import ResponsesRequest
from omniserve.server.responses.fields import (
    INCLUDE_REASONING,
    AllowedToolsChoice,
    ResponseCustomTool,
    ResponseFields,
    ResponseHostedTool,
)
from omniserve.server.responses.output_items import Event, OutputItems
from omniserve.server.responses.reading import read_request
from omniserve.server.responses.store import NewResponse
from omniserve.server.service import Service

logger = logging.getLogger(__name__)

# Those of errors that OpenAI has, and that can come here.
_ERROR_CODES = ("server_error", "rate_limit_exceeded", "invalid_prompt")
_DONE = "data: [DONE]\n\n"


class ResponseShape(AnswerShape):
    """Writes a response.

    Its items have ids that begin with the response's own, so that a reference to one names the response, too.
    """

    request_kind = ResponsesRequest
    id_prefix = "resp_"

    def __init__(self, service: Service, request: GenerationRequest, call_id: str) -> None:
        super().__init__(service, request, call_id)
        assert isinstance(request, ResponsesRequest)
        self.call_id = call_id
        self._head = _head(service, request, call_id)
        self.store = service.responses if request.asked.store else None
        """Where the answer is stored; None: it is not."""
        self._input, self._caller = request.stored_input, request.caller
        self._final: dict[str, Any] | None = None
        self._last_events: list[Event] = []
        self.is_background = request.asked.background
        """The call goes on without its connection, and its answer is stored."""
        self._items = OutputItems(
            call_id.removeprefix(self.id_prefix),
            custom_tools=request.custom_tools,
            with_summary=request.asked.with_summary,
            with_seal=INCLUDE_REASONING in request.asked.include,
            logprob=self._logprob if request.num_logprobs is not None else None,
        )
        self._codec = service.codec
        self._num_events = 0

    def use_tier(self, tier: str) -> None:
        self._head["service_tier"] = tier

    @classmethod
    async def read(
        cls, service: Service, body: bytes, *, caller: str | None = None, headers: HeaderFields = NO_HEADERS
    ) -> GenerationRequest:
        return await read_request(service, body, caller=caller, headers=headers)

    @property
    def new_response(self) -> NewResponse:
        """The response as it is now, for the store."""
        response = self.snapshot() if self._final is None else self._final
        response = response | {"store": True}
        return NewResponse(id=self.call_id, caller=self._caller, input=self._input, response=response)

    def snapshot(self, status: str = "in_progress") -> dict[str, Any]:
        """Return the response as it is now, with the items that are complete."""
        return self._response(status) | {"store": self.store is not None}

    def begin_background(self) -> None:
        """Tell from now on that the response is stored, as it is while it runs."""
        self._head["store"] = True

    def first_events(self, usage: Usage) -> str:
        response = self.snapshot()
        return self._text([{"type": f"response.{what}", "response": response} for what in ("created", "in_progress")])

    def events(self, deltas: Sequence[Delta]) -> str:
        return self._text([event for delta in deltas for event in self._items.add(delta)])

    async def settle(self, deltas: Sequence[Delta], usage: Usage) -> None:
        self._finish(deltas, usage)
        if self.store is None or self.is_background:
            return
        try:
            await self.store.put(self.new_response)
            self._final = self._finish((), usage) | {"store": True}
        except StorageError as error:
            logger.warning("responses: %s was not stored: %s", self.call_id, error)
            told = self._head.get("omniserve", {}) | {"not_stored": error.message}
            self._final = self._finish((), usage) | {"omniserve": told}

    def last_events(self, usage: Usage) -> str:
        response = self._finish((), usage)
        return (
            self._text([*self._last_events, {"type": f"response.{response['status']}", "response": response}]) + _DONE
        )

    def error_events(self, error: ApiError) -> str:
        self._items.end(is_whole=False)
        self._final = self._response("failed", error=error)
        return self._text([{"type": "response.failed", "response": self._final}]) + _DONE

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        return json.dumps(self._finish(deltas, usage)).encode()

    def _finish(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        """Return the complete response, of which these are the last deltas."""
        if self._final is None:
            for delta in deltas:
                self._items.add(delta)
            self._last_events = self._items.end()
            self._final = self._response("incomplete" if self._items.is_cut else "completed", usage)
        return self._final

    def _response(self, status: str, usage: Usage | None = None, error: ApiError | None = None) -> dict[str, Any]:
        """Return the response as it is now."""
        code = None if error is None else error.code if error.code in _ERROR_CODES else "server_error"
        return self._head | {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None if error is None else {"code": code, "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._items.items),
            "usage": None if usage is None else _usage(usage),
        }

    def _text(self, events: Sequence[Event]) -> str:
        """Return events as they are sent, numbered."""
        texts = []
        for event in events:
            texts.append(
                f"event: {event['type']}\ndata: {json.dumps(event | {'sequence_number': self._num_events})}\n\n"
            )
            self._num_events += 1
        return "".join(texts)

    def _logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
        return self._token(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._codec.token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(self._codec.token_bytes(token_id)),
        }


def _head(service: Service, request: ResponsesRequest, call_id: str) -> dict[str, Any]:
    """Return the fields of a response that its output does not change."""
    asked, reasoning, text = request.asked, request.asked.reasoning, request.asked.text
    form = {"type": "text"} if text is None or text.format is None else text.format.model_dump(
        by_alias=True, exclude_none=True)  # fmt: skip
    head = {
        "id": call_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": request.model or service.model_name,
        "background": asked.background,
        "frequency_penalty": request.frequency_penalty,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata,
        "parallel_tool_calls": asked.parallel_tool_calls,
        "presence_penalty": request.presence_penalty,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary or reasoning.generate_summary,
        },
        "safety_identifier": asked.safety_identifier,
        "service_tier": request.answered_tier,
        "store": False,
        "temperature": request.temperature,
        "text": {"format": form} | ({} if text is None or text.verbosity is None else {"verbosity": text.verbosity}),
        "tool_choice": _tool_choice(asked),
        "tools": [_tool(tool) for tool in asked.tools if not isinstance(tool, ResponseHostedTool)],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": asked.truncation,
        "user": asked.user,
    }
    if request.ignored_fields:
        head["omniserve"] = {"ignored_fields": list(request.ignored_fields)}
    return head


def _tool(tool: Any) -> dict[str, Any]:
    if isinstance(tool, ResponseCustomTool):
        return tool.model_dump(exclude_none=True)
    return {name: getattr(tool, name) for name in ("type", "name", "description", "parameters", "strict")}


def _tool_choice(asked: ResponseFields) -> Any:
    choice = asked.tool_choice
    if isinstance(choice, str):
        return choice
    found: dict[str, Any] = choice.model_dump(exclude_none=True)
    if isinstance(choice, AllowedToolsChoice):
        found["tools"] = [tool for tool in found["tools"] if tool["type"] in ("function", "custom")]
    return found


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        # What a cache is charged for writing, elsewhere.
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }

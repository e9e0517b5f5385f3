"""Answers of /v1/messages: the events of a stream, or the whole message, made of the same blocks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omniserve.core.logs import request_id
from omniserve.core.request import ClassSpec, FinishReason, ServiceClass
from omniserve.server.access.tiers import class_of_tier
from omniserve.server.answer_shape import MAX_INLINE_BODY, AnswerShape
from omniserve.server.anthropic.chat import MessagesRequest, read_request
from omniserve.server.anthropic.errors import REQUEST_ID_HEADER, error_body
from omniserve.server.anthropic.signatures import signature_of
from omniserve.server.choice import Delta
from omniserve.server.completions.protocol import GenerationRequest
from omniserve.server.dialects.base import ParsedCall
from omniserve.server.errors import ApiError
from omniserve.server.header_fields import NO_HEADERS, HeaderFields
from omniserve.server.jobs import Usage
from omniserve.server.service import Service

# Some clients miss fields that are absent, also those which belong to Anthropic's own tools and refusals.
_NO_STOP: Mapping[str, Any] = {"stop_reason": None, "stop_sequence": None, "stop_details": None, "container": None}
_PRIORITY_TIERS = ("priority", "fast", "scale")


class MessagesShape(AnswerShape):
    """Anthropic's messages: thinking, text and calls are blocks, which follow one another."""

    request_kind = MessagesRequest
    id_prefix = "msg"
    keep_alive = 'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, service: Service, request: GenerationRequest, call_id: str) -> None:
        super().__init__(service, request, call_id)
        assert isinstance(request, MessagesRequest)
        if (name := request_id.get()) is not None:
            self.headers = {**self.headers, REQUEST_ID_HEADER: name}
        self._message = {
            "id": call_id,
            "type": "message",
            "role": "assistant",
            "model": request.model or service.model_name,
        }
        self._classes = service.info.classes
        self.use_tier(request.service_tier)
        self._omits_thinking = request.omits_thinking
        self._max_tokens = request.output_limit
        self._stop_sequences = request.stop
        self._index = 0
        """Number of complete blocks in events so far."""
        self._open = ""
        """Type of the block whose deltas are being sent; empty between blocks."""
        self._num_characters = 0
        """Number of characters of text so far."""
        self._omitted: list[str] = []
        """The thinking of the open block that is for its signature alone."""
        self._finish_reason: str | None = None
        self._stop_string: str | None = None

    @classmethod
    def error_body(cls, error: ApiError) -> dict[str, Any]:
        return error_body(error)

    def use_tier(self, tier: str) -> None:
        self._service_tier = _service_tier(tier, self._classes)

    @classmethod
    async def read(
        cls, service: Service, body: bytes, *, caller: str | None = None, headers: HeaderFields = NO_HEADERS
    ) -> GenerationRequest:
        if len(body) <= MAX_INLINE_BODY:
            return read_request(service, body, headers)
        return await asyncio.to_thread(read_request, service, body, headers)

    def first_events(self, usage: Usage) -> str:
        message = {**self._message, **_NO_STOP, "content": [], "usage": self._usage(usage)}
        return _event("message_start", message=message) + self.keep_alive

    def events(self, deltas: Sequence[Delta]) -> str:
        return "".join([event for delta in deltas for event in self._events(delta)])

    def last_events(self, usage: Usage) -> str:
        stop = self._stop(self._finish_reason, self._stop_string, usage)
        told = _event("message_delta", delta=stop, usage=self._counts(usage))
        return "".join([*self._closed(), told, _event("message_stop")])

    def error_events(self, error: ApiError) -> str:
        return f"event: error\ndata: {json.dumps(error_body(error))}\n\n"

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        [delta] = deltas
        stop = self._stop(delta.finish_reason, delta.stop_string, usage)
        message = json.dumps({**self._message, **stop, "usage": self._usage(usage)})
        content = ", ".join([self._block(part) for part in self._parts(delta)])
        return f'{message[:-1]}, "content": [{content}]}}'.encode()

    def _block(self, part: tuple[str, str] | ParsedCall) -> str:
        """Return the JSON of a block of an answer that is not streamed."""
        if isinstance(part, ParsedCall):
            # As the model wrote the arguments: Python would not write each number as it read it.
            return f'{json.dumps(_tool_use(part))[:-1]}, "input": {part.arguments}}}'
        kind, text = part
        if kind == "text":
            return json.dumps(_text_block(text))
        signature = signature_of(text, is_omitted=self._omits_thinking)
        return json.dumps(_thinking_block("" if self._omits_thinking else text, signature))

    def _parts(self, delta: Delta) -> Iterator[tuple[str, str] | ParsedCall]:
        """Yield thinking, texts and calls of a delta in their order; called once per delta, in order."""
        if delta.reasoning:
            yield "thinking", delta.reasoning
        text, done = delta.text, 0
        for call in delta.tool_calls:
            end = call.text_before - self._num_characters
            if end > done:
                yield "text", text[done:end]
                done = end
            yield call
        if done < len(text):
            yield "text", text[done:]
        self._num_characters += len(text)

    def _events(self, delta: Delta) -> Iterator[str]:
        """Yield the events of what a delta adds."""
        for part in self._parts(delta):
            if isinstance(part, ParsedCall):
                if part.begins:
                    yield from self._closed()
                    self._open = "tool_use"
                    yield self._started({**_tool_use(part), "input": {}})
                if part.arguments:
                    yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})
                if part.ends:
                    yield from self._closed()
                continue
            kind, text = part
            if self._open != kind:
                yield from self._closed()
                self._open = kind
                yield self._started(_text_block("") if kind == "text" else _thinking_block("", ""))
            if kind == "thinking" and self._omits_thinking:
                self._omitted.append(text)
            else:
                yield self._delta({"type": f"{kind}_delta", kind: text})
        if delta.finish_reason is not None:
            self._finish_reason, self._stop_string = delta.finish_reason, delta.stop_string

    def _closed(self) -> Iterator[str]:
        """Yield the events that end the open block, if there is one."""
        if not self._open:
            return
        if self._open == "thinking":
            signature = signature_of("".join(self._omitted), is_omitted=self._omits_thinking)
            self._omitted.clear()
            yield self._delta({"type": "signature_delta", "signature": signature})
        yield _event("content_block_stop", index=self._index)
        self._open = ""
        self._index += 1

    def _started(self, block: dict[str, Any]) -> str:
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _stop(self, finish_reason: str | None, stop_string: str | None, usage: Usage) -> dict[str, Any]:
        """Return why the answer ended, with the fields beside that."""
        reason, sequence = "end_turn", None
        if finish_reason == "tool_calls":
            reason = "tool_use"
        elif finish_reason == FinishReason.LENGTH:
            is_whole = self._max_tokens is None or usage.num_output_tokens < self._max_tokens
            reason = "model_context_window_exceeded" if is_whole else "max_tokens"
        elif stop_string in self._stop_sequences:
            reason, sequence = "stop_sequence", stop_string
        return {**_NO_STOP, "stop_reason": reason, "stop_sequence": sequence}

    def _counts(self, usage: Usage) -> dict[str, Any]:
        """Return the counts of tokens."""
        return {
            "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.num_cached_tokens,
            "output_tokens": usage.num_output_tokens,
            "output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens},
            "server_tool_use": None,
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        more = {"service_tier": self._service_tier, "cache_creation": None, "inference_geo": None}
        return {**self._counts(usage), **more}


def _tool_use(call: ParsedCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "caller": {"type": "direct"}}


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def _thinking_block(thinking: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": thinking, "signature": signature}


def _service_tier(tier: str, classes: Sequence[ClassSpec]) -> str:
    """Return which of Anthropic's tiers the used one is like."""
    if class_of_tier(tier, classes).kind is ServiceClass.BE:
        return "batch"
    return "priority" if tier in _PRIORITY_TIERS else "standard"


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"

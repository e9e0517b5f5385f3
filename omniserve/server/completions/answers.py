"""The answers of /v1/completions and /v1/chat/completions: OpenAI's objects, made of the text of choices.

``CallShape`` is what all endpoints have that the engine works for.
"""

from __future__ import annotations

import abc
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from omniserve.core.request import TokenLogprob
from omniserve.server.answer_shape import AnswerShape, finite
from omniserve.server.choice import Delta
from omniserve.server.completions.protocol import ChatRequest, CompletionRequest, GenerationRequest
from omniserve.server.dialects.base import ParsedCall
from omniserve.server.errors import ApiError
from omniserve.server.jobs import Usage
from omniserve.server.service import Service

_DONE = "data: [DONE]\n\n"


class _CompletionsShape(AnswerShape):
    """What both endpoints' answers have in common."""

    answer_object: str
    chunk_object: str
    text_key: str
    """What is before the text in the object of a choice, in JSON, and ``text_end`` behind it."""
    text_end: str

    def __init__(self, service: Service, request: GenerationRequest, call_id: str) -> None:
        super().__init__(service, request, call_id)
        self._common = {
            "id": call_id,
            "created": int(time.time()),
            "model": request.model or service.model_name,
            "service_tier": request.answered_tier,
        }
        self._chunk_head = json.dumps(self._common | {"object": self.chunk_object})[:-1]  # an object still open
        self._include_usage = request.include_usage  # a stream ends with the token counts
        self._codec = service.codec
        self._with_logprobs = request.num_logprobs is not None
        self._token_text = _token_id_text if request.return_tokens_as_token_ids else service.codec.token_text
        self._with_token_ids = request.return_token_ids
        self._continuous_usage = request.continuous_usage
        self._with_text_alone = not (self._with_logprobs or self._with_token_ids or self._continuous_usage)
        self._chunk_end = ', "usage": null' if self._include_usage else ""
        self._num_tokens = 0  # of the output, in chunks so far
        self._usage = Usage()

    def first_events(self, usage: Usage) -> str:
        self._usage = usage
        return ""

    def use_tier(self, tier: str) -> None:
        self._common["service_tier"] = tier
        self._chunk_head = json.dumps(self._common | {"object": self.chunk_object})[:-1]

    def events(self, deltas: Sequence[Delta]) -> str:
        head, events = self._chunk_head, list[str]()
        for delta in deltas:
            if self._with_text_alone and self._is_text_alone(delta):  # written as below, in a third of the time
                events.append(
                    f'data: {head},"choices": [{{"index": {delta.index}, {self.text_key}{quoted(delta.text)}'
                    f'{self.text_end}, "logprobs": null, "finish_reason": null}}]{self._chunk_end}}}\n\n'
                )
            else:
                events += [f"data: {head},{json.dumps(chunk)[1:]}\n\n" for chunk in self._chunks(delta)]
        return "".join(events)

    def _is_text_alone(self, delta: Delta) -> bool:
        """Return whether a delta is a piece of text in the middle of its choice, and no more."""
        said_more = delta.finish_reason is not None or delta.reasoning or delta.tool_calls or delta.echo is not None
        return bool(delta.text) and not said_more

    def last_events(self, usage: Usage) -> str:
        if not self._include_usage:
            return _DONE
        return f'data: {self._chunk_head},"choices":[],"usage":{json.dumps(usage.as_dict())}}}\n\n{_DONE}'

    def error_events(self, error: ApiError) -> str:
        return f"data: {json.dumps(error.body())}\n\n{_DONE}"

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        choices = [self.whole(delta) for delta in deltas]
        fields = {"object": self.answer_object, "choices": choices, "usage": usage.as_dict()}
        return json.dumps(self._common | fields | self.beside_choices(deltas)).encode()

    def _chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the chunks, without their head, that tell some new text."""
        self._num_tokens += delta.num_tokens
        more: dict[str, Any] = {}
        if self._continuous_usage:
            so_far = Usage(
                num_prompt_tokens=self._usage.num_prompt_tokens,
                num_output_tokens=self._num_tokens,
                num_cached_tokens=self._usage.num_cached_tokens,
            )
            more["usage"] = so_far.as_dict()
        elif self._include_usage:
            more["usage"] = None  # as OpenAI sends it in all chunks but the last
        chunks: list[dict[str, Any]] = [{"choices": [choice], **more} for choice in self.choices(delta)]
        if chunks:
            chunks[0] |= self.beside_choices([delta])
        return chunks

    @abc.abstractmethod
    def choices(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the choice objects, one a chunk, that tell some new text."""

    def beside_choices(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return fields that an answer or a chunk has beside its choices."""
        return {}

    @abc.abstractmethod
    def whole(self, delta: Delta) -> dict[str, Any]:
        """Return the choice object of a complete text."""


class CompletionShape(_CompletionsShape):
    """Text completion objects."""

    request_kind = CompletionRequest
    id_prefix = "cmpl"
    answer_object = "text_completion"
    chunk_object = "text_completion"
    text_key, text_end = '"text": ', ""

    def __init__(self, service: Service, request: GenerationRequest, call_id: str) -> None:
        super().__init__(service, request, call_id)
        self._offsets: defaultdict[int, int] = defaultdict(int)

    def choices(self, delta: Delta) -> list[dict[str, Any]]:
        return [self.whole(delta)]

    def whole(self, delta: Delta) -> dict[str, Any]:
        echo = delta.echo
        choice = {
            "index": delta.index,
            "text": delta.text if echo is None else echo.text + delta.text,
            "logprobs": self._logprobs(delta) if self._with_logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        if self._with_token_ids:
            choice |= {"token_ids": delta.token_ids, "prompt_token_ids": delta.prompt_token_ids}
        return choice

    def _logprobs(self, delta: Delta) -> dict[str, list[Any]]:
        text, entries = self._token_text, delta.logprobs
        first: list[int] = []
        if delta.echo is not None:
            first, entries = [delta.echo.first_token_id], [*delta.echo.logprobs, *entries]
        tokens = [text(i) for i in (*first, *(entry.token_id for entry in entries))]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[delta.index])
            self._offsets[delta.index] += len(token)
        nothing = [None] * len(first)  # nothing predicts a prompt's first token
        return {
            "tokens": tokens,
            "token_logprobs": [*nothing, *(finite(entry.logprob) for entry in entries)],
            # The token that was taken belongs to the table even if it is not among the likeliest.
            "top_logprobs": [
                *nothing,
                *(
                    {text(i): finite(lp) for i, lp in (*entry.top, (entry.token_id, entry.logprob))}
                    for entry in entries
                ),
            ],
            "text_offset": offsets,
        }


class ChatShape(_CompletionsShape):
    """Chat completion objects."""

    request_kind = ChatRequest
    id_prefix = "chatcmpl"
    answer_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    text_key, text_end = '"delta": {"content": ', "}"

    def __init__(self, service: Service, request: GenerationRequest, call_id: str) -> None:
        super().__init__(service, request, call_id)
        self._opened: set[int] = set()

    def _is_text_alone(self, delta: Delta) -> bool:
        return delta.index in self._opened and super()._is_text_alone(delta)

    def choices(self, delta: Delta) -> list[dict[str, Any]]:
        chunks = []
        if delta.index not in self._opened:
            self._opened.add(delta.index)
            chunks.append(_chunk(delta.index, {"role": "assistant", "content": "", "refusal": None}))
        if delta.reasoning:
            logprobs = None if delta.text else self._logprobs(delta.logprobs)
            chunks.append(_chunk(delta.index, _reasoning(delta.reasoning), logprobs))
        if delta.text or (delta.logprobs and not delta.reasoning):
            chunks.append(_chunk(delta.index, {"content": delta.text}, self._logprobs(delta.logprobs)))
        for call in delta.tool_calls:
            if call.begins:
                begin = _call(replace(call, arguments=""))
                chunks.append(_chunk(delta.index, {"tool_calls": [{"index": call.index, **begin}]}))
            if call.arguments:
                more = {"index": call.index, "function": {"arguments": call.arguments}}
                chunks.append(_chunk(delta.index, {"tool_calls": [more]}))
        if delta.finish_reason is not None:
            chunks.append(_chunk(delta.index, {}, finish_reason=delta.finish_reason))
        if self._with_token_ids and chunks:
            chunks[-1]["token_ids"] = delta.token_ids
        return chunks

    def beside_choices(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        # A chat has one prompt, which all choices share.
        token_ids = deltas[0].prompt_token_ids
        return {} if token_ids is None or deltas[0].index else {"prompt_token_ids": token_ids}

    def whole(self, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None, "annotations": []}
        if delta.reasoning:
            message |= {"content": delta.text or None, **_reasoning(delta.reasoning)}
        if delta.tool_calls:
            message |= {"content": delta.text or None, "tool_calls": [_call(call) for call in delta.tool_calls]}
        choice = {
            "index": delta.index,
            "message": message,
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        return choice | {"token_ids": delta.token_ids} if self._with_token_ids else choice

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, list[Any]] | None:
        if not self._with_logprobs:
            return None
        content = [
            self._token(entry.token_id, entry.logprob) | {"top_logprobs": [self._token(i, lp) for i, lp in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": []}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(self._codec.token_bytes(token_id)),
        }


def _token_id_text(token_id: int) -> str:
    return f"token_id:{token_id}"


def _reasoning(text: str) -> dict[str, str]:
    # Two names: the first servers' and vLLM's.
    return {"reasoning_content": text, "reasoning": text}


def _call(call: ParsedCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

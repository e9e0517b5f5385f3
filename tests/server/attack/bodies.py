"""Bodies that a client might send by mistake or on purpose: hypothesis strategies, and what every answer must be."""

from __future__ import annotations

import json
from typing import Any

import httpx
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from omniserve.server.api import DetokenizeRequest, TokenizeRequest
from omniserve.server.completions.protocol import ChatRequest, CompletionRequest
from omniserve.server.fields import NOT_HONOURED
from omniserve.server.responses.fields import CreateResponse

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
_SCHEMA = {"name": "s", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
# A body that is right, for each path; attacks replace parts of it.
RIGHT: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a", "max_tokens": 3},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    RESPONSES: {"model": "fake", "input": "hi", "max_output_tokens": 3},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5, 6]},
}
_MODELS = {
    COMPLETIONS: CompletionRequest,
    CHAT: ChatRequest,
    RESPONSES: CreateResponse,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
# Near the limits of types and fields, and values that other fields take.
_NUMBERS = (0, 1, -1, 2, 20, 128, 129, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 0.5, 1e-9, 1e-320, 5e-324, 1e308)
_ODD: tuple[Any, ...] = (
    *_NUMBERS, float("nan"), float("inf"), -float("inf"), None, True, False, "", "a", "0", "\ud800", "\x00", "none",
    "auto", "required", "flex", [], {}, [[]], [5], [[5], [6]], ["a", "b"], ["a", 5], {"5": 1}, {"5": -100},
    {"399": 100, "0": -100}, {"role": "tool", "content": "x", "tool_call_id": "c"},
    [{"role": "assistant", "tool_calls": [_CALL]}], [{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}],
    {"type": "json_object"}, {"type": "text"}, {"type": "json_schema", "json_schema": _SCHEMA},
    [_TOOL], [_TOOL, _TOOL], [{**_TOOL, "function": {"name": "f", "strict": True}}],
    [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}], {"format": {"type": "json_object"}},
    [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}], [{"type": "reasoning", "summary": []}],
    {"type": "function", "function": {"name": "f"}}, {"include_usage": True}, {"ttft_s": 1e-300}, {"tpot_s": 1e300},
)  # fmt: skip
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(_NUMBERS)
    | st.floats()
    | st.text(st.characters(), max_size=8)
)
json_values = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
)


def bounded(num_examples: int) -> settings:
    """Return the settings of an attack with so many examples, which are the same ones each time."""
    return settings(
        max_examples=num_examples, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def _fields(path: str) -> list[str]:
    names = sorted(_MODELS[path].model_fields)
    return [*names, *sorted(name for name in NOT_HONOURED if "." not in name), "zzz"]


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draw a path and a body: no JSON, some JSON, or a right body of which parts were replaced."""
    path = draw(st.sampled_from(sorted(RIGHT)))
    kind = draw(st.sampled_from(["bytes", "json", "cut", "parts", "parts", "parts", "parts"]))
    if kind == "bytes":
        return path, draw(st.binary(max_size=64))
    if kind == "json":
        return path, json.dumps(draw(json_values)).encode()
    right = json.dumps(RIGHT[path])
    if kind == "cut":
        at = draw(st.integers(0, len(right)))
        return path, right[:at].encode() + draw(st.binary(max_size=3))
    names = draw(st.lists(st.sampled_from(_fields(path)), min_size=1, max_size=3, unique=True))
    parts = {name: draw(st.sampled_from(_ODD) | json_values) for name in names}
    return path, json.dumps(RIGHT[path] | parts).encode()


def check_answer(response: httpx.Response) -> None:
    """Fail unless an answer is a good one or a refusal in OpenAI's shape that blames the client."""
    said = f"{response.status_code} {response.text[:500]}"
    assert response.status_code in (200, 400, 404, 413, 429), said
    if response.status_code != 200:
        error = response.json()["error"]
        assert {"message", "type", "param", "code"} <= set(error), said
        assert error["message"], said
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n"), said
    else:
        assert isinstance(response.json(), dict), said

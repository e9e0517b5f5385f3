"""LiteLLM's ``anthropic/`` provider."""

from __future__ import annotations

import asyncio
import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches a list of prices first

import litellm
from pydantic import BaseModel
from scripts import AFTER, CAPITAL, CITY, PLAIN, THOUGHT
from trial import MODEL, TOO_LONG, URL, best_effort, check, main, raised

SERVER = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none", "num_retries": 0, "max_tokens": 300}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


class City(BaseModel):
    name: str
    people: int


def user(text):
    return [{"role": "user", "content": text}]


@check
def chat():
    answer = litellm.completion(**SERVER, messages=user("§plain§"), temperature=0.7)
    assert answer.choices[0].message.content == PLAIN and answer.usage.completion_tokens > 0


@check
def stream():
    chunks = litellm.completion(**SERVER, messages=user("§plain§"), stream=True, stream_options={"include_usage": True})
    whole = litellm.stream_chunk_builder(list(chunks))
    assert whole.choices[0].message.content == PLAIN and whole.usage.completion_tokens > 0


@check
def tools():
    messages = user("§weather§")
    message = litellm.completion(**SERVER, messages=messages, tools=[WEATHER]).choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Rome"}
    result = {
        "role": "tool", "tool_call_id": message.tool_calls[0].id, "name": "weather", "content": "sunny §after§",
    }  # fmt: skip
    for past in (message, message.model_dump()):
        answer = litellm.completion(**SERVER, messages=[*messages, past, result], tools=[WEATHER])
        assert answer.choices[0].message.content == AFTER


@check
def tools_must_be_called():
    forecast = WEATHER | {"function": WEATHER["function"] | {"name": "forecast"}}
    answer = litellm.completion(**SERVER, messages=user("§forecast§"), tools=[forecast], tool_choice="required")
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == {"city": "Oslo", "days": 37}


@check
def thinking():
    asked = SERVER | {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    asked["allowed_openai_params"] = ["thinking"]  # else it refuses them for a model that it does not know
    message = litellm.completion(**asked, messages=user("§thinks§")).choices[0].message
    assert (message.reasoning_content, message.content) == (THOUGHT, CAPITAL)
    again = litellm.completion(**asked, messages=[*user("§thinks§"), message, *user("§after§")])
    assert again.choices[0].message.content == AFTER


@check
def messages():
    asked = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none", "max_tokens": 300}
    answer = asyncio.run(litellm.anthropic.messages.acreate(**asked, messages=user("§plain§")))
    assert answer["content"][0]["text"] == PLAIN


@check
def flex():
    with best_effort():
        litellm.completion(**SERVER, messages=user("§plain§"), extra_headers={"x-omniserve-service-tier": "flex"})


@check
def errors():
    raised(litellm.ContextWindowExceededError, "prompt is too long", litellm.completion, **SERVER,
           messages=user(TOO_LONG))  # fmt: skip
    raised(litellm.NotFoundError, "other", litellm.completion, **(SERVER | {"model": "anthropic/other"}),
           messages=user("x"))  # fmt: skip


@check
def structured():
    answer = litellm.completion(**SERVER, messages=user("§json_tool§"), response_format=City)
    assert json.loads(answer.choices[0].message.content) == CITY


@check
async def concurrency():
    answers = await asyncio.gather(*(litellm.acompletion(**SERVER, messages=user("§plain§")) for _ in range(16)))
    assert all(answer.choices[0].message.content == PLAIN for answer in answers)


if __name__ == "__main__":
    main()

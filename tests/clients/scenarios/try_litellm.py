"""LiteLLM's ``openai/`` provider."""

from __future__ import annotations

import asyncio
import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches a list of prices first

import litellm
from pydantic import BaseModel
from scripts import AFTER, ANSWER, CITY, PLAIN, THOUGHT
from trial import BASE_URL, MODEL, TOO_LONG, best_effort, check, main, raised

SERVER = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": "none", "num_retries": 0}
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
    answer = litellm.completion(**SERVER, messages=user("§plain§"), max_tokens=50, temperature=0.7)
    assert answer.choices[0].message.content == PLAIN and answer.usage.completion_tokens > 0
    assert litellm.text_completion(
        **(SERVER | {"model": f"text-completion-openai/{MODEL}"}), prompt="§plain§", max_tokens=50
    ).choices[0].text == PLAIN  # fmt: skip


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
def structured():
    answer = litellm.completion(**SERVER, messages=user("§json§"), response_format=City)
    assert json.loads(answer.choices[0].message.content) == CITY


@check
def responses():
    assert litellm.responses(**SERVER, input="§plain§").output_text == PLAIN
    events = list(litellm.responses(**SERVER, input="§plain§", stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == PLAIN


@check
def reasoning():
    message = litellm.completion(**SERVER, messages=user("§think§")).choices[0].message
    assert (message.content, message.reasoning_content) == (ANSWER, THOUGHT)
    chunks = litellm.completion(**SERVER, messages=user("§think§"), stream=True)
    whole = litellm.stream_chunk_builder(list(chunks)).choices[0].message
    assert (whole.content, whole.reasoning_content) == (ANSWER, THOUGHT)
    answer = litellm.completion(**SERVER, messages=[*user("§think§"), whole, *user("§after§")])
    assert answer.choices[0].message.content == AFTER
    answer = litellm.completion(**SERVER, messages=user("§think json§"), response_format=City)
    assert json.loads(answer.choices[0].message.content) == CITY
    answer = litellm.completion(**SERVER, messages=user("§think call§"), tools=[WEATHER])
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == {"city": "Rome", "days": 3}


@check
def flex():
    with best_effort(2):
        litellm.completion(**SERVER, messages=user("§plain§"), service_tier="flex")
        litellm.completion(**SERVER, messages=user("§plain§"), extra_headers={"x-omniserve-service-tier": "flex"})


@check
def embeddings():
    answer = litellm.embedding(**SERVER, input=["a", "b and c"])
    assert abs(sum(x * x for x in answer.data[1]["embedding"]) - 1) < 1e-4 and answer.usage.total_tokens > 2
    with best_effort():
        litellm.embedding(**SERVER, input=["a"], extra_headers={"x-omniserve-service-tier": "flex"})
    server = SERVER | {"model": f"hosted_vllm/{MODEL}"}
    ranked = litellm.rerank(**server, query="b and c", documents=["a", "b and c"], top_n=1)
    assert len(ranked.results) == 1 and abs(ranked.results[0]["relevance_score"] - 1) < 1e-4


@check
def errors():
    raised(litellm.ContextWindowExceededError, "16384", litellm.completion, **SERVER, messages=user(TOO_LONG))
    raised(litellm.NotFoundError, "other", litellm.completion, **(SERVER | {"model": "openai/other"}),
           messages=user("x"))  # fmt: skip


@check
async def concurrency():
    answers = await asyncio.gather(*(litellm.acompletion(**SERVER, messages=user("§plain§")) for _ in range(16)))
    assert all(answer.choices[0].message.content == PLAIN for answer in answers)


if __name__ == "__main__":
    main()

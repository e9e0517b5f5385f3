"""OpenAI's own Python client."""

from __future__ import annotations

import asyncio
import io
import json

import openai
from pydantic import BaseModel
from scripts import AFTER, ANSWER, CITY, PLAIN, THOUGHT
from trial import BASE_URL, MODEL, TOO_LONG, best_effort, check, main, raised

client = openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather",
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
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "developer", "content": "Be brief."}, *user([{"type": "text", "text": "§plain§"}])],
        max_completion_tokens=50,
    )
    assert answer.choices[0].message.content == PLAIN and answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 10


@check
def stream():
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=user("§plain§"), stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == PLAIN
    assert len(chunks) > 3 and chunks[-1].usage.completion_tokens > 0


@check
def completions():
    answer = client.completions.create(model=MODEL, prompt=["§plain§", "x §after§"], max_tokens=50)
    assert [choice.text for choice in answer.choices] == [PLAIN, AFTER]


@check
def tools():
    messages = user("§weather§")
    message = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER]).choices[0].message
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"city": "Rome"}]
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny §after§"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    assert answer.choices[0].message.content == AFTER and answer.choices[0].finish_reason == "stop"


@check
def tools_must_be_called():
    forecast = WEATHER | {"function": WEATHER["function"] | {"name": "forecast"}}
    for choice in ("required", {"type": "function", "function": {"name": "forecast"}}):
        answer = client.chat.completions.create(
            model=MODEL, messages=user("§forecast§"), tools=[forecast], tool_choice=choice
        )
        (call,) = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Oslo", "days": 37}, call


@check
def tools_streamed():
    with client.chat.completions.stream(model=MODEL, messages=user("§two§"), tools=[WEATHER]) as events:
        message = events.get_final_completion().choices[0].message
    assert [json.loads(call.function.arguments)["city"] for call in message.tool_calls] == ["Rome", "Oslo"]
    answers = [
        {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "sunny §after§"}]}
        for call in message.tool_calls
    ]
    # As whole histories are kept: all that the client knows about a message comes back.
    history = [*user("§two§"), message.model_dump(), *answers]
    answer = client.chat.completions.create(model=MODEL, messages=history, tools=[WEATHER])
    assert answer.choices[0].message.content == AFTER


@check
def structured():
    answer = client.chat.completions.parse(model=MODEL, messages=user("§json§"), response_format=City)
    assert answer.choices[0].message.parsed == City(**CITY)
    tool = openai.pydantic_function_tool(City)
    answer = client.chat.completions.parse(model=MODEL, messages=user("§city§"), tools=[tool])
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == City(**CITY)
    assert client.chat.completions.create(model=MODEL, messages=[*user("x"), answer.choices[0].message,
        {"role": "tool", "tool_call_id": answer.choices[0].message.tool_calls[0].id, "content": "§after§"}],
    ).choices[0].message.content == AFTER  # fmt: skip


@check
def reasoning():
    answer = client.chat.completions.create(model=MODEL, messages=user("§think§"))
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == (ANSWER, THOUGHT, THOUGHT)
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens
    deltas = [
        chunk.choices[0].delta
        for chunk in client.chat.completions.create(model=MODEL, messages=user("§think§"), stream=True)
    ]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(getattr(delta, name, None) or "" for delta in deltas) == THOUGHT
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    again = client.chat.completions.create(model=MODEL, messages=[*user("§think§"), message, *user("§after§")])
    assert again.choices[0].message.content == AFTER


@check
def reasoning_before_tools_and_structure():
    answer = client.chat.completions.parse(model=MODEL, messages=user("§think json§"), response_format=City)
    message = answer.choices[0].message
    assert message.parsed == City(**CITY) and message.reasoning_content == "A city, then."
    with client.chat.completions.stream(model=MODEL, messages=user("§think json§"), response_format=City) as events:
        kinds = {event.type for event in events}
        assert events.get_final_completion().choices[0].message.parsed == City(**CITY) and "content.delta" in kinds
    whole = client.chat.completions.create(model=MODEL, messages=user("§think call§"), tools=[WEATHER])
    with client.chat.completions.stream(model=MODEL, messages=user("§think call§"), tools=[WEATHER]) as events:
        streamed = events.get_final_completion()
    for message in (whole.choices[0].message, streamed.choices[0].message):
        assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"city": "Rome", "days": 3}]
        assert message.reasoning_content == "I have to look outside." and not message.content
    look_up = WEATHER | {"function": WEATHER["function"] | {"name": "look_up"}}
    answer = client.chat.completions.create(
        model=MODEL, messages=user("§think forced§"), tools=[look_up], tool_choice="required"
    )
    message = answer.choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Oslo", "days": 58}
    assert message.reasoning_content == "I have to ask." and answer.choices[0].finish_reason == "tool_calls"


@check
def flex():
    with best_effort(2):
        client.chat.completions.create(model=MODEL, messages=user("§plain§"), service_tier="flex")
        client.completions.create(model=MODEL, prompt="§plain§", extra_body={"service_tier": "flex"})
    with best_effort():
        by_header = client.with_options(default_headers={"x-omniserve-service-tier": "flex"})
        by_header.chat.completions.create(model=MODEL, messages=user("§plain§"))


@check
def errors():
    for stream in (False, True):
        raised(openai.BadRequestError, "context_length_exceeded", client.chat.completions.create,
               model=MODEL, messages=user(TOO_LONG), stream=stream)  # fmt: skip
    raised(openai.NotFoundError, "other", client.chat.completions.create, model="other", messages=user("x"))


@check
async def concurrency():
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key="none", max_retries=0) as some:
        answers = await asyncio.gather(
            *(some.chat.completions.create(model=MODEL, messages=user(f"{i} §plain§"), n=2) for i in range(24))
        )
    assert all(choice.message.content == PLAIN for answer in answers for choice in answer.choices)


@check
def models():
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@check
def embeddings():
    texts = ["a", "b and c"]
    answer = client.embeddings.create(model=MODEL, input=texts)  # the client asks for base64
    as_floats = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    assert [entry.embedding for entry in answer.data] == [entry.embedding for entry in as_floats.data]
    assert abs(sum(x * x for x in answer.data[0].embedding) - 1) < 1e-4
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 2
    raw = client.embeddings.with_raw_response.create(model=MODEL, input="a")
    assert isinstance(json.loads(raw.text)["data"][0]["embedding"], str)
    assert raw.parse().data[0].embedding == answer.data[0].embedding
    with best_effort():
        client.embeddings.create(model=MODEL, input="a", extra_body={"service_tier": "flex"})
    raised(openai.BadRequestError, "context_length_exceeded", client.embeddings.create, model=MODEL, input=TOO_LONG)


@check
async def batches():
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key="none", max_retries=0) as some:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
                "body": {"model": MODEL, "messages": user("§plain§")}}  # fmt: skip
        file = await some.files.create(file=("in.jsonl", io.BytesIO(json.dumps(line).encode())), purpose="batch")
        batch = await some.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        while (batch := await some.batches.retrieve(batch.id)).status in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(0.2)
        output = await some.files.content(batch.output_file_id)
        assert json.loads(output.text)["response"]["body"]["choices"][0]["message"]["content"] == PLAIN


if __name__ == "__main__":
    main()

"""Anthropic's own Python client, with the Messages API."""

from __future__ import annotations

import asyncio
import json

import anthropic
from pydantic import BaseModel
from scripts import AFTER, CAPITAL, CITY, PLAIN, THOUGHT
from trial import MODEL, TOO_LONG, URL, best_effort, check, main, raised

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
ASKED = {"model": MODEL, "max_tokens": 300}
WEATHER = {
    "name": "weather",
    "description": "Tell the weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
THINKING = {"type": "enabled", "budget_tokens": 1024}


class City(BaseModel):
    name: str
    people: int


def user(content):
    return [{"role": "user", "content": content}]


def result_of(call):
    return {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny §after§"}]}


@check
def chat():
    blocks = [{"type": "text", "text": "§plain§", "cache_control": {"type": "ephemeral"}}]
    message = client.messages.create(**ASKED, system="Be brief.", messages=user(blocks))
    assert message.content[0].text == PLAIN and message.stop_reason == "end_turn"
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens > 10 < message.usage.output_tokens
    history = [*user("§plain§"), message.to_param(), *user("§after§")]
    assert client.messages.create(**ASKED, messages=history).content[0].text == AFTER


@check
def stream():
    with client.messages.stream(**ASKED, messages=user("§plain§")) as events:
        texts = list(events.text_stream)
        message = events.get_final_message()
    assert "".join(texts) == message.content[0].text == PLAIN and len(texts) > 3
    assert message.stop_reason == "end_turn" and message.usage.output_tokens > 0
    kinds = [event.type for event in client.messages.create(**ASKED, messages=user("§plain§"), stream=True)]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]


@check
def stop_sequences():
    message = client.messages.create(**ASKED, messages=user("§plain§"), stop_sequences=["never", " of Italy"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " of Italy")
    assert message.content[0].text == "Rome is the capital"
    assert client.messages.create(**ASKED | {"max_tokens": 3}, messages=user("§plain§")).stop_reason == "max_tokens"


@check
def tools():
    messages = user("§weather§")
    message = client.messages.create(**ASKED, messages=messages, tools=[WEATHER])
    [call] = message.content
    assert (call.type, call.name, call.input, message.stop_reason) == (
        "tool_use",
        "weather",
        {"city": "Rome"},
        "tool_use",
    )
    messages += [message.to_param(), *user([result_of(call)])]
    assert client.messages.create(**ASKED, messages=messages, tools=[WEATHER]).content[0].text == AFTER


@check
def tools_streamed():
    with client.messages.stream(**ASKED, messages=user("§two§"), tools=[WEATHER]) as events:
        message = events.get_final_message()
    assert [call.input["city"] for call in message.content if call.type == "tool_use"] == ["Rome", "Oslo"]
    results = [result_of(call) for call in message.content if call.type == "tool_use"]
    # As whole histories are kept: all that the client knows about a message comes back.
    history = [*user("§two§"), {"role": "assistant", "content": message.model_dump()["content"]}, *user(results)]
    assert client.messages.create(**ASKED, messages=history, tools=[WEATHER]).content[0].text == AFTER


@check
def tools_must_be_called():
    forecast = WEATHER | {"name": "forecast"}
    for choice in ({"type": "any"}, {"type": "tool", "name": "forecast", "disable_parallel_tool_use": True}):
        message = client.messages.create(**ASKED, messages=user("§forecast§"), tools=[forecast], tool_choice=choice)
        assert [call.input for call in message.content] == [{"city": "Oslo", "days": 37}]


@check
def tool_runner():
    @anthropic.beta_tool
    def weather(city: str, days: int = 1) -> str:
        """Tell the weather."""
        return f"sunny in {city} for {days} §after§"

    for streamed in (False, True):
        runner = client.beta.messages.tool_runner(
            **ASKED, messages=user("§two§"), tools=[weather], **({"stream": True} if streamed else {})
        )
        assert runner.until_done().content[-1].text == AFTER


@check
def thinking():
    message = client.messages.create(**ASKED | {"max_tokens": 2000}, messages=user("§thinks§"), thinking=THINKING)
    thought, text = message.content
    assert (thought.type, thought.thinking, text.text) == ("thinking", THOUGHT, CAPITAL) and thought.signature
    assert message.usage.output_tokens_details.thinking_tokens > 0
    with client.messages.stream(**ASKED, messages=user("§thinks§"), thinking={"type": "adaptive"}) as events:
        assert [block.to_dict() for block in events.get_final_message().content] == [
            block.to_dict() for block in message.content
        ]
    history = [*user("§thinks§"), message.to_param(), *user("§after§")]
    assert client.messages.create(**ASKED, messages=history, thinking={"type": "adaptive"}).content[0].text == AFTER
    assert client.messages.create(**ASKED, messages=user("§thinks§")).content[0].text == CAPITAL


@check
def structured():
    assert client.messages.parse(**ASKED, messages=user("§json§"), output_format=City).parsed_output == City(**CITY)
    schema = {"type": "json_schema", "schema": City.model_json_schema()}
    message = client.messages.create(**ASKED, messages=user("§json§"), output_config={"format": schema})
    assert json.loads(message.content[0].text) == CITY
    with client.messages.stream(**ASKED, messages=user("§json§"), output_format=City) as events:
        assert events.get_final_message().parsed_output == City(**CITY)


@check
def count_tokens():
    asked = {"model": MODEL, "messages": user("§plain§"), "tools": [WEATHER], "system": "Be brief."}
    message = client.messages.create(**asked, max_tokens=300)
    used = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert client.messages.count_tokens(**asked).input_tokens == used


@check
def models():
    [model] = client.models.list()
    assert model.id == MODEL == client.models.retrieve(MODEL).id and model.max_input_tokens > 0


@check
def flex():
    with best_effort(2):
        client.messages.create(**ASKED, messages=user("§plain§"), extra_body={"service_tier": "flex"})
        by_header = client.with_options(default_headers={"x-omniserve-service-tier": "flex"})
        by_header.messages.create(**ASKED, messages=user("§plain§"))


@check
def errors():
    for streamed in (False, True):
        raised(anthropic.BadRequestError, "prompt is too long: ", client.messages.create,
               **ASKED, messages=user(TOO_LONG), stream=streamed)  # fmt: skip
    raised(anthropic.NotFoundError, "other", client.messages.create, **ASKED | {"model": "other"}, messages=user("x"))
    image = {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}
    raised(
        anthropic.BadRequestError, "images are not supported", client.messages.create, **ASKED, messages=user([image])
    )
    try:
        client.messages.create(**ASKED, messages=[])
    except anthropic.BadRequestError as error:
        assert error.request_id.startswith("req_") and error.type == "invalid_request_error", (error, error.request_id)


@check
async def concurrency():
    async with anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0) as some:
        answers = await asyncio.gather(
            *(some.messages.create(**ASKED, messages=user(f"{i} §plain§")) for i in range(24))
        )
    assert all(answer.content[0].text == PLAIN for answer in answers)


if __name__ == "__main__":
    main()

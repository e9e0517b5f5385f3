"""OpenAI's own Python client with responses."""

from __future__ import annotations

import time

import openai
from pydantic import BaseModel
from scripts import AFTER, CITY, PLAIN
from trial import BASE_URL, MODEL, TOO_LONG, best_effort, check, main, raised

client = openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
responses = client.responses
FORECAST = {
    "type": "function",
    "name": "forecast",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
}


class City(BaseModel):
    name: str
    people: int


@check
def text():
    answer = responses.create(model=MODEL, input="§plain§", instructions="Be brief.", max_output_tokens=50)
    assert answer.output_text == PLAIN and answer.status == "completed"
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens > 10
    cut = responses.create(model=MODEL, input="§plain§", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@check
def stream():
    events = list(responses.create(model=MODEL, input="§plain§", stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == PLAIN
    with responses.stream(model=MODEL, input="§plain§") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == PLAIN


@check
def tools():
    first = responses.create(model=MODEL, input="§forecast§", tools=[FORECAST])
    [call] = [item for item in first.output if item.type == "function_call"]
    assert (call.name, call.arguments) == ("forecast", '{"city": "Oslo", "days": 37}')
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sun §after§"}
    items = [{"role": "user", "content": "§forecast§"}, *first.output, output]
    assert responses.create(model=MODEL, input=items, tools=[FORECAST], store=False).output_text == AFTER
    second = responses.create(model=MODEL, input=[output], tools=[FORECAST], previous_response_id=first.id)
    assert second.output_text == AFTER
    for choice in ("required", {"type": "function", "name": "forecast"}):
        forced = responses.create(model=MODEL, input="§forecast§", tools=[FORECAST], tool_choice=choice)
        assert [item.type for item in forced.output] == ["function_call"]


@check
def structured():
    assert responses.parse(model=MODEL, input="§json§", text_format=City).output_parsed == City(**CITY)
    with responses.stream(model=MODEL, input="§json§", text_format=City) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == City(**CITY)


@check
def stored():
    answer = responses.create(model=MODEL, input="§plain§", metadata={"a": "b"})
    assert responses.retrieve(answer.id) == answer
    assert [item.content[0].text for item in responses.input_items.list(answer.id)] == ["§plain§"]
    responses.delete(answer.id)
    raised(openai.NotFoundError, answer.id, responses.retrieve, answer.id)


@check
def background():
    answer = responses.create(model=MODEL, input="§plain§", background=True)
    while answer.status in ("queued", "in_progress"):
        time.sleep(0.1)
        answer = responses.retrieve(answer.id)
    assert answer.output_text == PLAIN
    answer = responses.create(model=MODEL, input="x", background=True, extra_body={"ignore_eos": True})
    assert responses.cancel(answer.id).status == "cancelled"


@check
def counted():
    counted = responses.input_tokens.count(model=MODEL, input="§plain§")
    assert counted.input_tokens == responses.create(model=MODEL, input="§plain§").usage.input_tokens


@check
def flex():
    with best_effort():
        assert responses.create(model=MODEL, input="§plain§", service_tier="flex").service_tier == "flex"


@check
def errors():
    raised(openai.BadRequestError, "context_length_exceeded", responses.create, model=MODEL, input=TOO_LONG)
    raised(openai.NotFoundError, "model_not_found", responses.create, model="other", input="x")


if __name__ == "__main__":
    main()

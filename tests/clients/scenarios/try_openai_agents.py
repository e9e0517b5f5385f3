"""OpenAI's Agents SDK with chat completions."""

from __future__ import annotations

import asyncio

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    SQLiteSession,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from pydantic import BaseModel
from scripts import AFTER, ANSWER, CITY, PLAIN, THOUGHT
from trial import BASE_URL, MODEL, TOO_LONG, best_effort, check, main

set_tracing_disabled(True)
KIND: type = OpenAIChatCompletionsModel


class City(BaseModel):
    name: str
    people: int


@function_tool
def forecast(city: str, days: int) -> str:
    """Tell what the weather will be."""
    return f"sunny in {city} §after§"


def agent(**options):
    client = openai.AsyncOpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
    model = KIND(model=MODEL, openai_client=client)
    return Agent(name="Assistant", instructions="Be brief.", model=model, **options)


@check
async def chat():
    result = await Runner.run(agent(), "§plain§")
    assert result.final_output == PLAIN and result.context_wrapper.usage.output_tokens > 0
    session = SQLiteSession("one")
    await Runner.run(agent(), "§plain§", session=session)
    assert (await Runner.run(agent(), "§after§", session=session)).final_output == AFTER


@check
async def stream():
    result = Runner.run_streamed(agent(), "§plain§")
    deltas = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == PLAIN and len(deltas) > 3


@check
async def tools():
    assert (await Runner.run(agent(tools=[forecast]), "§forecast§")).final_output == AFTER
    result = Runner.run_streamed(agent(tools=[forecast]), "§forecast§")
    async for _ in result.stream_events():
        pass
    assert result.final_output == AFTER
    forced = agent(tools=[forecast], model_settings=ModelSettings(tool_choice="required"))
    assert (await Runner.run(forced, "§forecast§")).final_output == AFTER


@check
async def handoffs():
    other = agent()

    def with_key(data):  # the history, in which the second agent finds what to say
        return data.clone(input_history=f"{data.input_history} §plain§")

    first = agent(handoffs=[handoff(other, tool_name_override="ask_other", input_filter=with_key)])
    result = await Runner.run(first, "§other§", max_turns=3)
    assert result.last_agent is other and result.final_output == PLAIN


@check
async def structured():
    assert (await Runner.run(agent(output_type=City), "§json§")).final_output == City(**CITY)


@function_tool
def weather(city: str, days: int) -> str:
    """Tell the weather."""
    return f"sunny in {city} §after§"


@check
async def reasoning():
    result = await Runner.run(agent(), "§think§")
    items = [item.raw_item for item in result.new_items if item.type == "reasoning_item"]
    told = [part.text for item in items for part in (item.summary or item.content)]
    assert result.final_output == ANSWER and told == [THOUGHT]
    result = Runner.run_streamed(agent(), "§think§")
    kinds = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
    assert result.final_output == ANSWER and any("reasoning" in kind for kind in kinds), set(kinds)
    assert (await Runner.run(agent(tools=[weather]), "§think call§")).final_output == AFTER
    assert (await Runner.run(agent(output_type=City), "§think json§")).final_output == City(**CITY)


@check
async def flex():
    settings = ModelSettings(extra_args={"service_tier": "flex"})
    with best_effort():
        await Runner.run(agent(model_settings=settings), "§plain§")


@check
async def errors():
    try:
        await Runner.run(agent(), TOO_LONG)
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded", error
    else:
        raise AssertionError("a prompt that is too long was taken")


@check
async def concurrency():
    results = await asyncio.gather(*(Runner.run(agent(tools=[forecast]), "§forecast§") for _ in range(8)))
    assert all(result.final_output == AFTER for result in results)


if __name__ == "__main__":
    main()

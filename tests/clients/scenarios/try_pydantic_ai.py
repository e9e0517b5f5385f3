"""Pydantic AI's agents."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from scripts import AFTER, ANSWER, CITY, PLAIN, THOUGHT
from trial import BASE_URL, MODEL, TOO_LONG, best_effort, check, main, raised

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key="none"))


class City(BaseModel):
    name: str
    people: int


def agent_with_weather(model=model):
    agent = Agent(model, instructions="Be brief.")

    @agent.tool_plain
    def weather(city: str, days: int = 1) -> dict[str, str]:
        """Tell the weather."""
        return {"weather": "sunny §after§", "city": city}

    return agent


@check
async def chat():
    result = await Agent(model, instructions="Be brief.").run("§plain§")
    usage = result.usage() if callable(result.usage) else result.usage
    assert result.output == PLAIN and usage.output_tokens > 0
    again = await Agent(model).run("§after§", message_history=result.all_messages())
    assert again.output == AFTER


@check
async def responses():
    model = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key="none"))
    assert (await Agent(model, instructions="Be brief.").run("§plain§")).output == PLAIN
    assert (await agent_with_weather(model).run("§two§")).output == AFTER
    async with Agent(model).run_stream("§plain§") as result:
        assert await result.get_output() == PLAIN
    assert (await Agent(model, output_type=NativeOutput(City)).run("§json§")).output == City(**CITY)


@check
async def stream():
    async with Agent(model).run_stream("§plain§") as result:
        parts = [part async for part in result.stream_text(delta=True, debounce_by=None)]
    assert "".join(parts) == PLAIN and len(parts) > 3


@check
async def tools():
    for key in ("weather", "two"):
        assert (await agent_with_weather().run(f"§{key}§")).output == AFTER
    async with agent_with_weather().run_stream("§two§") as result:
        assert await result.get_output() == AFTER


@check
async def structured():
    for output_type, key in ((City, "final"), (NativeOutput(City), "json"), (PromptedOutput(City), "json")):
        assert (await Agent(model, output_type=output_type).run(f"§{key}§")).output == City(**CITY), output_type


def thoughts(result):
    return [part.content for message in result.all_messages() for part in message.parts
            if isinstance(part, ThinkingPart)]  # fmt: skip


@check
async def reasoning():
    result = await Agent(model).run("§think§")
    assert result.output == ANSWER and thoughts(result) == [THOUGHT]
    again = await Agent(model).run("§after§", message_history=result.all_messages())
    assert again.output == AFTER
    async with Agent(model).run_stream("§think§") as streamed:
        assert await streamed.get_output() == ANSWER and thoughts(streamed) == [THOUGHT]
    assert (await agent_with_weather().run("§think call§")).output == AFTER
    assert (await Agent(model, output_type=NativeOutput(City)).run("§think json§")).output == City(**CITY)


@check
async def flex():
    with best_effort():
        await Agent(model, model_settings=OpenAIChatModelSettings(openai_service_tier="flex")).run("§plain§")


@check
def errors():
    raised(ModelHTTPError, "context_length_exceeded", Agent(model).run_sync, TOO_LONG)


@check
async def concurrency():
    results = await asyncio.gather(*(agent_with_weather().run("§weather§") for _ in range(8)))
    assert all(result.output == AFTER for result in results)


if __name__ == "__main__":
    main()

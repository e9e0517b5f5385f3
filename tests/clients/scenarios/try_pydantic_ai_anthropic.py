"""Pydantic AI's agents, with Anthropic's API."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.anthropic import AnthropicModel, AnthropicModelSettings
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from scripts import AFTER, CAPITAL, CITY, PLAIN, THOUGHT
from trial import MODEL, TOO_LONG, URL, best_effort, check, main, raised

# It takes models that it does not know for ones without JSON schemas.
profile = ModelProfile(supports_json_schema_output=True)
model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none"), profile=profile)


class City(BaseModel):
    name: str
    people: int


def agent_with_weather():
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
async def thinking():
    settings = AnthropicModelSettings(max_tokens=2000, anthropic_thinking={"type": "enabled", "budget_tokens": 1024})
    result = await Agent(model, model_settings=settings).run("§thinks§")
    thoughts = [part for part in result.all_messages()[-1].parts if isinstance(part, ThinkingPart)]
    assert result.output == CAPITAL and [part.content for part in thoughts] == [THOUGHT]
    again = await Agent(model, model_settings=settings).run("§after§", message_history=result.all_messages())
    assert again.output == AFTER


@check
async def structured():
    for output_type, key in ((City, "final"), (NativeOutput(City), "json"), (PromptedOutput(City), "prompted")):
        assert (await Agent(model, output_type=output_type).run(f"§{key}§")).output == City(**CITY), output_type


@check
async def flex():
    settings = AnthropicModelSettings(extra_body={"service_tier": "flex"})
    with best_effort():
        await Agent(model, model_settings=settings).run("§plain§")


@check
def errors():
    raised(ModelHTTPError, "prompt is too long", Agent(model).run_sync, TOO_LONG)


@check
async def concurrency():
    results = await asyncio.gather(*(agent_with_weather().run("§weather§") for _ in range(8)))
    assert all(result.output == AFTER for result in results)


if __name__ == "__main__":
    main()

"""OpenAI's Agents SDK with responses, its default."""

from __future__ import annotations

import try_openai_agents as chats
from agents import ModelSettings, OpenAIResponsesModel, Runner
from openai.types.shared import Reasoning
from scripts import AFTER, PLAIN
from trial import check, main

chats.KIND = OpenAIResponsesModel


@check
async def previous_response():
    first = await Runner.run(chats.agent(), "§plain§")
    second = await Runner.run(chats.agent(), "§after§", previous_response_id=first.last_response_id)
    assert (first.final_output, second.final_output) == (PLAIN, AFTER)
    result = await Runner.run(chats.agent(tools=[chats.forecast]), "§forecast§", auto_previous_response_id=True)
    assert result.final_output == AFTER


@check
async def settings():
    settings = ModelSettings(
        store=False, truncation="auto", verbosity="low", reasoning=Reasoning(effort="low", summary="auto"),
        response_include=["reasoning.encrypted_content"], top_logprobs=2, metadata={"a": "b"},
    )  # fmt: skip
    assert (await Runner.run(chats.agent(model_settings=settings), "§plain§")).final_output == PLAIN


if __name__ == "__main__":
    main()

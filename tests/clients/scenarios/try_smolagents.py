"""smolagents' agents that call tools."""

from __future__ import annotations

from scripts import ANSWER, PLAIN, THOUGHT
from smolagents import OpenAIModel, ToolCallingAgent, tool
from trial import BASE_URL, MODEL, best_effort, check, main

model = OpenAIModel(model_id=MODEL, api_base=BASE_URL, api_key="none")


def user(text):
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


@tool
def forecast(city: str, days: int) -> str:
    """Tell what the weather will be.

    Args:
        city: Where.
        days: In how many days.
    """
    return "sunny §final answer§"


@check
def chat():
    answer = model.generate(user("§plain§"))
    assert answer.content == PLAIN and answer.token_usage.output_tokens > 5


@check
def stream():
    deltas = list(model.generate_stream(user("§plain§")))
    assert "".join(delta.content or "" for delta in deltas) == PLAIN and len(deltas) > 3


@check
def tools():
    for streams in (False, True):
        agent = ToolCallingAgent(tools=[forecast], model=model, max_steps=3, stream_outputs=streams)
        assert agent.run("§forecast§") == "Take a hat.", streams


@check
def reasoning():
    answer = model.generate(user("§think§"))
    assert answer.content == ANSWER and answer.raw.choices[0].message.reasoning_content == THOUGHT


@check
def flex():
    with best_effort():
        model.generate(user("§plain§"), service_tier="flex")


if __name__ == "__main__":
    main()

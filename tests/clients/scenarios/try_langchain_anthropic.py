"""LangChain's ``ChatAnthropic``."""

from __future__ import annotations

import anthropic
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel
from scripts import AFTER, CAPITAL, CITY, PLAIN, THOUGHT
from trial import MODEL, TOO_LONG, URL, best_effort, check, main, raised

SERVER = {"model": MODEL, "base_url": URL, "api_key": "none", "max_retries": 0, "max_tokens": 300}
model = ChatAnthropic(**SERVER)


class City(BaseModel):
    """A city."""

    name: str
    people: int


@tool
def weather(city: str, days: int = 1) -> str:
    """Tell the weather."""
    return "sunny §after§"


@tool
def forecast(city: str, days: int) -> str:
    """Tell what the weather will be."""
    return "sunny §after§"


@check
def chat():
    answer = model.invoke([("system", "Be brief."), ("human", "§plain§")])
    assert answer.content == PLAIN and answer.usage_metadata["output_tokens"] > 5


@check
def stream():
    chunks = list(model.stream("§plain§"))
    assert "".join(chunk.text for chunk in chunks) == PLAIN and len(chunks) > 3
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 0


@check
def tools():
    with_tools = model.bind_tools([weather])
    history = [HumanMessage("§two§")]
    history.append(with_tools.invoke(history))
    assert [call["args"]["city"] for call in history[-1].tool_calls] == ["Rome", "Oslo"]
    history += [weather.invoke(call) for call in history[-1].tool_calls]
    assert isinstance(history[-1], ToolMessage)
    assert with_tools.invoke(history).content == AFTER
    message = None
    for chunk in with_tools.stream("§weather§"):
        message = chunk if message is None else message + chunk
    assert message.tool_calls[0]["args"] == {"city": "Rome"}
    forced = model.bind_tools([forecast], tool_choice="any")
    assert forced.invoke("§forecast§").tool_calls[0]["args"] == {"city": "Oslo", "days": 37}


@check
def thinking():
    thinks = ChatAnthropic(**SERVER | {"max_tokens": 2000}, thinking={"type": "enabled", "budget_tokens": 1024})
    thought, text = thinks.invoke("§thinks§").content
    assert (thought["thinking"], text["text"]) == (THOUGHT, CAPITAL)
    message = None
    for chunk in thinks.stream("§thinks§"):
        message = chunk if message is None else message + chunk
    assert message.content[0]["thinking"] == THOUGHT and message.text == CAPITAL
    assert thinks.invoke([HumanMessage("§thinks§"), message, HumanMessage("§after§")]).text == AFTER


@check
def structured():
    for method, key in (("json_schema", "json"), ("function_calling", "city")):
        assert model.with_structured_output(City, method=method).invoke(f"§{key}§") == City(**CITY), method


@check
def count_tokens():
    assert model.get_num_tokens_from_messages([HumanMessage("§plain§")]) > 3


@check
def flex():
    with best_effort():
        ChatAnthropic(**SERVER, default_headers={"x-omniserve-service-tier": "flex"}).invoke("§plain§")


@check
def errors():
    raised(anthropic.BadRequestError, "prompt is too long", model.invoke, TOO_LONG)


@check
async def concurrency():
    answers = [*model.batch(["§plain§"] * 16), *await model.abatch(["§plain§"] * 16)]
    assert all(answer.content == PLAIN for answer in answers)


if __name__ == "__main__":
    main()

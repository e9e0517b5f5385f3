"""LangChain's ``ChatOpenAI``."""

from __future__ import annotations

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel
from scripts import AFTER, ANSWER, CITY, PLAIN
from trial import BASE_URL, MODEL, TOO_LONG, best_effort, check, main, raised

SERVER = {"model": MODEL, "base_url": BASE_URL, "api_key": "none", "max_retries": 0}
model = ChatOpenAI(**SERVER)


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
    assert OpenAI(**SERVER, max_tokens=50).invoke("§plain§") == PLAIN


@check
def responses():
    model = ChatOpenAI(**SERVER, use_responses_api=True)
    first = model.invoke([("system", "Be brief."), ("human", "§plain§")])
    assert first.text == PLAIN and first.usage_metadata["output_tokens"] > 5
    assert "".join(chunk.text for chunk in model.stream("§plain§")) == PLAIN
    asked = HumanMessage("§weather§")
    message = model.bind_tools([weather]).invoke([asked])
    [call] = message.tool_calls
    assert call["args"] == {"city": "Rome"}
    result = ToolMessage("sunny §after§", tool_call_id=call["id"])
    assert model.bind_tools([weather]).invoke([asked, message, result]).text == AFTER
    assert model.with_structured_output(City, method="json_schema").invoke("§json§") == City(**CITY)


@check
def stream():
    chunks = list(ChatOpenAI(**SERVER, stream_usage=True).stream("§plain§"))
    assert "".join(chunk.content for chunk in chunks) == PLAIN and len(chunks) > 3
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
    forced = model.bind_tools([forecast], tool_choice="any", strict=True)
    assert forced.invoke("§forecast§").tool_calls[0]["args"] == {"city": "Oslo", "days": 37}


@check
def structured():
    for method, key in (("json_schema", "json"), ("function_calling", "city"), ("json_mode", "json")):
        assert model.with_structured_output(City, method=method).invoke(f"§{key}§") == City(**CITY), method


@check
def reasoning():
    answer = model.invoke("§think§")
    assert answer.content == ANSWER and answer.usage_metadata["output_token_details"]["reasoning"] > 0
    assert "".join(chunk.content for chunk in model.stream("§think§")) == ANSWER
    assert model.with_structured_output(City, method="json_schema").invoke("§think json§") == City(**CITY)
    assert model.bind_tools([weather]).invoke("§think call§").tool_calls[0]["args"] == {"city": "Rome", "days": 3}


@check
def flex():
    with best_effort(2):
        ChatOpenAI(**SERVER, service_tier="flex").invoke("§plain§")
        ChatOpenAI(**SERVER, default_headers={"x-omniserve-service-tier": "flex"}).invoke("§plain§")


@check
def embeddings():
    # Else it sends token ids of OpenAI's tokenizer.
    embedder = OpenAIEmbeddings(**SERVER, check_embedding_ctx_length=False)
    one, other = embedder.embed_documents(["a", "b and c"])
    assert embedder.embed_query("a") == one and len(other) == len(one)
    assert abs(sum(x * x for x in one) - 1) < 1e-4


@check
def errors():
    raised(openai.BadRequestError, "context_length_exceeded", model.invoke, TOO_LONG)


@check
async def concurrency():
    answers = [*model.batch(["§plain§"] * 16), *await model.abatch(["§plain§"] * 16)]
    assert all(answer.content == PLAIN for answer in answers)


if __name__ == "__main__":
    main()

"""LlamaIndex's ``OpenAILike``."""

from __future__ import annotations

import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from scripts import AFTER, ANSWER, CITY, PLAIN
from trial import BASE_URL, MODEL, TOO_LONG, best_effort, check, main, raised

SERVER = {
    "model": MODEL,
    "api_base": BASE_URL,
    "api_key": "none",
    "is_chat_model": True,
    "is_function_calling_model": True,
    "max_retries": 0,
}
model = OpenAILike(**SERVER)


class City(BaseModel):
    """A city."""

    name: str
    people: int


def weather(city: str, days: int = 1) -> str:
    """Tell the weather."""
    return "sunny §after§"


@check
def chat():
    assert (
        model.chat([ChatMessage(role="system", content="Be brief."), ChatMessage("§plain§")]).message.content == PLAIN
    )
    assert OpenAILike(**(SERVER | {"is_chat_model": False}), max_tokens=50).complete("§plain§").text == PLAIN


@check
def stream():
    deltas = [answer.delta for answer in model.stream_chat([ChatMessage("§plain§")])]
    assert "".join(deltas) == PLAIN and len(deltas) > 3


@check
def tools():
    tool = FunctionTool.from_defaults(weather)
    history = [ChatMessage("§two§")]
    answer = model.chat_with_tools([tool], chat_history=history, allow_parallel_tool_calls=True)
    calls = model.get_tool_calls_from_response(answer)
    assert [call.tool_kwargs["city"] for call in calls] == ["Rome", "Oslo"]
    history.append(answer.message)
    history += [
        ChatMessage(role="tool", content=weather("x"), additional_kwargs={"tool_call_id": call.tool_id})
        for call in calls
    ]
    assert model.chat_with_tools([tool], chat_history=history).message.content == AFTER


@check
def structured():
    city = OpenAILike(**SERVER, should_use_structured_outputs=True)
    for one, key in ((city, "json"), (city, "think json"), (model, "city")):
        assert one.structured_predict(City, PromptTemplate(f"§{key}§")) == City(**CITY), key


@check
def reasoning():
    assert model.chat([ChatMessage("§think§")]).message.content == ANSWER


@check
def flex():
    with best_effort():
        model.chat([ChatMessage("§plain§")], service_tier="flex")


@check
def errors():
    raised(openai.BadRequestError, "context_length_exceeded", model.chat, [ChatMessage(TOO_LONG)])


@check
async def concurrency():
    answers = [await model.achat([ChatMessage("§plain§")]) for _ in range(4)]
    assert all(answer.message.content == PLAIN for answer in answers)


if __name__ == "__main__":
    main()

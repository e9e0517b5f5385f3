"""Tools: told to the model, calls told from its text, calls that must be made. The fake engine repeats the prompt."""

from __future__ import annotations

import json

import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel
from tokenizers_for_tests import TOOL_CHAT_TEMPLATE, byte_level_tokenizer

from omniserve.sampling.grammar import GrammarCompiler, GrammarFailed
from omniserve.server.messages import Tool
from omniserve.server.tool_calls import ToolCallParser, calls_grammar

TOKENIZER = byte_level_tokenizer()
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "what it is like",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}


def parsed(text: str, size: int) -> tuple[str, list[tuple[int, str, str]]]:
    """Return what the parser makes of a text that comes in pieces of a size."""
    parser = ToolCallParser()
    results = [parser.push(text[i : i + size]) for i in range(0, len(text), size)] + [parser.flush()]
    calls = [call for _, some in results for call in some]
    assert len({call.call_id for call in calls}) == len(calls) == parser.num_calls
    return "".join(part for part, _ in results), [(call.index, call.name, call.arguments) for call in calls]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", [(0, "weather", '{"city": "Köln"}')]),
        (f"I look.\n{CALL}\n{OTHER_CALL}", "I look.", [(0, "weather", '{"city": "Köln"}'), (1, "time", "{}")]),
        (f"{CALL}\n", "", [(0, "weather", '{"city": "Köln"}')]),
        (CALL.removesuffix("\n</tool_call>"), "", [(0, "weather", '{"city": "Köln"}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [(0, "f", "{}")]),
        ("no call < here <tool \n", "no call < here <tool \n", []),
        ("a <tool_call>no json</tool_call> x", "a <tool_call>no json</tool_call> x", []),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        ('<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', []),
        ('<tool_call>\n{"name": "f", "arg', '<tool_call>\n{"name": "f", "arg', []),
        ("", "", []),
        (f"{CALL}\n\nbye", "\n\nbye", [(0, "weather", '{"city": "Köln"}')]),
        (
            '<tool_call>{"name": "f", "arguments": {"x": "a </tool_call> \\" b"}}</tool_call>',
            "",
            [(0, "f", '{"x": "a </tool_call> \\" b"}')],
        ),
        ('<tool_call>say "a</tool_call>b', '<tool_call>say "a</tool_call>b', []),
        ('<tool_call>{"name": "f</tool_call> x', '<tool_call>{"name": "f</tool_call> x', []),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}', '<tool_call>{"name": "f", "arguments": {"x": NaN}}', []),
    ],
)
def test_calls_are_told_from_text_whatever_the_pieces(text, content, calls, size):
    assert parsed(text, size) == (content, calls)


def test_text_is_held_back_no_longer_than_needed():
    parser = ToolCallParser()
    assert parser.push("hello <tool")[0] == "hello"
    assert parser.push("box> world")[0] == " <toolbox> world"


@pytest.fixture(scope="module")
def client(start_module_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    byte_level_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TOOL_CHAT_TEMPLATE)
    return start_module_server("--tokenizer", str(folder)).wait_until_ready().client()


[ASSISTANT] = TOKENIZER("<|assistant|>").input_ids
# A tool costs the fake engine's small context a token a letter.
SMALL = {"type": "function", "function": {"name": "f"}}


def say(client, text, **kwargs):
    """Make the fake engine say the prompt once: the tool in front, then the text."""
    kwargs = {"tools": [SMALL]} | kwargs
    extra = {"ignore_eos": True, "stop_token_ids": [ASSISTANT]}
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="fake", messages=messages, extra_body=extra, **kwargs)


def test_calls_are_told_apart_in_answers(client):
    [choice] = say(client, f"{CALL}\n{OTHER_CALL}").choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == json.dumps(SMALL), "the tool, as the template writes it"
    assert [(call.type, call.function.name) for call in choice.message.tool_calls] == [
        ("function", "weather"),
        ("function", "time"),
    ]
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Köln"}
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_streamed_calls_are_those_of_the_answer(client):
    text, calls, reasons = "", [], []
    for chunk in say(client, f"{CALL}\n{OTHER_CALL}", stream=True):
        [choice] = chunk.choices
        text += choice.delta.content or ""
        calls += choice.delta.tool_calls or []
        reasons.append(choice.finish_reason)
    assert text == json.dumps(SMALL)
    assert [(call.index, call.type, call.function.name) for call in calls] == [
        (0, "function", "weather"),
        (1, "function", "time"),
    ]
    assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}


def test_answer_ends_with_its_first_call_if_calls_are_not_to_be_parallel(client):
    [choice] = say(client, f"{CALL}\n{OTHER_CALL}", parallel_tool_calls=False).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    assert choice.finish_reason == "tool_calls"


def test_text_without_a_call_is_an_ordinary_answer(client):
    [choice] = say(client, "hello ").choices
    assert (choice.message.content, choice.message.tool_calls) == (json.dumps(SMALL) + "hello ", None)
    assert choice.finish_reason == "stop"


def test_tools_that_are_not_to_be_called_are_not_told(client):
    [choice] = say(client, CALL, tool_choice="none").choices
    assert (choice.message.content, choice.message.tool_calls) == (CALL, None)


def test_calls_and_their_answers_go_back_to_the_model(client):
    first = say(client, CALL).choices[0].message
    [call] = first.tool_calls
    messages = [
        {"role": "user", "content": "hi"},
        first,
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    answer = client.chat.completions.create(model="fake", messages=messages, max_tokens=1)
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "K\\u00f6ln"}}\n</tool_call>'
    chat = f"<|user|>hi<|end|><|assistant|>{first.content}{written}<|end|><|user|>rain<|end|><|assistant|>"
    lengths = {len(TOKENIZER(text).input_ids) for text in (chat, chat.replace("\\u00f6", "ö"))}
    assert answer.usage.prompt_tokens in lengths, "transformers' tojson may or may not escape"


class Weather(BaseModel):
    """A client's way to write a tool."""

    city: str


def test_tools_of_the_client_are_taken(client):
    tool = pydantic_function_tool(Weather)
    assert tool["function"]["strict"] is True
    messages = [{"role": "user", "content": "hi"}]
    for choice in ("auto", "required", {"type": "function", "function": {"name": "Weather"}}):
        client.chat.completions.create(
            model="fake", messages=messages, tools=[tool], tool_choice=choice, max_tokens=1
        )  # fmt: skip


@pytest.mark.parametrize("free_text", [False, True])
def test_grammar_of_calls_allows_calls_and_nothing_else(free_text):
    tools = [Tool.model_validate(tool) for tool in (WEATHER, TIME)]
    tools[0].function.strict = True
    grammar = calls_grammar(tools, free_text=free_text, several=True)
    good = [CALL, OTHER_CALL, f"{CALL}\n{OTHER_CALL}"]
    bad = [CALL.replace("city", "town"), CALL.replace("weather", "wetter")]
    (good if free_text else bad).extend(["hello", f"hello {CALL} bye"])
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []
    one = calls_grammar(tools, free_text=False, several=False)
    assert accepts(one, CALL) and not accepts(one, f"{CALL}\n{OTHER_CALL}")


def accepts(grammar: str, text: str) -> bool:
    compiler = GrammarCompiler(TOKENIZER, vocab_size=len(TOKENIZER), eos_token_ids=(TOKENIZER.eos_token_id,))
    state = compiler.compile(grammar).result().start()
    try:
        for token in [*TOKENIZER(text).input_ids, TOKENIZER.eos_token_id]:
            state.accept(token)
    except GrammarFailed:
        return False
    return True

"""Tools: told to the model, calls told from its text, calls that must be made. The fake engine repeats the prompt."""

from __future__ import annotations

import copy
import json
import random

import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel
from tokenizers import AddedToken
from tokenizers_for_tests import TOOL_CHAT_TEMPLATE, byte_level_tokenizer

from omniserve.sampling.detokenizer import Detokenizer, special_token_ids
from omniserve.sampling.grammar import GrammarCompiler, GrammarFailed
from omniserve.server.completions.messages import Tool
from omniserve.server.dialects.base import Opening
from omniserve.server.dialects.hermes import Hermes
from omniserve.server.dialects.tagged import TaggedDialect, ToolCallParser
from omniserve.server.tokenizing.text import TextCodec
from tests.masks import ids_of

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


NAMES = {"weather": {}, "time": {}, "f": {}}
HERMES = TaggedDialect(None, Hermes())


def parsed(text: str, size: int, *, several: bool = True) -> tuple[str, list[tuple[int, str, str]]]:
    """Return what the parser makes of a text that comes in pieces of a size."""
    parser = ToolCallParser(Hermes(), NAMES, several=several)
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


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    "arguments",
    [
        '{"x": 1e400, "y": 1.10, "z": 0.1e-7}',
        '{"x": 1, "x": 2}',
        '{ "x":\n"\\u00e9\\/é" }',
        '{"x": -0, "y": 123456789012345678901234567890}',
        '{"x": %s}' % ("1" * 5000),
        '{"x": "\\ud800"}',
        "{}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("word", ["arguments", "parameters"])
def test_arguments_are_the_text_that_the_model_wrote(word, arguments, size):
    text = f'<tool_call>{{"name": "f", "{word}": {arguments}}}</tool_call>'
    assert parsed(text, size) == ("", [(0, "f", arguments)])


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "g", "arguments": {}}',  # not offered
        '{"name": "", "arguments": {}}',
        '{"name": "F", "arguments": {}}',
        '{"name": ["f"], "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": {"x": Infinity}}',
        '{"name": "f", "arguments": {"x": 01}}',
        '{"name": "f", "arguments": {"x": 1,}}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "arguments": null}',
        '{"name": "f", "arguments": {}, "parameters": {}}',
        '{"name": "f", "arguments": {}, "arguments": {}}',
        '{"name": "f", "name": "time", "arguments": {}}',
        '{"name": "f", "arguments": {}} and more',
        '{"name": "f", "arguments": %s}' % ('{"x":' * 100_000),
        '[{"name": "f", "arguments": {}}]',
        "{}",
    ],
)
def test_what_cannot_be_a_call_of_an_offered_tool_stays_text(body):
    text = f"<tool_call>\n{body}\n</tool_call>"
    assert parsed(text, len(text)) == (text, [])
    assert parsed(text, max(1, len(text) // 50)) == (text, [])


def test_text_ends_with_the_first_call_if_there_is_one_only():
    """The mark of a call's end in its arguments is none, and what was no call ends nothing."""
    call = '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>'
    no_call = "<tool_call>none</tool_call>"
    for size in (1, 5, 1000):
        assert parsed(f"a{no_call}{call} b {call}", size, several=False) == (
            f"a{no_call}",
            [(0, "f", '{"x": "</tool_call>"}')],
        )


def test_text_is_held_back_no_longer_than_needed():
    parser = ToolCallParser(Hermes(), NAMES)
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
F_CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1e400}}\n</tool_call>'


def say(client, text, **kwargs):
    """Make the fake engine say the prompt once: the tool in front, then the text."""
    kwargs = {"tools": [SMALL]} | kwargs
    extra = {"ignore_eos": True, "stop_token_ids": [ASSISTANT]}
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="fake", messages=messages, extra_body=extra, **kwargs)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_told_apart_in_answers(client, stream):
    answer = say(client, f"{F_CALL}\n{CALL}\n{F_CALL}", stream=stream)
    text, calls, reasons = "", [], []
    for part in answer if stream else [answer]:
        [choice] = part.choices
        said = choice.delta if stream else choice.message
        text += said.content or ""
        for call in said.tool_calls or []:
            if stream and call.id is None:  # the arguments follow what is called
                assert (call.index, call.type, call.function.name) == (len(calls) - 1, None, None)
                calls[-1].function.arguments += call.function.arguments
            else:
                assert not stream or call.function.arguments == ""
                calls.append(call)
        reasons.append(choice.finish_reason)
    # The tool, as the template writes it, and a call of a tool that was not offered.
    assert text == f"{json.dumps(SMALL)}\n{CALL}"
    f = ("function", "f", '{"x": 1e400}')
    assert [(call.type, call.function.name, call.function.arguments) for call in calls] == [f, f]
    assert len({call.id for call in calls}) == 2
    assert not stream or [call.index for call in calls] == [0, 1]
    assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == ({None} if stream else set())


def test_a_call_that_is_cut_off_is_streamed_as_far_as_it_came(client):
    """As OpenAI does; as a whole answer, it stays text."""
    call = '<tool_call>{"name": "f", "arguments": {"x": "' + "a" * 40
    num_tokens = len(TOKENIZER("<|user|>" + json.dumps(SMALL) + call).input_ids)
    chunks = [chunk.choices[0] for chunk in say(client, call, stream=True, max_tokens=num_tokens)]
    pieces = [one.function.arguments for chunk in chunks for one in chunk.delta.tool_calls or []]
    assert "".join(pieces).startswith('{"x": "aaa') and '"}' not in "".join(pieces)
    assert chunks[-1].finish_reason == "length"
    [choice] = say(client, call, max_tokens=num_tokens).choices
    assert choice.message.tool_calls is None and '{"x": "aaa' in choice.message.content


def test_answer_ends_with_its_first_call_if_calls_are_not_to_be_parallel(client):
    [choice] = say(client, f"{CALL}{F_CALL}\n{F_CALL}", parallel_tool_calls=False).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["f"]
    assert choice.message.content == f"{json.dumps(SMALL)}{CALL}"
    assert choice.finish_reason == "tool_calls"


def test_text_without_a_call_is_an_ordinary_answer(client):
    [choice] = say(client, "hello ").choices
    assert (choice.message.content, choice.message.tool_calls) == (json.dumps(SMALL) + "hello ", None)
    assert choice.finish_reason == "stop"


def test_tools_that_are_not_to_be_called_are_not_told(client):
    [choice] = say(client, CALL, tool_choice="none").choices
    assert (choice.message.content, choice.message.tool_calls) == (CALL, None)


def test_calls_and_their_answers_go_back_to_the_model(client):
    first = say(client, CALL, tools=[{"type": "function", "function": {"name": "weather"}}]).choices[0].message
    [call] = first.tool_calls
    messages = [{"role": "user", "content": "hi"}, first, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
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


def tokenizer_with(*tags: str, special: bool = False):
    """Return a tokenizer that has a token of its own for each tag."""
    tokenizer = copy.deepcopy(byte_level_tokenizer())
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=special) for tag in tags])
    return tokenizer


TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TOKENIZERS = {
    "tags are text": TOKENIZER,
    "tags are added tokens": tokenizer_with(*TAGS),
    "tags are special tokens": tokenizer_with(*TAGS, special=True),
    "the begin alone is a special token": tokenizer_with(*TAGS[:1], special=True),
    "others than tags are special tokens": tokenizer_with(*TAGS[2:], special=True),
}
over_tokenizers = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


@over_tokenizers
@pytest.mark.parametrize("free_text", [False, True])
def test_grammar_of_calls_allows_calls_and_nothing_else(free_text, tokenizer):
    tools = [Tool.model_validate(tool) for tool in (WEATHER, TIME)]
    schemas = {tool.function.name: tool.arguments_schema for tool in tools}
    special = TextCodec(tokenizer).special_tokens(HERMES)
    grammar = HERMES.calls_grammar(schemas, free_text=free_text, several=True, special=special, opening=Opening())
    good = [CALL, OTHER_CALL, f"{CALL}\n{OTHER_CALL}"]
    # A special token is not the text, which is spelled by others.
    if tokenizer.convert_tokens_to_ids("<think>") not in special_token_ids(tokenizer):
        good.append(CALL.replace("Köln", "<think> é"))
    if "</tool_call>" not in special.tags:
        good.append(CALL.replace("Köln", "</tool_call>"))
    bad = [CALL.replace("city", "town"), CALL.replace("weather", "wetter")]
    free = ["hello", f"hello {CALL} bye", f"<think>which?</think>{CALL}<think>{CALL}</think>", "<think>none</think>"]
    (good if free_text else bad).extend(free)
    compiler = compiler_of(tokenizer)

    def accepted(grammar: str, texts: list[str]) -> list[str]:
        compiled = compiler.compile(grammar).result()
        return [text for text in texts if accepts(compiled.start(), text, tokenizer)]

    assert accepted(grammar, good) == good
    assert accepted(grammar, bad) == []
    one = HERMES.calls_grammar(schemas, free_text=False, several=False, special=special, opening=Opening())
    assert accepted(one, [CALL, f"{CALL}\n{OTHER_CALL}"]) == [CALL]


@over_tokenizers
def test_calls_that_a_grammar_forces_are_read_from_the_tokens(tokenizer):
    """The model may write any token that the mask allows, whatever stands for the tags."""
    codec = TextCodec(tokenizer)
    schemas = {"f": {"type": "object", "properties": {"x": {"enum": ["<think>", "</tool_call>", "<|end|>"]}},
                     "required": ["x"], "additionalProperties": False}}  # fmt: skip
    special = codec.special_tokens(HERMES)
    grammar = HERMES.calls_grammar(schemas, free_text=False, several=False, special=special, opening=Opening())
    compiled = compiler_of(tokenizer).compile(grammar).result()
    values = set()
    for seed in range(40):
        rng, state, token_ids = random.Random(seed), compiled.start(), []
        while not token_ids or token_ids[-1] != tokenizer.eos_token_id:
            token_ids.append(rng.choice(ids_of(state.allowed(), len(tokenizer))))
            state.accept(token_ids[-1])
        shown = Detokenizer(tokenizer, shown=special.tags.values())
        parser = ToolCallParser(Hermes(), {"f": {}})
        text, [call] = parser.push(shown.push(token_ids) + shown.flush())
        assert text == ""
        values.add(json.loads(call.arguments)["x"])
    assert values == {"<think>", "</tool_call>", "<|end|>"}


def compiler_of(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=len(tokenizer) + 8, eos_token_ids=(tokenizer.eos_token_id,))


def accepts(state, text: str, tokenizer) -> bool:
    try:
        for token in [*tokenizer(text).input_ids, tokenizer.eos_token_id]:
            state.accept(token)
    except GrammarFailed:
        return False
    return True

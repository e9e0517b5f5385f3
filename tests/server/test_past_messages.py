"""Messages that this server and others have written are taken back as history, and reach the chat template."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from openai.types.chat import ParsedChatCompletionMessage
from tokenizers_for_tests import CHAT_TEMPLATE, TOOL_CHAT_TEMPLATE, byte_level_tokenizer

from omniserve.server.completions.protocol import ChatRequest, parse
from omniserve.server.errors import ApiError
from omniserve.server.fields import IGNORED_FIELDS_HEADER, UnknownFields
from omniserve.server.tokenizing.text import TextCodec

CHAT = "/v1/chat/completions"
TOKENIZER = byte_level_tokenizer()
[ASSISTANT] = TOKENIZER("<|assistant|>").input_ids
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "ö"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "f"}}
REASONING = "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
# How templates write the arguments of a call.
ARGUMENTS = {
    "hermes": "{{ call.function.arguments | tojson }}",
    "qwen3": "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}",
    "qwen3-coder": "{% for k, v in call.function.arguments | items %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}",
    "llama": "{% for k, v in call.function.arguments.items() %}{{ k }}={{ v | tojson }}{% endfor %}",
    "deepseek": "{{ '<' + call.function.arguments + '>' }}",
    "glm": "{% set args = call.function.arguments %}{% for k in args.keys() %}{{ k }}: {{ args[k] }}{% endfor %}",
    "mapping": "{% if call.function.arguments is not mapping %}{{ raise_exception('no mapping') }}{% endif %}"
    "{{ call.function.arguments | tojson }}",
}


def codec_with(arguments: str) -> TextCodec:
    tokenizer = byte_level_tokenizer().__class__(tokenizer_object=TOKENIZER.backend_tokenizer, eos_token="<|end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>" + REASONING + "{{ m.content }}{% for call in m.tool_calls or [] %}"
        "[{{ call.function.name }} " + arguments + "]{% endfor %}<|end|>{% endfor %}"
    )
    return TextCodec(tokenizer)


def written(codec: TextCodec, messages: list[dict]) -> str:
    """Return the chat as the template writes it."""
    request = parse(ChatRequest, json.dumps({"messages": messages}).encode(), UnknownFields(refuse=True))

    async def run() -> str:
        chat = [message.for_template() for message in request.messages]
        return await codec.decode(await codec.encode_chat(chat, options=request.template_options))

    return asyncio.run(run())


def call_of(arguments, **fields):
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments} | fields}


@pytest.mark.parametrize("template", ARGUMENTS)
@pytest.mark.parametrize("text", ['{"a": "x', "[1]", "null", "5", "not json", '{"a": NaN}', '{"a": 1e400}',
                                  '{"a": "\\ud800"}', '{"a": ' + "[" * 300 + "]" * 300 + "}"])  # fmt: skip
def test_arguments_that_are_no_object_are_written_as_the_text_they_are(template, text):
    chat = written(codec_with(ARGUMENTS[template]), [{"role": "assistant", "tool_calls": [call_of(text)]}])
    assert text in chat or json.dumps(text)[1:-1] in chat, chat


@pytest.mark.parametrize("template", ARGUMENTS)
@pytest.mark.parametrize("arguments", ['{"a": "ö", "b": [1, null]}', {"a": "ö", "b": [1, None]}, "", " ", None, "{}"])
def test_arguments_that_are_an_object_are_one_for_the_template(template, arguments):
    chat = written(codec_with(ARGUMENTS[template]), [
        {"role": "assistant", "tool_calls": [call_of(arguments), call_of('{"broken')]}])  # fmt: skip
    empty = {"hermes": "[f {}]", "qwen3": "[f {}]", "mapping": "[f {}]", "deepseek": "[f <{}>]"}.get(template, "[f ]")
    if isinstance(arguments, dict) or "a" in (arguments or ""):
        assert "ö" in chat and ("null" in chat or "None" in chat)
    else:
        assert empty in chat
    assert "broken" in chat


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "a", "reasoning_content": "why"}, "(why)a"),
        ({"content": "a", "reasoning": "why"}, "(why)a"),
        ({"content": "a", "thinking": "why"}, "(why)a"),
        ({"content": [{"type": "thinking", "thinking": "why", "signature": "s"}, {"type": "text", "text": "a"}]},
         "(why)a"),
        ({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "why"}]}, "a"]}, "(why)a"),
        ({"content": [{"type": "reasoning", "reasoning": "why", "id": "r"}, {"type": "output_text", "text": "a",
                                                                            "annotations": []}]}, "(why)a"),
        ({"content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}]}, "a"),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"content": None, "refusal": "no"}, "no"),
        ({"refusal": "no"}, "no"),
        ({"content": None, "reasoning": "why", "reasoning_content": "why"}, "(why)"),
        ({"content": [None, {"type": "text", "text": None, "cache_control": None}]}, ""),
        ({}, ""),
        ({"content": None, "function_call": {"name": "f", "arguments": "{}"}}, "[f {}]"),
        ({"content": None, "tool_calls": [None, call_of("{}") | {"index": 0, "id": None, "type": None}]}, "[f {}]"),
        ({"tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f", "input": "x y"}}]}, '[f "x y"]'),
        ({"content": "a", "tool_calls": None, "function_call": None, "audio": None, "annotations": None, "parsed": None,
          "refusal": None, "name": None, "reasoning_content": None, "tool_call_id": None}, "a"),
        ({"content": "a", "tool_calls": [], "annotations": [{"type": "url_citation"}], "parsed": {"a": 1}, "images": [],
          "provider_specific_fields": {"x": 1}, "thinking_blocks": [{"type": "thinking"}], "reasoning_details": [{}],
          "cache_control": {"type": "ephemeral"}, "id": "m", "name": "n"}, "a"),
    ],
)  # fmt: skip
def test_an_assistants_message_is_taken_in_every_form(message, text):
    assert written(codec_with(ARGUMENTS["hermes"]), [{"role": "assistant"} | message]) == f"<|assistant|>{text}<|end|>"


def test_a_last_message_that_the_template_drops_cannot_go_on():
    codec = codec_with("")
    source = "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}"
    codec._tokenizer.chat_template = source
    codec = TextCodec(codec._tokenizer)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ApiError, match="continue_final_message of this request") as caught:
        asyncio.run(codec.encode_chat(chat, options={"continue_final_message": True}))
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("message", "role"),
    [
        ({"role": "system"}, "<|system|>"),
        ({"role": "developer"}, "<|system|>"),
        ({"role": "user"}, "<|user|>"),
        ({"role": "assistant"}, "<|assistant|>"),
        ({"role": "tool", "tool_call_id": "c"}, "<|tool|>"),
        ({"role": "function", "name": "f"}, "<|tool|>"),
    ],
)
@pytest.mark.parametrize("content", ["a", None, [], ["a"], [{"type": "text", "text": "a", "cache_control": {"x": 1}}]])
def test_every_role_and_form_of_content(message, role, content):
    text = written(codec_with(ARGUMENTS["hermes"]), [message | {"content": content}])
    assert text == f"{role}{'a' if content else ''}<|end|>"


@pytest.fixture(scope="module")
def servers(start_module_server, tmp_path_factory):
    """Servers of a model with tools in its template, and of one without."""
    made = {}
    for name, template in (("tools", TOOL_CHAT_TEMPLATE), ("plain", CHAT_TEMPLATE)):
        folder = tmp_path_factory.mktemp(name)
        TOKENIZER.save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(template)
        made[name] = start_module_server("--tokenizer", str(folder)).wait_until_ready()
    return made


def answer_of(client: openai.OpenAI, how: str, **fields):
    fields |= {"model": "fake", "extra_body": {"ignore_eos": True, "stop_token_ids": [ASSISTANT]}}
    if how == "streamed":
        with client.chat.completions.stream(**fields) as stream:
            return stream.get_final_completion().choices[0].message
    message = client.chat.completions.create(**fields).choices[0].message
    if how == "plain":
        return message
    dumped = message.model_dump()
    for call in dumped["tool_calls"] or ():
        call["function"]["parsed_arguments"] = {"a": "ö"}
    return ParsedChatCompletionMessage.model_validate(dumped | {"parsed": {"a": 1}})


@pytest.mark.parametrize("how", ["plain", "streamed", "parsed"])
@pytest.mark.parametrize("with_tools", [False, True])
def test_an_answer_is_taken_back(servers, how, with_tools):
    server = servers["tools" if with_tools else "plain"]
    tools = {"tools": [TOOL]} if with_tools else {}
    messages = [{"role": "user", "content": CALL if with_tools else "hi"}]
    message = answer_of(server.client(), how, messages=messages, **tools)
    assert bool(message.tool_calls) == with_tools
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "rain", "name": "f"} for call in message.tool_calls or ()
    ]
    with server.http() as http:
        for exclude_none in (False, True):
            chat = [*messages, message.model_dump(exclude_none=exclude_none), *results]
            for more in (tools, {}):  # tools that are not offered any more leave their calls behind
                response = http.post(CHAT, json={"messages": chat, "max_tokens": 1} | more)
                assert response.status_code == 200, response.text
                assert IGNORED_FIELDS_HEADER not in response.headers


def test_a_broken_call_does_not_end_a_chat(servers):
    assistant = {"role": "assistant", "content": None, "tool_calls": [call_of('{"a": "x')], "audio": {"id": "a"}}
    messages = [{"role": "user", "content": "hi"}, assistant, {"role": "tool", "tool_call_id": "c", "content": "?"}]
    for server in servers.values():
        with server.http() as http:
            response = http.post(CHAT, json={"messages": messages, "max_tokens": 1})
            assert response.status_code == 200, response.text
            assert response.headers[IGNORED_FIELDS_HEADER] == "messages.audio", "which the model cannot hear"

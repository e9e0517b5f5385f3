"""Chat templates of all styles: no text vanishes, and whatever one raises is told."""

from __future__ import annotations

import asyncio
import json

import pytest
from tokenizers_for_tests import tokenizer_with

from omniserve.server.errors import ApiError
from omniserve.server.tokenizing import chat_template, text
from omniserve.server.tokenizing.chat_template import ChatTemplate, Form
from omniserve.server.tokenizing.text import TextCodec

USER, SYSTEM = {"role": "user", "content": "hi there"}, {"role": "system", "content": "be kind"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
TOOLS = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "42 is it", "tool_call_id": "call00001"},
]
ASKS = {"add_generation_prompt": True}

_EACH = "{%% for m in messages %%}%s{%% endfor %%}"
_PARTS = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
STRING, PARTS, HIDDEN = Form.STRING, Form.PARTS, Form.HIDDEN
# Name -> source, form of users, system's, assistants' and tools' contents.
STYLES = {
    "string": (_EACH % "{{ m.role }}: {{ m.content }};", STRING, STRING, STRING, STRING),
    "parts": (_EACH % f"{{{{ m.role }}}}: {_PARTS};", PARTS, PARTS, PARTS, PARTS),
    "first part's type": (
        _EACH % ("{% if m.content[0]['type'] == 'image' %}:{% else %}: {% endif %}" + _PARTS),
        PARTS, PARTS, PARTS, PARTS,
    ),
    "only the first part": (_EACH % "{{ m.content[0]['text'] + ';' }}", PARTS, PARTS, PARTS, PARTS),
    "characters apart": (
        _EACH % "{% for p in m.content %}{{ p.text if p is mapping else p }},{% endfor %}", PARTS, PARTS, PARTS, PARTS
    ),
    "both": (
        "{% macro c(x) %}{% if x is string %}{{ x }}{% else %}{% for p in x %}{{ p.text }}{% endfor %}{% endif %}"
        "{% endmacro %}" + _EACH % "{{ c(m.content) }};",
        STRING, STRING, STRING, STRING,
    ),
    "parts of users alone": (
        _EACH % ("{% if m.role == 'user' %}" + _PARTS + "{% else %}{{ m.content | trim }}{% endif %};"),
        PARTS, STRING, STRING, STRING,
    ),
    "JSON": (_EACH % "{{ m.content | tojson }};", STRING, STRING, STRING, STRING),
    "no system": (
        _EACH % "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m.content }};",
        STRING, STRING, STRING, STRING,
    ),
    "parts and no system": (
        _EACH % ("{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + _PARTS),
        PARTS, PARTS, PARTS, PARTS,
    ),
    "a system first": (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + _EACH % _PARTS,
        PARTS, PARTS, PARTS, PARTS,
    ),
    "strict turns": (
        _EACH % "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
        "{{ m.content }};",
        STRING, STRING, STRING, STRING,
    ),
    "tools with tools only": (
        _EACH % "{% if m.role == 'tool' and not tools %}{% else %}{{ m.content }};{% endif %}",
        STRING, STRING, STRING, STRING,
    ),
    "hides the system's": (
        "{% for m in messages if m.role != 'system' %}{{ m.content }};{% endfor %}", STRING, HIDDEN, STRING, STRING
    ),
    "hides all": (_EACH % "{{ m.role }}: {{ m.text }};", HIDDEN, HIDDEN, HIDDEN, HIDDEN),
}  # fmt: skip


async def written(codec: TextCodec, messages, **more) -> str:
    return await codec.decode(await codec.encode_chat(messages, options=ASKS, **more))


def refusal(template, messages, **options) -> ApiError:
    async def refused() -> ApiError:
        codec = TextCodec(tokenizer_with(template))
        await codec.look_at_templates()
        with pytest.raises(ApiError) as caught:
            await codec.encode_chat(messages, options=ASKS | options)
        return caught.value

    return asyncio.run(refused())


@pytest.mark.parametrize("style", STYLES)
def test_the_form_in_which_a_template_reads_contents_is_found(style):
    source, *forms = STYLES[style]
    template = ChatTemplate(tokenizer_with(source), source)
    template.look()
    assert [template.forms[role] for role in ("user", "system", "assistant", "tool")] == forms
    assert (template.problem is not None) == (forms[0] is HIDDEN)


@pytest.mark.parametrize("style", [style for style in STYLES if "hides" not in style and "turns" not in style])
def test_the_text_of_each_message_is_in_the_prompt(style):
    source, *_ = STYLES[style]
    messages = [USER, *TOOLS] if "no system" in style else [SYSTEM, USER, *TOOLS]
    if style == "tools with tools only":
        messages = [SYSTEM, USER]

    async def prompt() -> str:
        codec = TextCodec(tokenizer_with(source))
        await codec.look_at_templates()
        return await written(codec, messages)

    found = asyncio.run(prompt())
    assert all(message["content"] in found for message in messages)
    assert "{'type'" not in found


def test_a_template_that_hides_what_users_say_is_told_at_the_start_and_refused(caplog):
    error = refusal(STYLES["hides all"][0], [USER])
    assert (error.status, error.param, error.code) == (400, "messages", "no_chat_template")
    assert "leaves out what users say" in str(error) and "--chat-template" in str(error)
    assert str(error) in caplog.text


def test_a_message_whose_text_would_vanish_is_refused(caplog):
    source = STYLES["hides the system's"][0]
    error = refusal(source, [SYSTEM, USER])
    assert error.param == "messages" and "role 'system'" in str(error)
    assert "the role 'system'" in caplog.text

    async def without() -> str:
        return await written(TextCodec(tokenizer_with(source)), [SYSTEM | {"content": ""}, USER])

    assert asyncio.run(without()) == "hi there;"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{{ m.content + 1 }}", "fails on the messages: TypeError"),
        ("{{ 1 // 0 }}", "fails on the messages: ZeroDivisionError"),
        ("{{ m.content.index('zzz') }}", "fails on the messages: ValueError"),
        ("{{ m.no.such }}", "refuses the messages: 'dict object' has no attribute 'no'"),
        ("{{ raise_exception('after you') }}", "refuses the messages: after you"),
        ("{% include 'x' %}", "fails on the messages: TypeError: no loader"),
        ("{{ m.content.__class__.mro() }}", "refuses the messages: access to attribute '__class__'"),
    ],
)
def test_whatever_a_template_raises_is_a_refusal_of_the_messages(body, said):
    error = refusal(_EACH % body, [USER])
    assert (error.status, error.param) == (400, "messages")
    assert said in str(error)


def test_what_a_variable_of_the_template_causes_is_not_put_down_to_the_messages():
    template = _EACH % "{{ m.content }}{{ 1 // (depth | default(1)) }}"
    error = refusal(template, [USER], depth=0)
    assert (error.status, error.param) == (400, "chat_template_kwargs")
    assert refusal(_EACH % "{{ m.content + 1 }}", [USER], depth=1).param == "messages"


def test_what_tools_cause_is_put_down_to_them():
    source = _EACH % "{{ m.content }}{% for t in tools or [] %}{{ t.function.parameters.properties.x.y }}{% endfor %}"
    template = ChatTemplate(tokenizer_with(source), source)
    tool = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(ApiError) as caught:
        template.write([USER], tools=[tool], options=ASKS)
    assert caught.value.param == "tools"


def test_a_template_that_is_none_does_not_stop_the_start(caplog):
    error = refusal("{% for m in messages %}", [USER])
    assert error.param == "messages" and "cannot be read: Unexpected end of template" in str(error)
    assert str(error) in caplog.text


_ENDLESS = "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_does_not_end_stops_neither_the_start_nor_what_comes_after(monkeypatch, caplog):
    monkeypatch.setattr(text, "_TEMPLATE_LIMIT_S", 0.5)
    assert "took more than 0.5 s" in str(refusal(_EACH % "{{ m.content }}" + _ENDLESS, [USER]))
    assert "took more than 0.5 s" in caplog.text

    async def after_an_endless_chat() -> str:
        codec = TextCodec(
            tokenizer_with(
                "{% if messages[0].content == 'stop' %}" + _ENDLESS + "{% endif %}" + _EACH % "{{ m.content }}"
            )
        )
        await codec.look_at_templates()
        endless = [codec.encode_chat([USER | {"content": "stop"}], options=ASKS) for _ in range(2)]
        good = written(codec, [USER])
        *errors, prompt = await asyncio.gather(*endless, good, return_exceptions=True)
        assert all(isinstance(error, ApiError) and error.param == "messages" for error in errors)
        return prompt

    assert asyncio.run(after_an_endless_chat()) == "hi there"


def test_a_template_that_writes_without_end_is_stopped(monkeypatch):
    monkeypatch.setattr(chat_template, "_MOST_CHARACTERS", 10_000)
    loop = "{% for i in range(99999) %}{{ m.content }}{% endfor %}"
    error = refusal(
        _EACH % ("{% if m.content == 'more' %}" + loop + "{% endif %}{{ m.content }}"), [USER | {"content": "more"}]
    )
    assert error.param == "messages" and "more than 10000 characters" in str(error)
    macro = "{% macro c(x) %}" + loop.replace("m.content", "x") + "{% endmacro %}"
    error = refusal(
        macro + _EACH % "{% if m.content == 'more' %}{% set y = c(m.content) %}{% endif %}{{ m.content }}",
        [USER | {"content": "more"}],
    )
    assert "more than 10000 characters" in str(error)


NAMED = {
    "short": "{% for m in messages %}S{{ m.content }}{% endfor %}",
    "tool_use": _EACH % "T{{ m.content }}<tool_call>{{ tools }}",
}


def test_templates_by_name_without_a_default_are_told_at_the_start(caplog):
    error = refusal(NAMED, [USER])
    assert (error.status, error.param) == (400, "messages")
    assert "'short', 'tool_use'" in str(error) and "--chat-template" in str(error)
    assert str(error) in caplog.text and "chats without tools are refused" in caplog.text


def test_chats_with_tools_are_written_with_the_template_for_them():
    async def prompts() -> list[str]:
        codec = TextCodec(tokenizer_with(NAMED | {"default": STYLES["parts"][0]}))
        tool = {"type": "function", "function": {"name": "f"}}
        return [await written(codec, [USER]), await written(codec, [USER], tools=[tool])]

    plain, with_tools = asyncio.run(prompts())
    assert plain == "user: hi there;" and with_tools.startswith("Thi there<tool_call>[{")


def test_a_template_may_be_chosen_by_name_or_file(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}F{{ m.content }}{% endfor %}")

    async def prompt(chosen: str) -> str:
        return await written(TextCodec(tokenizer_with(NAMED), chosen), [USER])

    assert asyncio.run(prompt("short")) == "Shi there"
    assert asyncio.run(prompt(str(file))) == "Fhi there"
    with pytest.raises(ValueError, match=r"--chat-template other: .*'short', 'tool_use'"):
        TextCodec(tokenizer_with(NAMED), "other")


@pytest.mark.parametrize(
    ("template", "said"), [(STYLES["hides all"][0], "leaves out"), (NAMED, "none is named 'default'")]
)
def test_a_server_whose_model_takes_no_chats_still_completes(start_server, tmp_path, template, said):
    tokenizer_with(template).save_pretrained(tmp_path)
    server = start_server("--tokenizer", str(tmp_path)).wait_until_ready()
    with server.http() as http:
        chat = http.post("/v1/chat/completions", content=json.dumps({"messages": [USER]}))
        completion = http.post("/v1/completions", content=json.dumps({"prompt": "abc", "max_tokens": 2}))
    assert chat.status_code == 400 and said in chat.json()["error"]["message"]
    assert completion.status_code == 200
    assert any("WARNING" in line and said in line for line in server.log)


def test_a_server_writes_chats_with_the_template_of_its_flag(start_server, tmp_path):
    tokenizer_with(NAMED).save_pretrained(tmp_path)
    server = start_server("--tokenizer", str(tmp_path), "--chat-template", "short").wait_until_ready()
    with server.http() as http:
        tokens = http.post("/tokenize", content=json.dumps({"messages": [USER]})).json()["tokens"]
        assert http.post("/detokenize", content=json.dumps({"tokens": tokens})).json() == {"prompt": "Shi there"}


def test_a_chat_template_that_is_not_there_is_told_at_the_start(start_server, tmp_path):
    server = start_server("--chat-template", str(tmp_path / "none.jinja"))
    assert server.wait() == 1
    assert any("--chat-template" in line and "no file that can be read" in line for line in server.log)

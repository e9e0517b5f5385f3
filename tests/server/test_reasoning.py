"""Reasoning and calls of every dialect in answers over HTTP. The fake engine repeats the prompt."""

from __future__ import annotations

import functools
import json

import openai
import pytest
from dialect_samples import FORMS
from fake_engine import FakeEngine
from tokenizers_for_tests import byte_level_tokenizer

from omniserve.core.request import SLO, FinishReason, Request, RequestOutput, SamplingParams
from omniserve.server.choice import Choice, TextForm, merge
from omniserve.server.dialects import choose
from omniserve.server.dialects.base import Opening
from omniserve.server.tokenizing.text import TextCodec

TOKENIZER = byte_level_tokenizer()
[ASSISTANT] = TOKENIZER("<|assistant|>").input_ids
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if tools %}{% endif %}{% if add_generation_prompt %}<|assistant|>"
)
ENDS = {
    "thinks": "<think>\n{% endif %}",
    "may think": "{% if not enable_thinking | default(true) %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "plain": "{% endif %}",
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}}}}}  # fmt: skip


@pytest.fixture(scope="module")
def client_of(start_module_server, tmp_path_factory):
    """Return clients of servers by the end of the template and flags."""
    clients = {}

    def client_of(end="plain", *flags):
        if (end, flags) not in clients:
            folder = tmp_path_factory.mktemp("template")
            TOKENIZER.save_pretrained(folder)
            (folder / "chat_template.jinja").write_text(TEMPLATE + ENDS[end])
            clients[end, flags] = start_module_server("--tokenizer", str(folder), *flags).wait_until_ready().client()
        return clients[end, flags]

    return client_of


def say(client, text, *, stream=False, **kwargs):
    """Make the fake engine say a text once; return message, finish reason and usage, of a stream put together."""
    extra = {"ignore_eos": True, "stop_token_ids": [ASSISTANT]} | kwargs.pop("extra_body", {})
    if kwargs.get("tool_choice") or extra.get("thinking_token_budget", -1) >= 0:
        del extra["ignore_eos"]  # which is refused with a constraint
    kwargs |= {"model": "fake", "messages": [{"role": "user", "content": text}], "extra_body": extra}
    if not stream:
        answer = client.chat.completions.create(**kwargs)
        [choice] = answer.choices
        message = choice.message.model_dump()
        return message, choice.finish_reason, answer.usage
    message = {"content": "", "tool_calls": []}
    reason = usage = None
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **kwargs):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta.model_dump()
            message["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                if call["id"] is None:  # more of the arguments
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
                else:
                    message["tool_calls"].append(call)
            for name in ("reasoning", "reasoning_content"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            reason = choice.finish_reason or reason
    return message, reason, usage


over_streams = pytest.mark.parametrize("stream", [False, True])


@over_streams
@pytest.mark.parametrize("name", sorted(FORMS))
def test_calls_of_every_dialect_are_in_answers(client_of, name, stream):
    client = client_of("plain", "--tool-call-parser", name)
    for arguments in ({"city": 'Köln "x"'}, {"days": 5}):  # one by one: some forms are long
        message, reason, _ = say(client, FORMS[name].write([("weather", arguments)]), stream=stream, tools=[WEATHER])
        [call] = message["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", arguments)
        assert (message["content"] or "", reason) == ("", "tool_calls")
    text = FORMS[name].write([("wetter", {})])
    message, reason, _ = say(client, text, stream=stream, tools=[WEATHER])
    assert not message["tool_calls"] and "wetter" in message["content"] and reason == "stop"


@over_streams
def test_reasoning_is_apart_from_content(client_of, stream):
    for end, text in (("thinks", "hm < x\n</think>\n\nhello"), ("may think", "<think>\nhm < x\n</think>\n\nhello")):
        message, reason, usage = say(client_of(end), text, stream=stream)
        assert message["reasoning"] == message["reasoning_content"] == "hm < x"
        assert (message["content"], reason) == ("hello", "stop")
        num_thought = len(TOKENIZER(f"<|user|>{text}"[: -len("\n\nhello")]).input_ids)
        assert abs(usage.completion_tokens_details.reasoning_tokens - num_thought) <= 1 + (end != "thinks") * 8
    message, reason, usage = say(client_of("thinks"), "cut ", stream=stream)
    assert (message["reasoning"], message["content"] or "") == ("cut", "")
    assert usage.completion_tokens_details.reasoning_tokens == usage.completion_tokens - 1


@over_streams
def test_an_answer_without_reasoning_is_as_ever(client_of, stream):
    for client in (client_of("may think"), client_of("plain")):
        message, reason, usage = say(client, "hello", stream=stream)
        assert (message["content"], reason, usage.completion_tokens_details) == ("hello", "stop", None)
        assert "reasoning" not in message and "reasoning_content" not in message
    message, _, _ = say(client_of("thinks", "--reasoning-parser", "none"), "hm</think>hello", stream=stream)
    assert message["content"] == "hm</think>hello"


@over_streams
def test_calls_come_behind_reasoning(client_of, stream):
    client = client_of("thinks", "--tool-call-parser", "qwen3_coder")
    call = FORMS["qwen3_coder"].write([("weather", {"city": "a", "days": 1})])
    message, reason, _ = say(client, f"<tool_call> or not\n</think>\n{call}", stream=stream, tools=[WEATHER])
    assert (message["reasoning"], reason, len(message["tool_calls"])) == ("<tool_call> or not", "tool_calls", 1)
    message, reason, _ = say(
        client, f"a</think>{call}{call}", stream=stream, tools=[WEATHER], parallel_tool_calls=False
    )
    assert (message["reasoning"], reason, len(message["tool_calls"])) == ("a", "tool_calls", 1)


def test_stream_helper_of_the_client_puts_reasoning_together(client_of):
    client = client_of("thinks", "--tool-call-parser", "qwen3_coder")
    call = FORMS["qwen3_coder"].write([("weather", {"city": "a", "days": 1})])
    extra = {"ignore_eos": True, "stop_token_ids": [ASSISTANT]}
    messages = [{"role": "user", "content": f"I look.</think>Wait.\n{call}"}]
    with client.chat.completions.stream(model="fake", messages=messages, tools=[WEATHER], extra_body=extra) as stream:
        message = stream.get_final_completion().choices[0].message
    assert (message.reasoning, message.reasoning_content, message.content) == ("I look.", "I look.", "Wait.")
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "a", "days": 1}


@over_streams
def test_channels_of_gpt_oss(client_of, stream):
    client = client_of("plain", "--reasoning-parser", "openai_gptoss")
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hello"
    message, reason, usage = say(client, text, stream=stream)
    assert (message["reasoning"], message["content"], reason) == ("hm", "hello", "stop")
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


@over_streams
def test_reasoning_can_be_left_out(client_of, stream):
    message, _, usage = say(
        client_of("thinks"), "hm</think>hello", stream=stream, extra_body={"include_reasoning": False}
    )
    assert message["content"] == "hello" and "reasoning" not in message
    assert usage.completion_tokens_details.reasoning_tokens > 0


def test_logprobs_of_reasoning_are_told(client_of):
    client = client_of("thinks")
    message = [{"role": "user", "content": "hm</think>hello"}]
    extra = {"ignore_eos": True, "stop_token_ids": [ASSISTANT]}
    given = {"model": "fake", "messages": message, "logprobs": True, "extra_body": extra}
    whole = client.chat.completions.create(**given)
    num = len(whole.choices[0].logprobs.content)
    assert num == whole.usage.completion_tokens - 1
    chunks = [c for c in client.chat.completions.create(stream=True, **given) if c.choices]
    assert sum(len(c.choices[0].logprobs.content) for c in chunks if c.choices[0].logprobs) == num


def test_reasoning_goes_back_to_the_template(client_of):
    client = client_of("plain")
    asked = {"role": "user", "content": "hi"}

    def length(**fields):
        messages = [asked, {"role": "assistant", "content": "a"} | fields, asked]
        return client.chat.completions.create(model="fake", messages=messages, max_tokens=1).usage.prompt_tokens

    expected = length() + len(TOKENIZER("(why)").input_ids)
    assert length(reasoning="why") == length(reasoning_content="why") == expected


def test_template_is_told_not_to_think(client_of):
    client = client_of("may think")
    usual = say(client, "hello")[2].prompt_tokens
    closed = len(TOKENIZER("<think>\n\n</think>\n\n").input_ids)
    for extra in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        _, _, usage = say(client, "hello", extra_body=extra)
        assert usage.prompt_tokens == usual + closed


def test_a_budget_is_refused_where_thinking_is_not_marked(client_of):
    with pytest.raises(openai.BadRequestError, match="--reasoning-parser") as error:
        say(client_of("plain"), "a", extra_body={"thinking_token_budget": 5})
    assert error.value.param == "thinking_token_budget"
    for budget in (5, 0, -1):
        say(client_of("thinks"), "a", extra_body={"thinking_token_budget": budget})
    with pytest.raises(openai.BadRequestError, match="thinking_token_budget"):
        say(client_of("thinks"), "a", extra_body={"thinking_token_budget": -2})


def test_chats_have_the_thinking_budget_of_their_class_unless_they_bring_one(client_of, monkeypatch):
    grammars = []
    add = FakeEngine.add

    def record(engine, request, **more):
        grammars.append(request.sampling.grammar)
        return add(engine, request, **more)

    monkeypatch.setattr(FakeEngine, "add", record)
    client = client_of("thinks", *"--class LS:LS:1:0.1:thinking=7 --class free:LS --class BE:BE:thinking=0".split())

    def grammar(tier, **extra):
        client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}], service_tier=tier, max_tokens=3,
            extra_body=extra,
        )  # fmt: skip
        return grammars.pop() or ""

    assert "max_tokens=7]" in grammar("LS") and "max_tokens=5]" in grammar("LS", thinking_token_budget=5)
    assert grammar("LS", thinking_token_budget=-1) == grammar("free") == grammar("LS", ignore_eos=True) == ""
    assert 'thought: "</think>"' in grammar("flex") and "max_tokens=5]" in grammar("free", thinking_token_budget=5)
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
    assert "max_tokens=7]" in grammar("LS", response_format=schema)
    client.completions.create(model="fake", prompt="hi", max_tokens=3)
    assert grammars.pop() is None


def test_a_budget_of_a_class_is_refused_at_the_start_where_thinking_is_not_marked(start_server):
    server = start_server("--class", "LS:LS:thinking=7", "--class", "BE:BE")
    server.wait()
    assert "--class LS has a thinking budget" in "".join(server.log) and "--reasoning-parser" in "".join(server.log)


def test_schema_of_a_tool_that_the_dialect_cannot_keep_is_refused(client_of):
    parameters = {"type": "object", "properties": {"a": {"type": "string", "format": "uri"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(openai.BadRequestError, match=r"of the tool 'f'.*properties\.a.*write a pattern"):
        say(client_of("plain", "--tool-call-parser", "qwen3_coder"), "a", tools=[tool], tool_choice="required")


def test_a_server_does_not_start_with_an_unknown_parser(start_server):
    for flags, message in (
        (("--tool-call-parser", "herms"), "unknown tool-call parser 'herms'; known: apertus"),
        (("--reasoning-parser", "x"), "unknown reasoning parser 'x'"),
        (("--tool-call-parser", "openai", "--reasoning-parser", "qwen3"), "do not go together"),
    ):
        server = start_server(*flags)
        server.wait()
        assert message in "".join(server.log)


@pytest.mark.parametrize("name", ["qwen3", "openai_gptoss"])
@pytest.mark.parametrize("stop", [(), ("END",)])
def test_steps_of_any_size_and_whole_answers_say_the_same(name, stop):
    """Drafts bring several tokens a step; an answer that is not streamed is read in large parts."""
    lead = "hm < x\n</think>\n\n"
    if name == "openai_gptoss":
        lead = "<|channel|>analysis<|message|>hm < x<|call|><|start|>assistant<|channel|>final<|message|>"
    call = FORMS["hermes"].write([("weather", {"city": "Köln"})]) if name == "qwen3" else ""
    token_ids = TOKENIZER(f"{lead}hello END bye {call}").input_ids
    codec, dialect = TextCodec(TOKENIZER), choose("", thinking=name, calls="hermes" if name == "qwen3" else "auto")
    opening = Opening("<think>" if name == "qwen3" else "")
    results = set()
    for size in (1, 2, 3, 7, 100, len(token_ids)):
        for at_once in (False, True):
            parser = functools.partial(dialect.parser, {"weather": {}}, opening=opening)
            form = TextForm(stop=stop, at_once=at_once, parser=parser)
            request = Request(request_id="r", prompt_token_ids=[5], sampling=SamplingParams(max_tokens=1000))
            choice = Choice(0, request, codec, slo=SLO(), arrival_s=0.0, form=form, echo=None)
            deltas = []
            for at in range(0, len(token_ids), size):
                if choice.finish_reason is None:
                    reason = FinishReason.LENGTH if at + size >= len(token_ids) else None
                    output = RequestOutput(
                        request_id="r", service_class="LS", new_token_ids=tuple(token_ids[at : at + size]),
                        finish_reason=reason,
                    )  # fmt: skip
                    deltas.append(choice.advance(output))
            whole = merge([delta for delta in deltas if delta is not None])
            calls = tuple((each.name, each.arguments) for each in whole.tool_calls)
            results.add((whole.reasoning, whole.text, calls, whole.finish_reason, choice.num_reasoning_tokens,
                         choice.times.num_tokens))  # fmt: skip
    [(reasoning, text, calls, _, num_reasoning, num_tokens)] = results
    assert (reasoning, text) == ("hm < x", "hello " if stop else "hello END bye" + " " * (not call))
    assert len(calls) == (bool(call) and not stop)
    thought = "hm < x\n</think>" if name == "qwen3" else "hm < x<|call|>"
    assert abs(num_reasoning - len(TOKENIZER(thought).input_ids)) <= 2
    assert num_tokens <= len(token_ids)

"""The whole way with a real engine: a tiny random Llama behind HTTP says what transformers says.

The servers are in this process; test_disk_kv.py and test_attack_real.py have some of their own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import jsonschema
import openai
import pytest
import torch
from in_process import InProcessServer
from otlp_receiver import receiving
from tokenizers_for_tests import byte_level_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from omniserve.latency import explain
from omniserve.server.cli import parse_args
from tests.latency.samples import make_profile

TOKENIZER = byte_level_tokenizer()
PROMPTS = ["The quick brown fox", "A list is a mutable sequence", "日本語", "x"]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=TOKENIZER.eos_token_id,
        initializer_range=0.5,  # so that the output is no endless repetition of one token
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def flags_of(model_folder, *more):
    """Return the flags of a server of the tiny model."""
    flags = "--port 0 --device cpu --execution compile=false --served-model-name tiny --device-kv-gib 0.001"
    flags += " --host-kv-gib 0.01 --block-size 16 --device-threads 1 --host-threads 1"
    flags += " --limit profile_time_limit_s=2"
    return ["--model", str(model_folder), *flags.split(), *more]


def folders_of(cache_folder):
    return {"XDG_CACHE_HOME": str(cache_folder), "XDG_DATA_HOME": str(cache_folder / "data")}


@pytest.fixture(scope="module")
def start(logged, model_folder):
    """Start servers with a real engine in this process; what still runs at the end is ended."""
    started = []

    def start(cache_folder, *more):
        started.append(InProcessServer(*parse_args(flags_of(model_folder, *more)), **folders_of(cache_folder)))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def server(start, cache_folder):
    flags = ("--dtype", "float32", "--trace-steps", str(cache_folder / "steps"))
    # No load of these tests is to be too much for a slow machine.
    server = start(cache_folder, *flags, "--ls-ttft-slo", "1000", "--ls-tpot-slo", "1000")
    yield server.wait_until_ready()
    assert server.stop() == 0, "".join(server.log)


@pytest.fixture(scope="module")
def expected(model_folder):
    """Greedy tokens of transformers; float32, so they are the same tokens exactly."""
    model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    texts = {}
    for prompt in PROMPTS:
        ids = TOKENIZER(prompt, return_tensors="pt").input_ids
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
        )
        texts[prompt] = TOKENIZER.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return texts


@pytest.mark.parametrize("tier", ["priority", "flex"])
def test_greedy_text_equals_transformers(server, expected, tier):
    client = server.client()

    def streamed(prompt):
        chunks = client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=NUM_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"service_tier": tier},
        )
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert dict(zip(PROMPTS, pool.map(streamed, PROMPTS), strict=True)) == expected
    answer = client.completions.create(model="tiny", prompt=PROMPTS, max_tokens=NUM_TOKENS, temperature=0, logprobs=2)
    assert [choice.text for choice in answer.choices] == list(expected.values())
    for choice in answer.choices:
        for token, logprob, top in zip(
            choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
        ):
            assert logprob == top[token] == max(top.values()), "greedy takes the likeliest"


def test_prompts_are_scored_as_transformers_scores_them(server, model_folder):
    """The requests that evaluations send, as best-effort work."""
    model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    prompts = [TOKENIZER(prompt * 3).input_ids for prompt in PROMPTS]
    answer = server.client().completions.create(
        model="tiny", prompt=prompts, max_tokens=1, temperature=0, echo=True, logprobs=1, seed=1234,
        extra_headers={"x-omniserve-service-tier": "flex"},
    )  # fmt: skip
    assert answer.service_tier == "flex"
    for ids, choice in zip(prompts, answer.choices, strict=True):
        with torch.inference_mode():
            logprobs_TV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        first, *rest, _ = choice.logprobs.token_logprobs
        assert first is None and choice.logprobs.top_logprobs[0] is None
        want = logprobs_TV[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert rest == pytest.approx(want.tolist(), abs=1e-4)
        best = logprobs_TV[:-1].max(dim=-1).values
        tops = [max(top.values()) for top in choice.logprobs.top_logprobs[1:-1]]
        assert tops == pytest.approx(best.tolist(), abs=1e-4)


@pytest.mark.parametrize("tier", ["priority", "flex"])
def test_answers_keep_a_schema(server, tier):
    schema = {
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "blau"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        },
        "required": ["colour", "count", "tags"],
        "additionalProperties": False,
    }
    answer = server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], n=4, seed=1, service_tier=tier,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
    )  # fmt: skip
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        value = json.loads(choice.message.content)
        assert list(value) == ["colour", "count", "tags"]
        assert value["colour"] in ("red", "blau") and 0 <= value["count"] <= 99 and len(value["tags"]) <= 2
    with pytest.raises(openai.BadRequestError, match="at its root: not cannot be enforced"):
        bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
        server.client().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], response_format=bad
        )  # fmt: skip


def test_seeds_repeat_and_choices_differ(server):
    client = server.client()

    def texts(seed):
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=16, n=3, seed=seed
        )
        return [choice.message.content for choice in answer.choices]

    assert texts(7) == texts(7)
    assert len(set(texts(7))) == 3
    assert texts(8)[0] == texts(7)[1], "choice i has the seed plus i"


def test_aborts_leave_the_engine_empty(server):
    async def leave():
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        streams = [
            await client.completions.create(
                model="tiny",
                prompt="x",
                max_tokens=200,
                stream=True,
                extra_body={"service_tier": tier, "ignore_eos": True},
            )
            for tier in ("default", "flex")
        ]
        for stream in streams:
            await anext(aiter(stream))
            await stream.close()

    asyncio.run(leave())
    for service_class in ("LS", "BE"):
        server.wait_for_metric(f'omniserve_requests_running{{service_class="{service_class}"}}', 0)
    server.wait_for_metric('omniserve_kv_blocks_used{tier="device"}', 0)
    server.wait_for_metric('omniserve_kv_blocks_used{tier="host"}', 0)


def test_too_long_for_the_pool_says_so(server):
    with pytest.raises(openai.BadRequestError, match="set max_tokens to at most"):
        server.client().completions.create(model="tiny", prompt="x", max_tokens=256)


def test_time_to_first_token_is_predicted(server):
    response = server.client().completions.with_raw_response.create(model="tiny", prompt="x", max_tokens=4)
    assert float(response.headers["x-omniserve-predicted-ttft-ms"]) > 0
    assert server.metric('omniserve_ttft_prediction_error_seconds_count{service_class="LS"}') >= 1
    assert server.metric("omniserve_latency_error") > 0


def test_objective_that_cannot_be_met_is_rejected(server):
    with pytest.raises(openai.RateLimitError, match="first token") as caught:
        server.client().completions.create(model="tiny", prompt=["x", "y"], extra_body={"slo": {"ttft_s": 1e-6}})
    error = caught.value.response.json()["error"]
    assert error["predicted_ttft_ms"] > error["required_ttft_ms"] == 0.001
    headers = caught.value.response.headers
    assert "retry-after" not in headers and headers["x-should-retry"] == "false", "it is refused for its size"


def test_trace_is_explained(server, cache_folder, capsys):
    """The engine goes on writing the trace meanwhile."""
    for tier in ("default", "flex"):
        server.client().completions.create(
            model="tiny", prompt="x", max_tokens=8, extra_body={"service_tier": tier, "slo": {"tpot_s": 1e-9}}
        )
    capsys.readouterr()
    assert explain.main([str(cache_folder / "steps")]) == 0
    told = capsys.readouterr().out
    for line in ("predicted: accuracy", "  LS     tpot", "  BE     tpot", "Missed objectives by main cause\n  class"):
        assert line in told, told


@pytest.mark.slow
def test_stays_on_the_host_tier_are_in_the_trace(start, cache_folder):
    """Requests that outgrow the device's memory leave it, decode on the host tier, and may come back."""
    flags = "--dtype float32 --profile none --device-kv-gib 0.0002 "
    flags += "--scheduler-option swap_in_delay_s=0 --scheduler-option min_residence_s=0"
    with receiving() as receiver:
        server = start(cache_folder, *flags.split(), "--otlp-endpoint", receiver.url).wait_until_ready()
        answer = server.client().completions.create(
            model="tiny", prompt="x", max_tokens=200, n=4, extra_headers={"x-request-id": "away"},
            extra_body={"service_tier": "flex", "ignore_eos": True},
        )  # fmt: skip
        assert answer.usage.completion_tokens == 800
        num_host_tokens = server.metric("omniserve_host_output_tokens_total")
        assert server.metric("omniserve_host_kv_read_bytes_total") > 0
        assert server.metric("omniserve_host_busy_seconds_total") > 0
        assert server.stop() == 0, "".join(server.log)
    root = receiver.root("away")
    assert root.attributes["gen_ai.usage.output_tokens"] == 800
    assert root.attributes["omniserve.host_tokens"] == num_host_tokens > 0
    by_choice = {i: [s for s in receiver.below(root) if s.attributes["omniserve.choice"] == i] for i in range(4)}
    stays = 0
    for spans in by_choice.values():
        (decode,) = [span for span in spans if span.name == "decode"]
        away = [span for span in spans if span.name == "away on host"]
        assert root.encloses(decode) and all(decode.encloses(stay) for stay in away)
        stays += len(away)
    assert stays > 0


@pytest.mark.slow
def test_profile_of_something_else_ends_the_start(start, cache_folder, tmp_path):
    path = tmp_path / "profile.json"
    make_profile().write(path)
    other = start(cache_folder, "--dtype", "float32", "--profile", str(path))
    assert other.wait() == 1
    log = "".join(other.log)
    assert "cannot start: " in log and "made for something else" in log and "float32" in log
    assert "Traceback" not in log


def test_page_shows_what_the_engine_does(server, open_page, monkeypatch):
    monkeypatch.setattr("omniserve.server.dashboard.history.INTERVAL_S", 0.25)
    page = open_page(server.url)
    page.get_by_text("Live", exact=True).wait_for()
    for service_class in ("LS", "BE"):
        page.select_option("#prompt-class", service_class)
        page.select_option("#prompt-api", "completion")
        page.fill("#prompt", PROMPTS[1])
        page.fill("#prompt-tokens", "100")
        page.click("#prompt-send")
        page.locator("#prompt-result", has_text=f"{service_class}: TTFT").wait_for()
        assert "TPOT" in page.inner_text("#prompt-result")
    figures = "title => [...document.querySelectorAll('figure')].find((f) => f.innerText.includes(title)).innerText"
    for title, text in (("LS time per output token", "p99"), ("SLO attainment", "100 %"), ("BE output", "device")):
        page.wait_for_function(f"([title, text]) => ({figures})(title).includes(text)", arg=[title, text])
    assert not page.locator("figure", has_text="LS time per output token").locator(".nothing").is_visible()


THINKING_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if tools %}{% endif %}<|assistant|>"
    "{% if enable_thinking | default(true) %}<think>\n{% else %}<think></think>{% endif %}"
)


@pytest.mark.parametrize("parser", ["qwen3_coder", "kimi_k2", "mistral"])
def test_a_random_model_thinks_within_its_budget_and_keeps_schemas_behind_it(start, cache_folder, tmp_path, parser):
    """What it thinks is anything, and would have no end."""
    (tmp_path / "template.jinja").write_text(THINKING_TEMPLATE)
    flags = "--dtype float32 --profile none --ls-ttft-slo 1000 --ls-tpot-slo 1000".split()
    flags += ["--chat-template", str(tmp_path / "template.jinja"), "--tool-call-parser", parser]
    server = start(cache_folder, *flags).wait_until_ready()
    client = server.client()
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0},
                                               "s": {"enum": ["a b", "é"]}},
              "required": ["n", "s"], "additionalProperties": False}  # fmt: skip
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    constraints = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ]
    end = len(TOKENIZER("</think>").input_ids)
    for constraint in constraints:
        for extra in ({"thinking_token_budget": 12}, {"chat_template_kwargs": {"enable_thinking": False}}):
            answer = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=200, extra_body=extra,
                **constraint,
            )  # fmt: skip
            [choice] = answer.choices
            message = choice.message.model_dump()
            if "tools" in constraint:
                [call] = message["tool_calls"]
                value = call["function"]["arguments"]
                assert choice.finish_reason == "tool_calls" and not message["content"]
            else:
                value = message["content"]
            jsonschema.validate(json.loads(value), schema)
            details = answer.usage.completion_tokens_details
            if "thinking_token_budget" not in extra:
                assert details is None and "reasoning" not in message
            else:
                assert 0 < details.reasoning_tokens <= 12 + end and message["reasoning"]
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=60,
        extra_body={"thinking_token_budget": 3},
    )  # fmt: skip
    assert answer.usage.completion_tokens_details.reasoning_tokens <= 3 + len("</think>")
    assert answer.choices[0].message.content
    assert server.stop() == 0


@pytest.mark.slow
def test_three_keys_with_unequal_floods_share_a_minute_by_weight(start, tmp_path):
    weights = {"a": 1.0, "b": 1.0, "c": 2.0}
    floods = {"a": (20, 60, 10), "b": (40, 20, 40), "c": (60, 40, 20)}  # requests at a time, prompt, output
    file = tmp_path / "keys.json"
    file.write_text(json.dumps([{"name": key, "key": key, "weight": weight} for key, weight in weights.items()]))
    server = start(tmp_path, "--api-key-file", str(file), "--max-num-seqs", "8").wait_until_ready()

    async def flood(key: str, size: int, prompt: int, output: int) -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=600) as client:
            fields = {"service_tier": "flex", "ignore_eos": True}

            async def send(number: int) -> None:
                for turn in itertools.count():
                    tokens = [(number + turn) % 250, *range(1, prompt)]
                    await client.completions.create(model="tiny", prompt=tokens, max_tokens=output, extra_body=fields)

            await asyncio.gather(*map(send, range(size)))

    def served() -> dict[str, float]:
        costs = dict.fromkeys(weights, 0.0)
        for line in httpx.get(f"{server.url}/metrics").text.splitlines():
            if match := re.match(r'omniserve_tenant_(prompt|output)_tokens_total\{.*"BE".*tenant="(.)"\} (.*)', line):
                costs[match[2]] += float(match[3]) * (2 if match[1] == "output" else 1)
        return costs

    async def shares() -> dict[str, float]:
        floods_under_way = [asyncio.create_task(flood(key, *size)) for key, size in floods.items()]
        await asyncio.sleep(10)
        before = await asyncio.to_thread(served)
        await asyncio.sleep(60)
        after = await asyncio.to_thread(served)
        for each in floods_under_way:
            each.cancel()
        await asyncio.gather(*floods_under_way, return_exceptions=True)
        return {key: after[key] - before[key] for key in weights}

    found = asyncio.run(shares())
    total = sum(found.values())
    assert total > 1000
    assert {key: 4 * cost / total for key, cost in found.items()} == pytest.approx(weights, rel=0.05)

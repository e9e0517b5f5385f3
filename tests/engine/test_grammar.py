"""Outputs that keep a grammar: valid for random schemas and a random model, whatever happens to a request meanwhile."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, normalizers

from omniserve import Engine, FinishReason, Request, SamplingParams, json_grammar, patch
from omniserve.sampling.grammar import GrammarCompiler, GrammarFailed
from omniserve.sampling.sampler import Sampler
from omniserve.server.dialects import choose
from omniserve.server.dialects.base import Opening
from omniserve.server.dialects.grammar_text import SpecialTokens
from tests.engine_settings import flat_config
from tests.parity.engine_histories import poison
from tests.parity.models import tiny_model
from tests.server.tokenizers_for_tests import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
END = TOKENIZER.eos_token_id
VOCAB = len(TOKENIZER) + 8  # padded, as models' often are
BLOCK = 8

# A schema, and what a value of it is made of, so that no JSON Schema validator is needed.
Check = Callable[[Any], bool]


def random_schema(rng: random.Random, depth: int = 2) -> tuple[dict[str, Any], Check]:
    """Return a schema whose values are short, so that every output comes to its end, and what tells its values."""
    kinds = ["integer", "enum", "string", "boolean", "null", *(["object", "array"] * 2 if depth else [])]
    match rng.choice(kinds):
        case "integer":
            low, high = sorted(rng.sample(range(-50, 200), 2))
            is_int: Check = lambda v: type(v) is int and low <= v <= high  # noqa: E731
            return {"type": "integer", "minimum": low, "maximum": high}, is_int
        case "enum":
            values = rng.sample(["red", "blau", 7, None, True, "a b"], 3)
            return {"enum": values}, lambda v: any(v == w and type(v) is type(w) for w in values)
        case "string":
            most = rng.randint(1, 6)
            return {"type": "string", "maxLength": most}, lambda v: isinstance(v, str) and len(v) <= most
        case "boolean":
            return {"type": "boolean"}, lambda v: isinstance(v, bool)
        case "null":
            return {"type": "null"}, lambda v: v is None
        case "array":
            item, checks_item = random_schema(rng, depth - 1)
            most = rng.randint(1, 3)
            schema = {"type": "array", "items": item, "maxItems": most}
            return schema, lambda v: isinstance(v, list) and len(v) <= most and all(map(checks_item, v))
        case _:
            names = rng.sample(["a", "city", "größe", "x y"], rng.randint(1, 3))
            parts = {name: random_schema(rng, depth - 1) for name in names}
            schema = {
                "type": "object",
                "properties": {name: part for name, (part, _) in parts.items()},
                "required": names,
                "additionalProperties": False,
            }
            return (
                schema,
                lambda v: isinstance(v, dict) and set(v) == set(names) and all(parts[n][1](v[n]) for n in names),
            )


@pytest.fixture(scope="module")
def model():
    made = tiny_model("llama", vocab_size=VOCAB, eos_token_id=END)
    made.generation_config.eos_token_id = END
    return patch(made, compile=False)


@pytest.fixture
def make_engine(model):
    engines: list[Engine] = []

    def make(*, device_blocks: int = 64, host_blocks: int = 64, tokenizer=TOKENIZER, **settings: Any) -> Engine:
        block_bytes = model.omniserve.spec.kv_block_bytes(BLOCK)
        sizes = {"device_kv_bytes": device_blocks * block_bytes, "host_kv_bytes": host_blocks * block_bytes}
        config = flat_config({"block_size": BLOCK, "compile": False, **sizes, **settings})
        engines.append(Engine(model, config, tokenizer=tokenizer))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def constrained(grammar: str, *, prompt: int = 5, max_tokens: int = 300, **fields: Any) -> Request:
    sampling = SamplingParams(
        grammar=grammar, max_tokens=max_tokens, temperature=fields.pop("temperature", 1.0), seed=0
    )
    return Request(prompt_token_ids=list(range(1, prompt + 1)), sampling=sampling, **fields)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_are_values_of_their_schemas(make_engine, temperature: float) -> None:
    rng = random.Random(0)
    drawn = [random_schema(rng) for _ in range(24)]
    engine = make_engine(device_blocks=2000)
    done = engine.generate([constrained(json_grammar(schema), temperature=temperature) for schema, _ in drawn])
    for (schema, is_value), completion in zip(drawn, done, strict=True):
        assert completion.finish_reason == FinishReason.STOP, (schema, completion.text)
        assert is_value(json.loads(completion.text)), (schema, completion.text)
        assert completion.token_ids[-1] == END


@pytest.mark.parametrize(("scheduler", "temperature"), [("omniserve", 1.0), ("sarathi", 0.0)])
def test_drafts_change_nothing_of_an_output(make_engine, scheduler: str, temperature: float) -> None:
    """Drafts that are right for a while, that the grammar forbids, and that go on behind its end; on both tiers."""
    rng = random.Random(2)
    drawn = [random_schema(rng, depth=2) for _ in range(16)]
    requests = [
        constrained(
            json_grammar(schema), prompt=rng.randint(1, 30), temperature=temperature,
            service_class=rng.choice(["LS", "BE", "BE"]),
        )
        for schema, _ in drawn
    ]  # fmt: skip
    alone = make_engine(device_blocks=2000).generate(requests)
    drafting = [
        replace(
            request, predicted_token_ids=[t if rng.random() < 0.9 else rng.randrange(VOCAB) for t in (*done, *done)]
        )
        for request, done in zip(requests, (completion.token_ids for completion in alone), strict=True)
    ]
    longest = max(len(r.prompt_token_ids) + len(c.token_ids) + 1 for r, c in zip(requests, alone, strict=True))
    drafting = [
        replace(r, sampling=replace(r.sampling, max_tokens=len(c.token_ids) + 1))
        for r, c in zip(drafting, alone, strict=True)
    ]
    engine = make_engine(device_blocks=-(-longest // BLOCK) + 6, host_blocks=200, scheduler=scheduler)
    done = engine.generate(drafting)
    assert [c.token_ids for c in done] == [c.token_ids for c in alone]
    assert [c.finish_reason for c in done] == [c.finish_reason for c in alone]
    stats = engine.stats()
    assert stats.scheduler.accepted_drafts > 0 and stats.scheduler.rejected_drafts > 0
    assert (stats.scheduler.host_output_tokens > 0) == (scheduler == "omniserve")


@pytest.mark.parametrize("scheduler", ["omniserve", "sarathi", "neo"])
def test_what_happens_to_a_request_changes_nothing_of_its_output(make_engine, scheduler: str) -> None:
    """The request runs on the device alone, and then with little memory: host rows, moves, preemption and
    recomputation."""
    rng = random.Random(1)
    drawn = [random_schema(rng, depth=3) for _ in range(16)]
    requests = [
        constrained(json_grammar(schema), prompt=rng.randint(1, 30), service_class=rng.choice(["LS", "BE", "BE"]))
        for schema, _ in drawn
    ]
    # Seeded: each output depends on the model, the seed and the grammar alone.
    alone = make_engine(device_blocks=2000).generate(requests)
    # No more than each needs, so that the pool can be small: the longest alone, and a little.
    ends = [len(completion.token_ids) + 1 for completion in alone]
    requests = [
        replace(request, sampling=replace(request.sampling, max_tokens=end))
        for request, end in zip(requests, ends, strict=True)
    ]
    longest = max(len(request.prompt_token_ids) + end for request, end in zip(requests, ends, strict=True))
    engine = make_engine(
        device_blocks=-(-longest // BLOCK) + 3, host_blocks=200, max_num_batched_tokens=24, scheduler=scheduler
    )
    which = {engine.add(request): i for i, request in enumerate(requests)}
    got: dict[int, list[int]] = {i: [] for i in range(len(requests))}
    while engine.has_unfinished:
        poison(engine)
        for output in engine.step():
            got[which[output.request_id]] += output.new_token_ids
        if engine.last_plan_was_empty:
            engine.wait(0.01)
    stats = engine.stats()
    assert stats.scheduler.preemptions + stats.scheduler.swaps_out > 0, "memory was never short"
    for i, ((_, is_value), completion) in enumerate(zip(drawn, alone, strict=True)):
        text = TOKENIZER.decode(got[i], skip_special_tokens=True)
        assert is_value(json.loads(text)), text
        assert tuple(got[i]) == completion.token_ids


def test_any_object_is_valid_json(make_engine) -> None:
    engine = make_engine(device_blocks=4000)
    ends = {"max_tokens": 400}
    done = engine.generate([constrained(json_grammar({"type": "object"}), prompt=n, **ends) for n in range(1, 9)])
    ended = [completion for completion in done if completion.finish_reason is FinishReason.STOP]
    assert ended, "a random model ends an object now and then"
    assert all(isinstance(json.loads(completion.text), dict) for completion in ended)


@pytest.mark.parametrize("several", [False, True])
def test_calls_that_must_be_made_are_made(make_engine, several: bool) -> None:
    schema, is_value = {"type": "object"}, None
    rng = random.Random(3)
    while schema["type"] != "object" or is_value is None:
        schema, is_value = random_schema(rng)
        schema.setdefault("type", "any")
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    dialect, tools = choose("", calls="hermes"), {"f": schema, "g": nothing}
    grammar = dialect.calls_grammar(tools, free_text=False, several=several, special=SpecialTokens(), opening=Opening())
    done = make_engine(device_blocks=2000).generate([constrained(grammar, prompt=n) for n in range(1, 9)])
    names = set()
    for completion in done:
        assert completion.finish_reason == FinishReason.STOP or several, "a random model may call on and on"
        _, text, calls = dialect.parser(tools, opening=Opening()).push(completion.text)
        assert text.strip() == "" and calls and (several or len(calls) == 1)
        for call in calls:
            names.add(call.name)
            arguments = json.loads(call.arguments)
            assert is_value(arguments) if call.name == "f" else arguments == {}
    assert names == {"f", "g"}


def test_grammar_needs_what_it_needs(make_engine, model) -> None:
    with pytest.raises(ValueError, match="needs a tokenizer"):
        make_engine(tokenizer=None).add(constrained(json_grammar({})))
    engine = make_engine()
    with pytest.raises(ValueError, match="not supported") as caught:
        engine.add(constrained(json_grammar({"type": "string", "pattern": "^(?=a)b"})))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="not supported"):
        engine.add(constrained("start: ("))
    assert not engine.has_unfinished
    with pytest.raises(ValueError, match="contradict"):
        SamplingParams(grammar="start: /a/", ignore_eos=True)
    with pytest.raises(ValueError, match="end-of-sequence"):
        GrammarCompiler(TOKENIZER, vocab_size=VOCAB, eos_token_ids=()).prepare()
    with pytest.raises(ValueError, match="fast tokenizer"):
        GrammarCompiler(object(), vocab_size=VOCAB, eos_token_ids=(END,)).prepare()


def test_model_whose_tokenizer_cannot_have_grammars_is_told_in_the_log(make_engine, caplog) -> None:
    make_engine(tokenizer=object()).prepare_grammars()
    assert "fast tokenizer" in caplog.text


def test_no_output_ends_before_its_least_length_but_at_the_end_of_its_grammar(make_engine) -> None:
    # A stop token that is by far the likeliest, and a stop string that every text has.
    shared = {"max_tokens": 20, "logit_bias": {7: 100.0}, "stop_token_ids": (7,), "ignore_eos": True}
    samplings = [
        SamplingParams(min_tokens=least, **shared, **more) for least in (0, 9) for more in ({}, {"temperature": 1.0})
    ]
    samplings.append(SamplingParams(max_tokens=20, min_tokens=20, stop=tuple("aeiou ")))
    samplings.append(SamplingParams(max_tokens=20, min_tokens=20, grammar='start: "ab"'))
    requests = [Request(prompt_token_ids=[1, 2, 3], sampling=sampling) for sampling in samplings]
    *free, stopped, constrained = make_engine().generate(requests)
    assert [len(completion.token_ids) for completion in free] == [1, 1, 10, 10]
    assert all(completion.stop_reason == 7 for completion in free)
    assert len(stopped.token_ids) == 20
    assert constrained.text == "ab" and constrained.finish_reason is FinishReason.STOP


def test_every_end_of_sequence_token_ends_a_grammar() -> None:
    other = END + 2
    compiler = GrammarCompiler(TOKENIZER, vocab_size=VOCAB, eos_token_ids=(END, other))
    state = compiler.compile('start: "a"').result().start()
    [a] = TOKENIZER("a").input_ids
    state.accept(a)
    bits = state.allowed()
    allowed = {i for i in range(VOCAB) if bits[i // 8] >> i % 8 & 1}
    assert allowed == {END, other}


def test_request_whose_grammar_fails_ends_alone() -> None:
    compiler = GrammarCompiler(TOKENIZER, vocab_size=VOCAB, eos_token_ids=(END,))
    state = compiler.compile('start: "a"').result().start()
    with pytest.raises(GrammarFailed):
        state.accept(TOKENIZER("z").input_ids[0])
    sampler = Sampler(vocab_size=VOCAB, device=torch.device("cpu"), seed=0)
    sampler.add("a", SamplingParams(grammar="start: /a/"), [1], state)
    sampler.add("b", SamplingParams(), [1])
    tokens, failed = sampler.sample(torch.zeros(2, VOCAB), ["a", "b"])
    assert set(tokens) == {"b"} and "grammar" in failed["a"]


def test_grammar_is_compiled_once_as_long_as_it_is_kept(monkeypatch) -> None:
    compiler = GrammarCompiler(TOKENIZER, vocab_size=VOCAB, eos_token_ids=(END,))
    monkeypatch.setattr("omniserve.sampling.grammar._MAX_KEPT", 2)
    first = compiler.compile("start: /a/")
    assert compiler.compile("start: /a/") is first
    one, other = (first.result().start() for _ in range(2))
    [a] = TOKENIZER("a").input_ids
    one.accept(a)
    other.accept(a)  # the state of one output is not that of another
    compiler.compile("start: /b/")
    assert compiler.compile("start: /a/") is first
    compiler.compile("start: /c/")
    assert compiler.compile("start: /a/") is first
    assert "/b/" not in str(compiler._kept), "the one that was used first goes first"
    monkeypatch.setattr("omniserve.sampling.grammar._MAX_KEPT_CHARACTERS", 30)
    compiler.compile("start: /" + "d" * 30 + "/")
    assert len(compiler._kept) == 1
    compiler.close()


def test_object_of_many_properties_goes_on_behind_its_begin() -> None:
    compiler = GrammarCompiler(TOKENIZER, vocab_size=VOCAB, eos_token_ids=(END,))
    optional = {f"p{i}": {"type": "integer"} for i in range(500)}
    state = compiler.compile(json_grammar({"type": "object", "properties": optional})).result().start()
    for token in TOKENIZER('{"p7":1,"p499":2}').input_ids:
        state.allowed()
        state.accept(token)
    compiler.close()


def test_added_tokens_are_text_unless_they_are_special() -> None:
    """Added tokens include those that a byte-level decoder reads as other bytes, and texts that a normalizer
    changes."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in ("§ü§", "<ü>", "<think>")])
    tokenizer.add_tokens([AddedToken("<hidden>", normalized=False, special=True)], special_tokens=True)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    compiler = GrammarCompiler(tokenizer, vocab_size=len(tokenizer), eos_token_ids=(END,))
    for text in ("§ü§", "<ü>", "<think>", "<hidden>", "<|end|>", "e\u0301", "a§ü§<think> <hidden>e\u0301"):
        state, token_ids = compiler.compile(json_grammar({"const": text})).result().start(), []
        while not token_ids or token_ids[-1] != END:
            bits = state.allowed()
            token_ids.append(max(i for i in range(len(tokenizer)) if bits[i // 8] >> i % 8 & 1))
            state.accept(token_ids[-1])
        assert json.loads(tokenizer.decode(token_ids, skip_special_tokens=True)) == text


def test_a_panic_in_one_output_is_the_end_of_no_grammar() -> None:
    """llguidance panics where a text that ends a rule by ``stop`` is in two tokens and the second goes on."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_tokens(["hm</thi", "nk>x"])
    compiler = GrammarCompiler(tokenizer, vocab_size=len(tokenizer), eos_token_ids=[END])
    grammar = 'start: a "</think>" /x*/\na[stop="</think>", max_tokens=9]: /(.|\\n)*/'
    first = compiler.compile(grammar).result().start()
    with pytest.raises(GrammarFailed, match="panic"):
        for token in ("hm</thi", "nk>x"):
            first.allowed()
            first.accept(tokenizer.convert_tokens_to_ids(token))
        first.allowed()
    second = compiler.compile(grammar).result().start()
    second.accept(tokenizer("hm").input_ids[0])
    assert second.allowed()
    compiler.close()

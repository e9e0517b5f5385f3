"""Trained weights: tokens over random histories, prose, schemas, turns, and llama.cpp on the same file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.common.server import ServerProcess
from omniserve import Engine, EngineConfig, ExecutionConfig, Request, SamplingParams, patch
from omniserve.layers.weights.gguf import remember_file
from omniserve.layers.weights.loaded_model import held_tensors
from tests.parity.engine_histories import Reference, run_histories
from tests.real.checkpoint import END_OF_TURN, GGUF, CannotBeHad, model_folder
from tests.real.llama_cpp import Answers, answers
from tests.real.readable import LARGEST_PERPLEXITY, faults, perplexity

pytestmark = [pytest.mark.slow, pytest.mark.real]

ROOT = Path(__file__).parents[2]
LICENCE = (ROOT / "LICENSE").read_text()
SHORT = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return",
    "Die Hauptstadt von Österreich heißt",
    "東京は日本の",
    "Water boils at a temperature of",
    "1, 2, 3, 4, 5, 6, 7,",
    "Once upon a time there was a little girl who lived in a",
    "import json\n\nwith open('data.json') as file:\n",
    "La tour Eiffel se trouve à",
    "<html>\n<head>\n  <title>",
]
PROSE = "The old lighthouse stood at the end of the island. Every evening, the keeper"
CHAT = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "What is the capital of Spain?"},
    {"role": "assistant", "content": "Madrid."},
    {"role": "user", "content": "What is the capital of Italy?"},
]
WINDOW = 512
"""Tokens that most of the layers attend to; the longest prompt has more."""
MAX_TOKENS = 12
LARGEST_GAP = 0.6
"""Gap between two logits up to which llama.cpp, which rounds the inputs of each linear to 8 bits, may take the other
token."""


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return model_folder()
    except CannotBeHad as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def hugging_face(folder: Path) -> PreTrainedModel:
    """The model as transformers runs it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # histories ask for a fixed number of tokens
    return model


@pytest.fixture(scope="module")
def reference(hugging_face: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Reference:
    """Continuations of short prompts, of some of 100 to 200 tokens, and of one that is longer than the window."""
    middle = [LICENCE[begin : begin + length] for begin, length in ((3000, 900), (5000, 700), (7000, 500), (9000, 600))]
    texts = (SHORT[0], middle[0], SHORT[1], middle[1], LICENCE, SHORT[2], middle[2], *SHORT[3:], middle[3])
    prompts = [tuple(tokenizer.encode(text))[: WINDOW + 8] for text in texts]
    return Reference(hugging_face, prompts=prompts, num_prompts=8, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def patched(folder: Path) -> PreTrainedModel:
    return patch(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), compile=False)


@pytest.fixture(scope="module")
def engine(patched: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[Engine]:
    config = EngineConfig(
        device_kv_bytes=64 << 20, host_kv_bytes=64 << 20, max_model_len=1024, execution=ExecutionConfig(compile=False)
    )
    with Engine(patched, config, tokenizer=tokenizer) as engine:
        yield engine


@pytest.fixture(scope="module")
def of_codes(folder: Path) -> PreTrainedModel:
    """The model of the GGUF file, whose codes are read as they are."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert not remember_file(model, GGUF).dense
    patch(model, compile=False)
    held = {id(each): each.nbytes for module in model.modules() for each in held_tensors(module).values()}
    assert sum(held.values()) <= 1.1 * GGUF.stat().st_size
    return model


@pytest.mark.parametrize("held", ["patched", "of_codes"])
def test_random_histories_equal_hugging_face(held: str, reference: Reference, request: pytest.FixtureRequest) -> None:
    """Mixed with each other, in chunks, preempted, and piggybacked."""
    patched: PreTrainedModel = request.getfixturevalue(held)
    assert max(map(len, reference.prompts)) > WINDOW, "the long prompt has a near tie: take another length"
    block_bytes = patched.omniserve.spec.kv_block_bytes(8)
    run_histories(
        patched, reference, range(3), reach=("host_tokens", "piggyback_rows", "preemptions", "swaps_out"),
        kv=lambda seed: ("paged", "tiered", "bidirectional")[seed % 3],
        max_num_batched_tokens=lambda seed: (96, 64, 32)[seed % 3], max_host_requests=16, max_num_seqs=8,
        has_profile=False, max_model_len=WINDOW + 32, device_kv_bytes=70 * block_bytes,
        host_kv_bytes=lambda seed: (0, 400, 400)[seed % 3] * block_bytes,
    )  # fmt: skip


def test_drawn_text_is_prose(engine: Engine, hugging_face: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer.encode(PROSE)
    sampling = SamplingParams(max_tokens=200, temperature=1.0, top_p=0.95, seed=3, ignore_eos=True)
    (completion,) = engine.generate([Request(prompt_token_ids=ids, sampling=sampling)])
    tokens = list(completion.token_ids)
    assert len(tokens) == 200
    assert not faults(completion.text, tokenizer), completion.text
    assert perplexity(hugging_face, ids, tokens) < LARGEST_PERPLEXITY, completion.text
    # What the rules are for is found by them.
    assert faults("The keeper lit the lamp. " * 20, tokenizer), "repetition"
    mixed = random.Random(0).sample(range(1000, 200_000), 200)
    assert faults(tokenizer.decode(mixed), tokenizer), "tokens at random"
    random.Random(0).shuffle(tokens)
    assert perplexity(hugging_face, ids, tokens) > LARGEST_PERPLEXITY, "the same words in another order"


@pytest.fixture(scope="module")
def client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    scratch = tmp_path_factory.mktemp("server")
    arguments = (
        "--model", str(folder), "--served-model-name", "gemma", "--execution", "compile=false",
        "--device-kv-gib", "0.1", "--host-kv-gib", "0.1", "--limit", "profile_time_limit_s=2",
        "--ls-ttft-slo", "1000", "--ls-tpot-slo", "1000",
    )  # fmt: skip
    environment = {"XDG_CACHE_HOME": str(scratch), "XDG_DATA_HOME": str(scratch), "HF_HUB_OFFLINE": "1"}
    with ServerProcess(arguments, scratch / "log", environment=environment) as server:
        server.wait_until_healthy(600.0)
        yield openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=600.0)


def test_an_answer_ends_with_its_turn(client: openai.OpenAI, tokenizer: PreTrainedTokenizerBase) -> None:
    """The base model has never met the tokens around turns: behind an answer it finds all tokens unlikely, and this one
    lies 9 below the best of them. Within the answer it lies 30 below. A bias in between makes it the end."""
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    ask: dict[str, Any] = {"model": "gemma", "messages": CHAT, "temperature": 0, "max_tokens": 8}
    answer = client.chat.completions.create(**ask, logit_bias={str(end): 15})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == "Rome."
    assert answer.usage.completion_tokens == 3, "Rome, a full stop, the end"
    assert answer.usage.prompt_tokens == len(
        tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    )
    longer = client.chat.completions.create(**ask)
    assert longer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("tier", ["priority", "flex"])
def test_an_answer_keeps_a_schema(client: openai.OpenAI, tier: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "born": {"type": "integer", "minimum": 1000, "maximum": 2100},
            "places": {"type": "array", "items": {"enum": ["London", "Paris"]}, "minItems": 1, "maxItems": 2},
        },
        "required": ["name", "born", "places"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="gemma", temperature=0, max_tokens=80, service_tier=tier,  # type: ignore[arg-type]
        messages=[{"role": "user", "content": "Ada Lovelace was born in London in 1815. Write that as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}},
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "stop"
    value = json.loads(answer.choices[0].message.content)
    assert list(value) == ["name", "born", "places"]
    assert len(value["name"]) <= 30 and 1000 <= value["born"] <= 2100
    assert 1 <= len(value["places"]) <= 2 and set(value["places"]) <= {"London", "Paris"}


TEXTS = [
    *SHORT,
    "  two  spaces\n\n\n\tdef f(x):\n\t\treturn 'é😀'",
    " lead and trail ",
    "Größe, naïve, 東京タワー, Привет мир, नमस्ते",
    "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "1234567890 3.14159 https://example.org/a?b=c&d=%20",
    "a\u200bb\ufeffc\r\nd\x00\x01",
    "👩\u200d👩\u200d👧\u200d👦 flags 🇩🇪 <b>bold</b><table>",
    (ROOT / "omniserve" / "core" / "plan.py").read_text(),
]


@pytest.fixture(scope="module")
def llama_cpp(folder: Path, reference: Reference) -> Answers:
    return answers(TEXTS, reference.prompts, MAX_TOKENS)


def test_texts_become_the_tokens_of_llama_cpp(llama_cpp: Answers, tokenizer: PreTrainedTokenizerBase) -> None:
    """Texts have no runs of more than 31 spaces: the file's longest token of spaces has 31, which llama.cpp takes
    first, as SentencePiece does; transformers merges halves, so the same spaces become other tokens."""
    for text, ids in zip(TEXTS, llama_cpp.texts, strict=True):
        assert tokenizer.encode(text) == ids, text[:80]
        assert tokenizer.decode(ids, skip_special_tokens=False).removeprefix("<bos>") == text


def test_llama_cpp_goes_on_with_the_same_tokens(
    llama_cpp: Answers, reference: Reference, hugging_face: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The first token that differs is one that our model holds for about as likely."""
    differing = 0
    for prompt, ours, theirs in zip(reference.prompts, reference.tokens, llama_cpp.prompts, strict=True):
        same = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), MAX_TOKENS)
        if same == MAX_TOKENS:
            continue
        differing += 1
        with torch.inference_mode():
            logits = hugging_face(torch.tensor([[*prompt, *ours[:same]]])).logits[0, -1]
        gap = float(logits[ours[same]] - logits[theirs[same]])
        assert gap < LARGEST_GAP, (tokenizer.decode(prompt), ours, theirs, gap)
    assert differing <= len(reference.prompts) // 2

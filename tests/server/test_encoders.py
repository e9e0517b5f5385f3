"""The second model: tiny encoders and cross-encoders with random weights, which must say what Hugging Face's do."""

from __future__ import annotations

import json
import random
import time

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from omniserve.core.config import EngineConfig
from omniserve.core.request import FinishReason, Request, SamplingParams
from omniserve.server.embeddings import encoder as encoders
from omniserve.server.embeddings.encoder import Encoder, EncoderEngine

VOCAB_SIZE = 60
WORDS = [f"w{i}" for i in range(VOCAB_SIZE - 5)]
COMMON = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "pad_token_id": 1,
}  # fmt: skip
TYPES = {
    "bert": {"max_position_embeddings": 40},
    "roberta": {"max_position_embeddings": 42, "type_vocab_size": 1},
    "xlm-roberta": {"max_position_embeddings": 42, "type_vocab_size": 1},
    "modernbert": {"max_position_embeddings": 40, "global_attn_every_n_layers": 2, "local_attention": 8},
}
# Sums over padded batches, in fp32.
CLOSE = {"rtol": 0.0, "atol": 2e-5}


def tokenizer_of(is_roberta: bool) -> PreTrainedTokenizerFast:
    specials = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*specials, *WORDS])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pair = "[CLS] $A [SEP] [SEP] $B [SEP]" if is_roberta else "[CLS] $A [SEP] $B:1 [SEP]:1"
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=pair, special_tokens=[("[CLS]", 0), ("[SEP]", 2)]
    )
    names = {"cls_token": "[CLS]", "pad_token": "[PAD]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=40, **names)


def make(folder, model_type: str, *, pairs: bool = False, pooling: str | None = None, **config: object):
    """Write a random model, and return it and its tokenizer as Hugging Face's are loaded."""
    torch.manual_seed(0)
    made = AutoConfig.for_model(
        model_type, **COMMON, **TYPES[model_type], **config, **({"num_labels": 1} if pairs else {})
    )
    kind = AutoModelForSequenceClassification if pairs else AutoModel
    model = kind.from_config(made).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # far from 0, so that a wrong position or type shows
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    tokenizer = tokenizer_of("roberta" in model_type)
    tokenizer.save_pretrained(folder)
    if pooling is not None:
        modules = [{"type": f"sentence_transformers.models.{name}", "path": path} for name, path in (
            ("Transformer", ""), ("Pooling", "1_Pooling"))]  # fmt: skip
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 24}))
    return model, tokenizer


def some_text(rng: random.Random, most: int = 18) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))


def embedding(model, tokenizer, text: str, pooling: str) -> np.ndarray:
    with torch.inference_mode():
        hidden_TD = model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).last_hidden_state[0]
    return (hidden_TD.mean(0) if pooling == "mean" else hidden_TD[-1 if pooling == "last" else 0]).numpy()


def score(model, tokenizer, pair: tuple[str, str], *, has_types: bool) -> float:
    with torch.inference_mode():
        inputs = tokenizer(*pair, return_tensors="pt", return_token_type_ids=has_types)
        return float(model(**inputs).logits[0, 0])


@pytest.mark.parametrize("pooling", [None, "mean", "cls", "lasttoken"])
@pytest.mark.parametrize("model_type", TYPES)
def test_encoders_embed_texts_as_hugging_face_does(tmp_path, model_type, pooling):
    model, tokenizer = make(tmp_path, model_type, pooling=pooling)
    encoder = Encoder(str(tmp_path))
    assert encoder.max_tokens == (24 if pooling else 40)
    rng = random.Random(0)
    texts = [some_text(rng) for _ in range(9)]
    found = encoder.read([tokenizer(text).input_ids for text in texts])
    how = {None: "mean", "lasttoken": "last"}.get(pooling, pooling)
    for text, vector in zip(texts, found, strict=True):
        np.testing.assert_allclose(vector, embedding(model, tokenizer, text, how), **CLOSE)


@pytest.mark.parametrize("model_type", TYPES)
def test_cross_encoders_score_pairs_as_hugging_face_does(tmp_path, model_type):
    model, tokenizer = make(tmp_path, model_type, pairs=True)
    encoder = Encoder(str(tmp_path))
    rng = random.Random(0)
    pairs = [(some_text(rng, 8), some_text(rng, 8)) for _ in range(9)]
    found = encoder.read([tokenizer(*pair).input_ids for pair in pairs])
    want = [score(model, tokenizer, pair, has_types=model_type == "bert") for pair in pairs]
    np.testing.assert_allclose(np.array(found)[:, 0], want, **CLOSE)


def test_texts_of_both_lanes_come_back_whatever_is_dropped_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(encoders, "_MOST_TOKENS", 60)
    model, tokenizer = make(tmp_path, "bert")
    engine = EncoderEngine(Encoder(str(tmp_path)), EngineConfig())
    rng = random.Random(1)
    texts = {f"{i}": some_text(rng) for i in range(60)}
    for name, text in texts.items():
        engine.add(
            Request(
                request_id=name,
                prompt_token_ids=tokenizer(text).input_ids,
                sampling=SamplingParams(max_tokens=0, pooling="mean"),
                service_class=rng.choice(["LS", "BE"]),
            )
        )
    found, dropped = {}, set()
    while engine.has_unfinished:
        found |= {output.request_id: output for output in engine.step()}
        victim = rng.choice(list(texts))
        if rng.random() < 0.2 and engine.abort(victim):
            dropped.add(victim)
    assert set(found) | dropped == set(texts) and not set(found) & dropped
    for name, output in found.items():
        np.testing.assert_allclose(output.embedding, embedding(model, tokenizer, texts[name], "mean"), **CLOSE)
        assert output.finished and output.times.first_token_s >= output.times.first_scheduled_s
    assert engine.stats().scheduler.waiting == {"LS": 0, "BE": 0}
    engine.close()


def test_ls_texts_do_not_wait_for_a_be_batch(tmp_path, monkeypatch):
    _, tokenizer = make(tmp_path, "bert")
    encoder = Encoder(str(tmp_path))
    engine = EncoderEngine(encoder, EngineConfig())
    read, ids = encoder.read, tokenizer("w1 w2").input_ids

    def slow(texts):
        time.sleep(0.5 if len(texts) == 3 else 0)
        return read(texts)

    monkeypatch.setattr(encoder, "read", slow)
    for i in range(3):
        engine.add(Request(request_id=f"BE{i}", prompt_token_ids=ids, service_class="BE"))
    engine.step()
    engine.add(Request(request_id="LS", prompt_token_ids=ids))
    order = []
    while engine.has_unfinished:
        order += [output.request_id for output in engine.step()]
    assert order == ["LS", "BE0", "BE1", "BE2"]
    engine.close()


def test_a_text_that_has_waited_for_too_long_is_not_read(tmp_path, monkeypatch):
    _, tokenizer = make(tmp_path, "bert")
    engine, ids = EncoderEngine(Encoder(str(tmp_path)), EngineConfig()), tokenizer("w1 w2").input_ids
    come_s = time.monotonic()
    engine.add(Request(request_id="late", prompt_token_ids=ids, max_queue_s=1.0), arrival_s=come_s - 2)
    engine.add(Request(request_id="patient", prompt_token_ids=ids, max_queue_s=60.0), arrival_s=come_s - 2)
    ended = {}
    while engine.has_unfinished:
        ended |= {output.request_id: output for output in engine.step()}
    assert (ended["late"].finish_reason, ended["late"].embedding) == (FinishReason.TIMEOUT, ())
    assert ended["patient"].embedding
    engine.close()


def test_models_that_cannot_be_read_here_are_refused_by_name(tmp_path):
    make(tmp_path, "bert", pooling="max")
    with pytest.raises(ValueError, match=r"1_Pooling/config.json asks for 'max'"):
        Encoder(str(tmp_path))
    made = AutoConfig.for_model("bert", **COMMON, num_labels=3)
    AutoModelForSequenceClassification.from_config(made).save_pretrained(tmp_path / "three")
    tokenizer_of(False).save_pretrained(tmp_path / "three")
    with pytest.raises(ValueError, match="has 3 labels; a model that scores pairs has one"):
        Encoder(str(tmp_path / "three"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, pairs in (("embedder", False), ("judge", True)):
        folder = tmp_path_factory.mktemp("second") / name
        folder.mkdir()
        made[name] = folder, *make(folder, "bert", pairs=pairs)
    return made


def test_a_served_encoder_embeds_scores_and_ranks(start_server, folders):
    folder, model, tokenizer = folders["embedder"]
    server = start_server("--embedding-model", str(folder)).wait_until_ready()

    def unit(text):
        vector = embedding(model, tokenizer, text, "mean")
        return vector / np.linalg.norm(vector)

    with server.http() as http:
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["fake", "embedder"]
        assert http.get("/v1/models/embedder").json()["id"] == "embedder"
        for fields in ({}, {"model": "embedder"}, {"service_tier": "flex"}):
            answer = http.post("/v1/embeddings", json={"input": ["w1", "w2 w3"], **fields}).json()
            assert answer["model"] == "embedder" and answer["usage"]["prompt_tokens"] == 7
            np.testing.assert_allclose(answer["data"][1]["embedding"], unit("w2 w3"), **CLOSE)
        assert (
            len(http.post("/v1/embeddings", json={"input": "a", "model": "fake"}).json()["data"][0]["embedding"]) == 8
        )
        answer = http.post("/v1/score", json={"text_1": "w1", "text_2": "w2 w3"}).json()
        assert answer["data"][0]["score"] == pytest.approx(float(unit("w1") @ unit("w2 w3")), abs=2e-5)
        for path, fields, message in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "it writes no text"),
            ("/v1/embeddings", {"input": " ".join(["w1"] * 50)}, "maximum context length is 40 tokens"),
            ("/v1/embeddings", {"input": [60]}, "this model's ids are 0 to 59"),
        ):
            response = http.post(path, json={"model": "embedder", **fields})
            assert response.status_code == 400 and message in response.json()["error"]["message"]
        cut = http.post("/v1/embeddings", json={"input": " ".join(["w1"] * 50), "truncate_prompt_tokens": -1}).json()
        assert cut["usage"]["prompt_tokens"] == 40
        np.testing.assert_allclose(cut["data"][0]["embedding"], unit(" ".join(["w1"] * 38)), **CLOSE)
        name = 'omniserve_requests_total{finish_reason="length",service_class="BE"}'
        assert f"{name} 2.0" in http.get("/metrics").text


def test_a_served_cross_encoder_scores_pairs(start_server, folders):
    folder, model, tokenizer = folders["judge"]
    server = start_server("--embedding-model", str(folder)).wait_until_ready()
    documents = ["w1", "w2 w3", "w4 w5 w6"]
    want = [1 / (1 + np.exp(-score(model, tokenizer, ("w9 w8", text), has_types=True))) for text in documents]
    with server.http() as http:
        answer = http.post("/v1/score", json={"text_1": "w9 w8", "text_2": documents}).json()
        assert [entry["score"] for entry in answer["data"]] == pytest.approx(want, abs=2e-5)
        ranked = http.post("/rerank", json={"query": "w9 w8", "documents": documents}).json()["results"]
        assert [result["index"] for result in ranked] == sorted(range(3), key=lambda i: -want[i])
        assert len(http.post("/v1/embeddings", json={"input": "a"}).json()["data"][0]["embedding"]) == 8, "the other's"
        response = http.post("/v1/embeddings", json={"input": "a", "model": "judge"})
        assert response.status_code == 400 and "it has no embeddings" in response.json()["error"]["message"]
        long = {"text_1": "w9 " * 30, "text_2": "w1 " * 30}
        assert "maximum context length is 40" in http.post("/v1/score", json=long).json()["error"]["message"]
        cut = http.post("/v1/score", json=long | {"truncate_prompt_tokens": -1}).json()
        with torch.inference_mode():
            inputs = tokenizer(
                long["text_1"], long["text_2"], truncation=True, max_length=40, return_tensors="pt",
                return_token_type_ids=True,
            )  # fmt: skip
            logit = float(model(**inputs).logits[0, 0])
        assert cut["data"][0]["score"] == pytest.approx(1 / (1 + np.exp(-logit)), abs=2e-5)
        assert "separates texts" in http.post("/v1/score", json={"text_1": "w1 [SEP] w2", "text_2": "w1"}).text


def test_a_second_model_that_cannot_be_loaded_ends_the_start(start_server, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    server = start_server("--embedding-model", str(tmp_path))
    assert server.wait() == 1
    assert "cannot start: " in "".join(server.log)

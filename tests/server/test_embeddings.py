"""Embeddings, scores and ranks over HTTP and in batches, of an engine whose embeddings are made up."""

from __future__ import annotations

import base64
import json

import httpx
import numpy as np
import openai
import pytest
from batch_inputs import line, results, submit, wait_for
from fake_engine import embedding_of
from openai.types import EmbeddingCreateParams
from tokenizers_for_tests import byte_level_tokenizer

from omniserve.core.request import Pooling
from omniserve.server.embeddings.model_files import find_pooling
from omniserve.server.embeddings.protocol import EmbeddingRequest
from omniserve.server.embeddings.vectors import matrix_of

MANY = ["one", "two three", "The quick brown fox"]


def ids_of(text: str) -> list[int]:
    return byte_level_tokenizer()(text).input_ids


def unit(text: str, pooling: str = "last", dimensions: int | None = None) -> np.ndarray:
    vector = np.array(embedding_of(ids_of(text), pooling)[:dimensions])
    return vector / np.linalg.norm(vector)


def folder_with(tmp_path_factory, pooling: dict[str, object] | None, **config: object) -> str:
    folder = tmp_path_factory.mktemp("model")
    byte_level_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, **config}))
    if pooling is not None:
        modules = [{"type": f"sentence_transformers.models.{name}", "path": path} for name, path in (
            ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))]  # fmt: skip
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return str(folder)


@pytest.fixture(scope="module")
def mean(start_module_server, tmp_path_factory):
    """A model that is pooled by the mean, and whose embeddings may be cut."""
    pooling = {"word_embedding_dimension": 8, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    folder = folder_with(tmp_path_factory, pooling, matryoshka_dimensions=[2, 4, 8])
    return start_module_server("--tokenizer", folder).wait_until_ready()


@pytest.mark.parametrize("texts", ["one", MANY, ids_of("one"), [ids_of(text) for text in MANY]])
def test_the_openai_client_gets_embeddings_of_texts_and_token_ids(client, texts):
    answer = client.embeddings.create(model="fake", input=texts, user="u")  # the client asks for base64
    wanted = MANY if texts not in ("one", ids_of("one")) else ["one"]
    assert [entry.index for entry in answer.data] == list(range(len(wanted)))
    for entry, text in zip(answer.data, wanted, strict=True):
        assert entry.embedding == pytest.approx(unit(text), abs=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(ids_of(text)) for text in wanted)
    assert answer.model == "fake"


def test_base64_is_float32(client, server):
    fields = {"input": "one", "encoding_format": "base64"}
    raw = client.embeddings.with_raw_response.create(model="fake", input="one").http_response.json()["data"]
    answer = httpx.post(f"{server.url}/v1/embeddings", json=fields).json()
    assert answer["data"] == raw
    assert np.frombuffer(base64.b64decode(raw[0]["embedding"]), "<f4") == pytest.approx(unit("one"), abs=1e-6)
    assert answer["usage"].keys() == {"prompt_tokens", "total_tokens", "prompt_tokens_details"}
    assert answer["service_tier"] == "default" and answer["id"].startswith("embd-")


def test_what_is_not_normalised_is_as_the_model_has_it(server):
    fields = {"input": "one", "normalize": False, "service_tier": "flex", "slo": {"ttft_s": 30}}
    answer = httpx.post(f"{server.url}/v1/embeddings", json=fields).json()
    assert answer["data"][0]["embedding"] == list(embedding_of(ids_of("one"), "last"))
    assert answer["service_tier"] == "flex"


def test_the_models_files_say_how_it_is_pooled_and_cut(mean):
    client = mean.client()
    for dimensions in (openai.omit, 2, 4, 8):
        (entry,) = client.embeddings.create(model="fake", input="two three", dimensions=dimensions).data
        number = 8 if dimensions is openai.omit else dimensions
        assert entry.embedding == pytest.approx(unit("two three", "mean", number), abs=1e-6)
    with pytest.raises(openai.BadRequestError, match="can have 2, 4, 8 dimensions, got 3"):
        client.embeddings.create(model="fake", input="a", dimensions=3)


WRONG = [
    ({"input": ""}, "input", "empty"),
    ({"input": ["a", ""]}, "input", "empty"),
    ({"input": []}, "input", "not empty"),
    ({"input": [[]]}, "input", "empty"),
    ({"input": [["a"]]}, "input", "list of strings"),
    ({}, "input", "missing"),
    ({"input": [100000]}, "input", "100000 is unknown"),
    ({"input": "a", "model": "other"}, "model", "'other' is not served here"),
    ({"input": "a", "dimensions": 4}, "dimensions", "does not say that its embeddings may be cut"),
    ({"input": "a", "dimensions": 0}, "dimensions", "greater"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
    ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "float32"),
    ({"input": "a", "service_tier": "x"}, "service_tier", "must be one of"),
    ({"input": "a b " * 600}, "input", "maximum context length is 512 tokens; a text has"),
    ({"input": [5] * 513}, "input", "set truncate_prompt_tokens to -1"),
    ({"input": "a", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "takes 512 tokens"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "input", "empty"),
]


@pytest.mark.parametrize(("fields", "param", "message"), WRONG)
def test_what_is_wrong_is_named(server, fields, param, message):
    response = httpx.post(f"{server.url}/v1/embeddings", json=fields)
    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400)
    assert error["param"] == param and message in error["message"], error


@pytest.mark.parametrize("number", [-1, 3])
def test_texts_are_cut_at_their_ends(server, number):
    fields = {"input": ["a b " * 600, "one"], "truncate_prompt_tokens": number, "normalize": False}
    answer = httpx.post(f"{server.url}/v1/embeddings", json=fields).json()
    kept = 512 if number == -1 else number
    assert answer["usage"]["prompt_tokens"] == kept + min(kept, len(ids_of("one")))
    assert answer["data"][0]["embedding"] == list(embedding_of(ids_of("a b " * 600)[:kept], "last"))
    fields["input"] = [list(range(5, 105)) * 6]
    answer = httpx.post(f"{server.url}/v1/embeddings", json=fields).json()
    assert answer["data"][0]["embedding"] == list(embedding_of(fields["input"][0][:kept], "last"))


def test_scores_are_cosines_of_one_text_with_many_or_of_pairs(server):
    for first, second in (("one", MANY), (MANY, MANY[::-1]), ("one", "two three")):
        all_first = first if isinstance(first, list) else [first] * (len(second) if isinstance(second, list) else 1)
        pairs = zip(all_first, second if isinstance(second, list) else [second], strict=True)
        want = [float(unit(one) @ unit(other)) for one, other in pairs]
        for names in (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")):
            answer = httpx.post(f"{server.url}/v1/score", json=dict(zip(names, (first, second), strict=True))).json()
            assert [entry["score"] for entry in answer["data"]] == pytest.approx(want, abs=1e-6)
            assert [entry["index"] for entry in answer["data"]] == list(range(len(want)))
    response = httpx.post(f"{server.url}/v1/score", json={"text_1": ["a", "b"], "text_2": "a"})
    assert response.status_code == 400 and "as many as text_2, which has 1; got 2" in response.text


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked(server, path):
    fields = {"query": "two three", "documents": ["one", {"text": "two three"}, "The quick brown fox"]}
    results = httpx.post(f"{server.url}{path}", json=fields).json()["results"]
    want = sorted(range(3), key=lambda i: -float(unit("two three") @ unit(["one", "two three", MANY[2]][i])))
    assert [result["index"] for result in results] == want
    assert results[0] == {"index": 1, "relevance_score": pytest.approx(1.0), "document": {"text": "two three"}}
    best = httpx.post(f"{server.url}{path}", json=fields | {"top_n": 2, "return_documents": False}).json()
    assert [set(result) for result in best["results"]] == [{"index", "relevance_score"}] * 2
    # A text that is there twice is read once.
    assert best["usage"]["prompt_tokens"] == sum(len(ids_of(text)) for text in MANY)


def test_lines_of_a_batch_may_ask_for_embeddings(client):
    texts = {"a": MANY[1], "b": MANY, "c": ""}
    lines = [line(name, {"input": text}, "/v1/embeddings") for name, text in texts.items()]
    batch = wait_for(client, submit(client, lines, endpoint="/v1/embeddings").id)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
    answers = {entry["custom_id"]: entry["response"]["body"] for entry in results(client, batch.output_file_id)}
    assert answers["a"]["data"][0]["embedding"] == pytest.approx(unit(MANY[1]), abs=1e-6)
    assert answers["a"]["service_tier"] == "flex" and len(answers["b"]["data"]) == 3
    (wrong,) = results(client, batch.error_file_id)
    assert wrong["response"]["status_code"] == 400 and "empty" in wrong["response"]["body"]["error"]["message"]


def test_embeddings_are_counted_like_other_requests(start_server):
    server = start_server().wait_until_ready()
    name = 'omniserve_requests_total{finish_reason="length",service_class="BE"}'
    with server.http() as http:
        http.post("/v1/embeddings", json={"input": MANY, "service_tier": "flex"})
        assert f"{name} 3.0" in http.get("/metrics").text
        ttft = 'omniserve_ttft_seconds_count{service_class="BE"} 3.0'
        assert ttft in http.get("/metrics").text


def test_many_long_embeddings_are_written_beside_the_event_loop(server, monkeypatch):
    monkeypatch.setattr("omniserve.server.embeddings.shapes._MAX_INLINE", 4)
    answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": MANY}).json()
    assert [entry["embedding"] for entry in answer["data"]] == [pytest.approx(unit(text), abs=1e-6) for text in MANY]


POOLINGS = [
    (None, {}, Pooling.LAST),
    ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, {}, Pooling.LAST),
    ({"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}, {}, Pooling.MEAN),
    ({"pooling_mode": "mean"}, {}, Pooling.MEAN),
    ({"pooling_mode": "lasttoken"}, {"is_matryoshka": True}, Pooling.LAST),
    ({"pooling_mode_cls_token": True}, {}, "asks for 'cls_token'"),
    ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, {}, "asks for 'mean_tokens+max_tokens'"),
    ({}, {}, "asks for 'nothing'"),
]


@pytest.mark.parametrize(("pooling", "config", "want"), POOLINGS)
def test_pooling_is_what_sentence_transformers_files_say(tmp_path_factory, pooling, config, want):
    found = find_pooling(folder_with(tmp_path_factory, pooling, **config))
    if isinstance(want, Pooling):
        assert (found.how, found.why_not, found.width) == (want, None, 8)
        assert found.is_matryoshka == ("is_matryoshka" in config)
    else:
        assert want in found.why_not


def test_modules_that_are_not_known_are_named_to_who_asks(start_server, tmp_path_factory):
    folder = folder_with(tmp_path_factory, {"pooling_mode": "mean"})
    with open(f"{folder}/modules.json", "w") as file:
        json.dump([{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}], file)
    server = start_server("--tokenizer", folder).wait_until_ready()
    response = httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"})
    assert response.status_code == 400
    assert "modules.json names Dense" in response.json()["error"]["message"]


def test_every_field_of_openai_is_known():
    assert set(EmbeddingCreateParams.__annotations__) <= set(EmbeddingRequest.model_fields)


def test_vectors_of_length_0_stay_so():
    assert matrix_of([(0.0, 0.0), (3.0, 4.0)]).tolist() == [[0, 0], [pytest.approx(0.6), pytest.approx(0.8)]]

"""schemathesis takes /openapi.json at its word: no internal error, no status and no answer that is not in it."""

from __future__ import annotations

import httpx
import pytest
import schemathesis
from hypothesis import given
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.quick import slow_except
from tests.server.attack.bodies import bounded

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]


@pytest.fixture(scope="module")
def harmless(start_module_server):
    server = start_module_server("--no-faults").wait_until_ready()
    yield server
    server.wait_until_free()
    assert server.stop() == 0
    assert not [line for line in server.log if "Traceback" in line], "".join(server.log)


OPERATIONS = [
    "POST /v1/completions", "POST /v1/chat/completions", "POST /tokenize", "POST /detokenize", "GET /v1/models",
    "POST /v1/responses", "POST /v1/responses/input_tokens", "GET /v1/responses/{response_id}",
    "DELETE /v1/responses/{response_id}", "POST /v1/responses/{response_id}/cancel",
    "GET /v1/responses/{response_id}/input_items",
    "POST /v1/messages", "POST /v1/messages/count_tokens",
    "POST /v1/embeddings", "POST /v1/score", "POST /rerank", "POST /v1/rerank", "POST /v2/rerank",
    "GET /v1/models/{name}", "GET /health", "GET /health/live", "GET /health/ready", "GET /metrics",
    "POST /v1/files", "GET /v1/files", "GET /v1/files/{file_id}", "DELETE /v1/files/{file_id}",
    "GET /v1/files/{file_id}/content", "POST /v1/batches", "GET /v1/batches", "GET /v1/batches/{batch_id}",
    "POST /v1/batches/{batch_id}/cancel", "POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter",
    "POST /v1/cache/clear", "GET /admin/engines", "POST /admin/engines", "POST /admin/engines/{engine_id}/drain",
    "POST /admin/engines/{engine_id}/resume", "DELETE /admin/engines/{engine_id}",
]  # fmt: skip
# Those that have a body or a query, of which something can be wrong.
TAKERS = [
    "POST /v1/completions", "POST /v1/chat/completions", "POST /tokenize", "POST /detokenize", "POST /v1/files",
    "POST /v1/responses", "POST /v1/responses/input_tokens", "GET /v1/responses/{response_id}",
    "GET /v1/responses/{response_id}/input_items", "GET /v1/files", "POST /v1/batches", "GET /v1/batches",
    "POST /v1/messages", "POST /v1/messages/count_tokens",
    "POST /v1/embeddings", "POST /v1/score", "POST /v1/rerank",
    "POST /v1/cache/clear", "POST /admin/engines", "DELETE /admin/engines/{engine_id}",
]  # fmt: skip


@pytest.fixture(scope="module")
def api(harmless):
    return schemathesis.openapi.from_url(f"{harmless.url}/openapi.json")


@pytest.mark.parametrize("num_examples", slow_except((3,), (3, 25)))
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, GenerationMode.POSITIVE) for name in OPERATIONS] + [(name, GenerationMode.NEGATIVE) for name in TAKERS],
    ids=lambda value: value if isinstance(value, str) else value.value,
)
def test_the_document_is_true(api, name, mode, num_examples):
    method, path = name.split()

    @bounded(num_examples)
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def attack(case):
        case.call_and_validate(checks=CHECKS, timeout=30)

    attack()


def test_the_document_names_every_route(harmless):
    found = httpx.get(f"{harmless.url}/openapi.json").json()["paths"]
    assert sorted(OPERATIONS) == sorted(f"{method.upper()} {path}" for path in found for method in found[path])


def test_the_document_says_who_needs_a_key(start_server):
    server = start_server("--api-key", "secret").wait_until_ready()
    assert httpx.get(f"{server.url}/openapi.json").status_code == 401
    found = httpx.get(f"{server.url}/openapi.json", headers={"authorization": "Bearer secret"}).json()
    for path, methods in found["paths"].items():
        for operation in methods.values():
            guarded = not path.startswith(("/health", "/metrics"))
            assert ("security" in operation) == ("401" in operation["responses"]) == guarded, path

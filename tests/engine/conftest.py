"""A tiny patched model and engines of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from transformers import PreTrainedModel

from omniserve import Engine, patch
from tests.engine_settings import flat_config
from tests.parity.conftest import few_objects
from tests.parity.models import tiny_model

__all__ = ["BLOCK", "few_objects", "make_engine", "model"]

BLOCK = 8


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return patch(tiny_model("llama"), compile=False)


@pytest.fixture
def make_engine(model: PreTrainedModel) -> Iterator[Callable[..., Engine]]:
    """Build engines (sizes in blocks) that are closed after the test."""
    engines: list[Engine] = []

    def make(*, device_blocks: int = 64, host_blocks: int = 64, tokenizer: object = None, **settings: object) -> Engine:
        block_bytes = model.omniserve.spec.kv_block_bytes(BLOCK)
        sizes = {"device_kv_bytes": device_blocks * block_bytes, "host_kv_bytes": host_blocks * block_bytes}
        config = flat_config({"block_size": BLOCK, "compile": False, **sizes, **settings})
        engines.append(Engine(model, config, tokenizer=tokenizer))  # type: ignore[arg-type]
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()

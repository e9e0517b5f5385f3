"""What --dtype auto takes, by CPU, model and memory; that the loader does so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omniserve import EngineConfig
from omniserve.core.config import GIB
from omniserve.engine.fingerprint import fingerprint_of
from omniserve.launch import model_dtype
from omniserve.launch.loading import EngineLoader
from omniserve.launch.model_dtype import auto_dtype, served_dtype
from omniserve.layers import narrow
from tests.parity.models import tiny_model

HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> set[torch.dtype]:
    """Dtypes of which the CPU has products; at first fp32 alone."""
    dtypes = {torch.float32}
    for module in (model_dtype, narrow):
        monkeypatch.setattr(module, "has_products", lambda dtype: dtype in dtypes)
    return dtypes


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Path]:
    found = {}
    for dtype in (*HALVES, torch.float32):
        found[dtype] = tmp_path_factory.mktemp("model")
        tiny_model("llama", dtype).save_pretrained(found[dtype])
    return found


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_is_served_in_fp32_where_the_cpu_has_no_products_of_it(
    dtype: torch.dtype, products: set[torch.dtype], folders: dict[torch.dtype, Path]
) -> None:
    chosen, why = auto_dtype(folders[dtype], "cpu", EngineConfig())
    assert chosen is served_dtype(dtype) is torch.float32
    name = str(dtype).removeprefix("torch.")
    assert f"float32 instead of the model's {name}" in why and f"--dtype {name}" in why and "\n" not in why
    products.add(dtype)
    assert auto_dtype(folders[dtype], "cpu", EngineConfig()) == (dtype, "")


def test_an_fp32_model_and_a_gpu_are_left_alone(products: set[torch.dtype], folders: dict[torch.dtype, Path]) -> None:
    assert auto_dtype(folders[torch.float32], "cpu", EngineConfig()) == (torch.float32, "")
    assert auto_dtype(folders[torch.bfloat16], "cuda", EngineConfig()) == (None, "")


def test_fp32_must_fit_beside_the_pools(
    products: set[torch.dtype], folders: dict[torch.dtype, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    weights = 4 * model.num_parameters()
    config = EngineConfig(device_kv_bytes=2 * GIB, host_kv_bytes=GIB)
    for available, kv, expected in (
        (weights + 3 * GIB, "tiered", torch.float32),
        (weights + 3 * GIB - 1, "tiered", torch.bfloat16),
        (weights + 2 * GIB, "paged", torch.float32),  # which has no host pool
        (weights + 2 * GIB - 1, "paged", torch.bfloat16),
    ):
        monkeypatch.setattr(model_dtype, "available_bytes", lambda available=available: available)
        settings = EngineConfig(device_kv_bytes=config.device_kv_bytes, host_kv_bytes=config.host_kv_bytes, kv=kv)
        chosen, why = auto_dtype(folders[torch.bfloat16], "cpu", settings)
        assert chosen is expected
        assert why.startswith("warning: bfloat16, slowly") == (expected is torch.bfloat16)


@pytest.mark.parametrize(("asked", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_the_loader_takes_it_and_says_so_once(
    asked: str, expected: torch.dtype, products: set[torch.dtype], folders: dict[torch.dtype, Path]
) -> None:
    told: list[str] = []
    loader = EngineLoader(model=str(folders[torch.bfloat16]), dtype=asked, device="cpu", config=EngineConfig())
    model = loader.load_model(told.append)
    assert model.dtype is expected
    assert sum("instead of the model's" in line for line in told) == (asked == "auto")


@pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="this CPU holds no weights in bf16")
def test_a_profile_tells_fp32_weights_from_bf16_ones_in_fp32(products: set[torch.dtype]) -> None:
    plain, widened = tiny_model("llama"), tiny_model("llama", torch.bfloat16).float()
    config = EngineConfig()
    of_plain, of_widened = fingerprint_of(plain, config), fingerprint_of(widened, config)
    assert (of_plain.weights, of_widened.weights) == ("", "bfloat16")
    assert of_plain.dtype == of_widened.dtype and of_plain.key != of_widened.key
    from omniserve import patch

    assert fingerprint_of(patch(widened, compile=False), config) == of_widened

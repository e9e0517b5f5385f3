"""The forecast of GPU steps: what it counts is what a reader counts by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.common.record import ROOT, read_row
from benchmarks.forecast.kernels import Work, bound_s, eager_work, expected_s, fake_mode
from benchmarks.gpu.engines import TINY
from omniserve.simulate.analytic import Efficiency
from omniserve.simulate.hardware import find_devices

_, H200 = find_devices("H200-141GB")


def test_bytes_and_flops_of_code_that_is_not_compiled() -> None:
    with fake_mode():
        table, weight = torch.empty(100, 64, dtype=torch.bfloat16), torch.empty(32, 64, dtype=torch.bfloat16)
        tokens = torch.zeros(4, dtype=torch.int64)
        looked_up, product, shifted = eager_work(lambda: F.linear(F.embedding(tokens, table), weight)[1:] + 1)
    assert looked_up.num_bytes == 4 * 8 + 2 * (2 * 4 * 64), "of the table what is looked up"
    assert (product.num_bytes, product.flops) == (2 * (4 * 64 + 32 * 64 + 4 * 32), 2 * 4 * 64 * 32)
    assert (shifted.num_bytes, shifted.flops) == (2 * 2 * (3 * 32), 0)


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [({"num_bytes": 4.8e9}, 1.0), ({"flops": 989e9}, 1.0), ({"bus_bytes": 50e6, "num_bytes": 4.8e6}, 1.0)],
)
def test_a_kernel_takes_as_long_as_the_slowest_of_memory_arithmetic_and_bus(
    fields: dict[str, float], seconds: float
) -> None:
    work = Work(kind="product", name="", **{"num_bytes": 0.0, **fields})  # type: ignore[arg-type]
    assert bound_s(work, H200) == pytest.approx(1e-3 * seconds)


def test_an_expected_time_is_a_share_of_the_peak_and_a_gap() -> None:
    work = Work(kind="prefill", name="", num_bytes=1.0, flops=989e9)
    assert expected_s(work, H200, Efficiency(), 2e-6) == pytest.approx(1e-3 / Efficiency().prefill_flops + 2e-6)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The forecasts for the tiny model, from a process of their own: the compiler must believe in a GPU."""
    path: Path = tmp_path_factory.mktemp("forecast") / "tiny.json"
    command = [sys.executable, "-m", "benchmarks.gpu_forecast", "--tiny", "--record", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    results = read_row(path)["results"][TINY.name]
    assert results["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2, "layers, K and V, heads, size, bytes"
    return list(results["steps"])


@pytest.mark.slow
def test_a_tiny_model_by_hand(steps: list[dict[str, Any]]) -> None:
    pytest.importorskip("triton")

    def of(**fields: int) -> dict[str, Any]:
        (found,) = (each for each in steps if fields.items() <= {"seats": 0, **each["step"]}.items())
        return found

    # q|k|v, o, gate|up, down, two layers of them, and the head: inputs and outputs.
    products = [*2 * [(64, 4 * 16 + 2 * 2 * 16), (64, 64), (64, 2 * 128), (128, 64)], (64, 512)]
    for batch in (1, 8, 64):
        short, long = (of(kind="decode", batch=batch, context=context, seats=0) for context in (1024, 8192))
        read_and_written = sum(i * o + batch * (i + o) for i, o in products)
        assert short["bytes_by_kind"]["product"] == 2 * read_and_written, "each weight once"
        keys = batch * (8192 - 1024)
        assert long["bytes_by_kind"]["decode"] - short["bytes_by_kind"]["decode"] == keys * 256
        assert short["bytes_by_kind"]["decode"] >= batch * 1024 * 256
        assert short["flops"] == 2 * batch * sum(i * o for i, o in products) + batch * 2 * 4 * 4 * 16 * 1024
        assert short["bytes"] == sum(short["bytes_by_kind"].values())
        times, slower = short["devices"]["H200-141GB"], short["devices"]["H100-80GB"]
        weights = sum(i * o for i, o in products) + 5 * 64  # and the norms'
        assert times["floor_s"] == pytest.approx((2 * weights + batch * 1024 * 256) / 4.8e12)
        assert times["floor_s"] < times["expected_s"] < slower["expected_s"]

    plain = of(kind="decode", batch=8, context=1024, seats=0)
    for seats in (16, 64):
        seated = of(kind="decode", batch=8, context=1024, seats=seats)
        assert seated["bus_bytes"] == 2 * seats * ((4 + 2 * 2) * 16 * 2 + 8), "q, k, v and a flag in each layer"
        assert seated["kernels"] - plain["kernels"] >= 2 * 3, "in each layer three kernels that move rows"
        assert seated["devices"]["H200-141GB"]["expected_s"] > plain["devices"]["H200-141GB"]["expected_s"]

    chunk = of(kind="chunk", num_tokens=512, context=7680)
    layers, head = products[:-1], products[-1]
    seen = 512 * 7680 + 512 * 513 // 2
    assert chunk["flops"] == 2 * 512 * sum(i * o for i, o in layers) + 2 * head[0] * head[1] + 2 * 4 * 4 * 16 * seen

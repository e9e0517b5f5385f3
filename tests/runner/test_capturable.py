"""Steps that no CUDA graph can hold are refused by name, or run as they are."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from omniserve import EngineConfig, ExecutionConfig
from omniserve.layers.tracing.traced import TracedFamily
from omniserve.ops.attention import resolve_attention
from omniserve.runner.capturable import wants_graphs, why_not_captured
from tests.parity.models import tiny_model

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("family", "dtype", "capability", "is_captured"),
    [
        ("mixtral", torch.bfloat16, (9, 0), True),
        ("mixtral", torch.bfloat16, (10, 0), True),
        ("mixtral", torch.bfloat16, (8, 0), False),
        ("mixtral", torch.bfloat16, (12, 0), False),
        ("qwen3_moe", torch.float16, (9, 0), False),
        ("mixtral_batched", torch.float32, (8, 0), True),
        ("llama", torch.float32, (8, 0), True),
    ],
)
def test_experts_whose_products_wait_for_the_device(
    family: str, dtype: torch.dtype, capability: tuple[int, int], is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = TracedFamily(tiny_model(family))
    assert not layers.why_not_captured(), "it is not on a GPU"
    layers.embedding_and_head.probe = SimpleNamespace(device=CUDA, dtype=dtype)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = layers.why_not_captured()
    assert not reason if is_captured else "set step_graphs='off'" in reason


def model_on(device: torch.device, reason: str, *, has_between: bool = False) -> SimpleNamespace:
    family = SimpleNamespace(why_not_captured=lambda: reason)
    return SimpleNamespace(device=device, spec=None, family=family, has_between=has_between)


@pytest.mark.parametrize("device", [CUDA, torch.device("cpu")])
def test_layers_that_do_not_attend_keep_steps_out_of_constant_shapes(device: torch.device) -> None:
    config = EngineConfig(execution=ExecutionConfig(attention="flex", step_graphs="on"))
    with pytest.raises(ValueError, match="some layers do not attend"):
        wants_graphs(config, model_on(device, "", has_between=True), resolve_attention("flex", CUDA))


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_what_is_asked_for_is_refused_and_what_is_not_is_left_out(
    attention: str, caplog: pytest.LogCaptureFixture
) -> None:
    attend = resolve_attention(attention, CUDA)
    reason = "set attention='triton' or 'flex'" if attention == "sdpa" else "experts wait"
    model = model_on(CUDA, "experts wait")

    def constant_steps(step_graphs: str) -> bool:
        return wants_graphs(
            EngineConfig(execution=ExecutionConfig(attention=attention, step_graphs=step_graphs)), model, attend
        )

    with pytest.raises(ValueError, match=f"step_graphs='on' is not possible: .*{reason}"):
        constant_steps("on")
    with caplog.at_level(logging.WARNING):
        assert not constant_steps("auto")
    assert reason in caplog.text


def test_without_a_gpu_there_is_nothing_to_refuse() -> None:
    attend = resolve_attention("sdpa", torch.device("cpu"))
    assert not why_not_captured(
        model_on(torch.device("cpu"), "experts wait"), attend, EngineConfig(execution=ExecutionConfig(attention="sdpa"))
    )

"""Steps in constant shapes: the tokens are Hugging Face's, whatever is padded."""

from __future__ import annotations

import pytest
import torch

from omniserve import Engine, EngineConfig
from omniserve.graphs import steps
from omniserve.layers.merged import MergedLinear
from omniserve.sched import SCHEDULERS
from tests.graphs.tape import TapeRecorder
from tests.parity.engine_histories import Tally, run_histories, run_history
from tests.parity.test_engine import DEVICES, model_and_reference


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheduler", SCHEDULERS.names())
def test_every_scheduler(scheduler: str, device: str) -> None:
    model, reference = model_and_reference("llama", device)
    tally = Tally()
    for seed, kv in enumerate(("tiered", "bidirectional"), 700):
        run_history(
            model, reference, seed, scheduler=scheduler, kv=kv, step_graphs="on", async_steps=seed % 2 == 0, tally=tally
        )
    assert tally.finished > 0
    # ConServe's best-effort rows may leave any of its steps.
    assert tally.constant_decodes > 0 or scheduler == "conserve"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "opt", "qwen3_moe", "mixtral_batched", "phi3"])
def test_piggybacked_tokens(family: str, device: str) -> None:
    model, reference = model_and_reference(family, device)

    def run(step_graphs: str, *more: str) -> None:
        run_histories(
            model, reference, range(710, 713), reach=("host_tokens", "swaps_out", *more), has_profile=False,
            host_kv_bytes=1 << 20, max_host_requests=16, step_graphs=step_graphs, async_steps=True,
        )  # fmt: skip

    if device == "cuda" and family == "qwen3_moe":  # float32: its grouped products wait for the device
        with pytest.raises(ValueError, match="step_graphs='on' is not possible: experts implementation 'grouped_mm'"):
            run("on")
        run("auto")
    else:
        run("on", "constant_decodes", "constant_chunks")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_merged_projections(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: queries, keys and values are views of one product."""
    monkeypatch.setattr("omniserve.layers.merged._DEVICES", {"cpu"})
    model, reference = model_and_reference.__wrapped__(family, "cpu")
    assert sum(isinstance(module, MergedLinear) for module in model.modules()) == 5 * len(model.model.layers)
    for step_graphs in ("on", "off"):
        run_histories(
            model, reference, range(760, 762), reach=("host_tokens", "swaps_out"), has_profile=False,
            host_kv_bytes=1 << 20, max_host_requests=16, step_graphs=step_graphs, async_steps=True,
        )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("deaths", [False, True])
def test_late_failing_and_dying_host_attention(deaths: bool, device: str) -> None:
    model, reference = model_and_reference("llama", device)
    run_histories(
        model, reference, range(720, 725), reach=("host_tokens", "failures"), scheduler="omniserve", faults=True,
        deaths=deaths, step_graphs="on", async_steps=True,
    )  # fmt: skip


@pytest.mark.parametrize("scheduler", ["omniserve", "sarathi"])
def test_recordings_do_what_the_code_did(scheduler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with CUDA graphs, Python runs once, and later steps only write other inputs to the same places."""
    model, reference = model_and_reference("llama", "cpu")
    spec = model.__dict__["omniserve"].spec
    shape = (64, spec.num_heads, spec.head_size)
    monkeypatch.setattr(steps, "PlainRecorder", lambda: TapeRecorder(shape, torch.float32, torch.device("cpu")))
    run_histories(
        model, reference, range(730, 732), reach=("constant_decodes", "constant_chunks"), scheduler=scheduler,
        step_graphs="on", async_steps=True, attention="tests.graphs.tape:attend", max_step_tokens=16,
        max_num_requests=8,
    )  # fmt: skip


def test_warming_attention_up_writes_no_kv() -> None:
    model, _ = model_and_reference("gemma2", "cpu")
    config = EngineConfig(
        block_size=8, device_kv_bytes=1 << 20, host_kv_bytes=0, max_model_len=64, compile=False, step_graphs="on"
    )
    with Engine(model, config) as engine, torch.inference_mode():
        constant = engine.runner.constant
        assert constant is not None
        engine.runner._storage.k_LBKSH.normal_()
        before = engine.runner._storage.k_LBKSH.clone()
        for num_rows in (1, 16, 40):
            constant._layers.warm_up_attention(num_rows, 8)
        assert torch.equal(engine.runner._storage.k_LBKSH, before)

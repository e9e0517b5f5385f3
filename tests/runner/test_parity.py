"""Steps in constant shapes: the tokens are Hugging Face's, whatever is padded."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from omniserve import Engine, EngineConfig, ExecutionConfig
from omniserve.core.plan import DeviceChunk, StepPlan
from omniserve.layers.weights.merged import MergedLinear
from omniserve.runner.cuda_graphs import graph_runner
from omniserve.runner.cuda_graphs.budget import Budget
from omniserve.sched import SCHEDULERS
from tests.parity.engine_histories import Reference, Tally, run_histories, run_history
from tests.parity.test_engine import DEVICES, model_and_reference
from tests.quick import slow_except
from tests.runner.tape import TapeCapture
from tests.sched import preemptible


@pytest.mark.slow
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
    assert tally.constant_decodes > 0 or scheduler in ("conserve", "conserve-paper")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "family",
    slow_except(("gemma2",), ["llama", "gemma2", "opt", "qwen3_moe", "mixtral_batched", "phi3", "llama4", "gpt_oss"]),
)
def test_piggybacked_tokens(family: str, device: str) -> None:
    model, reference = model_and_reference(family, device)

    def run(step_graphs: str, *more: str) -> None:
        run_histories(
            model, reference, range(710, 711), reach=("host_tokens", "swaps_out", *more), has_profile=False,
            host_kv_bytes=1 << 20, max_host_requests=16, step_graphs=step_graphs, async_steps=True,
        )  # fmt: skip

    if device == "cuda" and family in ("qwen3_moe", "gpt_oss"):  # float32: its grouped products wait for the device
        with pytest.raises(ValueError, match="step_graphs='on' is not possible: experts implementation 'grouped_mm'"):
            run("on")
        run("auto")
    else:
        run("on", "constant_decodes", "constant_chunks")


@pytest.mark.parametrize(("family", "step_graphs"), [("llama", "on"), ("qwen3", "off")])
def test_merged_projections(family: str, step_graphs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values are views of one product, as on a GPU."""
    monkeypatch.setattr("omniserve.layers.weights.merged._DEVICES", {"cpu"})
    monkeypatch.setattr("omniserve.layers.weights.packed.HAS_VECTOR_KERNEL", False)
    model, reference = model_and_reference.__wrapped__(family, "cpu")
    assert sum(isinstance(module, MergedLinear) for module in model.modules()) == 5 * len(model.model.layers)
    run_histories(
        model, reference, range(760, 761), reach=("host_tokens", "swaps_out"), has_profile=False,
        host_kv_bytes=1 << 20, max_host_requests=16, step_graphs=step_graphs, async_steps=True,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("deaths", slow_except((True,), [False, True]))
def test_late_failing_and_dying_host_attention(deaths: bool, device: str) -> None:
    model, reference = model_and_reference("llama", device)
    run_histories(
        model, reference, range(720, 721), reach=("host_tokens", "failures"), scheduler="omniserve", faults=True,
        deaths=deaths, step_graphs="on", async_steps=True,
    )  # fmt: skip


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> tuple[PreTrainedModel, Reference]:
    """A model, and its reference, whose engines capture steps on tapes: Python runs once, as with CUDA graphs."""
    model, reference = model_and_reference("llama", "cpu")
    spec = model.__dict__["omniserve"].spec
    shape = (64, spec.num_heads, spec.head_size)
    monkeypatch.setattr(graph_runner, "Capture", lambda: TapeCapture(shape, torch.float32, torch.device("cpu")))
    return model, reference


_TAPES: dict[str, Any] = {
    "step_graphs": "on", "attention": "tests.runner.tape:attend", "max_num_batched_tokens": 16, "max_num_seqs": 8,
}  # fmt: skip


@pytest.mark.parametrize("scheduler", ["omniserve", "sarathi"])
def test_graphs_do_what_the_code_did(scheduler: str, tapes: tuple[PreTrainedModel, Reference]) -> None:
    """Later steps only write other inputs to the same places."""
    run_histories(
        *tapes, range(730, 731), reach=("constant_decodes", "constant_chunks"), scheduler=scheduler, async_steps=True,
        **_TAPES,
    )  # fmt: skip


@pytest.mark.parametrize("scheduler", slow_except((preemptible.NAME,), [preemptible.NAME, preemptible.DEFERRING]))
def test_rows_leave_between_the_parts_of_a_step(scheduler: str, tapes: tuple[PreTrainedModel, Reference]) -> None:
    """The input of a layer is kept, so that the rows can go on there later, and the others at once without graphs."""
    defers = scheduler == preemptible.DEFERRING
    more: dict[str, Any] = {"classes": preemptible.CLASSES, "defer_classes": True} if defers else {}
    run_histories(
        *tapes, range(750, 752), reach=("halted", "left_graphs", *(["late_joins"] if defers else [])),
        scheduler=scheduler, has_profile=defers, kv="tiered", host_kv_bytes=1 << 20, max_host_requests=16,
        faults=lambda seed: seed % 2 == 0, **_TAPES, **more,
    )  # fmt: skip


@pytest.mark.parametrize(("kv", "share"), [("tiered", 0.0), ("tiered", 0.5), ("bidirectional", 0.2)])
def test_some_graphs_or_none(
    kv: str, share: float, tapes: tuple[PreTrainedModel, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever part of the table the budget has room for, steps are padded to a captured shape or run eagerly."""
    rng = random.Random(f"{kv} {share}")
    monkeypatch.setattr(Budget, "admits", lambda self, kind: rng.random() < share)
    tally = run_histories(
        *tapes, range(740, 741), reach=("host_tokens", *(["constant_decodes"] if share else [])), kv=kv,
        scheduler="omniserve", has_profile=False, host_kv_bytes=1 << 20, max_host_requests=16, async_steps=True,
        **_TAPES,
    )  # fmt: skip
    assert (tally.constant_decodes > 0) == (share > 0)


@pytest.mark.parametrize("kind", ["decodes", "chunks"])
def test_blocks_that_run_from_the_right_do_not_leave_the_graphs(kind: str) -> None:
    """Steps outside of the graphs would need kernels for such blocks, which nothing has compiled."""
    model, _ = model_and_reference("llama", "cpu")
    config = EngineConfig(
        block_size=8, device_kv_bytes=1 << 20, host_kv_bytes=1 << 20, max_model_len=64,
        execution=ExecutionConfig(compile=False, step_graphs="on"), kv="bidirectional",
    )  # fmt: skip
    tokens = (5,) if kind == "decodes" else (5, 6, 7)
    chunk = DeviceChunk(
        request_id="be", token_ids=tokens, start=9, block_ids=(1, 2), samples=True, is_reversed=True
    )  # fmt: skip
    with Engine(model, config) as engine:
        assert engine.runner.graphs.shape_for(StepPlan(step_id=0, chunks=(chunk,))) is not None

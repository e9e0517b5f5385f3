"""Replayed decode steps: the bits are those of the layer loop, and what cannot be replayed runs there."""

from __future__ import annotations

import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from omniserve import Engine, EngineConfig, ExecutionConfig, Request, SamplingParams
from omniserve.core.config import LoRAConfig
from omniserve.core.plan import StepPlan
from omniserve.layers.noted_half import Buffers, Noter, NotNoted
from omniserve.layers.patching import patched_model
from omniserve.ops.replay import Replay
from omniserve.runner.replayed_steps import MOST_ROWS, ReplayedSteps
from omniserve.runner.step_inputs import LayersOutput
from tests.layers.weights.test_lora import save
from tests.parity.models import tiny_model
from tests.quick import slow_except

pytestmark = pytest.mark.usefixtures("few_objects")


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Compare each replayed step with the same step in the loop; return how many there were, by number of rows."""
    counts = Counter[int]()
    original = ReplayedSteps.run

    def compared(self: ReplayedSteps, plan: StepPlan) -> LayersOutput | None:
        output = original(self, plan)
        if output is not None:
            again = self._loop.run(plan)  # writes the same KV to the same slots
            assert torch.equal(output.hidden_TD, again.hidden_TD)
            assert torch.equal(output.sampled.rows, again.sampled.rows)
            assert output.sampled.request_ids == again.sampled.request_ids
            counts[len(plan.chunks)] += 1
        return output

    monkeypatch.setattr(ReplayedSteps, "run", compared)
    return counts


@pytest.mark.parametrize("family", slow_except(("gemma2",), ["llama", "gemma2", "opt", "phi3", "gpt_neox"]))
def test_steps_have_the_bits_of_the_loop(family: str, replayed: Counter[int]) -> None:
    """Requests come and end at different steps, and are preempted and recomputed in a pool that is short."""
    model = tiny_model(family)
    config = EngineConfig(device_kv_bytes=10 * _kv_block_bytes(model, 4), host_kv_bytes=0, block_size=4)
    requests = [
        Request(
            prompt_token_ids=range(1 + i, 6 + 2 * i), sampling=SamplingParams(max_tokens=4 + 3 * i, ignore_eos=True),
            service_class="LS" if i % 2 else "BE",
        )
        for i in range(5)
    ]  # fmt: skip
    with Engine(model, config) as engine:
        engine.generate(requests)
        assert engine.stats().scheduler.preemptions > 0
    assert len(replayed) > 1 and sum(replayed.values()) > 20


def test_steps_with_adapters_have_the_bits_of_the_loop(replayed: Counter[int], tmp_path: Path) -> None:
    model = tiny_model("llama")
    config = EngineConfig(
        device_kv_bytes=1 << 20, host_kv_bytes=0, lora=LoRAConfig(max_loras=2, max_lora_rank=8), block_size=4
    )
    with Engine(model, config) as engine:
        for seed, name in enumerate("abc"):
            engine.load_lora(name, save(tmp_path / name, model, "q_proj", "up_proj", "down_proj", seed=seed))
        sampling = SamplingParams(max_tokens=8, ignore_eos=True)
        names = [None, "a", "b", "c", "a"]
        asked = [Request(prompt_token_ids=[1, 2, 3], sampling=sampling, lora=name) for name in names]
        outputs = [done.token_ids for done in engine.generate(asked)]
    assert outputs[1] == outputs[4] and len(set(outputs)) == 4
    assert sum(replayed.values()) > 5


def _kv_block_bytes(model: PreTrainedModel, block_size: int) -> int:
    return patched_model(model, compile=True).spec.kv_block_bytes(block_size)


def decoded(engine: Engine, num_requests: int) -> list[tuple[int, ...]]:
    """Return the tokens of requests that decode side by side."""
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    prompts = [[1 + i, 2, 3 + i] for i in range(num_requests)]
    return [
        each.token_ids for each in engine.generate([Request(prompt_token_ids=p, sampling=sampling) for p in prompts])
    ]


def compiled_engine(**execution: Any) -> Engine:
    """Return an engine with a tiny compiled Llama in bfloat16."""
    config = EngineConfig(
        device_kv_bytes=8 << 20, host_kv_bytes=0, max_num_seqs=64, max_num_batched_tokens=256,
        execution=ExecutionConfig(**execution),
    )  # fmt: skip
    return Engine(tiny_model("llama", dtype=torch.bfloat16), config)


def test_steps_of_more_rows_run_in_the_loop(replayed: Counter[int]) -> None:
    with compiled_engine() as engine:
        side_by_side = decoded(engine, MOST_ROWS + 1)
        assert not replayed
        assert decoded(engine, MOST_ROWS) == side_by_side[:MOST_ROWS]
        assert replayed[MOST_ROWS] > 0


def test_step_graphs_off_replays_nothing(replayed: Counter[int]) -> None:
    with compiled_engine(step_graphs="off") as engine:
        decoded(engine, 1)
    assert not replayed


def test_a_half_that_calls_something_else_runs_from_python(
    replayed: Counter[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Noter, *_: Any) -> Any:
        raise NotNoted("it calls something")

    with compiled_engine() as engine:
        expected = decoded(engine, 2)
        assert replayed
    replayed.clear()
    monkeypatch.setattr(Noter, "note", refuse)
    with caplog.at_level(logging.INFO), compiled_engine() as engine:
        assert decoded(engine, 2) == expected
    assert not replayed
    assert caplog.text.count("decode steps run from Python: a layer's half cannot be replayed, for it calls") == 1


SOURCE = "def call(args):\n    x, = args\n    return (%s,)\n"


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        ("torch.ops.aten.mm(x, x)", "it uses torch.ops.aten"),
        ("torch.ops.omniserve.all_reduce(x)", "it uses torch.ops.omniserve.all_reduce"),
        ("torch.relu(x)", "it uses torch.relu"),
        ("extern_kernels.mm(x, x)", "it uses extern_kernels.mm"),
        ("assert_size_stride(x)", "it calls assert_size_stride"),
    ],
)
def test_other_calls_are_not_noted(result: str, complaint: str) -> None:
    names: dict[str, Any] = {"empty_strided_cpu": None, "extern_kernels": torch, "assert_size_stride": print}
    exec(SOURCE % result, names)
    with pytest.raises(NotNoted, match=re.escape(complaint)):
        Noter(Replay(), Buffers()).note(names["call"], [torch.zeros(2, 2)])


def test_a_function_of_another_kind_is_not_noted() -> None:
    with pytest.raises(NotNoted, match="is not what the compiler wrote"):
        Noter(Replay(), Buffers()).note(lambda arguments: arguments, [])


def test_layers_take_turns_with_the_buffers() -> None:
    buffers, taken = Buffers(), []
    for _ in range(4):
        buffers.begin_layer()
        taken.append(
            [buffers.rows((2, 3), torch.float32), buffers.rows((2, 3), torch.float32), buffers.rows((4,), torch.int32)]
        )
    addresses = [[each.data_ptr() for each in layer] for layer in taken]
    assert addresses[:2] == addresses[2:]
    assert len({*addresses[0], *addresses[1]}) == 6

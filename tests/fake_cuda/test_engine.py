"""A real engine on a GPU of fake tensors: each family's steps, captured and not, keep the rules of a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from omniserve import Request, SamplingParams
from omniserve.core.plan import PENDING_TOKEN, PiggybackEntry, PooledRows, PromptScores, StepPlan
from omniserve.core.work import MoveDirection, SlotCopy
from omniserve.layers.weights.merged import MergedLinear
from omniserve.runner.safepoint import LayerPreemption
from tests.events import WORK_DONE, kind_of
from tests.fake_cuda.engines import SEATS, chunk, engine_on
from tests.fake_cuda.runtime import FakeRuntime
from tests.fake_cuda.watch import is_on_device
from tests.parity.models import MODELS

# Their products wait for the device in other dtypes; see `why_not_captured`.
GROUPED = ("mixtral", "qwen3_moe")
# These have one linear for q, k and v, and one or none for gate and up, as Hugging Face has them.
FUSED_BY_THEMSELVES = ("phi3", "gpt_neox", "gpt_neox_serial")
# One of each that differs much from the others; phi3, opt and fp32 run in steps of their own shapes.
USUAL = ("llama", "gemma2", "gpt_neox", "qwen3_moe")
CHOSEN = ("gpt_neox", "qwen3_moe")
"""Families of the default run, one with linears and one with products that others lack; ``--slow`` runs the other usual
ones, too."""


def cases() -> list[Any]:
    usual = [
        pytest.param(family, torch.bfloat16, id=family, marks=() if family in CHOSEN else pytest.mark.slow)
        for family in USUAL
    ]
    return usual + [
        pytest.param(family, dtype, id=f"{family}-{dtype}", marks=pytest.mark.exhaustive)
        for dtype in (torch.bfloat16, torch.float32)
        for family in MODELS
        if dtype is torch.float32 or family not in USUAL
    ]


@pytest.mark.parametrize(("family", "dtype"), cases())
def test_captured_steps(family: str, dtype: torch.dtype, gpu: FakeRuntime) -> None:
    with engine_on(gpu, family, dtype) as fake:
        constant = fake.engine.runner.graphs
        if family in GROUPED and dtype is not torch.bfloat16:
            assert constant is None
            return
        assert constant is not None
        assert family not in GROUPED or fake.model.config._experts_implementation == "grouped_mm"
        merged = [module for module in fake.model.modules() if isinstance(module, MergedLinear)]
        assert bool(merged) == (family not in FUSED_BY_THEMSELVES)
        for name in ("a", "b", "host"):
            fake.sample(name)
        expected_rows = []

        assert set(fake.run(chunks=(chunk("a", 5),)).tokens) == {"a"}  # in pieces
        expected_rows.append(8)
        assert set(fake.run(chunks=(chunk("a", 1, 5), chunk("b", 1, 3))).tokens) == {"a", "b"}  # as a whole
        expected_rows.append(2)
        assert set(fake.pass_host_tier((chunk("a", 4), chunk("b", 1, 3))).tokens) == {"a", "b", "host"}
        expected_rows += [8 + SEATS] * 3
        assert set(fake.pass_host_tier((chunk("a", 1, 4),)).tokens) == {"a", "host"}
        expected_rows += [2 + SEATS] * 3
        assert set(fake.pass_host_tier().tokens) == {"host"}
        expected_rows += [SEATS] * 3

        width = fake.engine.spec.hidden_size
        assert [tuple(hidden.shape) for hidden in fake.hidden] == [(rows, width) for rows in expected_rows]
        assert constant.num_decode_steps == 7 and constant.num_chunk_steps == 4
        # A piece before and behind each attention, or one launch.
        assert gpu.num_replays == 7 + 4 * (fake.num_layers + 1)
        assert all(graph.launches for graph in gpu.graphs)


@pytest.mark.parametrize(
    ("family", "dtype", "attention"),
    [
        ("phi3", torch.bfloat16, "triton"),
        ("opt", torch.float32, "triton"),
        pytest.param("gemma2", torch.bfloat16, "sdpa", marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_steps_in_their_own_shapes(family: str, dtype: torch.dtype, attention: str, gpu: FakeRuntime) -> None:
    with engine_on(gpu, family, dtype, step_graphs="off", attention=attention) as fake:
        for name in ("a", "b", "host"):
            fake.sample(name)
        assert fake.engine.runner.graphs is None
        assert set(fake.run(chunks=(chunk("a", 5), chunk("b", 1, 9))).tokens) == {"a", "b"}
        assert set(fake.pass_host_tier((chunk("a", 3, 2), chunk("b", 1, 3))).tokens) == {"a", "b", "host"}
        assert set(fake.pass_host_tier().tokens) == {"host"}
        assert set(fake.run(chunks=(chunk("a", 3, is_reversed=True), chunk("b", 1))).tokens) == {"a", "b"}
        fake.run(chunks=(chunk("a", 1),), work=(SlotCopy(source_block=0, target_block=1, begin=2, end=5),))
        rows = [6, *[4 + SEATS] * 3, *[SEATS] * 3, 4, 1]
        width = fake.engine.spec.hidden_size
        assert [tuple(hidden.shape) for hidden in fake.hidden] == [(n, width) for n in rows]
        assert not gpu.graphs


@pytest.mark.parametrize("as_planned", [False, True])
def test_rows_that_leave_between_layers_and_go_on_later(gpu: FakeRuntime, as_planned: bool) -> None:
    with engine_on(gpu, "llama", torch.bfloat16, step_graphs="off", scheduler="conserve") as fake:
        fake.sample("a")
        fake.sample("b")
        must_leave = iter([] if as_planned else [{"b"}, set()])  # nobody is asked about rows that leave as planned
        leaves: dict[str, Any] = {"leaves_at": 1} if as_planned else {"is_preemptible": True}
        (strategy,) = (each for each in fake.engine.runner.strategies if isinstance(each, LayerPreemption))
        strategy.must_leave = lambda: next(must_leave)
        fake.may_wait = (
            not as_planned
        )  # for the layer before the last: a safepoint asked as layers are launched comes too early
        output = fake.run(chunks=(chunk("a", 1), chunk("b", 4, **leaves)))
        assert output.halted == {"b": 1} and set(output.tokens) == {"a"}
        fake.may_wait = False
        output = fake.run(chunks=(chunk("a", 1, 1), chunk("b", 4, from_layer=1)))
        assert not output.halted and set(output.tokens) == {"a", "b"}
        assert [len(hidden) for hidden in fake.hidden] == [1, 5]


def test_prompt_scores_read_back_what_they_tell_and_nothing_else(gpu: FakeRuntime) -> None:
    with engine_on(gpu, "llama", torch.bfloat16, step_graphs="off") as fake:
        fake.sample("a")
        scored = chunk("a", 4, scores=PromptScores(first_row=0, token_ids=(1, 1, 1), num_top=2))
        before = gpu.launches["download"]
        fake.may_wait = True  # for the scores
        output = fake.run(chunks=(scored,))
        assert [len(entry.top) for entry in output.prompt_logprobs["a"]] == [2, 2, 2]
        assert gpu.launches["download"] - before == 1 + 1, "the sample, and the scores"


def test_embeddings_wait_for_nothing_but_their_copy(gpu: FakeRuntime) -> None:
    with engine_on(gpu, "llama", torch.bfloat16, step_graphs="off") as fake:
        fake.sample("chat")
        for pooling, first_row in (("last", 3), ("mean", 0)):
            before = gpu.launches["download"]
            pooled = PooledRows(first_row=first_row, total=4 - first_row)
            output = fake.run(chunks=(chunk("chat", 1), chunk(pooling, 4, pooled=pooled)))
            assert set(output.tokens) == {"chat"}
            assert len(output.embeddings[pooling]) == fake.engine.spec.hidden_size
            assert gpu.launches["download"] - before == 1 + 1, "the sample, and the embedding"


def test_a_second_sub_batch_runs_on_the_device(gpu: FakeRuntime) -> None:
    with engine_on(gpu, "llama", torch.bfloat16, step_graphs="off", scheduler="neo") as fake:
        fake.sample("a")
        fake.sample("host")
        entry = PiggybackEntry(request_id="host", token_id=3, position=2, slot=1, epoch=0, block_ids=(0,))
        with gpu.lenient():  # it waits for the host tier in each layer, which is what it is for
            output = fake.run(chunks=(chunk("a", 3),), pipelined=(entry,))
        assert set(output.tokens) == {"a", "host"} and not output.lost


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_moves_wait_for_nothing(kv_dtype: str, gpu: FakeRuntime) -> None:
    """Blocks move in both directions, by the kernel that reads the pool where it lies, and by way of a staging
    buffer."""
    with engine_on(gpu, "llama", torch.bfloat16, host_kv_dtype=kv_dtype, step_graphs="off") as fake:
        for move_id, direction in enumerate(MoveDirection):
            for is_reversed in (False, True):
                event = fake.move(direction, move_id=2 * move_id + is_reversed, is_reversed=is_reversed)
                assert kind_of(event) == WORK_DONE, event.message
        # Two compiled at the start.
        assert gpu.launches["_copy_blocks_kernel"] == (4 + 2 if kv_dtype == "auto" else 0)


def test_a_token_goes_from_one_step_into_the_next_on_the_device(gpu: FakeRuntime) -> None:
    with engine_on(gpu, "llama", torch.bfloat16) as fake:
        runner = fake.engine.runner
        fake.sample("a")
        fake.sample("host")
        runner.launch(StepPlan(step_id=1, chunks=(chunk("a", 3), chunk("host", 2))))
        pending = dataclasses.replace(chunk("a", 1, 3), token_ids=(PENDING_TOKEN,))
        entry = PiggybackEntry(
            request_id="host", token_id=PENDING_TOKEN, position=2, slot=1, epoch=0, block_ids=(0,)
        )  # fmt: skip
        before = gpu.launches["aten::index_copy_"]
        step = runner.launch(StepPlan(step_id=2, chunks=(pending,), entries=(entry,), num_piggyback_seats=SEATS))
        assert gpu.launches["aten::index_copy_"] - before == 1
        assert step.sample is not None and is_on_device(step.sample.tokens_R)


@pytest.mark.parametrize(
    ("kv", "async_steps"),
    [
        ("tiered", True),
        pytest.param("tiered", False, marks=pytest.mark.exhaustive),
        pytest.param("incremental", True, marks=pytest.mark.exhaustive),
        pytest.param("bidirectional", True, marks=pytest.mark.exhaustive),
    ],
)
def test_a_scheduler_that_uses_both_tiers(kv: str, async_steps: bool, gpu: FakeRuntime) -> None:
    """Prompts, decodes, moves, entries and joins as they come; no launch waits for the device."""
    with engine_on(
        gpu, "llama", torch.bfloat16, kv=kv, async_steps=async_steps, device_kv_bytes=1 << 13, max_num_seqs=4,
        max_num_batched_tokens=16, scheduler_options={"min_residence_s": 0.0, "swap_in_delay_s": 0.0},
    ) as fake:  # fmt: skip
        sampling = SamplingParams(max_tokens=12)
        requests = [
            Request(prompt_token_ids=(1,) * 9, sampling=sampling, service_class=name) for name in ("LS", *["BE"] * 4)
        ]
        completions = fake.engine.generate(requests)
        assert [len(completion.token_ids) for completion in completions] == [12] * 5
        stats = fake.engine.stats()
        assert stats.scheduler.swaps_out and stats.scheduler.host_output_tokens and stats.piggyback_rows
        assert bool(gpu.num_replays) == (kv != "bidirectional"), "no graph holds blocks that run from the right"

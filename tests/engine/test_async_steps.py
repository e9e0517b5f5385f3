"""Steps that overlap in the engine: the same tokens, whoever ends while a later step is in flight."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from omniserve import Engine, EngineConfig, ExecutionConfig, FinishReason, Request, RequestOutput, SamplingParams, patch
from omniserve.core.plan import PENDING_TOKEN, DeviceChunk, PiggybackEntry, StepPlan
from omniserve.latency.trace import read_steps
from omniserve.ops.streams import AsyncHostCopy, upload
from omniserve.runner.step_inputs import PendingTokens
from tests.engine.test_engine import hf_tokens, request
from tests.parity.models import tiny_model
from tests.sched import preemptible
from tests.server.tokenizers_for_tests import byte_level_tokenizer

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_async(make_engine: MakeEngine) -> MakeEngine:
    return lambda **settings: make_engine(async_steps=True, **settings)


def run(engine: Engine) -> Iterator[RequestOutput]:
    while engine.has_unfinished:
        yield from engine.step()
        engine.scheduler.check_integrity()
        if engine.last_plan_was_empty:
            engine.wait(0.01)


def is_clean(engine: Engine) -> bool:
    stats = engine.stats()
    return stats.kv.device_used == stats.kv.host_used == 0 and not engine.scheduler._in_flight


def test_a_step_is_launched_before_the_one_before_it_is_collected(make_async: MakeEngine) -> None:
    engine = make_async()
    calls: list[str] = []
    launch, collect = engine.runner.launch, engine.runner.collect
    ids: dict[int, int] = {}

    def note_launch(plan: StepPlan) -> Any:
        launched = launch(plan)
        ids[id(launched)] = plan.step_id
        calls.append(f"launch {plan.step_id}")
        return launched

    def note_collect(launched: Any) -> Any:
        calls.append(f"collect {ids[id(launched)]}")
        return collect(launched)

    engine.runner.launch, engine.runner.collect = note_launch, note_collect  # type: ignore[method-assign]
    engine.add(request(5, 4))
    tokens = [token for output in run(engine) for token in output.new_token_ids]
    assert tokens == hf_tokens(5, 4)
    assert calls[:7] == ["launch 0", "launch 1", "collect 0", "launch 2", "collect 1", "launch 3", "collect 2"]
    assert calls[7] == "collect 3", (
        "the last token was certain to be the last: no step was made for the request after it"
    )


@pytest.mark.parametrize("async_steps", [False, True])
def test_a_step_without_tokens_is_waited_for_like_any_other(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, async_steps: bool
) -> None:
    """Otherwise the host would launch all of a long prompt's steps at once, and a new request would wait for them."""
    calls: list[str] = []

    class NotedEvent:
        def __init__(self, device: torch.device) -> None:
            self.number = sum(call.startswith("event") for call in calls)
            calls.append(f"event {self.number}")

        def wait(self, what: str) -> None:
            calls.append(f"wait {self.number}")

    monkeypatch.setattr("omniserve.runner.runner.StreamEvent", NotedEvent)
    engine = make_engine(async_steps=async_steps, max_num_batched_tokens=4)
    engine.add(request(18, 2))  # 5 steps, the last of which samples
    assert [token for output in run(engine) for token in output.new_token_ids] == hf_tokens(18, 2)
    if async_steps:  # one step ahead, no more
        expected = ["event 0", "event 1", "wait 0", "event 2", "wait 1", "event 3", "wait 2", "wait 3"]
    else:
        expected = [f"{word} {step}" for step in range(4) for word in ("event", "wait")]
    assert calls == expected


@pytest.mark.gpu
@pytest.mark.parametrize("async_steps", [False, True])
def test_no_more_than_a_step_is_ahead_of_a_gpu(async_steps: bool) -> None:
    model = tiny_model("llama").cuda()
    config = EngineConfig(
        block_size=8, device_kv_bytes=1 << 20, host_kv_bytes=0, max_num_batched_tokens=4,
        execution=ExecutionConfig(compile=False, async_steps=async_steps),
    )  # fmt: skip
    with Engine(patch(model, compile=False), config) as engine:
        ends: list[torch.cuda.Event] = []
        engine.add(request(40, 2))
        while engine.has_unfinished:
            engine.step()
            assert all(end.query() for end in (ends[:-1] if async_steps else ends))
            torch.cuda._sleep(10_000_000)  # the next step begins late
            ends.append(torch.cuda.Event())
            ends[-1].record()


@pytest.mark.parametrize("output", [1, 2, 9])
def test_generate_gives_hugging_faces_tokens(make_async: MakeEngine, output: int) -> None:
    engine = make_async()
    completions = engine.generate([request(3 + i, output, "BE" if i % 2 else "LS") for i in range(6)])
    assert [list(c.token_ids) for c in completions] == [hf_tokens(3 + i, output) for i in range(6)]
    assert not engine.has_unfinished and is_clean(engine)
    for times in (completion.times for completion in completions):
        assert times.first_scheduled_s is not None and times.first_token_s is not None and times.finished_s is not None
        assert times.arrival_s <= times.first_scheduled_s <= times.first_token_s <= times.finished_s


def test_a_stop_token_ends_a_request_that_the_next_step_holds(make_async: MakeEngine) -> None:
    tokens = hf_tokens(5, 12)
    engine = make_async()
    (alone,) = engine.generate([request(5, 12, stop_token_ids=(tokens[6],))])
    assert not engine.has_unfinished, "what was launched for it is collected, too"
    stopped, other = engine.generate([request(5, 12, stop_token_ids=(tokens[6],)), request(4, 12)])
    assert alone.token_ids == stopped.token_ids
    assert list(stopped.token_ids) == tokens[: tokens.index(tokens[6]) + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, tokens[6])
    assert list(other.token_ids) == hf_tokens(4, 12)
    assert not engine.has_unfinished and is_clean(engine)


def test_a_plan_that_is_not_certain_loses_who_ended_since_it_was_made(make_async: MakeEngine) -> None:
    tokens = hf_tokens(5, 12)
    for before in range(1, 9):  # at one of them the stop token is in flight as the step with safepoints is planned
        engine = make_async(scheduler=preemptible.NAME)
        names = {engine.add(request(5, 12, stop_token_ids=(tokens[5],))): tokens[: tokens.index(tokens[5]) + 1]}
        got: dict[str, list[int]] = {}
        outputs = [output for _ in range(before) for output in engine.step()]
        names[engine.add(request(7, 4, "BE"))] = hf_tokens(7, 4)
        for output in (*outputs, *run(engine)):
            got.setdefault(output.request_id, []).extend(output.new_token_ids)
        assert got == names
        assert is_clean(engine)


def test_the_context_ends_a_request_at_the_same_token(make_async: MakeEngine) -> None:
    engine = make_async(max_model_len=9)
    (completion,) = engine.generate([request(5, 4)])
    assert list(completion.token_ids) == hf_tokens(5, 4) and completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("service_class", ["LS", "BE"])
def test_abort_and_reuse_of_an_id_while_its_step_is_in_flight(make_async: MakeEngine, service_class: str) -> None:
    for after in range(6):
        engine = make_async()
        engine.add(Request(prompt_token_ids=[9, 8, 7], request_id="mine", service_class=service_class))
        others = [engine.add(request(4, 8)), engine.add(request(6, 8, "BE"))]
        got: dict[str, list[int]] = {name: [] for name in ("mine", *others)}
        for _ in range(after):
            for output in engine.step():
                got[output.request_id] += output.new_token_ids
        assert engine.abort("mine") and not engine.abort("mine")
        again = Request(
            prompt_token_ids=[1, 2, 3, 4, 5], request_id="mine", sampling=SamplingParams(max_tokens=7),
            service_class=service_class,
        )  # fmt: skip
        got["mine"] = []
        assert engine.add(again) == "mine"
        for output in run(engine):
            got[output.request_id] += output.new_token_ids
        assert got == {"mine": hf_tokens(5, 7), others[0]: hf_tokens(4, 8), others[1]: hf_tokens(6, 8)}
        assert is_clean(engine)


def test_aborting_all_leaves_a_step_that_is_only_collected(make_async: MakeEngine) -> None:
    engine = make_async()
    ids = [engine.add(request(5, 20)) for _ in range(3)]
    for _ in range(3):
        engine.step()
    for request_id in ids:
        engine.abort(request_id)
    assert engine.has_unfinished
    assert engine.step() == []
    assert not engine.has_unfinished and is_clean(engine)


def test_non_finite_logits_fail_a_request_that_the_next_step_holds() -> None:
    model = tiny_model("llama", seed=9)
    with torch.no_grad():
        model.get_input_embeddings().weight[77] = torch.nan
    config = EngineConfig(
        execution=ExecutionConfig(compile=False, async_steps=True), device_kv_bytes=1 << 20, host_kv_bytes=0
    )
    with Engine(model, config) as engine:
        bad = Request(prompt_token_ids=[5, 77, 6], sampling=SamplingParams(max_tokens=8))
        good = Request(prompt_token_ids=[5, 7, 6], sampling=SamplingParams(max_tokens=8))
        failed, fine = engine.generate([bad, good])
        assert failed.finish_reason is FinishReason.ERROR and "non-finite" in str(failed.stop_reason)
        assert failed.token_ids == () and len(fine.token_ids) == 8
        assert is_clean(engine)


SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "logprobs": 2},
    {"temperature": 1.0, "seed": 3, "top_k": 9, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 1.3, "seed": 4, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"repetition_penalty": 1.8, "logprobs": 0},
    {"logit_bias": ((3, 4.0), (5, -100.0))},
    {"prompt_logprobs": 2},
    {"temperature": 1.0},
    {},
)


def test_every_way_of_sampling_gives_what_it_gives_without_overlap(make_engine: MakeEngine) -> None:
    requests = [request(4 + i, 14, "BE" if i % 2 else "LS", **sampling) for i, sampling in enumerate(SAMPLINGS)]
    for memory in (64, 12):
        want, got = (
            make_engine(device_blocks=memory, host_blocks=0, async_steps=overlaps).generate(requests)
            for overlaps in (False, True)
        )
        for one, other in zip(want, got, strict=True):
            assert one.token_ids == other.token_ids
            for a, b in zip(one.logprobs, other.logprobs, strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)  # fp32 rounding: other batches
            assert [entry.token_id for entry in one.prompt_logprobs] == [e.token_id for e in other.prompt_logprobs]


def test_embeddings_are_what_they_are_without_overlap(make_engine: MakeEngine) -> None:
    poolings = [{"pooling": pooling} for pooling in ("last", "mean", "mean", "last")]
    requests = [request(30 + i, 0, "BE" if i % 2 else "LS", **fields) for i, fields in enumerate(poolings)]
    chats = [request(4 + i, 14, "BE" if i % 2 else "LS") for i in range(4)]
    for memory in (64, 12):
        want, got = (
            make_engine(device_blocks=memory, host_blocks=0, async_steps=overlaps, max_num_batched_tokens=9).generate(
                [*requests, *chats]
            )
            for overlaps in (False, True)
        )
        for one, other in zip(want, got, strict=True):
            assert one.token_ids == other.token_ids
            assert one.embedding == pytest.approx(other.embedding, abs=1e-4)  # fp32 rounding: other batches
        assert all(len(each.embedding) > 1 for each in got[:4])


def test_stop_strings_and_grammars(model: PreTrainedModel) -> None:
    tokenizer = byte_level_tokenizer()
    vocab, end = len(tokenizer) + 8, tokenizer.eos_token_id
    made = tiny_model("llama", vocab_size=vocab, eos_token_id=end)
    made.generation_config.eos_token_id = end
    patch(made, compile=False)

    def completions(overlaps: bool, stop: tuple[str, ...]) -> list[tuple[Any, ...]]:
        config = EngineConfig(
            execution=ExecutionConfig(compile=False, async_steps=overlaps), device_kv_bytes=1 << 20, host_kv_bytes=0
        )
        requests = [
            Request(
                prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=30, grammar='start: "abc" /[0-9]{1,4}/')
            ),
            Request(prompt_token_ids=[4, 5, 6], sampling=SamplingParams(max_tokens=30, ignore_eos=True, stop=stop)),
            Request(prompt_token_ids=[7, 8], sampling=SamplingParams(max_tokens=9, ignore_eos=True)),
        ]
        with Engine(made, config, tokenizer=tokenizer) as engine:
            done = engine.generate(requests)
            assert is_clean(engine)
        return [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in done]

    text = completions(False, ())[1][1]
    stop = (text[len(text) // 2 : len(text) // 2 + 2],)
    want = completions(False, stop)
    assert want[1][3] == stop[0] and want[0][1].startswith("abc")
    assert completions(True, stop) == want


def test_a_request_decodes_on_the_host_tier_with_pending_tokens(make_async: MakeEngine) -> None:
    engine = make_async(device_blocks=10, host_blocks=80)
    pending = 0
    launch = engine.runner.launch

    def note(plan: StepPlan) -> Any:
        nonlocal pending
        pending += sum(entry.token_id == PENDING_TOKEN for entry in plan.entries)
        return launch(plan)

    engine.runner.launch = note  # type: ignore[method-assign]
    completions = engine.generate([request(12 + i, 30, "BE") for i in range(6)])
    assert [list(c.token_ids) for c in completions] == [hf_tokens(12 + i, 30) for i in range(6)]
    assert engine.stats().scheduler.host_output_tokens > 0 and pending > 0 and is_clean(engine)


def test_closing_drops_what_is_in_flight(make_async: MakeEngine) -> None:
    engine = make_async()
    engine.add(request(5, 20))
    engine.step()
    engine.step()
    engine.close()
    engine.close()


def test_a_trace_and_on_step_see_each_step_once(make_async: MakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    engine = make_async(trace_steps=str(path))
    seen: list[tuple[int, float]] = []
    engine.on_step = lambda plan, host_works, seconds: seen.append((plan.step_id, seconds))
    tokens = hf_tokens(5, 12)
    engine.generate([request(5, 12, stop_token_ids=(tokens[4],)), request(7, 12, "BE")])
    steps = read_steps(path).steps
    assert [step.step for step in steps] == [step_id for step_id, _ in seen]
    assert all(seconds > 0 for _, seconds in seen)
    assert engine.stats().step_seconds == pytest.approx(sum(seconds for _, seconds in seen))
    # They follow one another without overlap or gap.
    for one, other in itertools.pairwise(steps):
        assert other.started_s == pytest.approx(one.started_s + one.measured_s)
    assert sum(len(step.outcomes) for step in steps) == 4


def test_pending_tokens_go_into_their_rows() -> None:
    pending = PendingTokens(torch.device("cpu"))
    chunk = {"block_ids": (0,), "samples": True}
    entry = {"position": 3, "epoch": 1, "block_ids": (0,)}
    plan = StepPlan(
        step_id=7,
        chunks=(
            DeviceChunk(request_id="a", token_ids=(4, 5), start=0, **chunk),
            DeviceChunk(request_id="b", token_ids=(6, PENDING_TOKEN), start=0, **chunk),
            DeviceChunk(request_id="c", token_ids=(PENDING_TOKEN,), start=2, **chunk),
        ),
        entries=(
            PiggybackEntry(request_id="d", token_id=8, slot=0, **entry),
            PiggybackEntry(request_id="e", token_id=PENDING_TOKEN, slot=1, **entry),
        ),
        num_piggyback_seats=4,
    )
    with pytest.raises(RuntimeError, match=r"step 7 waits for tokens of \['b', 'c', 'e'\]"):
        pending.fill(torch.zeros(9, dtype=torch.int64), plan)
    pending.note(["e", "x", "c", "b"], torch.tensor([50, 51, 52, 53]))
    rows = torch.tensor([4, 5, 6, -1, -1, 8, -1, 0, 0])
    pending.fill(rows, plan)
    assert rows.tolist() == [4, 5, 6, 53, 52, 8, 50, 0, 0]
    padded = torch.tensor([4, 5, 6, -1, -1, 0, 0, 0, 8, -1, 0, 0])  # device rows padded to a bucket of 8
    pending.fill(padded, plan, first_seat=8)
    assert padded.tolist() == [4, 5, 6, 53, 52, 0, 0, 0, 8, 50, 0, 0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_download_brings_tensors_as_they_are(device: str) -> None:
    host = [torch.tensor([3, -1]), torch.tensor([[0.1, torch.inf], [-2.5, 7.0]]), torch.zeros(0, 3)]
    got = AsyncHostCopy([upload(tensor, torch.device(device)) for tensor in host]).wait()
    for tensor, want in zip(got, host, strict=True):
        assert tensor.device.type == "cpu" and tensor.shape == want.shape and tensor.tolist() == want.tolist()

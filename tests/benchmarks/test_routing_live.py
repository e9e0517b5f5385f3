"""The benchmark of routers before engines that sleep: its requests, and the engines on a clock of the test's own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks import routing_live
from benchmarks.common import sleeping_engine
from benchmarks.common.client import BE_TIER, LS_TIER
from benchmarks.routing_live import Seen, Workload, asks
from omniserve.core.load import PROMPT_SIZES
from omniserve.core.request import Request, SamplingParams

WORKLOAD = Workload(engines=2, seconds=60.0, singles_per_s=0.5, chats_per_s=0.2, be_per_flood=3)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of the forms that the benchmark reads."""
    folder, rng = tmp_path_factory.mktemp("traces"), random.Random(0)
    (folder / "lengths").mkdir()
    rows = [f"{i * 0.5},{rng.randrange(20, 600)},{rng.randrange(2, 100)}" for i in range(2000)]
    (folder / "servegen_mmid_1h.csv").write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]))
    for name in ("sharegpt_v3_first_turn", "arxiv_summarization_llama2"):
        pairs = [f"{rng.randrange(20, 3000)},{rng.randrange(2, 300)}" for _ in range(50)]
        (folder / "lengths" / f"{name}.csv").write_text("\n".join(["input_tokens,output_tokens", *pairs]))
    return folder


def test_a_seed_has_the_same_requests_each_time(traces: Path) -> None:
    first, again, other = (asks(WORKLOAD, traces, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert all(0 <= ask.at_s <= WORKLOAD.seconds + 0.5 and ask.max_tokens >= 1 for ask in first)
    best_effort = [ask for ask in first if ask.tier == BE_TIER]
    assert len(best_effort) == 3 * 2 * 3, "three floods, of three requests for each of two engines"


def test_chats_repeat_what_was_said_and_others_begin_alike_by_no_chance(traces: Path) -> None:
    prompts = [ask.prompt for ask in asks(WORKLOAD, traces, 3) if ask.tier == LS_TIER]
    repeated = [prompt for prompt in prompts if any(prompt != other and prompt.startswith(other) for other in prompts)]
    assert repeated
    assert len({ask.prompt[:16] for ask in asks(WORKLOAD, traces, 3) if ask.tier == BE_TIER}) == 18


def test_objectives_are_judged_as_the_client_saw_them() -> None:
    def is_kept(num_events: int, first_s: float, last_s: float) -> bool:
        return Seen(LS_TIER, 11, first_s=first_s, last_s=last_s, num_events=num_events, status=200).kept(WORKLOAD)

    assert is_kept(12, 1.9, 3.9), "eleven tokens, and the end of the stream"
    assert not is_kept(12, 2.1, 3.0), "it began too late"
    assert not is_kept(12, 1.0, 3.1), "its pace was too slow"
    assert is_kept(6, 1.0, 2.0) and not is_kept(6, 1.0, 2.1), "six of its tokens have come"
    assert not Seen(LS_TIER, 11, status=429).kept(WORKLOAD)


class Clock:
    """Stands for the module ``time``: sleeping is all that takes time."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_sleeping_engine_takes_as_long_as_its_machine_would(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(sleeping_engine, "time", clock)
    taken_s = {}
    for speed in (1.0, 0.5):
        engine = sleeping_engine.SleepingLoader(speed=speed, noise=0.0)(print)
        began_s, num_tokens = clock.now_s, 0
        for service_class in ("LS", "BE"):
            sampling = SamplingParams(max_tokens=5, ignore_eos=True)
            engine.add(Request(prompt_token_ids=[7] * 300, sampling=sampling, service_class=service_class))
        assert len(engine.load(2).ttft_s["LS"]) == len(PROMPT_SIZES)
        while engine.has_unfinished:
            num_tokens += sum(len(output.new_token_ids) for output in engine.step())
        assert num_tokens == 10
        taken_s[speed] = clock.now_s - began_s
        stats = engine.stats()
        assert stats.latency.drift == 1.0 and stats.step_seconds == pytest.approx(taken_s[speed])
    assert 1.5 < taken_s[0.5] / taken_s[1.0] < 2.1, "a machine of half the speed, with the same overheads"


def test_steps_that_end_late_show_in_the_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(sleeping_engine, "time", clock)
    sleep = clock.sleep
    monkeypatch.setattr(clock, "sleep", lambda seconds: sleep(1.25 * seconds))
    engine = sleeping_engine.SleepingLoader(noise=0.0)(print)
    engine.add(Request(prompt_token_ids=[7] * 50, sampling=SamplingParams(max_tokens=20, ignore_eos=True)))
    while engine.has_unfinished:
        engine.step()
    assert engine.stats().latency.drift == pytest.approx(1.25, rel=0.01)


def test_a_program_of_others_has_to_be_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        routing_live.main(["--traces", str(tmp_path)])
    assert "--vllm-router PROGRAM" in capsys.readouterr().err

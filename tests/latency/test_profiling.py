"""Real measurements of a tiny model: models made of them predict something, and profiles are found again."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from omniserve import Engine, EngineConfig, ExecutionConfig, HostsConfig, Request, SamplingParams, patch
from omniserve.core.config import DiskKVConfig
from omniserve.core.request import ServiceClass
from omniserve.latency import LATENCY_MODELS, Profile, ProfileMismatch
from omniserve.latency.profile import STATES, Conditions, path_in
from omniserve.profiling import (
    find_or_make_profile,
    fingerprint_of,
    measure_steps,
    mixed_load,
    profile_model,
    steps,
    timer,
)
from omniserve.profiling.bench import ModuleBench
from omniserve.profiling.modules import _Sampler
from omniserve.profiling.summary import summarise
from omniserve.profiling.timer import Surroundings, Timer
from tests.parity.models import tiny_model
from tests.parity.zoo import tiny

BLOCK = 8


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs beside the tests, nothing disturbs a measurement."""
    monkeypatch.setattr(Conditions, "disturbances", lambda self: [])


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are measured until the host tier has worked, although its threads may wait long for a core."""
    monkeypatch.setattr(steps, "_MOST_STEPS_FOR_IT", 2000)
    monkeypatch.setattr(steps, "_MAX_SAMPLES", 2000)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return patch(tiny_model("llama"), compile=False)


@pytest.fixture(scope="module")
def config(model: PreTrainedModel) -> EngineConfig:
    pool = 64 * model.omniserve.spec.kv_block_bytes(BLOCK)
    return EngineConfig(
        block_size=BLOCK,
        device_kv_bytes=pool,
        host_kv_bytes=pool,
        max_num_batched_tokens=64,
        execution=ExecutionConfig(compile=False),
        host_threads=1,
    )


@pytest.fixture(scope="module")
def profile(model: PreTrainedModel, config: EngineConfig) -> Profile:
    """A profile that was measured within a limit of CPU time, of which there is enough on a busy machine, too."""
    told: list[tuple[str, float]] = []
    threads = torch.get_num_threads()
    nowhere = HostsConfig(cpu_hosts=("127.0.0.1:1",), cpu_host_secret_file="/no/such/file")  # measuring leaves them out
    config = dataclasses.replace(config, hosts=nowhere)
    with pytest.MonkeyPatch.context() as clock:
        clock.setattr(timer, "time", SimpleNamespace(perf_counter=time.process_time))
        profile = profile_model(model, config, time_limit_s=1.5, progress=lambda *now: told.append(now))
    assert torch.get_num_threads() == threads
    assert len({what for what, _ in told}) > 5
    assert [spent for _, spent in told] == sorted(spent for _, spent in told)
    return profile


@pytest.mark.parametrize("name", LATENCY_MODELS.names())
def test_predictions_are_finite_and_positive(profile: Profile, name: str) -> None:
    predictor = LATENCY_MODELS.get(name).from_profile(profile)
    predicted = [predictor.step_s(step.features) for step in profile.steps]
    assert predicted and all(math.isfinite(seconds) and seconds >= 0 for seconds in predicted)
    # Steps of a machine that has much else to do may make a linear model leave a few out altogether.
    assert sum(seconds > 0 for seconds in predicted) >= 0.9 * len(predicted)


def test_everything_is_measured(profile: Profile) -> None:
    for state in STATES:
        assert len(profile.dense[state]) > 5
        assert len(profile.head[state]) > 5
        assert len(profile.prefill_attention[state]) >= 4
        assert len(profile.decode_attention[state]) >= 4
    assert profile.piggyback
    assert profile.host_attention and profile.host_drafts
    assert profile.copy_to_host.beta_s + profile.copy_to_host.alpha_s > 0
    assert profile.copy_to_device.beta_s + profile.copy_to_device.alpha_s > 0


def test_a_model_with_recurrent_state_is_measured() -> None:
    model = patch(tiny("lfm2"), compile=False)
    pool = 64 * model.omniserve.spec.kv_block_bytes(BLOCK)
    config = EngineConfig(
        block_size=BLOCK, device_kv_bytes=pool, host_kv_bytes=pool, max_num_batched_tokens=32, max_num_seqs=8,
        execution=ExecutionConfig(compile=False), host_threads=1, max_model_len=128,
    )  # fmt: skip
    profile = profile_model(model, config, time_limit_s=0.3)
    assert profile.steps and profile.dense and not profile.host_drafts
    with Engine(model, config, profile=profile) as engine:
        request = Request(prompt_token_ids=[3, 4, 5], sampling=SamplingParams(max_tokens=4))
        assert len(engine.generate([request])[0].token_ids) == 4


def test_without_a_host_tier_nothing_of_it_is_measured(model: PreTrainedModel, config: EngineConfig) -> None:
    alone = profile_model(model, dataclasses.replace(config, host_kv_bytes=0), time_limit_s=0.2)
    assert alone.piggyback == alone.host_attention == alone.host_drafts == ()
    assert alone.fingerprint.host_threads == 0
    assert alone.dense[STATES[0]] == alone.dense[STATES[1]]


@pytest.mark.parametrize(
    "settings", [{"kv": "incremental"}, {"kv": "bidirectional"}, {"scheduler_options": {"checkpoint_kv": True}}]
)
def test_managers_that_keep_copies_on_the_host_are_measured(
    model: PreTrainedModel, config: EngineConfig, settings: dict[str, object], patient: None
) -> None:
    made = profile_model(model, dataclasses.replace(config, **settings), time_limit_s=0.2)  # type: ignore[arg-type]
    assert made.host_attention
    assert {step.features.host_works for step in made.steps} == {False, True}


@pytest.mark.parametrize(
    "settings",
    [
        {"disk_kv": DiskKVConfig(gib=0.01), "execution": ExecutionConfig(compile=False, prefix_cache=True)},
        {"disk_kv": DiskKVConfig(gib=0.01, keep=True), "trace_steps": "steps.jsonl"},
        {"device_kv_bytes": 0},
        {"host_kv_bytes": 0, "kv": "paged"},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_what_an_engine_serves_with_is_measured(
    model: PreTrainedModel, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    if settings.get("device_kv_bytes") == 0:  # the least there can be
        settings = {"device_kv_bytes": model.omniserve.spec.kv_block_bytes(BLOCK)}
    config = dataclasses.replace(config, **settings)
    made = profile_model(model, config, time_limit_s=0.2)
    assert made.steps
    assert not list(tmp_path.iterdir()), "measuring opens no file of the server's"
    with Engine(model, config, profile=made) as engine:
        request = Request(prompt_token_ids=[3, 4, 5], sampling=SamplingParams(max_tokens=4))
        assert len(engine.generate([request])[0].token_ids) == 4


def test_what_no_engine_serves_with_is_refused_before_it_is_measured(
    model: PreTrainedModel, config: EngineConfig
) -> None:
    told: list[str] = []
    wrong = dataclasses.replace(config, kv="paged", disk_kv=DiskKVConfig(gib=0.01))
    with pytest.raises(ValueError, match="set kv to tiered"):
        profile_model(model, wrong, time_limit_s=0.2, progress=lambda what, _: told.append(what))
    assert not told


def test_the_summary_says_what_was_measured(profile: Profile) -> None:
    text = summarise(profile)
    assert profile.fingerprint.device in text
    assert "dense, shared" in text
    assert f"{len(profile.steps)} whole ones" in text
    assert profile.conditions is not None and f"{profile.conditions.others_cores:.2f} cores busy for others" in text


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_a_time_limit_must_be_positive(model: PreTrainedModel, config: EngineConfig, limit: float) -> None:
    with pytest.raises(ValueError, match="time_limit_s"):
        profile_model(model, config, time_limit_s=limit)


@pytest.mark.usefixtures("quiet")
def test_a_made_profile_is_kept_and_found_again(
    model: PreTrainedModel, config: EngineConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    with caplog.at_level(logging.INFO, logger="omniserve.profiling"):
        made = find_or_make_profile(
            model, config, folder=tmp_path, time_limit_s=0.2, progress=lambda what, spent: told.append(what)
        )
        assert told
        assert Profile.read(path_in(tmp_path, fingerprint_of(model, config))) == made
        told.clear()
        assert find_or_make_profile(model, config, folder=tmp_path) == made
    assert not told, "it was measured again"
    assert str(tmp_path) in caplog.text


def test_a_profile_of_a_busy_machine_is_used_and_not_kept(
    model: PreTrainedModel, config: EngineConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Conditions, "disturbances", lambda self: ["somebody sang"])
    assert find_or_make_profile(model, config, folder=tmp_path, time_limit_s=0.2).dense
    assert not list(tmp_path.iterdir())
    assert "busy" in caplog.text and "somebody sang" in caplog.text


def test_a_process_that_takes_our_cores_is_seen() -> None:
    began_s, surroundings = time.perf_counter(), Surroundings(num_threads=10_000)
    code = "import time\nwhile time.process_time() < 0.2: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    seen = surroundings.conditions(spread=0.0)
    seconds = time.perf_counter() - began_s
    assert seen.others_cores * seconds > 0.15 and seen.spare_cores == 0


def test_what_is_left_out_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    # Busy, own and waited seconds: at the start, before and after compilers that ran for 7 s of others, and in the end.
    read = iter([(0.0, 0.0, 0.0), (1.0, 1.0, 0.0), (9.0, 2.0, 3.0), (10.0, 3.0, 3.0)])
    monkeypatch.setattr(Surroundings, "_read", lambda self: next(read))
    surroundings = Surroundings(num_threads=1)
    with surroundings.left_out():
        pass
    seen = surroundings.conditions(spread=0.0)
    assert seen.others_cores == seen.waited == 0.0


def test_a_thread_that_finds_no_core_waits() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # on the same core
    try:
        surroundings = Surroundings(num_threads=1)
        ends_s = time.monotonic() + 0.3
        while time.monotonic() < ends_s:
            pass
        assert surroundings.conditions(spread=0.0).waited > 0.1
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.wait()


def test_the_spread_is_that_of_repeated_samples() -> None:
    timer = Timer(torch.device("cpu"), 1.0)
    assert timer.spread() == 0.0
    for point, samples in enumerate(([1.0, 1.0, 1.1], [2.0, 4.0, 3.0], [1.0, 1.2, 9.0], [1.0, 70.0])):
        for seconds in samples:
            timer.add("dense", (point, 0), seconds)
    assert timer.spread() == pytest.approx(0.2)  # of 0, 0.5 and 0.2; two samples are too few


@pytest.mark.usefixtures("quiet")
def test_a_profile_for_other_settings_is_not_found(
    model: PreTrainedModel, config: EngineConfig, profile: Profile, tmp_path: Path
) -> None:
    profile.write(path_in(tmp_path, profile.fingerprint))
    other = dataclasses.replace(config, device_threads=1)
    made = find_or_make_profile(model, other, folder=tmp_path, time_limit_s=0.2)
    assert made.fingerprint != profile.fingerprint
    assert len(list(tmp_path.iterdir())) == 2


def test_a_given_file_is_read_or_refused(
    model: PreTrainedModel, config: EngineConfig, profile: Profile, tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    profile.write(path)
    assert find_or_make_profile(model, config, path=path) == profile
    with pytest.raises(ProfileMismatch, match="host_kv_dtype"):
        find_or_make_profile(model, dataclasses.replace(config, host_kv_dtype="int8"), path=path)
    with pytest.raises(OSError):
        find_or_make_profile(model, config, path=tmp_path / "absent.json")
    assert [file.name for file in tmp_path.iterdir()] == ["mine.json"]


@pytest.mark.usefixtures("quiet")
def test_a_folder_that_cannot_be_written_to_is_said(
    model: PreTrainedModel, config: EngineConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    profile = find_or_make_profile(model, config, folder=tmp_path / "file" / "folder", time_limit_s=0.2)
    assert profile.dense
    assert "not kept" in caplog.text


def test_pools_and_policies_change_no_fingerprint_but_threads_and_models_do(
    model: PreTrainedModel, config: EngineConfig
) -> None:
    mark = fingerprint_of(model, config)
    same = dataclasses.replace(config, scheduler="sarathi", device_kv_bytes=config.device_kv_bytes * 2)
    assert fingerprint_of(model, same) == mark
    assert fingerprint_of(model, dataclasses.replace(config, device_threads=1)) != mark or mark.device_threads == 1
    assert fingerprint_of(tiny_model("llama", num_layers=4), config).differences(mark) != []


def test_measured_steps_end_as_told_and_leave_the_engine_empty(model: PreTrainedModel, config: EngineConfig) -> None:
    load = mixed_load(3, num_steps=60, vocab_size=64, max_prompt=40, max_output=20)
    with Engine(model, config) as engine:
        samples = measure_steps(engine, load, max_samples=25)
        assert len(samples) == 25
        assert not engine.has_unfinished
        assert engine.on_step is None
        assert engine.stats().kv.device_used == 0
    assert min(sample.seconds for sample in samples) > 0


def test_measuring_goes_on_until_the_host_tier_has_worked(
    model: PreTrainedModel, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: dict[str, Any] = {"max_samples": 2000, "least": 1, "least_with_host": 3, "go_on": lambda: False}
    load = mixed_load(3, num_steps=60, vocab_size=64, max_prompt=40, max_output=20)
    tight = dataclasses.replace(config, device_kv_bytes=8 * model.omniserve.spec.kv_block_bytes(config.block_size))
    with Engine(model, tight) as engine, monkeypatch.context() as patience:
        patience.setattr(steps, "_MOST_STEPS_FOR_IT", 2000)  # its threads may wait long for a core
        samples = measure_steps(engine, load, **wanted)
    assert sum(sample.features.host_works for sample in samples) == 3
    without = dataclasses.replace(config, host_kv_bytes=0)
    with Engine(model, without) as engine:
        samples = measure_steps(engine, load, **wanted)
    assert 1 < len(samples) <= 64, "a policy that has no use for the host tier is not waited for without end"


def test_a_load_is_the_same_for_a_seed_and_has_both_classes() -> None:
    first, again, other = (
        mixed_load(seed, num_steps=200, vocab_size=64, max_prompt=40, max_output=20) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert {arrival.request.service_class for arrival in first} == set(ServiceClass)
    assert [a.at_step for a in first] == sorted(a.at_step for a in first)
    assert all(len(a.request.prompt_token_ids) <= 40 and a.request.sampling.max_tokens <= 20 for a in first)


class Visitors:
    """Requests that wait each time that profiling asks, for a while; they note when they were let in."""

    def __init__(self, *, each_takes_s: float = 0.0, most: int = 1_000_000) -> None:
        self.num_asked = self.num_visits = 0
        self._each_takes_s, self._most = each_takes_s, most

    def are_waiting(self) -> bool:
        self.num_asked += 1
        return self.num_visits < self._most

    def run(self) -> None:
        self.num_visits += 1
        torch.set_num_threads(1)
        time.sleep(self._each_takes_s)


def test_a_coarse_profile_says_so_and_is_not_kept(
    model: PreTrainedModel, config: EngineConfig, tmp_path: Path, patient: None
) -> None:
    profile = find_or_make_profile(model, config, folder=tmp_path, time_limit_s=0.2, is_coarse=True)
    assert profile.is_coarse
    assert not list(tmp_path.iterdir())
    for name in LATENCY_MODELS.names():
        assert LATENCY_MODELS.get(name).from_profile(profile).step_s(profile.steps[0].features) > 0
    assert any(step.features.host_works for step in profile.steps)


def test_a_kept_profile_is_taken_where_a_coarse_one_would_do(
    model: PreTrainedModel, config: EngineConfig, profile: Profile, tmp_path: Path
) -> None:
    profile.write(path_in(tmp_path, profile.fingerprint))
    assert find_or_make_profile(model, config, folder=tmp_path, time_limit_s=0.2, is_coarse=True) == profile


def test_long_samples_are_left_out(
    model: PreTrainedModel, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sample takes more than 50 ms on a clock on which a row of a step takes 10 ms and all else nothing."""
    longest_s, seen = 0.05, list[int]()

    def timed(timer: Timer, run: Callable[[], object]) -> float:
        run()
        return 1e-6

    def dense(bench: ModuleBench, num_rows: int) -> Callable[[], object]:
        seen.append(num_rows)
        return lambda: None

    def latency(sampler: _Sampler, state: str, module: str) -> Callable[[int], float]:
        def seconds(rows: int) -> float:
            sampler.sample(state, module, (rows, 0))
            sampler._timer.add(f"{module}, {state}", (rows, 0), 0.01 * rows)
            return 0.01 * rows

        return seconds

    monkeypatch.setattr(Timer, "time", timed)
    monkeypatch.setattr(ModuleBench, "dense", dense)
    monkeypatch.setattr(_Sampler, "latency", latency)
    profile_model(model, config, time_limit_s=0.2, longest_s=longest_s)
    assert 1 < max(seen) <= 5
    seen.clear()
    profile_model(model, config, time_limit_s=0.2)
    assert max(seen) == config.max_num_batched_tokens + config.max_piggyback_seats


def test_measuring_gives_way_before_each_sample_and_its_time_does_not_count(
    model: PreTrainedModel, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_samples = 0
    add = Timer.add

    def counted(*arguments: Any) -> None:
        nonlocal num_samples
        num_samples += 1
        add(*arguments)

    monkeypatch.setattr(Timer, "add", counted)
    visitors, threads = Visitors(each_takes_s=0.02, most=10), torch.get_num_threads()
    began_s = time.perf_counter()
    profile = profile_model(model, config, time_limit_s=0.2, others=visitors)
    assert visitors.num_visits == 10
    assert visitors.num_asked >= num_samples + len(profile.steps)
    assert profile.seconds <= time.perf_counter() - began_s - 10 * 0.02
    assert torch.get_num_threads() == threads


def test_a_step_behind_other_work_is_no_sample(model: PreTrainedModel, config: EngineConfig) -> None:
    """The seconds of such a step would run from the end of the step before that work."""
    load = mixed_load(0, num_steps=40, vocab_size=64, max_prompt=8, max_output=8)
    ways = iter([True, False, False] * 1000)
    with Engine(model, config) as engine:
        numbers: list[int] = []
        samples = measure_steps(
            engine, load, max_samples=10, give_way=lambda: numbers.append(0) or next(ways), on_sample=lambda: None
        )
    assert len(samples) == 10
    assert len(numbers) >= 5 + 10 * 3 // 2, "one step in three is left out, and the first five"

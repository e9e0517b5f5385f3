"""Profiling measures what an engine runs: in constant shapes, captured, through the mailbox."""

from __future__ import annotations

import dataclasses
import gc
import time
import weakref

import pytest
import torch
from transformers import PreTrainedModel

from omniserve import Engine, EngineConfig, ExecutionConfig, patch
from omniserve.engine.fingerprint import has_constant_steps
from omniserve.host.cores import CoreSplit
from omniserve.latency import Profile
from omniserve.layers.patched_model import PatchedModel
from omniserve.profiling import fingerprint_of, measure, profile_model, steps
from omniserve.profiling.bench import ModuleBench, Served
from omniserve.profiling.host import _HostBench
from omniserve.profiling.modules import _Sampler
from omniserve.profiling.timer import Timer
from tests.latency.samples import FINGERPRINT
from tests.parity.models import tiny_model
from tests.runner.tape import TapeCapture, attend

BLOCK = 8
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return patch(tiny_model("llama"), compile=False)


@pytest.fixture(scope="module")
def patched(model: PreTrainedModel) -> PatchedModel:
    return model.omniserve


@pytest.fixture(scope="module")
def config(patched: PatchedModel) -> EngineConfig:
    pool = 64 * patched.spec.kv_block_bytes(BLOCK)
    return EngineConfig(
        block_size=BLOCK, device_kv_bytes=pool, host_kv_bytes=pool, max_num_batched_tokens=64,
        execution=ExecutionConfig(compile=False, step_graphs="on"), host_threads=1,
    )  # fmt: skip


@pytest.fixture
def taped(patched: PatchedModel, config: EngineConfig) -> Served:
    """Captured as on a GPU: of a graph only the device's work runs again."""
    spec = patched.spec
    capture = TapeCapture((0, spec.num_heads, spec.head_size), patched.dtype, patched.device)
    served = Served(patched, config, capture=capture)
    served.attend = attend
    return served


@pytest.fixture
def gpu_like(monkeypatch: pytest.MonkeyPatch) -> list[Timer]:
    """Preparing does not count, as on a GPU; return the timers made."""
    made: list[Timer] = []

    def timer(device: torch.device, limit_s: float, **options: object) -> Timer:
        made.append(Timer(device, limit_s, **{**options, "counts_preparing": False}))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(measure, "Timer", timer)
    return made


@pytest.mark.parametrize("setting", ["auto", "on", "off"])
def test_an_engine_runs_what_is_measured(model: PreTrainedModel, config: EngineConfig, setting: str) -> None:
    config = dataclasses.replace(config, execution=dataclasses.replace(config.execution, step_graphs=setting))
    served = Served(model.omniserve, config)
    with Engine(model, config) as engine:
        assert served.constant == (engine.runner.graphs is not None)
        assert engine.host_tier is not None
        assert served.mailbox == (engine.host_tier.mailbox_SW is not None)
        assert served.max_blocks == -(-engine.max_model_len // BLOCK)


def test_graphs_are_what_a_gpu_has_by_default() -> None:
    auto, off = EngineConfig(), EngineConfig(execution=ExecutionConfig(step_graphs="off"))
    assert has_constant_steps(auto, torch.device("cuda")) and not has_constant_steps(off, torch.device("cuda"))
    assert not has_constant_steps(auto, CPU)


def test_constant_steps_are_part_of_what_a_profile_is_valid_for(model: PreTrainedModel, config: EngineConfig) -> None:
    plain = fingerprint_of(
        model, dataclasses.replace(config, execution=dataclasses.replace(config.execution, step_graphs="auto"))
    )
    assert plain == fingerprint_of(
        model, dataclasses.replace(config, execution=dataclasses.replace(config.execution, step_graphs="off"))
    )
    recorded = fingerprint_of(model, config)
    assert recorded.differences(plain) == ["constant_steps: True, not False"]
    assert recorded.key != plain.key


def test_profiles_of_earlier_versions_are_found_under_their_names() -> None:
    assert FINGERPRINT.key == "f18e1c6fc47625a5"


@torch.inference_mode()
def test_a_recorded_pass_of_the_halves_runs_them(patched: PatchedModel, config: EngineConfig, taped: Served) -> None:
    plain, recorded = ModuleBench(patched, config, 64), ModuleBench(patched, config, 64, served=taped)
    for _ in range(2):
        torch.testing.assert_close(recorded.dense(5)(), plain.dense(5)())


@torch.inference_mode()
def test_recorded_decodes_store_and_attend(patched: PatchedModel, config: EngineConfig, taped: Served) -> None:
    bench = ModuleBench(patched, config, 64, served=taped)
    run = bench.attention([(1, 9)] * 3)
    first = run()
    bench.storage.k_LBKSH.zero_()
    bench.storage.v_LBKSH.zero_()
    torch.testing.assert_close(run(), first)
    stored = bench.storage.k_LBKSH.abs().sum(dim=(2, 4)).count_nonzero(dim=(1, 2))
    assert stored.tolist() == [3] * patched.num_layers
    assert first.shape == (3, patched.spec.num_heads, patched.spec.head_size)


@torch.inference_mode()
def test_decodes_attend_as_in_a_recording_and_chunks_as_beside_it(patched: PatchedModel, config: EngineConfig) -> None:
    calls: list[tuple[bool, bool, int]] = []
    served = Served(patched, config)

    def spy(q, k, v, metadata, spec):
        calls.append((metadata.one_query_each, metadata.host_lengths is None, metadata.block_table_RM.shape[1]))
        return q

    served.attend = spy
    bench = ModuleBench(patched, config, 64, served=served)
    bench.attention([(1, 9), (1, 3)])()
    bench.attention([(4, 9)])()
    layers = patched.num_layers
    assert calls == [(True, True, served.max_blocks)] * layers + [(False, False, 2)] * layers


@torch.inference_mode()
def test_more_rows_than_any_shape_has_are_not_recorded(patched: PatchedModel, config: EngineConfig) -> None:
    recorded: list[object] = []

    class Spy:
        def full(self, run):
            recorded.append(run)
            return run

    served = Served(patched, config, capture=Spy())  # type: ignore[arg-type]
    most = config.max_num_batched_tokens + config.max_piggyback_seats
    run = served.launched(lambda: torch.zeros(1), num_rows=most + 1)
    assert not recorded and run().shape == (1,)
    served.launched(run, num_rows=most)
    assert recorded == [run] and gc.isenabled()


@torch.inference_mode()
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_piggyback_rows_are_sent_through_the_mailbox(
    patched: PatchedModel, config: EngineConfig, taped: Served, rows: int
) -> None:
    bench = _HostBench(patched, config, 1, served=taped)
    try:
        tier = bench.tier
        assert tier.mailbox_SW is not None and bench._sending is not None
        tier.mailbox_SW.fill_(7.0)
        timer = Timer(CPU, 1.0)
        assert bench.piggyback(4, rows, timer) > 0
        tier.mailbox_SW.fill_(7.0)
        assert bench.piggyback(4, rows, timer) > 0  # a replay
        sent = (tier.mailbox_SW != 7.0).any(dim=1)
        # Each row is that of a token; the rows of a slot's drafts are behind it.
        assert sent.tolist() == [
            row % tier.max_rows == 0 and row // tier.max_rows < rows for row in range(len(sent))
        ]  # fmt: skip
        assert tier.stats().tasks_in_hand == 0 and not tier.poll()
    finally:
        bench.tier.close()


def test_first_calls_do_not_count_where_they_are_dear(patched: PatchedModel, config: EngineConfig) -> None:
    began_s, sleep_s = time.perf_counter(), 0.05
    timer = Timer(CPU, 100.0, counts_preparing=False)

    class Bench:
        calls = 0

        def head(self, rows):
            def run():
                self.calls += 1
                if self.calls == 1:
                    time.sleep(sleep_s)  # compiles
                    assert timer.seconds == seconds

            seconds = timer.seconds
            return run

    bench = Bench()
    sampler = _Sampler(bench, timer, CoreSplit(device=CPU, device_threads=None, host_threads=0))  # type: ignore[arg-type]
    for _ in range(3):
        sampler.sample("alone", "head", (4, 0))
    assert bench.calls == 4
    assert timer.seconds <= time.perf_counter() - began_s - sleep_s


def test_first_calls_count_where_they_are_cheap() -> None:
    timer = Timer(CPU, 1.0)
    with timer.preparing():
        time.sleep(0.05)
    assert timer.seconds >= 0.05


def test_a_profile_of_constant_steps_has_everything(
    model: PreTrainedModel, config: EngineConfig, gpu_like: list[Timer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_MOST_STEPS_FOR_IT", steps._MAX_SAMPLES)  # the host's threads may wait long for a core
    alive: list[weakref.ref[Engine]] = []
    spent: list[float] = []

    class OneAtATime(Engine):
        def __init__(self, *args: object, group: None) -> None:
            assert all(engine() is None for engine in alive), "the engine before is still there"
            spent.append(gpu_like[0].seconds)
            super().__init__(*args)  # type: ignore[arg-type]
            assert gpu_like[0].seconds == spent[-1], "building an engine counts"
            alive.append(weakref.ref(self))

    gc.disable()
    monkeypatch.setattr(steps, "Engine", OneAtATime)
    try:
        profile: Profile = profile_model(model, config, time_limit_s=0.2)
    finally:
        gc.enable()
    assert profile.fingerprint.constant_steps
    assert len(alive) == 2
    assert profile.piggyback and all(seconds > 0 for *_, seconds in profile.piggyback)
    assert profile.host_attention and profile.decode_attention["alone"]
    assert profile.copy_to_host.beta_s + profile.copy_to_host.alpha_s > 0
    assert {step.features.host_works for step in profile.steps} == {False, True}


@pytest.mark.gpu
def test_a_gpu_is_measured_through_graphs_and_serves_with_the_profile() -> None:
    model = patch(tiny_model("llama").to("cuda"), compile=False)
    pool = 64 * model.omniserve.spec.kv_block_bytes(16)
    config = EngineConfig(
        device_kv_bytes=pool,
        host_kv_bytes=pool,
        max_num_batched_tokens=64,
        execution=ExecutionConfig(compile=False),
        host_threads=2,
    )
    profile = profile_model(model, config, time_limit_s=3.0)
    assert profile.fingerprint.constant_steps
    assert profile.piggyback and profile.host_attention and len(profile.dense["alone"]) > 5
    assert {step.features.host_works for step in profile.steps} == {False, True}
    with Engine(model, config, profile=profile) as engine:
        assert engine.runner.graphs is not None

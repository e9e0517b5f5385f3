"""Tests of a server that began early: beside its requests it takes compiled halves and refines its profile."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.utils import fresh_cache
from transformers import PreTrainedModel

from omniserve import SLO, ClassSpec, Engine, EngineConfig, ExecutionConfig, Request, SamplingParams, patch
from omniserve.engine.compiling import BackgroundCompile, compile_beside
from omniserve.latency import Profile
from omniserve.latency.profile import Conditions
from omniserve.latency.trace import read_steps
from omniserve.launch.background_startup import BackgroundStartup, longest_sample_s
from omniserve.profiling import find_or_make_profile, profile_model
from tests.parity.models import tiny_model

BLOCK, PATIENCE_S = 8, 500.0
PROMPTS = [[3, 4, 5], [7] * 11, [9, 1]]


def config_for(model: PreTrainedModel, *, compile: bool) -> EngineConfig:
    pool = 64 * model.omniserve.spec.kv_block_bytes(BLOCK)
    return EngineConfig(
        block_size=BLOCK, device_kv_bytes=pool, host_kv_bytes=pool, max_num_batched_tokens=64,
        execution=ExecutionConfig(compile=compile), host_threads=1, device_threads=1,
    )  # fmt: skip


def tokens(engine: Engine) -> list[tuple[int, ...]]:
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    requests = [Request(prompt_token_ids=prompt, sampling=sampling, slo=SLO()) for prompt in PROMPTS]
    return [tuple(completion.token_ids) for completion in engine.generate(requests)]


class Requests:
    """Requests that are there each tenth time that upkeep asks, and are run to their end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_asked = 0
        self.outputs: list[list[tuple[int, ...]]] = []

    def are_waiting(self) -> bool:
        self.num_asked += 1
        return self.num_asked % 10 == 0

    def run(self) -> None:
        self.outputs.append(tokens(self._engine))


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Conditions, "disturbances", lambda self: [])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return patch(tiny_model("llama"), compile=False)


@pytest.fixture(scope="module")
def coarse(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    folder = tmp_path_factory.mktemp("none")
    return find_or_make_profile(
        model, config_for(model, compile=False), folder=folder, time_limit_s=0.3, is_coarse=True
    )


@pytest.mark.usefixtures("quiet")
def test_a_profile_is_refined_between_requests_whose_tokens_it_does_not_change(
    model: PreTrainedModel, coarse: Profile, tmp_path: Path
) -> None:
    trace = tmp_path / "steps" / "steps.jsonl"
    trace.parent.mkdir()
    config = dataclasses.replace(config_for(model, compile=False), trace_steps=str(trace))
    with Engine(model, config, profile=coarse) as engine:
        expected = tokens(engine)
        upkeep = BackgroundStartup(
            engine, model, config, compiling=None, refines=True, time_limit_s=0.5, folder=tmp_path
        )
        assert upkeep.is_due and not upkeep.is_done
        others = Requests(engine)
        upkeep.run(others)
        assert upkeep.is_done
        assert len(others.outputs) > 1 and all(output == expected for output in others.outputs)
        assert tokens(engine) == expected
        assert not engine.stats().latency.is_coarse
        engine.scheduler.check_integrity()
        num_steps = engine.stats().steps
    assert len(read_steps(trace).steps) == num_steps, "measured steps are not traced"
    found = find_or_make_profile(model, config, folder=tmp_path, time_limit_s=1e9)  # would take years to measure
    assert not found.is_coarse and found.steps


@pytest.mark.parametrize("disturbances", [[], ["others kept 2 cores busy"]])
def test_of_the_engines_of_a_server_one_measures_and_the_others_take_what_it_has_measured(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disturbances: list[str]
) -> None:
    monkeypatch.setattr(Conditions, "disturbances", lambda self: disturbances)
    config, since_s = config_for(model, compile=False), time.time() - 1
    clock, num_measured = [100.0], list[bool]()

    def counted(*arguments: Any, **options: Any) -> Profile:
        num_measured.append(options.get("is_coarse", False))
        return profile_model(*arguments, **options)

    monkeypatch.setattr("omniserve.profiling.measure.profile_model", counted)
    monkeypatch.setattr("omniserve.launch.background_startup.profile_model", counted)

    def begun() -> Profile:
        return find_or_make_profile(
            model, config, folder=tmp_path, time_limit_s=0.3, is_coarse=True, shared_since_s=since_s
        )

    first, second = begun(), begun()
    assert first == second and first.is_coarse and num_measured == [True]
    with Engine(model, config, profile=first) as one, Engine(model, config, profile=second) as other:
        upkeeps = [
            BackgroundStartup(
                engine, model, config, compiling=None, refines=True, time_limit_s=0.3, folder=tmp_path,
                shared_since_s=since_s, clock=lambda: clock[0],
            )
            for engine in (one, other)
        ]  # fmt: skip

        class Meanwhile(Requests):
            def run(self) -> None:
                upkeeps[1].run(Requests(other))
                assert not upkeeps[1].is_due and not upkeeps[1].is_done, "it is the first one's turn"

        upkeeps[0].run(Meanwhile(one))
        assert upkeeps[0].is_done
        clock[0] += 2
        assert upkeeps[1].is_due
        upkeeps[1].run(Requests(other))
        assert upkeeps[1].is_done and num_measured == [True, False]
        assert not one.stats().latency.is_coarse and not other.stats().latency.is_coarse
    kept = [path for path in tmp_path.glob("*.json") if not path.name.endswith(".server.json")]
    assert len(kept) == (not disturbances), "no later server takes a profile of a busy machine"


def test_a_profile_that_cannot_be_refined_stays_coarse_and_the_engine_serves(
    model: PreTrainedModel, coarse: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def broken(*arguments: object, **options: object) -> Profile:
        raise RuntimeError("the host tier failed")

    monkeypatch.setattr("omniserve.launch.background_startup.profile_model", broken)
    config = config_for(model, compile=False)
    with Engine(model, config, profile=coarse) as engine:
        upkeep = BackgroundStartup(
            engine, model, config, compiling=None, refines=True, time_limit_s=0.5, folder=tmp_path
        )
        upkeep.run(Requests(engine))
        assert upkeep.is_done and engine.stats().latency.is_coarse
        assert "stays coarse" in caplog.text and "the host tier failed" in caplog.text
        assert tokens(engine)
    assert not list(tmp_path.iterdir())


def test_a_sample_leaves_the_most_of_the_shortest_ttft() -> None:
    objectives = {"gold": SLO(ttft_s=0.2), "LS": SLO(ttft_s=1.0)}
    classes = [ClassSpec(name=name, kind="LS", slo=slo) for name, slo in objectives.items()]
    best_effort = ClassSpec(name="BE", kind="BE")
    assert 0 < longest_sample_s([*classes, best_effort]) <= 0.1
    assert longest_sample_s([best_effort]) == math.inf


@pytest.fixture
def cache() -> Iterator[None]:
    with fresh_cache():
        yield


def ended(compiling: BackgroundCompile) -> bool:
    deadline_s = time.monotonic() + PATIENCE_S
    while (succeeded := compiling.poll()) is None:
        assert time.monotonic() < deadline_s, "the child hangs"
        time.sleep(0.05)
    return succeeded


@pytest.mark.usefixtures("cache")
def test_halves_are_compiled_beside_serving_and_taken_when_it_is_quiet(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omniserve.engine.compiling._LOWEST_PRIORITY", 0)  # other tests run beside this
    caplog.set_level(logging.INFO)
    torch.mm(torch.ones(300, 300), torch.ones(300, 300))  # this process has OpenMP threads, which the child has not
    plain, model = patch(tiny_model("llama"), compile=False), patch(tiny_model("llama"))
    config = config_for(model, compile=True)
    compiling = compile_beside(model, config)
    assert compiling is not None
    with Engine(plain, config_for(plain, compile=False)) as engine:
        expected = tokens(engine)
    with Engine(model, config) as engine:
        upkeep = BackgroundStartup(
            engine, model, config, compiling=compiling, refines=False, time_limit_s=1.0, folder=tmp_path
        )
        assert tokens(engine) == expected, "it serves before anything is compiled"
        assert not upkeep.is_due and not upkeep.is_done
        deadline_s = time.monotonic() + PATIENCE_S
        while not upkeep.is_due:
            upkeep.poll()
            assert time.monotonic() < deadline_s, "the child hangs"
            time.sleep(0.05)
        assert "in use" not in caplog.text
        upkeep.run(Requests(engine))
        assert upkeep.is_done and "compiled halves are in use" in caplog.text
        assert tokens(engine) == expected
        assert all(half.is_direct for half in [*engine.model._pre.values(), *engine.model._post.values()])
    assert compile_beside(patch(tiny_model("llama")), config) is None, "the next process finds them"


@pytest.mark.usefixtures("cache")
def test_halves_that_a_child_could_not_compile_are_compiled_when_it_is_quiet(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = patch(tiny_model("llama"))
    config = config_for(model, compile=True)
    with monkeypatch.context() as broken:
        broken.setattr("omniserve.engine.compiling._compile", lambda *_: False)
        compiling = BackgroundCompile(model.omniserve, fused=False)
        assert not ended(compiling)
    calls: list[bool] = []

    def find(*, else_compile: bool, fused: bool) -> bool:
        calls.append(else_compile)
        return True

    monkeypatch.setattr(model.omniserve, "find_compiled", find)

    class Dead:
        def poll(self) -> bool:
            return False

    with Engine(model, dataclasses.replace(config, host_kv_bytes=0)) as engine:
        upkeep = BackgroundStartup(engine, model, config, compiling=Dead(), refines=False, time_limit_s=1.0)  # type: ignore[arg-type]
        upkeep.poll()
        assert "could not be compiled" in caplog.text and upkeep.is_due and not calls
        upkeep.run(Requests(engine))
        assert calls == [True] and upkeep.is_done


def test_compiled_halves_wait_for_a_quiet_moment_but_not_for_ever(model: PreTrainedModel) -> None:
    clock, calls = [100.0], list[float]()

    class Done:
        def poll(self) -> bool:
            return True

    config = config_for(model, compile=False)
    with Engine(model, config) as engine:
        upkeep = BackgroundStartup(
            engine,
            model,
            config,
            compiling=Done(),
            refines=False,
            time_limit_s=1.0,
            clock=lambda: clock[0],  # type: ignore[arg-type]
        )
        upkeep._take_halves = lambda: calls.append(clock[0])  # type: ignore[method-assign]
        for clock[0] in (100.0, 105.0, 109.0, 111.0):
            upkeep.poll()
    assert calls == [111.0]


def test_a_child_is_ended_with_the_engine(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniserve.engine.compiling._compile", lambda *_: time.sleep(1000))
    compiling = BackgroundCompile(model.omniserve, fused=False)
    assert compiling.poll() is None
    compiling.stop()
    with pytest.raises(ChildProcessError):
        os.waitpid(compiling._pid, os.WNOHANG)

"""A feature that is off is not there: with default settings an engine or a simulation has not imported its modules."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FEATURES = {
    "safepoints": ("omniserve.runner.safepoint", "omniserve.engine.preemption"),
    "deferral": ("omniserve.sched.deferral",),
    "planned deferral": ("omniserve.sched.planned_deferral",),
    "policies but the default one": (
        "omniserve.sched.apex",
        "omniserve.sched.baselines",
        "omniserve.sched.bros",
        "omniserve.sched.conserve",
        "omniserve.sched.disciplines",
        "omniserve.sched.neo",
        "omniserve.sched.omniserve_paper",
        "omniserve.sched.parking",
        "omniserve.sched.second_batch",
    ),
    "second sub-batches and hybrid batches": ("omniserve.runner.pipelining",),
    "CUDA graphs": ("omniserve.runner.cuda_graphs",),
    "drafts": (
        "omniserve.sched.features.drafts",
        "omniserve.sched.features.drafter",
        "omniserve.sched.features.speculation",
        "omniserve.sched.features.draft_rows",
        "omniserve.sched.features.host_draft_rows",
        "omniserve.simulate.drafter",
    ),
    "chunks that left a step": ("omniserve.sched.features.halted_chunks",),
    "recurrent states": ("omniserve.sched.features.state_slots",),
    "disk": (
        "omniserve.sched.sources.disk",
        "omniserve.kv.disk_prefix_index",
        "omniserve.kv.disk_prefixes",
        "omniserve.host.disk",
        "omniserve.host.disk_file",
    ),
    "CPU hosts and prefill engines": (
        "omniserve.kv.network",
        "omniserve.sched.network",
        "omniserve.remote",
        "omniserve.prefill",
        "omniserve.sched.sources.prefill",
        "omniserve.sched.sources.placement",
        "omniserve.simulate.prefill_engines",
    ),
    "ranks": ("omniserve.parallel", "omniserve.cluster"),
    "stages": ("omniserve.sched.stages", "omniserve.runner.staged_loop", "omniserve.ops.stage_link"),
    "bidirectional and incremental KV": (
        "omniserve.kv.bidirectional",
        "omniserve.kv.incremental",
        "omniserve.sched.features.shared_blocks",
    ),
}
"""The modules of each feature; a package stands for all that is in it."""

STEPS = 100

ENGINE = f"""
import sys
from omniserve import Engine, EngineConfig, ExecutionConfig, Request, SamplingParams, patch
from tests.parity.models import tiny_model

model, PLAIN = patch(tiny_model("llama"), compile=False), ExecutionConfig(compile=False)
with Engine(model, EngineConfig(device_kv_bytes=1 << 20, host_kv_bytes=1 << 20, execution=PLAIN)) as engine:
    for service_class in ("LS", "BE"):
        sampling = SamplingParams(max_tokens={STEPS}, ignore_eos=True)
        engine.add(Request(prompt_token_ids=[1, 2, 3], sampling=sampling, service_class=service_class))
    while engine.has_unfinished:
        engine.step()
    assert engine.stats().steps >= {STEPS}
print(*sys.modules, sep="\\n")
"""

SIMULATION = """
import sys
from omniserve.simulate.cli import main

load = "--ls-rate 1 --be 4 --minutes 0.1 --device-kv-gb 8 --host-kv-gb 8 --no-plan"
main(f"--model llama-2-70b --device 4xA100-80GB --hosts 2xXeon-6342 {load} --record /dev/null".split())
print(*sys.modules, sep="\\n")
"""


@pytest.fixture(scope="module", params=[ENGINE, SIMULATION], ids=["engine", "simulation"])
def imported(request: pytest.FixtureRequest) -> set[str]:
    """Return the modules that a process has imported."""
    done = subprocess.run([sys.executable, "-c", request.param], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {line for line in done.stdout.splitlines() if line.startswith("omniserve.")}


@pytest.mark.parametrize("feature", FEATURES)
def test_modules_of_features_that_are_off_are_not_imported(feature: str, imported: set[str]) -> None:
    assert "omniserve.sched.scheduler" in imported
    here = {name for name in imported for module in FEATURES[feature] if f"{name}.".startswith(f"{module}.")}
    assert not here


@pytest.mark.parametrize("module", sorted({module for modules in FEATURES.values() for module in modules}))
def test_the_modules_that_are_listed_exist(module: str) -> None:
    assert importlib.util.find_spec(module) is not None


STAGES = """
import dataclasses, sys
from omniserve import ParallelConfig
from omniserve.simulate import Load, SimulationConfig, simulate
from omniserve.simulate.load import TraceRequest
from tests.simulate.machines import constant
from tests.simulate.test_simulate import engine

machine = dataclasses.replace(constant(0.01), num_stages=2)
config = dataclasses.replace(engine(), parallel=ParallelConfig(pipeline_parallel_size=2))
load = Load(latency_sensitive=[TraceRequest(0.0, 10, 100)])
assert simulate(SimulationConfig(machine=machine, engine=config, load=load)).num_steps >= 100
assert "omniserve.sched.stages" in sys.modules
"""


def test_stages_are_imported_where_a_model_has_some() -> None:
    done = subprocess.run([sys.executable, "-c", STAGES], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr

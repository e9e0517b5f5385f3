"""A feature that is off is not there: plain engines and simulations do not import the modules of features."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ROOMS = ("omniserve.sched.stages",)
"""Modules that an engine, or a simulation, imports only if its settings ask for what is in them."""

SERVES = """
from omniserve import Engine, EngineConfig, ExecutionConfig, Request, SamplingParams
from tests.parity.models import tiny_model
config = EngineConfig(device_kv_bytes=1 << 20, host_kv_bytes=1 << 20, execution=ExecutionConfig(compile=False))
with Engine(tiny_model("llama"), config) as engine:
    engine.generate([Request(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=100, ignore_eos=True))])
    assert engine.stats().steps >= 100
"""
SIMULATES = """
import dataclasses
from omniserve import ParallelConfig
from omniserve.simulate import Load, SimulationConfig, simulate
from omniserve.simulate.load import TraceRequest
from tests.simulate.machines import constant
from tests.simulate.test_simulate import engine
machine = dataclasses.replace(constant(0.01), num_stages={num_stages})
config = dataclasses.replace(engine(), parallel=ParallelConfig(pipeline_parallel_size={num_stages}))
load = Load(latency_sensitive=[TraceRequest(0.0, 10, 100)])
assert simulate(SimulationConfig(machine=machine, engine=config, load=load)).num_steps >= 100
"""


def rooms_after(code: str) -> set[str]:
    """Return which rooms a fresh interpreter has imported once it has run this code."""
    code += f"\nimport sys\nprint(*(name for name in {ROOMS!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("code", [SERVES, SIMULATES.format(num_stages=1)], ids=["engine", "simulation"])
def test_what_is_off_is_not_imported(code: str) -> None:
    assert rooms_after(code) == set()


def test_stages_are_imported_where_a_model_has_some() -> None:
    assert rooms_after(SIMULATES.format(num_stages=2)) == {"omniserve.sched.stages"}


def test_the_rooms_are_there() -> None:
    missing = [name for name in ROOMS if not (ROOT / f"{name.replace('.', '/')}.py").exists()]
    assert not missing

"""A feature that is deleted is not missed: without its modules, whoever does not need it works as before."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.engine.test_features_off import FEATURES, ROOT
from tests.quick import slow_except

DELETED = ("disk", "CPU hosts and prefill engines", "drafts", "safepoints", "second sub-batches and hybrid batches")

REFUSE = """
import importlib.abc, sys

class Deleted(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if any(f"{name}.".startswith(f"{room}.") for room in ROOMS):
            raise ModuleNotFoundError(f"{name} is deleted")

sys.meta_path.insert(0, Deleted())
"""

ON_A_FAKE_DEVICE = """
from omniserve.sched import SCHEDULERS
from tests.sched.test_histories import run_history

for seed, scheduler in enumerate(SCHEDULERS.names(), 9000):
    run_history(scheduler, seed, kv="tiered")
"""

WITH_A_MODEL = """
from omniserve import Engine, EngineConfig, ExecutionConfig, Request, SamplingParams
from omniserve.sched import SCHEDULERS, policy_of
from tests.parity.models import tiny_model

expected, model, num_run = None, tiny_model("llama"), 0
for scheduler in SCHEDULERS.names():
    config = EngineConfig(
        scheduler=scheduler, device_kv_bytes=1 << 20, host_kv_bytes=1 << 20, execution=ExecutionConfig(compile=False)
    )
    policy, options = policy_of(config)
    if (IS_OF_SAFEPOINTS and options.preempts) or (IS_OF_SUB_BATCHES and policy.awaits_host):
        continue
    num_run += 1
    requests = [
        Request(prompt_token_ids=[1, 2, number], sampling=SamplingParams(max_tokens=8), service_class=name)
        for number, name in enumerate(("LS", "BE", "BE"))
    ]
    with Engine(model, config) as engine:
        tokens = [each.token_ids for each in engine.generate(requests)]
    expected = expected or tokens
    assert tokens == expected, scheduler
assert num_run >= 8
"""


@pytest.mark.parametrize("feature", slow_except(("disk",), DELETED))
def test_whoever_does_not_need_a_feature_works_without_it(feature: str) -> None:
    facts = f"""
ROOMS = {FEATURES[feature]!r}
IS_OF_SAFEPOINTS, IS_OF_SUB_BATCHES = {feature == "safepoints"}, {feature.startswith("second sub-batches")}
"""
    code = facts + REFUSE + ON_A_FAKE_DEVICE + WITH_A_MODEL
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_who_needs_a_feature_that_is_deleted_is_told() -> None:
    code = f"ROOMS = {FEATURES['drafts']!r}" + REFUSE
    code += (
        "from tests.sched.test_histories import run_history\nrun_history('omniserve', 1, kv='tiered', has_drafts=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "omniserve.sched.features.drafts is deleted" in done.stderr

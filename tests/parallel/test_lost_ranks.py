"""Ranks that are killed or hang in a step: the engine says so, within the time-out."""

from __future__ import annotations

import os
import signal
import time

import pytest

from omniserve import Engine, EngineConfig, ExecutionConfig, Request, SamplingParams
from omniserve.core.errors import PeerLost
from tests.parallel.ranks import ranks_of


def _serve_until_lost(
    number: signal.Signals, *, num_shards: int, num_stages: int, uses_sockets: bool, victim: int = 0,
    at_step: int = 3, timeout_s: float = 20.0,
) -> tuple[str, float]:  # fmt: skip
    """Send a rank a signal before a step; return how the engine tells that it is lost, and the seconds until then."""
    with ranks_of(
        "llama", num_shards, num_stages=num_stages, uses_sockets=uses_sockets, timeout_s=timeout_s
    ) as (model, group, parallel):  # fmt: skip
        config = EngineConfig(
            parallel=parallel, execution=ExecutionConfig(compile=False), block_size=8, max_model_len=80,
            device_kv_bytes=1 << 20, host_kv_bytes=1 << 20,
        )  # fmt: skip
        with Engine(model, config, group=group) as engine:
            for name in ("LS", "BE"):
                sampling = SamplingParams(max_tokens=60, ignore_eos=True)
                engine.add(Request(prompt_token_ids=[1, 2, 3], sampling=sampling, service_class=name))
            with pytest.raises(PeerLost) as lost:
                for step in range(500):
                    if step == at_step:
                        began_s = time.monotonic()
                        os.kill(group.pids[victim], number)
                    engine.step()
            return str(lost.value), time.monotonic() - began_s


@pytest.mark.parametrize(
    ("num_stages", "victim", "at_step", "uses_sockets"),
    [(1, 0, 0, False), (1, 0, 3, False), (1, 0, 3, True), *((2, victim, 3, False) for victim in range(3))],
)
def test_a_rank_that_is_killed_ends_the_step(num_stages: int, victim: int, at_step: int, uses_sockets: bool) -> None:
    told, _ = _serve_until_lost(
        signal.SIGKILL, num_shards=2, num_stages=num_stages, uses_sockets=uses_sockets, victim=victim, at_step=at_step
    )
    assert ("rank 1" if num_stages == 1 else "rank") in told


@pytest.mark.parametrize(("num_shards", "num_stages", "uses_sockets"), [(2, 1, False), (2, 1, True), (1, 2, False)])
def test_a_rank_that_hangs_ends_the_step_within_the_timeout(
    num_shards: int, num_stages: int, uses_sockets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omniserve.parallel.group._SAYS_WHY_S", 0.2)  # it will not
    told, seconds = _serve_until_lost(
        signal.SIGSTOP, num_shards=num_shards, num_stages=num_stages, uses_sockets=uses_sockets, timeout_s=1.0
    )
    assert seconds < 10.0
    assert "step failed" in told or "rank 1" in told

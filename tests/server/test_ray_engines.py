"""Engines that Ray places on the three nodes of a cluster of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from batch_inputs import completion_line, submit, wait_for
from engines_to_kill import ray_actors
from fake_engine import SLOW
from running import wait_until
from test_engines_admin import ask, engines
from test_fleet import complete

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patched:  # its processes import the fake engine
        paths = [str(Path(__file__).parent), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        patched.setenv("PYTHONPATH", os.pathsep.join(paths))
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield from _running_cluster(Cluster)


def _running_cluster(Cluster):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
def test_ray_places_engines_on_its_nodes_and_starts_them_again(cluster, start_server):
    server = start_server("--ray-address", cluster.address, "--replicas", "3", "--router", "round-robin")
    server.wait_until_ready()

    def states() -> list[str]:
        return [each["state"] for each in engines(server)]

    wait_until(lambda: states() == ["up"] * 3, lambda: str(engines(server)))
    groups = ray.util.placement_group_table().values()
    assert [len({*group["bundles_to_node_id"].values()}) for group in groups] == [3], "one on each node"
    assert [complete(server, [5, 6, i]).usage.completion_tokens for i in range(6)] == [3] * 6
    assert [each["calls"] for each in engines(server)] == [2, 2, 2]

    lines = [completion_line(n, prompt=[SLOW, 5, n + 1], max_tokens=40) for n in range(60)]
    batch = submit(server.client(), lines)
    wait_until(lambda: all(each["requests"]["BE"] for each in engines(server)), lambda: str(engines(server)))
    ray_actors()[0].send_signal(signal.SIGKILL)
    wait_until(lambda: states().count("up") == 2)
    assert complete(server, [5]).usage.completion_tokens == 3
    ended = wait_for(server.client(), batch.id)
    assert ended.request_counts.completed == 60 and ended.error_file_id is None
    wait_until(lambda: states() == ["up"] * 3, lambda: str(engines(server)))
    assert sum(each["restarts"] for each in engines(server)) == 1

    ask(server, "DELETE", "/0")
    wait_until(lambda: len(engines(server)) == 2 and len(ray_actors()) == 2)
    assert complete(server, [5]).usage.completion_tokens == 3


@pytest.mark.slow
def test_engines_for_which_there_is_no_room_are_told(cluster, monkeypatch):
    from omniserve.server.engines import on_ray

    monkeypatch.setattr(on_ray, "_PLACE_S", 2.0)
    with pytest.raises(ValueError, match="no room for 9 engines"):
        on_ray.place_engines(cluster.address, [None] * 9)


@pytest.mark.slow
def test_the_autoscaler_is_asked_for_what_the_server_wants(cluster, start_server):
    """The example of deploy/ray; what it asks for is where Ray's autoscaler reads it."""
    from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
    from ray.experimental.internal_kv import _internal_kv_get

    def asked_for() -> list[dict[str, object]]:
        kept = _internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL)
        return json.loads(kept) if kept else []

    server = start_server().wait_until_ready()
    script = Path(__file__).parents[2] / "deploy" / "ray" / "autoscale.py"
    command = [sys.executable, str(script), "--url", server.url, "--every", "0.2", "--least", "2", "--engine"]
    with ray.init(address=cluster.address, ignore_reinit_error=True):
        environment = {**os.environ, "RAY_ADDRESS": cluster.address}
        with subprocess.Popen([*command, '{"CPU": 3}'], env=environment) as asking:
            try:
                wait_until(lambda: len(asked_for()) == 2, lambda: str(asked_for()))
                assert server.metric("omniserve_replicas_wanted") == 1, "the least is more than the load needs"
                assert asked_for() == [{"CPU": 3}] * 2
            finally:
                asking.kill()


def test_an_engine_has_its_share_of_a_node():
    from omniserve.server.engines.on_ray import _bundle

    def node(**resources):
        return {"Alive": True, "Resources": resources}

    assert _bundle([node(CPU=8.0), node(CPU=4.0), node(CPU=0.0)], 2, 1) == {"CPU": 4}
    assert _bundle([node(CPU=8.0), node(CPU=4.0)], 4, 1) == {"CPU": 2}
    assert _bundle([node(CPU=2.0), node(CPU=32.0, GPU=4.0)], 2, 2) == {"CPU": 16, "GPU": 2}
    assert _bundle([node(CPU=1.0)], 3, 1) == {"CPU": 1}


def test_no_cluster_is_told():
    from omniserve.server.engines.on_ray import place_engines

    assert os.environ.get("RAY_ADDRESS") is None
    with pytest.raises(ValueError, match="no Ray cluster there"):
        place_engines("not-an-address", [])

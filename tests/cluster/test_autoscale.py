"""deploy/ray/autoscale.py: a Ray cluster gets the nodes that a gauge asks for, and loses those that it does not."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="needs Ray: install the extra ray")
SCRIPT = Path(__file__).parents[2] / "deploy" / "ray" / "autoscale.py"


class Gauge(http.server.BaseHTTPRequestHandler):
    """A server's /metrics with one gauge."""

    wanted = 0

    def do_GET(self) -> None:
        body = f"omniserve_replicas_wanted {float(self.wanted)}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def metrics_url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gauge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def cluster() -> Iterator[None]:
    """A head without CPUs, and nodes of one CPU that the autoscaler starts on this machine."""
    from ray.cluster_utils import AutoscalingCluster

    worker = {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 3}
    found = AutoscalingCluster(
        head_resources={"CPU": 0}, worker_node_types={"engine": worker}, idle_timeout_minutes=0.1
    )  # fmt: skip
    found.start()
    try:
        ray.init(address="auto", logging_level="error")
        yield
    finally:
        ray.shutdown()
        found.shutdown()


def wait_until(done: Callable[[], bool], what: str, timeout_s: float = 240.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < until_s, f"{what}; the cluster has {ray.cluster_resources()}"
        time.sleep(1.0)


@pytest.mark.slow
def test_nodes_come_and_go_with_the_gauge(cluster: None, metrics_url: str) -> None:
    def num_engines() -> int:
        return int(ray.cluster_resources().get("CPU", 0))

    assert num_engines() == 0
    Gauge.wanted = 2
    command = [sys.executable, str(SCRIPT), "--url", metrics_url, "--every", "1"]
    asking = subprocess.Popen(command, env=os.environ | {"PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: num_engines() == 2, "two engines were wanted")
        Gauge.wanted = 1
        wait_until(lambda: num_engines() == 1, "one engine was wanted")
    finally:
        asking.terminate()
        output, _ = asking.communicate(timeout=60)
    assert output.splitlines() == ["asked for 2 engines", "asked for 1 engines"]

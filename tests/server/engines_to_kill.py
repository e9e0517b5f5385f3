"""Engines that ``kill_engines`` kills: a server's own and those of other machines, or those that Ray places."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import psutil
from proxy import Proxy, free_address

from omniserve.server.engines.curve import make_keys
from omniserve.server.workers.process import PROCESS_NAME

if TYPE_CHECKING:
    from kill_engines import Torture

HEARTBEAT_S = 2
_HERE = Path(__file__).parent


class Engines(ABC):
    """The engines of a server."""

    number: ClassVar[int]
    flags: list[str]
    """The server's, that give it these engines."""

    @abstractmethod
    def ways(self, torture: Torture) -> list[Callable[[], object]]:
        """Return what does harm to an engine, each in another way."""

    @abstractmethod
    def close(self) -> None:
        """End those that the server does not end."""


class OwnAndRemoteEngines(Engines):
    """Two engines of the server itself, and two on "other machines", to which connections lead that can be cut."""

    number = 4

    def __init__(self, folder: Path) -> None:
        make_keys(folder / "keys")
        self._remote = [_RemoteEngine(folder / "keys") for _ in range(2)]
        file = folder / "engines.json"
        file.write_text(json.dumps({"keys": "keys", "engines": [each.address for each in self._remote]}))
        self.flags = ["--replicas", "2", "--engines", str(file)]

    def ways(self, torture: Torture) -> list[Callable[[], object]]:
        def kill_own() -> None:
            torture.signal("kill -9 of an engine", _engines_of(torture.server_pid), signal.SIGKILL)

        def stop_own() -> None:  # for good: the server has to kill it
            torture.signal("SIGSTOP of an engine", _engines_of(torture.server_pid), signal.SIGSTOP)

        def kill_remote() -> None:
            of_remotes = [process for each in self._remote for process in _engines_of(each.process.pid)]
            torture.signal("kill -9 of a remote engine", of_remotes, signal.SIGKILL)

        def kill_agent() -> None:
            each = torture.choice(self._remote)
            process = psutil.Process(each.process.pid)
            if torture.signal("kill -9 of a remote machine's process", [process], signal.SIGKILL):
                each.process.wait()
                each.start()

        def stop_agent() -> None:  # for longer than the heartbeat; it goes on then, and must not answer twice
            process = psutil.Process(torture.choice(self._remote).process.pid)
            if torture.signal("SIGSTOP of a remote machine's process", [process], signal.SIGSTOP):
                time.sleep(1.5 * HEARTBEAT_S)
                process.send_signal(signal.SIGCONT)

        def cut() -> None:
            torture.wait_until_two_are_up()
            torture.choice(self._remote).proxy.cut()
            torture.note("cut connection")

        return [kill_own, stop_own, kill_remote, kill_agent, stop_agent, cut]

    def close(self) -> None:
        for each in self._remote:
            each.close()


class _RemoteEngine:
    """``omniserve engine`` in a process, behind a connection that can be cut."""

    def __init__(self, keys: Path) -> None:
        self._keys, self._inside, self.address = keys, free_address(), free_address()
        self.proxy = Proxy(self.address, self._inside)
        self.start()

    def start(self) -> None:
        command = [sys.executable, str(_HERE / "engine_fake.py"), "--listen", self._inside, "--keys", str(self._keys)]
        command += ["--heartbeat", str(HEARTBEAT_S), "--restarts", "1000", "--no-faults"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)

    def close(self) -> None:
        self.proxy.close()
        self.process.kill()
        self.process.wait()


def _engines_of(pid: int) -> list[psutil.Process]:
    """Return the engine processes that a process has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(pid).children(recursive=True)
        return [child for child in children if _is_engine(child)]
    return []


def _is_engine(process: psutil.Process) -> bool:
    return "spawn_main" in " ".join(process.cmdline()) and process.name() != PROCESS_NAME


class EnginesOfRay(Engines):
    """Engines on the three nodes of a Ray cluster of this machine."""

    number = 3

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        # Its processes import the fake engine.
        paths = [str(_HERE), str(_HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        self._nodes = [self._cluster.add_node(num_cpus=1) for _ in range(2)]
        self._cluster.wait_for_nodes()
        self.flags = ["--ray-address", self._cluster.address, "--replicas", str(self.number)]

    def ways(self, torture: Torture) -> list[Callable[[], object]]:
        def kill_actor() -> None:
            torture.signal("kill -9 of an engine of Ray", ray_actors(), signal.SIGKILL)

        def stop_actor() -> None:  # for good: the server has to kill it
            torture.signal("SIGSTOP of an engine of Ray", ray_actors(), signal.SIGSTOP)

        def lose_node() -> None:
            torture.wait_until_two_are_up()
            node = torture.choice(self._nodes)
            self._cluster.remove_node(node, allow_graceful=False)
            torture.note("a node of Ray lost")
            self._nodes = [each for each in self._nodes if each is not node]
            self._nodes.append(self._cluster.add_node(num_cpus=1))

        return [kill_actor, stop_actor, lose_node]

    def close(self) -> None:
        self._cluster.shutdown()


def ray_actors() -> list[psutil.Process]:
    """Return the processes of the engines' actors, in the order of their starts."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [""])[0].startswith("ray::EngineActor"):
            found.append(process)
    return sorted(found, key=lambda process: process.create_time())

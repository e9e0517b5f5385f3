"""Engines as Ray actors: Ray places them on the nodes of its cluster, and starts one again that dies.

An actor is what ``omniserve engine`` is, and the server connects to its address. Nothing of requests goes through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

from omniserve.core.errors import EngineStopped
from omniserve.server.engines.curve import CurveKeys, new_pair
from omniserve.server.engines.peer import Peer
from omniserve.server.engines.process import EngineMaker
from omniserve.server.engines.remote import RemotePeer
from omniserve.server.engines.sources import EngineSource

logger = logging.getLogger("omniserve.server")

_PLACE_S = 120.0
_ASK_S = 10.0
_PAUSE_S = 0.5


class EngineActor:
    """``omniserve engine`` as an actor.

    Args:
        make_engine: Makes the engine.
        keys: Of the engine.
        heartbeat_s, max_restarts, log_level, log_format: As ``EngineServer`` takes them.
    """

    def __init__(
        self,
        make_engine: EngineMaker,
        keys: CurveKeys,
        heartbeat_s: float,
        max_restarts: int,
        log_level: str,
        log_format: str,
    ) -> None:
        import ray

        from omniserve.core.logs import set_up_logs
        from omniserve.server.engines.agent import EngineServer

        set_up_logs(log_level, log_format)
        self._server = EngineServer(
            make_engine,
            f"tcp://{ray.util.get_node_ip_address()}:*",
            keys,
            heartbeat_s=heartbeat_s,
            max_restarts=max_restarts,
            log_level=log_level,
            log_format=log_format,
        )
        threading.Thread(target=self._serve, name="engine", daemon=True).start()

    def address(self) -> str:
        """Return where it listens: somewhere else after Ray has started it again."""
        return self._server.address

    def _serve(self) -> None:
        """Serve until the engine has died too often; Ray makes a new process then."""
        try:
            asyncio.run(self._server.run())
        except BaseException:  # whatever it is: the process ends with it
            logger.exception("an engine has failed")
        finally:
            time.sleep(_PAUSE_S)
            os._exit(1)


class RaySource:
    """An engine that Ray places; see ``EngineSource``.

    Args:
        name: As in ``EngineSource``.
        actor: Its actor.
        keys: Of the server.
    """

    is_local = False

    def __init__(self, name: str, actor: Any, keys: CurveKeys) -> None:
        self.name, self._actor, self._keys, self._server_id = name, actor, keys, uuid.uuid4().hex
        self._has_answered = False
        """The actor has answered since it was killed last."""

    async def connect(self) -> Peer:
        import ray

        try:
            asking = self._actor.address.remote()
            address: Any = await asyncio.to_thread(ray.get, asking, timeout=_ASK_S)
        except ray.exceptions.GetTimeoutError:
            if self._has_answered:  # it hangs, or its node is lost: Ray starts another process
                with contextlib.suppress(ray.exceptions.RayError):  # it has ended
                    await asyncio.to_thread(ray.kill, self._actor, no_restart=False)
                self._has_answered = False
            raise EngineStopped(f"Ray has not started it within {_ASK_S:g} s") from None
        except ray.exceptions.RayError as error:
            raise EngineStopped(f"Ray: {str(error).strip().splitlines()[-1]}") from None
        self._has_answered = True
        return RemotePeer(address, self._keys, self._server_id)

    async def end(self) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError):  # it has ended
            await asyncio.to_thread(ray.kill, self._actor)


def place_engines(
    address: str,
    makers: Sequence[EngineMaker],
    *,
    num_ranks: int = 1,
    heartbeat_s: float = 20.0,
    max_restarts: int = 3,
    log_level: str = "warning",
    log_format: str = "text",
) -> list[EngineSource]:
    """Have a Ray cluster place engines, each in its bundle of one placement group, on as many nodes as can be.

    They end with this process.

    Args:
        address: Of the cluster, as ``ray.init`` takes it.
        makers: What makes each engine.
        num_ranks: Processes of each engine, which has as many GPUs if the cluster has any.
        heartbeat_s, max_restarts, log_level, log_format: As ``EngineServer`` takes them.

    Raises:
        ValueError: Ray is not installed, there is no such cluster, or it has no room.
    """
    try:
        import ray
    except ImportError:
        raise ValueError("--ray-address needs Ray: pip install 'omniserve[ray]'") from None
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    try:
        ray.init(address=address, logging_level=logging.WARNING, ignore_reinit_error=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ValueError(f"--ray-address {address}: no Ray cluster there: {error}") from None
    bundle = _bundle(ray.nodes(), len(makers), num_ranks)
    group = placement_group([bundle] * len(makers), strategy="SPREAD")
    if not group.wait(_PLACE_S):
        free = ray.available_resources()
        ray.util.remove_placement_group(group)
        raise ValueError(
            f"--ray-address {address}: Ray has no room for {len(makers)} engines with {bundle} each; the cluster has "
            f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs left: ask for fewer --replicas"
        )
    of_engines, of_server = new_pair(), new_pair()
    engine_keys = CurveKeys(*of_engines, other=of_server[0])
    server_keys = CurveKeys(*of_server, other=of_engines[0])
    sources: list[EngineSource] = []
    for number, maker in enumerate(makers):
        actor = ray.remote(EngineActor).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_restarts=-1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        )
        handle = actor.remote(maker, engine_keys, heartbeat_s, max_restarts, log_level, log_format)
        sources.append(RaySource(f"ray:{number}", handle, server_keys))
    return sources


def _bundle(nodes: Sequence[dict[str, Any]], num_engines: int, num_ranks: int) -> dict[str, float]:
    """Return what an engine needs of a node: a GPU for each rank if there are any, and its share of the CPUs."""
    usable = [node["Resources"] for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    has_gpus = any(resources.get("GPU", 0) for resources in usable)
    if has_gpus:
        usable = [resources for resources in usable if resources.get("GPU", 0) >= num_ranks]
    num_sharing = math.ceil(num_engines / max(1, len(usable)))
    cpus = min((int(resources["CPU"]) // num_sharing for resources in usable), default=1)
    bundle: dict[str, float] = {"CPU": max(1, cpus)}
    return bundle | {"GPU": num_ranks} if has_gpus else bundle

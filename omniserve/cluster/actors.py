"""What runs on a node of the cluster: a CPU host, or a rank, in the process of a Ray actor, with which it ends."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

import ray

from omniserve.core.errors import PeerLost, PeerRefused

_PAUSE_S = 0.5
_REFUSED_PAUSE_S = 10.0


def _log_to_stderr() -> None:
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)


class CPUHost:
    """``python -m omniserve.host`` as an actor.

    Args:
        secret: As in ``HostServer``, like ``kv_bytes`` and ``num_threads``.
        ip: Where it listens; None: at the node's own address.
        port: The same again if Ray starts it again, so that the engine finds it.
    """

    def __init__(self, secret: bytes, ip: str | None, port: int, kv_bytes: int, num_threads: int) -> None:
        _log_to_stderr()
        from omniserve.host.server import HostServer  # imports torch, which takes seconds

        address = (ip or ray.util.get_node_ip_address(), port)
        self._server = HostServer(secret=secret, kv_bytes=kv_bytes, num_threads=num_threads, address=address)
        self._server.start()

    def address(self) -> str:
        """Return where it listens."""
        return "{}:{}".format(*self._server.address)


class Rank:
    """``python -m omniserve.rank`` as an actor.

    Args:
        secret: What the engine's ``rank_secret_file`` has.
        address: The engine's ``rank_listen``.
    """

    def __init__(self, secret: bytes, address: tuple[str, int]) -> None:
        _log_to_stderr()
        self._secret, self._address = secret, address
        threading.Thread(target=self._join, name="rank", daemon=True).start()

    def address(self) -> str:
        """Return which node it is on."""
        return str(ray.util.get_node_ip_address())

    def _join(self) -> None:
        """Serve one engine. The next one finds a new process, which Ray makes when this one ends."""
        from omniserve.parallel.cli import join

        logger, pause_s = logging.getLogger("omniserve.cluster"), _PAUSE_S
        try:
            join(self._address, self._secret)
        except PeerRefused as error:
            logger.error("%s", error)
            pause_s = _REFUSED_PAUSE_S
        except (PeerLost, OSError) as error:
            logger.warning("%s", error)
        finally:
            time.sleep(pause_s)
            os._exit(1)

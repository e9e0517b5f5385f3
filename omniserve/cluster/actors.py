"""The Ray actors on a node of the cluster: each process is a CPU host, a rank or a prefill engine."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence

import ray

from omniserve.core.config import CPU_HOST_SECRET_VARIABLE, PREFILL_SECRET_VARIABLE
from omniserve.core.errors import PeerLost, PeerRefused
from omniserve.core.logs import set_up_logs

_PAUSE_S = 0.5
_REFUSED_PAUSE_S = 10.0


def _log_to_stderr() -> None:
    set_up_logs("info", "text")


class CPUHost:
    """``python -m omniserve.host`` as an actor.

    Args:
        secret: As in ``HostServer``, like ``kv_bytes`` and ``num_threads``.
        ip: Where it listens; None: at the node's own address.
        port: The same again if Ray starts it again, so that the engine finds it.
    """

    def __init__(self, secret: bytes, ip: str | None, port: int, kv_bytes: int, num_threads: int) -> None:
        _log_to_stderr()
        from omniserve.remote.host_server import HostServer  # imports torch, which takes seconds

        address = (ip or ray.util.get_node_ip_address(), port)
        self._server = HostServer(secret=secret, kv_bytes=kv_bytes, num_threads=num_threads, address=address)
        self._server.start()

    def address(self) -> str:
        """Return where it listens."""
        return "{}:{}".format(*self._server.address)


class PrefillEngine:
    """``python -m omniserve.prefill`` as an actor.

    Args:
        secret: What the engine's ``prefill_secret_file`` has.
        ip: Where it listens; None: at the node's own address.
        port: The same again if Ray starts it again, so that the engine finds it.
        flags: Flags of the server. Those that are not an engine's are left out, and so are the files of its disk tier
            and of its trace, which two processes must not share, and of its profile, which is of another machine.
    """

    def __init__(self, secret: bytes, ip: str | None, port: int, flags: Sequence[str]) -> None:
        _log_to_stderr()
        self._secret, self._address = secret, (ip or ray.util.get_node_ip_address(), port)
        self._flags = ["--listen", self.address(), "--secret-file", "", *flags]
        threading.Thread(target=self._serve, name="prefill", daemon=True).start()

    def address(self) -> str:
        """Return where it will listen, when it has loaded the model."""
        return "{}:{}".format(*self._address)

    def _serve(self) -> None:
        """Serve until this fails; Ray makes a new process then."""
        from omniserve.prefill.cli import build_parser, run

        os.environ[PREFILL_SECRET_VARIABLE] = self._secret.decode()  # for its other ranks
        try:
            args, _ = build_parser().parse_known_args(self._flags)
            args.disk_kv_gib, args.disk_kv_dir, args.disk_kv_keep, args.trace_steps = 0.0, None, False, None
            args.profile = "none" if args.profile == "none" else None
            run(args, self._secret, self._address, lambda server: None)
        except BaseException:  # whatever it is, an exit of the parser too: the process ends with it
            logging.getLogger("omniserve.cluster").exception("a prefill engine has failed")
        finally:
            time.sleep(_PAUSE_S)
            os._exit(1)


class Rank:
    """``python -m omniserve.rank`` as an actor.

    Args:
        secret: What the engine's ``rank_secret_file`` has, its ``cpu_host_secret_file`` and its
            ``prefill_secret_file``.
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

        for variable in (CPU_HOST_SECRET_VARIABLE, PREFILL_SECRET_VARIABLE):
            os.environ[variable] = self._secret.decode()
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

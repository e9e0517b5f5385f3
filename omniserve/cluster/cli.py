"""The command line that serves a model on a Ray cluster: the server on this node, and what helps it on the others.

That is CPU hosts, ranks or prefill engines.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from omniserve.core.arguments import ArgumentParser
from omniserve.core.config import GIB
from omniserve.core.logs import set_up_logs

logger = logging.getLogger("omniserve.cluster")

_START_S = 120.0
_LOCAL = "local"
_LOOPBACK = "127.0.0.1"


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="python -m omniserve.cluster", description=__doc__, usage="%(prog)s [options] -- [flags of the server]"
    )
    parser.add_argument(
        "--address",
        default="auto",
        help="of the Ray cluster; auto: the one that this machine is a node of; local: a new one of this machine alone "
        "(default: auto)",
    )
    parser.add_argument(
        "--cpu-hosts", type=int, default=0, metavar="N", help="CPU hosts, on as many nodes as there are (default: 0)"
    )
    parser.add_argument(
        "--cpu-host-kv-gib", type=float, default=1.0, metavar="GIB", help="memory of each for KV (default: 1)"
    )
    parser.add_argument(
        "--cpu-host-threads", type=int, metavar="THREADS", help="of each (default: the CPUs that Ray has for it there)"
    )
    parser.add_argument("--cpu-host-port", type=int, default=7001, metavar="PORT", help="of the first (default: 7001)")
    parser.add_argument(
        "--prefill-engines", type=int, default=0, metavar="N", help="prefill engines, likewise (default: 0)"
    )
    parser.add_argument("--prefill-port", type=int, default=7101, metavar="PORT", help="of the first (default: 7101)")
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N", help="as the server's; the others go to nodes"
    )
    parser.add_argument(
        "--pipeline-parallel-size", type=int, default=1, metavar="N", help="as the server's; the others go to nodes"
    )
    parser.add_argument("--rank-port", type=int, default=7000, metavar="PORT", help="for ranks (default: 7000)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Start everything, and serve until the server ends; return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, server_flags = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = _parser()
    args = parser.parse_args(own)
    set_up_logs("info", "text", text="%(levelname)s %(message)s")
    try:
        _check(args)
        if args.prefill_engines and any(flag.split("=")[0] == "--config" for flag in server_flags):
            raise ValueError("prefill engines read no --config: give the settings of the model as flags behind --")
        import ray
    except ValueError as error:
        parser.error(str(error))
    except ImportError:
        parser.error("Ray is not installed: pip install 'omniserve[ray]'")
    try:
        more: dict[str, Any] = {"include_dashboard": False} if args.address == _LOCAL else {}
        ray.init(address=args.address, logging_level=logging.WARNING, **more)
    except ConnectionError as error:
        print(f"error: no Ray cluster at {args.address!r}: {error}", file=sys.stderr)
        return 2
    try:
        return _serve(args, server_flags)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        ray.shutdown()  # ends the actors, too


def _check(args: argparse.Namespace) -> None:
    for name in ("cpu_hosts", "prefill_engines"):
        if getattr(args, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} must be >= 0, got {getattr(args, name)}")
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(args, name)}")
    num_ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    if not args.cpu_host_kv_gib > 0:
        raise ValueError(f"--cpu-host-kv-gib must be > 0, got {args.cpu_host_kv_gib:g}")
    if args.cpu_host_threads is not None and args.cpu_host_threads < 1:
        raise ValueError(f"--cpu-host-threads must be >= 1, got {args.cpu_host_threads}")
    if not args.cpu_hosts and not args.prefill_engines and num_ranks == 1:
        raise ValueError(
            "give --cpu-hosts, --prefill-engines, --tensor-parallel-size or --pipeline-parallel-size: without them, "
            "use python -m omniserve.server"
        )


def _serve(args: argparse.Namespace, server_flags: Sequence[str]) -> int:
    """Start the actors and the server.

    Raises:
        RuntimeError: An actor does not start.
    """
    import ray

    secret = secrets.token_hex(32)
    is_local = args.address == _LOCAL
    ip = _LOOPBACK if is_local else str(ray.util.get_node_ip_address())
    hosts = _start_cpu_hosts(args, secret.encode(), _LOOPBACK if is_local else None)
    sizes = ["--tensor-parallel-size", str(args.tensor_parallel_size)]
    sizes += ["--pipeline-parallel-size", str(args.pipeline_parallel_size)]
    prefills = _start_prefill_engines(args, secret.encode(), _LOOPBACK if is_local else None, [*server_flags, *sizes])
    ranks = _start_ranks(args, secret.encode(), (ip, args.rank_port))
    addresses = _addresses(hosts + prefills + ranks)
    logger.info(
        "Ray has started %d CPU hosts, %d prefill engines and %d ranks: %s",
        len(hosts),
        len(prefills),
        len(ranks),
        ", ".join(addresses),
    )
    with tempfile.TemporaryDirectory(prefix="omniserve-") as folder:  # only this user can read it
        secret_file = Path(folder) / "secret"
        secret_file.write_text(secret)
        command = [sys.executable, "-m", "omniserve.server", *server_flags]
        if hosts:
            command += ["--cpu-hosts", ",".join(addresses[: len(hosts)]), "--cpu-host-secret-file", str(secret_file)]
        if prefills:
            of_prefills = addresses[len(hosts) : len(hosts) + len(prefills)]
            command += ["--prefill-engines", ",".join(of_prefills), "--prefill-secret-file", str(secret_file)]
        if ranks:
            command += [*sizes, "--rank-listen", f"{ip}:{args.rank_port}", "--rank-secret-file", str(secret_file)]
        server = subprocess.Popen(command)

        def end(number: int, frame: FrameType | None) -> None:
            server.terminate()

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        status = server.wait()
    return status if status >= 0 else 128 - status


def _nodes() -> list[dict[str, Any]]:
    """Return the nodes that are there, this one last."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    return sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"] == here)


def _start_cpu_hosts(args: argparse.Namespace, secret: bytes, ip: str | None) -> list[Any]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from omniserve.cluster.actors import CPUHost

    started = []
    for number, (node, num_before, sharers) in enumerate(_nodes_for(args.cpu_hosts)):
        threads = args.cpu_host_threads or max(1, int(node["Resources"].get("CPU", 1)) // sharers)
        actor = ray.remote(CPUHost).options(
            num_cpus=threads,
            max_restarts=-1,
            name=f"omniserve-cpu-host-{number}-{os.getpid()}",
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        kv_bytes = int(args.cpu_host_kv_gib * GIB)
        started.append(actor.remote(secret, ip, args.cpu_host_port + num_before, kv_bytes, threads))
    return started


def _nodes_for(count: int) -> list[tuple[dict[str, Any], int, int]]:
    """Return for each of ``count`` processes its node, how many have it before this one, and how many in all."""
    nodes = _nodes()
    return [
        (nodes[number % len(nodes)], number // len(nodes), len(range(number % len(nodes), count, len(nodes))))
        for number in range(count)
    ]


def _start_prefill_engines(args: argparse.Namespace, secret: bytes, ip: str | None, flags: Sequence[str]) -> list[Any]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from omniserve.cluster.actors import PrefillEngine

    num_ranks = args.tensor_parallel_size * args.pipeline_parallel_size  # all on its node
    started, num_gpus = [], num_ranks if ray.cluster_resources().get("GPU", 0) else 0
    for number, (node, num_before, _) in enumerate(_nodes_for(args.prefill_engines)):
        actor = ray.remote(PrefillEngine).options(
            num_cpus=1,
            num_gpus=num_gpus,
            max_restarts=-1,
            name=f"omniserve-prefill-{number}-{os.getpid()}",
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        # Its other ranks listen at the ports behind its own.
        port = args.prefill_port + num_ranks * num_before
        started.append(actor.remote(secret, ip, port, list(flags)))
    return started


def _start_ranks(args: argparse.Namespace, secret: bytes, address: tuple[str, int]) -> list[Any]:
    import ray

    from omniserve.cluster.actors import Rank

    num_gpus = 1 if ray.cluster_resources().get("GPU", 0) else 0
    actor = ray.remote(Rank).options(num_cpus=1, num_gpus=num_gpus, max_restarts=-1, scheduling_strategy="SPREAD")
    num_ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    return [actor.remote(secret, address) for _ in range(1, num_ranks)]


def _addresses(actors: Sequence[Any]) -> list[str]:
    """Wait for actors to be there, and return their addresses."""
    import ray

    try:
        return list(ray.get([actor.address.remote() for actor in actors], timeout=_START_S))
    except ray.exceptions.GetTimeoutError:
        free = ray.available_resources()
        raise RuntimeError(
            f"Ray has not started all {len(actors)} processes within {_START_S:g} s; the cluster has "
            f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs left: ask for fewer, or for fewer threads"
        ) from None
    except ray.exceptions.RayActorError as error:
        raise RuntimeError(f"a process has not started: {str(error).strip().splitlines()[-1]}") from None

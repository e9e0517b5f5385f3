"""Which cores and which NUMA node a rank, or one of several engines, has on a CPU, of those of its machine.

torch is imported behind that, as libraries start threads when they are imported.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from omniserve.core import numa

if TYPE_CHECKING:
    from omniserve.layers.patched_model import PatchedModel

logger = logging.getLogger(__name__)


def pin_to_share(rank: int, num_ranks: int, how: str = "auto", *, num_engines: int = 1) -> None:
    """Keep this thread, and those that it starts, to a rank's share of the cores that this process has.

    With ``auto`` the share is of one NUMA node, and memory comes from there, if ranks can be spread evenly over nodes.
    With ``off`` the nodes do not matter. With fewer cores than ranks several ranks share one. A CPU quota is shared
    likewise, by the ranks of ``num_engines`` engines.
    """
    numa.release()
    share = _share(rank, num_ranks, how, "ranks")
    _keep_to(share, f"rank {rank} of {num_ranks}", num_ranks * num_engines)


def keep_engine_to_share(number: int, num_engines: int, how: str = "auto", *, has_ranks: bool) -> None:
    """Keep this process, an engine of several, to its share of this machine's cores, as a rank is, and for good.

    Args:
        number: Which engine.
        num_engines: How many.
        how: As of ``pin_to_share``.
        has_ranks: Its ranks divide the share, and choose where their memory comes from.
    """
    share = _share(number, num_engines, how, "engines")
    _keep_to(numa.Share(share.cores) if has_ranks else share, f"engine {number} of {num_engines}", num_engines)
    numa.settle()


def _share(number: int, count: int, how: str, what: str) -> numa.Share:
    """Return the share of one of ``count`` processes; ``what`` they are is for the log."""
    cores = os.sched_getaffinity(0)
    nodes = numa.read_nodes(cores) if how == "auto" else []
    shares = numa.shares_of(count, cores, nodes)
    if shares is None:
        _log_why(count, nodes, how, what)
        shares = numa.equal_shares(count, cores)
    return shares[number]


def place_joined(how: str) -> None:
    """Keep this process, a rank that joins an engine from outside, to a NUMA node.

    Args:
        how: The number of a node, ``off``, or ``auto``: torchrun's ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` say which of
            how many processes of this machine this is; without them, and where there is a GPU, nothing is done.

    Raises:
        ValueError: There is no such node.
    """
    if how == "off":
        return
    cores = os.sched_getaffinity(0)
    if how != "auto":
        node = numa.node_numbered(int(how), cores)
        _keep_to(numa.Share(node.cores, (node,)), "this rank")
        return
    nodes = numa.read_nodes(cores)
    local, count = (int(os.environ.get(name, 0)) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if len(nodes) < 2:
        logger.debug("this rank is not kept to a NUMA node: %d nodes", len(nodes))
    elif _has_gpu():
        logger.debug("this rank is not kept to a NUMA node: it may have a GPU")
    elif not 0 <= local < count:
        logger.info("this rank has the cores of %d NUMA nodes: --numa NODE keeps it to one", len(nodes))
    elif (shares := numa.shares_of(count, cores, nodes)) is None:
        _log_why(count, nodes, how, "ranks")
    else:
        _keep_to(shares[local], f"rank {local} of {count} on this machine", count)


def take_weights(model: PatchedModel) -> None:
    """Copy what a rank that is kept to a node still reads in the pages of a file: they may be of another node."""
    from omniserve.layers.weights.mapped import copy_mapped_weights

    if numa.is_kept_to_nodes() and (num_bytes := copy_mapped_weights(model.family.model)):
        logger.info("%.2f GiB of weights were copied out of the pages of their files", num_bytes / 2**30)


def _keep_to(share: numa.Share, name: str, num_sharing: int = 1) -> None:
    """Keep this thread to a share; ``num_sharing`` processes share this one's CPU quota."""
    numa.keep_to(share)
    import torch

    from omniserve.host.cores import available_cores, share_quota

    share_quota(num_sharing)
    torch.set_num_threads(available_cores())
    level = logging.INFO if share.nodes else logging.DEBUG
    logger.log(level, "%s has %s; %d threads", name, numa.describe(share), torch.get_num_threads())


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _log_why(count: int, nodes: list[numa.Node], how: str, what: str) -> None:
    """Tell why processes are not kept to nodes."""
    if len(nodes) < 2:
        logger.debug("%s are not kept to NUMA nodes: %s", what, "off" if how == "off" else f"{len(nodes)} nodes")
        return
    sizes = " and ".join(f"{len(node.cores)} on node {node.number}" for node in nodes)
    logger.info(
        "%d %s cannot be spread evenly over NUMA nodes (cores: %s): each has an equal share of all cores, and "
        "memory of any node",
        count,
        what,
        sizes,
    )

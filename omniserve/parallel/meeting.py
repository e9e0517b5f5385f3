"""Connects the ranks: process groups for the collectives of a stage's ranks, and for rows from stage to stage."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from omniserve.layers.patched_model import PatchedModel
from omniserve.ops import collectives
from omniserve.ops.collectives import DistributedGroup
from omniserve.ops.shared_memory import SharedMemoryGroup
from omniserve.ops.stage_link import StageLink
from omniserve.parallel.place import Place


def connect_collectives(
    device: torch.device,
    place: Place,
    files: Sequence[str] | None,
    store: tuple[str, int] | dist.Store | None,
    address: str,
    timeout_s: float,
) -> dist.ProcessGroup | None:
    """Meet the other ranks, and connect the collectives of a stage's ranks; arguments as of ``messages.Connect``.

    The sockets of gloo, on a CPU, are on this rank's ``address``. On rank 0 ``store`` is the store itself.

    Returns:
        The group of all ranks, if they have a store.
    """
    everybody: dist.ProcessGroup | None = None
    if store is not None:
        if isinstance(store, tuple):
            store = dist.TCPStore(*store, is_master=False, timeout=timedelta(seconds=timeout_s))
        num_ranks = place.num_shards * place.num_stages
        everybody = _process_group(device, dist.PrefixStore("all", store), place.rank, num_ranks, address, timeout_s)
    if place.num_shards == 1:
        return everybody
    if files is not None:
        collectives.connect(SharedMemoryGroup(files[place.stage], place.shard, place.num_shards, timeout_s))
    elif place.num_stages == 1:
        collectives.connect(DistributedGroup(everybody))
    else:
        assert isinstance(store, dist.Store)
        own = dist.PrefixStore(f"stage {place.stage}", store)
        group = _process_group(device, own, place.shard, place.num_shards, address, timeout_s)
        collectives.connect(DistributedGroup(group))
    return everybody


def stage_link(model: PatchedModel, place: Place, group: dist.ProcessGroup | None) -> StageLink:
    """Return a rank's connections to the stages before and behind its own."""
    if place.num_stages == 1:
        return StageLink()
    with torch.inference_mode(), collectives.alone():
        ids_T = torch.zeros(1, dtype=torch.int64, device=model.device)
        width = model.embed(ids_T, ids_T).shape[1]
    return StageLink(
        group,
        before=place.before,
        behind=place.behind,
        width=width,
        most_under_way=2 * place.num_stages,  # rows, and flags behind them
        dtype=model.dtype,
        device=model.device,
    )


def _process_group(
    device: torch.device, store: dist.Store, rank: int, num_ranks: int, address: str, timeout_s: float
) -> Any:
    options: Any
    if device.type == "cpu":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout_s)
        return dist.ProcessGroupGloo(store, rank, num_ranks, options)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, rank, num_ranks, options)

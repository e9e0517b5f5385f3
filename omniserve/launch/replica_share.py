"""The part of a machine that one of several engines has: some of its cores, and of its GPUs if there are any."""

from __future__ import annotations

import os

from omniserve.parallel.shares import keep_engine_to_share


def keep_to_share(number: int, count: int, numa: str = "auto", *, has_ranks: bool) -> None:
    """Keep this process to the share of engine ``number`` of ``count``; CUDA must not have been used yet.

    Cores are divided as among ranks, within NUMA nodes if that is even and ``numa`` is not ``off``. GPUs are divided in
    their order; with fewer GPUs than engines several share one. The ranks of an engine, if it ``has_ranks``, divide its
    share.
    """
    keep_engine_to_share(number, count, numa, has_ranks=has_ranks)
    import torch

    if num_gpus := torch.cuda.device_count():  # by the driver's library: it begins nothing on a GPU
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(i) for i in range(num_gpus)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(share_of(names, number, count))


def share_of(gpus: list[str], number: int, count: int) -> list[str]:
    """Return the GPUs of engine ``number`` of ``count``."""
    if len(gpus) < count:
        return [gpus[number % len(gpus)]]
    return gpus[number * len(gpus) // count : (number + 1) * len(gpus) // count]

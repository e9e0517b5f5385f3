"""The disk tier that an engine's settings ask for."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from transformers import PreTrainedModel

from omniserve.core.config import GIB, EngineConfig
from omniserve.core.spec import ModelSpec
from omniserve.engine.capacity import caches_prefixes
from omniserve.host.disk import DiskTier
from omniserve.host.disk_file import DiskFile
from omniserve.host.tier import HostTier
from omniserve.kv import KV_MANAGERS, KeepsPrefixesOnDisk
from omniserve.latency.profile import cache_folder
from omniserve.layers.kv_fingerprint import kv_fingerprint

logger = logging.getLogger(__name__)


def check_disk(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ValueError if a disk tier is wanted and this KV manager or model cannot have one."""
    if not config.disk_kv.gib:
        return
    if not issubclass(KV_MANAGERS.get(config.kv), KeepsPrefixesOnDisk):
        raise ValueError(f"kv={config.kv!r} keeps nothing on disk: set kv to tiered, or disk_kv.gib to 0")
    if spec.state_bytes or not caches_prefixes(config, spec):
        raise ValueError("the disk tier keeps what the prefix cache has, and there is none: set disk_kv.gib to 0")


def open_disk(config: EngineConfig, spec: ModelSpec, model: PreTrainedModel, tier: HostTier) -> DiskTier | None:
    """Open the disk tier below a host tier; None if none is wanted.

    Raises:
        ValueError, OSError: See ``DiskFile``.
    """
    if not config.disk_kv.gib:
        return None
    fingerprint = None
    if config.disk_kv.keep:
        began_s = time.monotonic()
        fingerprint = kv_fingerprint(model, config)
        logger.info("disk tier: the weights were compared in %.1f s", time.monotonic() - began_s)
    file = DiskFile(
        Path(config.disk_kv.dir) if config.disk_kv.dir is not None else cache_folder() / "kv",
        num_bytes=int(config.disk_kv.gib * GIB), block_bytes=spec.host_block_bytes(config.block_size, "auto"),
        fingerprint=fingerprint,
    )  # fmt: skip
    return DiskTier(file, tier.pool_LBK2SH)

"""Sources: the places from which KV of a waiting request's first tokens can come into host memory.

Each source is a file of its own, and is imported only if an engine has it. To add one, subclass ``KVSource``
(``base.py``) and add an entry to ``KV_SOURCES``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from omniserve.core.config import EngineConfig
from omniserve.kv.base import KVManager
from omniserve.sched.sources.base import KVSource


@dataclass(frozen=True, slots=True)
class KVSourceEntry:
    """A kind of source."""

    is_wanted: Callable[[EngineConfig, KVManager], bool]
    """Tells whether an engine with these settings and this KV manager has such a source."""
    load: Callable[[], type[KVSource]]
    """Imports its class."""


def _has_disk(config: EngineConfig, kv: KVManager) -> bool:
    return kv.prefixes is not None and kv.prefixes.disk is not None


def _disk() -> type[KVSource]:
    from omniserve.sched.sources.disk import DiskSource

    return DiskSource


def _has_prefill_engines(config: EngineConfig, kv: KVManager) -> bool:
    return bool(config.prefill.prefill_engines) and kv.prefixes is not None and kv.prefixes.host is not None


def _prefill() -> type[KVSource]:
    from omniserve.sched.sources.prefill import PrefillSource

    return PrefillSource


KV_SOURCES = [KVSourceEntry(_has_disk, _disk), KVSourceEntry(_has_prefill_engines, _prefill)]
"""All kinds of sources; a request waits for the first of them that has KV for it."""


def sources_of(config: EngineConfig, kv: KVManager) -> list[type[KVSource]]:
    """Return the classes of the sources that an engine has."""
    return [entry.load() for entry in KV_SOURCES if entry.is_wanted(config, kv)]

"""What loading a rank's part of a model takes of memory and of the disk, in a process that has done nothing else."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import threading
import time
from pathlib import Path

from omniserve import EngineConfig
from omniserve.launch.loading import EngineLoader
from omniserve.layers.model_classes import import_model_classes
from omniserve.layers.patching import patched_model
from omniserve.layers.weights.sharding import shard
from omniserve.parallel.place import Place

_LOOK_S = 0.002


def loading_of(folder: Path, dtype: str, place: Place, how: str) -> dict[str, float]:
    """Load a rank in a new process, and return what that took; the file is not in the page cache when it begins.

    Args:
        folder: The checkpoint.
        dtype: As of ``EngineLoader``.
        place: The rank's.
        how: ``part``: as an engine loads it; ``whole``: all weights, which are cut then.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_load, (folder, dtype, place, how))


def _load(folder: Path, dtype: str, place: Place, how: str) -> dict[str, float]:
    import_model_classes()
    loader = EngineLoader(model=str(folder), dtype=dtype, device="cpu", config=EngineConfig())
    for file in folder.glob("*.safetensors"):
        _drop_from_cache(file)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before_kib, disk_before = _status_kib(), _read_bytes()
    with _Peak() as peak:
        began_s = time.perf_counter()
        if how == "part":
            model = loader.load_rank(place)
        else:
            model = shard(loader.load_model(lambda what: None), place.shard, place.num_shards)
        patched_model(model, compile=False, keep=place.layers)
        seconds = time.perf_counter() - began_s
    peak_rss_kib = _status_kib()["VmHWM"]
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    gib = 1 << 20  # of KiB
    return {
        "peak_own_gib": (peak.kib - before_kib["RssAnon"]) / gib,
        "peak_mapped_gib": (peak_rss_kib - before_kib["VmRSS"]) / gib,
        "held_gib": (_status_kib()["RssAnon"] - before_kib["RssAnon"]) / gib,
        "disk_gib": (_read_bytes() - disk_before) / (1 << 30),
        "seconds": seconds,
    }


def _drop_from_cache(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _status_kib() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines) if "kB" in value}


def _read_bytes() -> int:
    """Return how much this process has had read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


class _Peak:
    """The most memory of its own, in KiB, that the process has while this is entered; looked at all few ms."""

    def __init__(self) -> None:
        self.kib = 0
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self.kib = max(self.kib, _status_kib()["RssAnon"])

    def __enter__(self) -> _Peak:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._watcher.join()
        self.kib = max(self.kib, _status_kib()["RssAnon"])

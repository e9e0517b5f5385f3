"""What loading a rank's part of a model takes of memory and of the disk.

python -m benchmarks.rank_loading --record benchmarks/results/rank_loading.json
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path

from benchmarks.common.cases import Benchmark, Trials
from benchmarks.common.models import saved_llama
from omniserve import EngineConfig
from omniserve.launch.loading import EngineLoader
from omniserve.layers.model_classes import import_model_classes
from omniserve.layers.patching import patched_model
from omniserve.layers.weights.sharding import shard
from omniserve.parallel.place import Place

LOADING = Benchmark("rank_loading")
_LOOK_S = 0.002
_LLAMA_860M = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
"""The layers of Llama-3.2-1B, but fewer of them and of the tokens."""


@LOADING.case(
    places=(["1x1", "2x1", "4x1", "1x2", "2x2"], "ranks of a stage x stages"), repeats=1, uncounted=0,
    dtype=("bfloat16", "of the model; the checkpoint is bfloat16"), small=(False, "a model of a few MB"),
    tiny={"places": ["2x1"], "repeats": 1, "small": True},
)  # fmt: skip
def rank_loading(args: argparse.Namespace) -> Trials:
    """Memory and bytes from the disk that loading a rank takes: its part alone, or the whole model that is cut then.

    A random bf16 checkpoint of a Llama in one file, which is not in the page cache. Rank 0 of each place is loaded and
    patched, without compiling, in a process of its own. ``peak_own_gib``: the most memory of the process that is no
    page of a file, beyond what it had before; ``peak_mapped_gib`` counts mapped pages of files, too, which ranks of one
    machine share. ``held_gib``: its own memory at the end. These do not vary, so that one repeat is enough; ``seconds``
    do.
    """
    if args.small:
        folder = saved_llama(
            "llama-2m", {**_LLAMA_860M, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 99}
        )
    else:
        folder = saved_llama("llama-860m", _LLAMA_860M)
    size_gib = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / (1 << 30)
    for each in args.places:
        shards, stages = map(int, each.split("x"))
        place = Place(0, shards, stages)
        names = [f"tensor parallel {shards}"] * (shards > 1) + [f"pipeline parallel {stages}"] * (stages > 1)
        arms = {how: functools.partial(loading_of, folder, args.dtype, place, how) for how in ("whole", "part")}
        result = yield " x ".join(names) or "one process", arms
        result["checkpoint_gib"] = size_gib


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


if __name__ == "__main__":
    sys.exit(LOADING.main())

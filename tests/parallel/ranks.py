"""Ranks of tiny models, each a process of its own, for tests in this process."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from transformers import PreTrainedModel

from omniserve import EngineConfig, ExecutionConfig
from omniserve.core import link
from omniserve.core.config import LoRAConfig, ParallelConfig
from omniserve.launch.loading import EngineLoader
from omniserve.layers.patching import patched_model
from omniserve.layers.weights.sharding import shard
from omniserve.parallel.follow import follow, summary_of
from omniserve.parallel.group import RankGroup
from omniserve.parallel.place import Place
from tests.parity.engine_histories import Reference
from tests.parity.models import MODELS, tiny_model
from tests.parity.zoo import tiny

NO_LORA = LoRAConfig()

PRELOADED = ["tests.prefill.servers"]
"""Modules that the server from which ranks and prefill engines are forked imports: all that either uses."""


class ForkedRanks(RankGroup):
    """Ranks that are forked from a process that has imported everything and has no threads: they are there at once."""

    def _start(self, secret: bytes, *, shares_cores: bool) -> None:
        # A prefill engine has imported all by then, too, and has no other thread yet.
        is_prefill_engine = multiprocessing.parent_process() is not None
        context = multiprocessing.get_context("fork" if is_prefill_engine else "forkserver")
        context.set_forkserver_preload(PRELOADED)
        for rank in range(1, self.size):
            process = context.Process(target=_run_rank, args=(self._address, secret, rank))
            process.start()
            self._processes.append(_Started(process))  # type: ignore[arg-type]

    def _shares_memory(self, device: torch.device) -> bool:
        return not self.uses_sockets

    uses_sockets = False
    """Collectives go as they would between machines."""

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]


class _Started:
    """A forked process as ``subprocess`` would show it."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid = process.pid
        self.kill = process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()


def _run_rank(address: tuple[str, int], secret: bytes, rank: int) -> None:
    torch.set_num_threads(1)
    follow(link.connect(address, secret, 10.0, "rank 0"), rank)


def load_tiny(family: str, place: Place) -> PreTrainedModel:
    """Return a tiny model with a rank's part of each layer, made without a checkpoint."""
    return shard(whole_model(family), place.shard, place.num_shards)


def load_part(folder: str, place: Place) -> PreTrainedModel:
    """Return a rank's part of the model in a folder, as an engine loads it."""
    return EngineLoader(model=folder, dtype="auto", device="cpu", config=EngineConfig()).load_rank(place)


@functools.cache
def checkpoint_of(family: str) -> str:
    """Return a folder with a tiny model, which is there until this process ends."""
    folder = tempfile.mkdtemp(prefix=f"omniserve-{family}-")
    atexit.register(shutil.rmtree, folder)
    whole_model(family).save_pretrained(folder)
    return folder


def whole_model(family: str) -> PreTrainedModel:
    """Return a tiny model: of a family, or of any type that transformers has."""
    return tiny_model(family) if family in MODELS else tiny(family)


@contextlib.contextmanager
def ranks_of(
    family: str, num_shards: int = 2, *, num_stages: int = 1, timeout_s: float = 20.0, compile: bool = False,
    load: Callable[[Place], Any] | None = None, uses_sockets: bool = False, lora: LoRAConfig = NO_LORA,
) -> Iterator[tuple[PreTrainedModel, ForkedRanks, ParallelConfig]]:  # fmt: skip
    """Start the ranks of a tiny model; they serve one engine after the other.

    Yields rank 0's part, the group, and the configuration.
    """
    parallel = ParallelConfig(
        tensor_parallel_size=num_shards, pipeline_parallel_size=num_stages, rank_timeout_s=timeout_s
    )
    config = EngineConfig(
        parallel=parallel, execution=ExecutionConfig(compile=compile), lora=lora, host_kv_bytes=1 << 20
    )
    load = load or functools.partial(load_part, checkpoint_of(family))
    group = ForkedRanks(config, load, progress=lambda what: None, shares_cores=False, keeps_ranks=True)
    group.uses_sockets = uses_sockets
    try:
        model = load(group.place)
        patched = patched_model(model, compile=compile, keep=group.place.layers, lora=lora)
        group.await_loaded(summary_of(patched))
        if compile:
            patched.warm_up()
            group.compile(fused=False)
        group.connect(patched)
        yield model, group, parallel
    finally:
        group.close()


@functools.cache
def reference_of(family: str) -> Reference:
    """Return what Hugging Face makes of the whole model."""
    return Reference(whole_model(family))

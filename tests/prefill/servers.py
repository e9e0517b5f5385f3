"""Prefill engines of tiny models, each a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from omniserve import Engine, EngineConfig, PrefillConfig, patch
from omniserve.engine.capacity import pool_bytes
from omniserve.layers.kv_fingerprint import kv_fingerprint
from omniserve.prefill.server import PrefillServer
from tests.engine_settings import flat_config
from tests.parallel.ranks import PRELOADED, ranks_of
from tests.parity.models import MODELS, tiny_model
from tests.parity.zoo import tiny

SECRET = "a secret of some length"


def make_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make prefixes of a block worth a copy, and have what was lost tried again soon."""
    monkeypatch.setattr("omniserve.sched.prefixes_on_host.LEAST_RESTORED_TOKENS", 8)
    monkeypatch.setattr("omniserve.remote.prefill_engines._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("omniserve.remote.prefill_engines._LONGEST_PAUSE_S", 0.05)


def config_of(model: PreTrainedModel, **settings: Any) -> EngineConfig:
    """Return settings of a prefill engine for a patched tiny model."""
    block_bytes = model.omniserve.spec.kv_block_bytes(8)
    sizes = {
        "block_size": 8, "device_kv_bytes": 40 * block_bytes, "host_kv_bytes": 60 * block_bytes, "kv": "tiered",
        "max_num_batched_tokens": 24, "host_threads": 1, "compile": False, "prefix_cache": True,
        "max_host_requests": 4, "async_steps": False,
    }  # fmt: skip
    config = flat_config({**sizes, **settings})
    num_bytes = pool_bytes(config.device_kv_bytes, config, model.omniserve.spec)  # room for recurrent states, if any
    return dataclasses.replace(config, device_kv_bytes=num_bytes)


def model_of(family: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a tiny model of a family, or of a type with recurrent states; the same in each process."""
    return tiny_model(family, dtype) if family in MODELS else tiny(family).to(dtype)


class Server:
    """A prefill engine in a process of its own."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self.process, self._pipe = process, pipe
        self.address: tuple[str, int]
        self.rank_pids: list[int]
        """Processes of the engine's ranks but rank 0."""
        self.address, self.rank_pids = pipe.recv()

    def stats(self) -> dict[str, int]:
        """Return its counters."""
        self._pipe.send("stats")
        told: dict[str, int] = self._pipe.recv()
        return told

    def close(self) -> None:
        self._pipe.close()
        self.process.join(20)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()


@contextlib.contextmanager
def prefill_server(
    family: str, port: int = 0, dtype: str = "float32", *, ranks: tuple[int, int] = (1, 1), secret_file: str = "",
    rank_timeout_s: float = 20.0, **settings: Any,
) -> Iterator[Server]:  # fmt: skip
    """Run a prefill engine with a tiny model of its own, of so many shards and stages."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    pipe, other = context.Pipe()
    process = context.Process(
        target=_serve, args=(family, port, dtype, ranks, secret_file, rank_timeout_s, settings, other)
    )
    process.start()
    other.close()
    server = Server(process, pipe)
    try:
        yield server
    finally:
        server.close()


def _serve(
    family: str, port: int, dtype: str, ranks: tuple[int, int], secret_file: str, rank_timeout_s: float,
    settings: dict[str, Any], pipe: Connection,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        if ranks == (1, 1):
            model, group, parallel = patch(model_of(family, getattr(torch, dtype)), compile=False), None, None
        else:
            model, group, parallel = stack.enter_context(
                ranks_of(family, ranks[0], num_stages=ranks[1], timeout_s=rank_timeout_s)
            )
            settings = {**settings, "parallel": parallel}
        config = config_of(model, prefill=PrefillConfig(is_prefill_engine=True), **settings)
        engine = stack.enter_context(Engine(model, config, group=group))
        server = PrefillServer(
            engine, fingerprint=kv_fingerprint(model, config), secret=SECRET.encode(), secret_file=secret_file,
            address=("127.0.0.1", port),
        )  # fmt: skip
        pipe.send((server.address, group.pids if group is not None else []))

        def answer() -> None:
            with contextlib.suppress(EOFError):
                while True:
                    pipe.recv()
                    pipe.send(dataclasses.asdict(server.counters))
            server.close()

        threading.Thread(target=answer, daemon=True).start()
        server.run()

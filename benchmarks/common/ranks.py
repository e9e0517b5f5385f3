"""An engine of one process or of several ranks, with a random model of a few hundred million parameters."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.common.models import random_llama
from benchmarks.common.sources import starts
from omniserve import Engine, EngineConfig
from omniserve.layers.patching import patched_model
from omniserve.layers.weights.sharding import shard
from omniserve.parallel.follow import summary_of
from omniserve.parallel.group import RankGroup
from omniserve.parallel.place import Place
from omniserve.parallel.shares import pin_to_share

QWEN_HALF_B: dict[str, Any] = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
"""The layers of Qwen2.5-0.5B, with fewer tokens in the vocabulary."""


def load(dtype: str, place: Place) -> PreTrainedModel:
    """Return the model with a rank's part of each layer."""
    model = random_llama(dtype=getattr(torch, dtype), **QWEN_HALF_B)
    return shard(model, place.shard, place.num_shards)


def free_port() -> int:
    """Return a port of the loopback interface that is not in use."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def engine_of(config: EngineConfig, dtype: str) -> Iterator[tuple[Engine, RankGroup | None]]:
    """Yield an engine, and its ranks if the settings ask for several: all on this machine, with equal shares of cores.

    With ``rank_listen`` two ranks reach each other as from machine to machine.
    """
    parallel = config.parallel
    with contextlib.ExitStack() as stack:
        group: RankGroup | None = None
        if parallel.num_ranks > 1:
            is_local = parallel.rank_listen is None
            if not is_local:
                starts("omniserve.rank")
                command = [sys.executable, "-m", "omniserve.rank", "--join", str(parallel.rank_listen), "--rank", "1"]
                command += ["--secret-file", str(parallel.rank_secret_file), "--share-cores", "2"]
                joined = subprocess.Popen([*command, "--log-level", "warning"])
                stack.callback(joined.wait)
                stack.callback(joined.kill)
                pin_to_share(0, 2)
            group = RankGroup(config, functools.partial(load, dtype), progress=lambda what: None, shares_cores=is_local)
        model = load(dtype, Place.of(0, parallel))
        patched = patched_model(model, compile=True, keep=None if group is None else group.place.layers)
        patched.warm_up()
        if group is not None:
            group.await_loaded(summary_of(patched))
            group.compile(fused=False)
            group.connect(patched)
        yield stack.enter_context(Engine(model, config, group=group)), group


@contextlib.contextmanager
def processes_of(
    arms: Sequence[str], serve: Callable[..., None], *arguments: Any
) -> Iterator[Callable[[str, Any], dict[str, float]]]:
    """Start a process for each arm; yield what asks one of them.

    Args:
        arms: By name.
        serve: ``serve(arm, *arguments, pipe)`` sends "ready", and then answers what it is asked, until that is None.
        *arguments: Of ``serve``.

    Raises:
        EOFError: When an arm's process has failed.
    """
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        pipes: dict[str, Connection] = {}
        for arm in arms:
            mine, other = context.Pipe()
            process = context.Process(target=serve, args=(arm, *arguments, other))
            process.start()
            other.close()  # so that ``recv`` ends when the process does
            stack.callback(process.join)
            pipes[arm] = stack.enter_context(mine)  # closing it ends the process, if it is still there
            assert mine.recv() == "ready"
            print(f"{arm}: ready", file=sys.stderr)

        def ask(arm: str, asked: Any) -> dict[str, float]:
            pipes[arm].send(asked)
            told: dict[str, float] = pipes[arm].recv()
            return told

        yield ask
        for pipe in pipes.values():
            pipe.send(None)

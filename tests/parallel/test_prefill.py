"""Prefill engines of as many ranks as the engine that asks them: exact tokens, whatever becomes of them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from omniserve import Engine, PrefillConfig
from omniserve.parallel.place import Place
from omniserve.remote.prefill_engines import PrefillEngines
from omniserve.remote.prefill_messages import OpenedSession
from tests.parallel.ranks import ranks_of, reference_of, whole_model
from tests.parity.engine_histories import Reference, Tally, run_histories, run_history
from tests.parity.test_network import cuts
from tests.prefill.servers import Server, config_of, make_quick, prefill_server
from tests.quick import slow_except
from tests.remote.proxy import Proxy


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    make_quick(monkeypatch)


def _small(model: Any) -> dict[str, Any]:
    block_bytes = model.omniserve.spec.kv_block_bytes(8)
    return {
        "block_size": 8, "device_kv_bytes": 14 * block_bytes, "host_kv_bytes": 30 * block_bytes, "kv": "tiered",
        "host_kv_dtype": "auto", "max_num_batched_tokens": 64, "max_host_requests": 16, "prefix_cache": True,
        "has_profile": False,
    }  # fmt: skip


def _config(address: tuple[str, int], secret_file: str) -> PrefillConfig:
    return PrefillConfig(
        prefill_engines=("{}:{}".format(*address),), prefill_secret_file=secret_file, prefill_placement="always",
        prefill_timeout_s=5.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("family", "ranks"),
    slow_except(
        [("llama", (2, 1)), ("llama", (1, 2))],
        [
            *[(family, (2, 1)) for family in ("llama", "gemma2", "qwen3_moe", "phi3", "gpt_neox", "cohere2", "llama4")],
            *[(family, (1, 2)) for family in ("llama", "opt", "gpt_oss", "bloom", "deepseek_v3")],
            ("llama", (2, 2)),
        ],
    ),
)
def test_tokens_equal_hugging_face(
    family: str, ranks: tuple[int, int], secret_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        ranks_of(family, ranks[0], num_stages=ranks[1]) as (model, group, parallel),
        prefill_server(family, ranks=ranks, secret_file=secret_file) as server,
        behind_proxies(server, monkeypatch) as proxies,
    ):
        settings = {
            "prefill": _config(proxies[server.address].address, secret_file), "group": group, "parallel": parallel,
            **_small(model),
        }  # fmt: skip
        reach = ("prefilled_tokens", "restored_tokens")
        run_histories(model, reference_of(family), range(1100, 1101), reach=reach, **settings)
        assert len(proxies) == ranks[0] * ranks[1]
        run_histories(
            model, reference_of(family), range(1110, 1112), reach=reach, faults=lambda seed: seed % 2 == 0,
            disturb=lambda seed: cuts([*proxies.values()]), **settings,
        )  # fmt: skip


@contextlib.contextmanager
def behind_proxies(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[tuple[str, int], Proxy]]:
    """Put a proxy before each rank of a prefill engine, as soon as it is known where it listens."""
    proxies = {server.address: Proxy(server.address)}
    welcome = PrefillEngines.welcome

    def behind(self: PrefillEngines, number: int) -> OpenedSession:
        told = welcome(self, number)
        for address in told.ranks:
            if address not in proxies:
                proxies[address] = Proxy(address)
        return dataclasses.replace(told, ranks=tuple(proxies[address].address for address in told.ranks))

    monkeypatch.setattr(PrefillEngines, "welcome", behind)
    try:
        yield proxies
    finally:
        for proxy in proxies.values():
            proxy.close()


@pytest.mark.parametrize(
    ("number", "rank", "after"),
    slow_except(
        [(signal.SIGKILL, 1, 20), (signal.SIGSTOP, 1, 1)],
        itertools.product((signal.SIGKILL, signal.SIGSTOP), (0, 1), (1, 20)),
    ),
)
def test_no_request_is_lost_with_an_engine_whose_rank_is_gone(
    number: signal.Signals, rank: int, after: int, secret_file: str
) -> None:
    """Whichever rank it is: what it was asked for is computed here."""
    with (
        ranks_of("llama") as (model, group, parallel),
        prefill_server("llama", ranks=(2, 1), secret_file=secret_file, rank_timeout_s=1.0) as server,
    ):
        steps, pids = itertools.count(), [server.process.pid, *server.rank_pids]

        def disturb(rng: random.Random) -> None:
            if next(steps) == after:
                os.kill(pids[rank], number)

        tally = Tally()
        run_history(
            model, reference_of("llama"), 1140 + after, tally=tally, disturb=disturb, group=group,
            prefill=dataclasses.replace(_config(server.address, secret_file), prefill_timeout_s=0.5),
            parallel=parallel, **_small(model),
        )  # fmt: skip
        assert tally.finished > 0
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_rank_with_other_weights_is_left_out(
    secret_file: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank has another model that differs in the first stage alone, of which rank 0 has nothing."""
    with (
        ranks_of("llama", 1, num_stages=2, load=_load_changed) as (model, group, parallel),
        prefill_server("llama", ranks=(1, 2), secret_file=secret_file) as server,
    ):
        tally = Tally()
        run_history(
            model, Reference(_change(whole_model("llama"))), 1150, tally=tally, group=group, parallel=parallel,
            prefill=_config(server.address, secret_file), **_small(model),
        )  # fmt: skip
        assert tally.finished > 0 and not tally.prefilled_tokens
        assert server.stats()["asked"] == 0


def _load_changed(place: Place) -> PreTrainedModel:
    return _change(whole_model("llama"))


def _change(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] += 1.0
    return model


def test_engines_with_other_ranks_are_refused(secret_file: str) -> None:
    with ranks_of("llama") as (model, group, parallel), prefill_server("llama") as server:
        config = config_of(model, prefill=_config(server.address, secret_file), parallel=parallel)
        with pytest.raises(ValueError, match="other sizes of tensor and pipeline parallel"):
            Engine(model, config, group=group)

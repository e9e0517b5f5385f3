"""CPU hosts on the network, used by all ranks of a model, lost by one rank or by all: exact tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest

from omniserve.core.work import HostEvent, HostJoined, HostLost
from omniserve.parallel.host_tier import EventMerge
from tests.host.helpers import shorten_pauses
from tests.parallel.ranks import ranks_of, reference_of
from tests.parity.engine_histories import run_histories
from tests.parity.test_network import hosts_behind_proxies, small_pools
from tests.quick import slow_except
from tests.remote.proxy import Proxy


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pauses(monkeypatch)


def _cuts(proxies: list[Proxy]) -> Any:
    """Cut one rank's connection, or those of all ranks."""
    for proxy in proxies:
        proxy.corrupt = ""

    def disturb(rng: random.Random) -> None:
        chance = rng.random()
        if chance < 0.03:
            rng.choice(proxies).cut_one(rng)
        elif chance < 0.04:
            rng.choice(proxies).cut()
        elif chance < 0.05:
            rng.choice(proxies).corrupt = rng.choice(["up", "down"])

    return disturb


@pytest.mark.parametrize(
    ("family", "num_shards", "num_stages", "num_hosts"),
    slow_except(
        [("llama", 2, 1, 1), ("llama", 1, 2, 2)],
        [
            *[(family, 2, 1, 1) for family in ("llama", "gemma2", "qwen3_moe", "mixtral_batched", "phi3", "gpt_neox")],
            *[(family, 2, 1, 2) for family in ("llama", "cohere2", "deepseek_v3", "gemma3", "llama4")],
            *[(family, 1, 2, 2) for family in ("llama", "opt", "gpt_oss", "bloom", "deepseek_v3")],
            ("llama", 2, 2, 1), ("gemma3", 2, 2, 2),
        ],
    ),
)  # fmt: skip
def test_tokens_equal_hugging_face(
    family: str, num_shards: int, num_stages: int, num_hosts: int, secret_file: str
) -> None:
    with ranks_of(family, num_shards, num_stages=num_stages) as (model, group, parallel):
        settings = {"group": group, "parallel": parallel, "kv": "tiered", "has_profile": False, **small_pools(model)}
        num_ranks = num_shards * num_stages
        with hosts_behind_proxies(model, num_hosts, secret_file, num_ranks=num_ranks) as (hosts, proxies):
            run_histories(
                model, reference_of(family), range(1100, 1101), reach=("network_tasks", "network_moves"), hosts=hosts,
                **settings,
            )  # fmt: skip
            run_histories(
                model, reference_of(family), range(1110, 1112), reach=("network_tasks", "lost_hosts"), hosts=hosts,
                faults=lambda seed: seed % 2 == 1, disturb=lambda seed: _cuts(proxies), **settings,
            )  # fmt: skip


@pytest.mark.parametrize("scheduler", slow_except((), ["omniserve", "apex", "neo", "neo-paper", "conserve", "llumnix"]))
def test_every_policy_that_moves_requests_may_have_them(scheduler: str, secret_file: str) -> None:
    with ranks_of("llama") as (model, group, parallel):
        settings = {
            "group": group, "parallel": parallel, "scheduler": scheduler, "has_profile": False,
            "kv": lambda seed: ("tiered", "incremental")[seed % 2], **small_pools(model),
        }  # fmt: skip
        with hosts_behind_proxies(model, 2, secret_file, num_ranks=2) as (hosts, proxies):
            run_histories(
                model, reference_of("llama"), range(1120, 1128), hosts=hosts, faults=lambda seed: seed % 3 == 0,
                reach=("network_tasks",) if scheduler in ("omniserve", "apex", "neo", "neo-paper") else (),
                drafts=lambda seed: seed % 2 == 0, async_steps=lambda seed: seed % 4 == 1,
                step_graphs=lambda seed: ("off", "on")[seed // 2 % 2], disturb=lambda seed: _cuts(proxies), **settings,
            )  # fmt: skip


# -- what the events of ranks come to --------------------------------------------------------------------------------


def _joined(num_blocks: int) -> HostEvent:
    return HostJoined(host=1, num_blocks=num_blocks, num_threads=1)


_LOST = HostLost(host=1)


def test_a_host_has_joined_when_all_ranks_have_it_and_is_lost_once() -> None:
    dropped: list[int] = []
    allowed: list[int] = []
    merge = EventMerge(2, drop=lambda lost: dropped.append(lost.host), allow=lambda lost: allowed.append(lost.host))
    for _ in range(2):
        assert merge.add([_joined(7)]) == []
        (joined,) = merge.add([_joined(5)])
        assert joined.num_blocks == 5 and not dropped
        assert merge.add([_LOST]) == [_LOST] and dropped == [1] and not allowed
        assert merge.add([_LOST]) == [] and allowed == [1]
        dropped.clear()
        allowed.clear()


def test_a_host_that_one_rank_never_reached_has_not_joined() -> None:
    dropped: list[int] = []
    allowed: list[int] = []
    merge = EventMerge(2, drop=lambda lost: dropped.append(lost.host), allow=lambda lost: allowed.append(lost.host))
    assert merge.add([_joined(5), _LOST]) == [] and dropped == [1]
    assert merge.add([_LOST]) == [] and allowed == [1]  # the other one was told to give up
    assert merge.add([_joined(5)]) == [] and len(merge.add([_joined(5)])) == 1


def test_a_join_that_was_on_the_way_as_the_host_was_lost_does_not_count() -> None:
    allowed: list[int] = []
    merge = EventMerge(2, allow=lambda lost: allowed.append(lost.host))
    assert merge.add([_joined(5), _LOST]) == []
    assert merge.add([_joined(5)]) == [] and not allowed
    assert merge.add([_LOST]) == [] and allowed == [1]

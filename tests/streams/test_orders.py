"""In whatever order a GPU runs what it is given, tokens are Hugging Face's; and each wait in the product is needed."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
import torch

from tests.rotation import rotating
from tests.streams.conftest import Ask
from tests.streams.device import EXTREMES, Order
from tests.streams.mutations import MUTATIONS, PACE
from tests.streams.runs import CASES, reach_of
from tests.streams.scenes import SCENES

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None, reason="CUDA is made up for a CPU build of torch; a CUDA build has a real one"
)

_TRIES = 60
_MOST_MORE = 60
"""Most histories of a test: whether a result is late in one depends on the machine's threads, too."""
_USUAL = {
    "device, graphs", "host", "host, graphs", "late results", "late results, graphs", "staged moves", "checkpoints",
    "shared blocks", "safepoints, graphs", "neo", "drafts, graphs",
}  # fmt: skip
"""Cases of the default run."""


def _orders(seed: int) -> tuple[Order, ...]:
    return (*EXTREMES, Order("random", "random", seed), Order("late", "random", seed), Order("random", "late", seed))


def _run(ask: Ask, case: str, order: Order, seed: int, **settings: Any) -> dict[str, Any]:
    answer = ask(case=case, order=astuple(order), seed=seed, settings=settings)
    assert "error" not in answer, f"{case}; {order}; history {seed}\n{answer['traceback']}"
    stats: dict[str, Any] = answer["stats"]
    return stats


def _run_until_reached(ask: Ask, case: str, first_seed: int, num_seeds: int, **settings: Any) -> None:
    """Run some histories, and then more until they have come to all that the case is about."""
    missed = set(reach_of(case))
    for i in range(10 * num_seeds + _MOST_MORE):
        if i >= num_seeds and not missed:
            return
        seed = first_seed + i
        orders = _orders(seed)
        stats = _run(ask, case, orders[seed % len(orders)], seed, **settings)
        missed -= {name for name in missed if stats[name] > 0}
    assert not missed, f"the histories never came to {', '.join(sorted(missed))}"


@pytest.mark.parametrize(
    "case",
    [
        *rotating((case for case in CASES if case in _USUAL), 5),
        *(pytest.param(case, marks=pytest.mark.exhaustive) for case in CASES if case not in _USUAL),
    ],
)
def test_tokens_do_not_depend_on_the_order(ask: Ask, case: str) -> None:
    _run_until_reached(ask, case, first_seed=4 * list(CASES).index(case), num_seeds=1)


@pytest.mark.parametrize("scene", SCENES)
def test_scene(ask: Ask, scene: str) -> None:
    answer = ask(scene=scene)
    assert "error" not in answer, answer["traceback"]


@pytest.mark.parametrize("mutation", rotating(MUTATIONS, 3))
def test_it_is_found_that(ask: Ask, mutation: str) -> None:
    """Each of these changes takes one wait out of the product: some order of some history must fail with it."""
    first_seed = MUTATIONS[mutation].first_seed
    for seed in range(first_seed, first_seed + _TRIES):
        orders = _orders(seed)
        if "error" in ask(mutation=mutation, order=astuple(orders[seed % len(orders)]), seed=seed):
            return
    raise AssertionError(f"{_TRIES} histories do not show that {mutation}: is the wait needed?")


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_many_histories_in_many_orders(ask: Ask, case: str) -> None:
    _run_until_reached(ask, case, first_seed=1000, num_seeds=30)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["gemma2", "opt", "phi3", "qwen3"])
@pytest.mark.parametrize("case", ["host", "host, graphs"])
def test_every_kind_of_family(ask: Ask, case: str, family: str) -> None:
    _run_until_reached(ask, case, first_seed=2000, num_seeds=5, family=family)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mutation", PACE)
def test_no_token_depends_on_the_pace(ask: Ask, mutation: str) -> None:
    for seed in range(14):
        orders = _orders(seed)
        answer = ask(mutation=mutation, order=astuple(orders[seed % len(orders)]), seed=seed)
        assert "error" not in answer, answer["traceback"]

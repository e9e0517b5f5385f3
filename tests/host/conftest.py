"""Fixtures of the host tier's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from omniserve.core.spec import ModelSpec
from tests.host.helpers import Driver, NetworkTier, make_spec, make_tier


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The reference computations are tiny; a second torch thread would spin on a core that the tier's threads need."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def place() -> str:
    """The place of a driver's blocks: ``here``, or on a host on the ``network``; see ``helpers.anywhere``."""
    return "here"


@pytest.fixture
def open_driver(place: str) -> Iterator[Callable[..., Driver]]:
    """A function that makes a tier and a driver for it; the tiers are closed afterwards."""
    tiers: list[Any] = []

    def open_one(spec: ModelSpec | None = None, **settings: Any) -> Driver:
        spec = spec or make_spec()
        tiers.append(make_tier(spec, **settings) if place == "here" else NetworkTier(spec, **settings))
        return Driver(tiers[-1], spec)

    yield open_one
    for tier in tiers:
        tier.close()

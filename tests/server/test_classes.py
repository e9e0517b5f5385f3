"""Tests of more than two classes: which one a tier means, and that its name goes all the way."""

from __future__ import annotations

import openai
import pytest
from fake_engine import SECONDS_PER_TOKEN

from omniserve.core.config import DEFAULT_CLASSES
from omniserve.core.request import ClassSpec
from omniserve.server.access.tiers import class_of_tier
from omniserve.server.errors import ApiError

LS, BE = DEFAULT_CLASSES
FOUR = (
    ClassSpec(name="gold", kind="LS"),
    ClassSpec(name="silver", kind="LS"),
    ClassSpec(name="batch", kind="BE"),
    ClassSpec(name="idle", kind="BE"),
)


@pytest.mark.parametrize(
    ("classes", "tiers"),
    [
        (DEFAULT_CLASSES, {"auto": "LS", "default": "LS", "priority": "LS", "fast": "LS", "scale": "LS", "flex": "BE"}),
        (DEFAULT_CLASSES, {"LS": "LS", "BE": "BE"}),
        (FOUR, {"auto": "silver", "default": "silver", "priority": "gold", "fast": "gold", "scale": "gold"}),
        (FOUR, {"flex": "batch", "gold": "gold", "silver": "silver", "batch": "batch", "idle": "idle"}),
        ((FOUR[0], LS, FOUR[1], FOUR[2], BE), {"default": "LS", "auto": "LS", "priority": "gold", "flex": "BE"}),
        ((ClassSpec(name="flex", kind="LS"), FOUR[2]), {"flex": "flex", "auto": "flex"}),
    ],
)
def test_tier_means_a_class(classes, tiers):
    assert {tier: class_of_tier(tier, classes).name for tier in tiers} == tiers


@pytest.mark.parametrize("tier", ["", "GOLD", "LS", "platinum"])
def test_unknown_tier_is_refused_with_the_list(tier):
    with pytest.raises(
        ApiError, match=r"'auto', 'default', .*'flex', 'gold', 'silver', 'batch', 'idle'; got"
    ) as caught:
        class_of_tier(tier, FOUR)
    assert (caught.value.status, caught.value.param) == (400, "service_tier")


@pytest.fixture(scope="module")
def server(start_module_server):
    flags = "--class gold:LS:0.5:0.05 --class silver:LS --class batch:BE:100:".split()
    return start_module_server(*flags).wait_until_ready()


@pytest.mark.parametrize(
    ("tier", "answered", "name", "has_ttft"),
    [
        ("priority", "priority", "gold", True),
        ("gold", "gold", "gold", True),
        ("auto", "default", "silver", False),
        ("flex", "flex", "batch", True),
        ("batch", "batch", "batch", True),
    ],
)
def test_class_and_its_objectives_reach_the_engine(server, tier, answered, name, has_ttft):
    counter = f'omniserve_requests_total{{finish_reason="length",service_class="{name}"}}'
    before = server.metric(counter)
    response = server.client().completions.with_raw_response.create(
        model="fake", prompt=[5, 6], max_tokens=1, extra_body={"service_tier": tier}
    )
    assert response.parse().service_tier == answered
    # The fake engine predicts for requests with an objective for their first token.
    predicted = str(2 * SECONDS_PER_TOKEN * 1e3) if has_ttft else None
    assert response.headers.get("x-omniserve-predicted-ttft-ms") == predicted
    assert server.metric(counter) == before + 1


def test_every_class_has_its_gauges_and_unknown_ones_are_refused(server):
    for name in ("gold", "silver", "batch"):
        assert server.metric(f'omniserve_requests_running{{service_class="{name}"}}') == 0
        assert server.metric(f'omniserve_requests_rejected_total{{service_class="{name}"}}') == 0
    with pytest.raises(openai.BadRequestError, match="'batch'; got 'LS'"):
        server.client().completions.create(model="fake", prompt="a", extra_body={"service_tier": "LS"})

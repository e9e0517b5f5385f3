"""What an event of side work says in one word: its type, and whether it is of a success."""

from __future__ import annotations

from omniserve.core.work import (
    AttentionResult,
    Done,
    HostEvent,
    HostJoined,
    HostLost,
    PrefillEngineJoined,
    PrefillEngineLost,
    TierDown,
)

Kind = tuple[type, bool]

ATTENTION_DONE, ATTENTION_FAILED = (AttentionResult, True), (AttentionResult, False)
WORK_DONE, WORK_FAILED = (Done, True), (Done, False)
TIER_DOWN, HOST_JOINED, HOST_LOST = (TierDown, True), (HostJoined, True), (HostLost, True)
ENGINE_JOINED, ENGINE_LOST = (PrefillEngineJoined, True), (PrefillEngineLost, True)


def kind_of(event: HostEvent) -> Kind:
    return type(event), getattr(event, "ok", True)

"""Every policy with every KV manager, over random histories: each is watched for all that a scheduler promises."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from omniserve.kv import KV_MANAGERS
from omniserve.sched import SCHEDULERS
from tests.pairwise import drawn_pairwise
from tests.rotation import chosen_of
from tests.sched import hybrid, preemptible
from tests.sched.checkers import CHECKERS, WITH_ADMISSION
from tests.sched.histories import History, Options
from tests.sched.limits import BLOCK

# What the policies that use the host tier must have come to, or their histories say nothing.
REACHED = {
    "omniserve": ("joins", "late_joins", "missed", "swaps_out", "swaps_in", "checkpoints"),
    "omniserve-paper": ("joins", "swaps_out", "swaps_in", "checkpoints"),
    "neo": ("pipelined", "swaps_out", "swaps_in"),
    "neo-paper": ("pipelined", "swaps_out", "ls_on_host"),
    "apex": ("joins", "late_joins", "missed", "swaps_out", "swaps_in", "pipelined", "hybrid"),
    "llumnix": ("joins", "late_joins", "missed", "swaps_out", "checkpoints"),
    **dict.fromkeys(("conserve", "conserve-paper", "bros", "bros-paper"), ("swaps_out", "swaps_in", "checkpoints")),
    hybrid.NAME: ("hybrid", "swaps_out"),
}
PAIRS = [
    *((scheduler, kv) for scheduler in (*SCHEDULERS.names(), preemptible.NAME) for kv in KV_MANAGERS.names()),
    *((preemptible.DEFERRING, kv) for kv in KV_MANAGERS.names() if kv != "paged"), (hybrid.NAME, "tiered"),
]  # fmt: skip
MOST_HISTORIES = 300
NOT_IN_STAGES = ("neo", "neo-paper", "conserve", "conserve-paper", hybrid.NAME, preemptible.NAME, preemptible.DEFERRING)
"""Policies whose steps stop between layers."""

Choice = tuple[str, Any] | None
PLAIN: Choice = None
STAGES = ("num_stages", 3)
OVERLAPS, FORECAST, DRAFTS = ("overlaps", True), ("has_forecast", True), ("has_drafts", True)
STATES, PREFIXES = ("has_states", True), ("has_prefixes", True)
CROWDED, HOST_SHORT = ("is_crowded", True), ("is_host_short", True)
FAILURES, DEATH, DEATH_AT_RETURN = ("failure_rate", 0.2), ("tier_down", True), ("down_at_return", True)
HALTS = ("halt_rate", 0.4)
KINDS = ("has_kinds", True)
ON_DISK = {"content": PREFIXES, "memory": HOST_SHORT}
HOST_DRAFTS = {"drafts": DRAFTS, "memory": CROWDED, "trouble": PLAIN, "content": PLAIN}
RESTORES = {"content": PLAIN, "memory": HOST_SHORT, "steps": PLAIN}
HELPFUL = {
    "wrong_drafts": {"drafts": DRAFTS, "content": PLAIN},
    "reused": {"steps": OVERLAPS, "forecast": PLAIN},
    "doomed": {"steps": OVERLAPS, "memory": CROWDED},
    "host_drafts": HOST_DRAFTS,
    "dropped_drafts": HOST_DRAFTS,
    "read": ON_DISK | {"trouble": PLAIN},
    "failed_disk_copies": ON_DISK | {"trouble": FAILURES},
    "shared_on_host": {"content": PREFIXES, "memory": CROWDED},
    "failed_returns": {"content": PREFIXES, "trouble": FAILURES},
    "checkpoints": RESTORES,
    "restored": RESTORES | {"trouble": PLAIN},
    "failed_restores": RESTORES | {"trouble": FAILURES},
    "returns_of_dead": RESTORES | {"trouble": DEATH_AT_RETURN},
    "halts": {"forecast": FORECAST, "halts": HALTS},
    "deferred": dict.fromkeys(("steps", "drafts", "content", "memory", "trouble"))
    | {"forecast": FORECAST, "halts": HALTS},
}
"""A goal that comes seldom -> what the next histories have, if it is missing when all pairs of choices have come."""


def run_history(scheduler: str, seed: int, *, kv: str = "tiered", **options: Any) -> Counter[str]:
    """Run one history under the eyes of all checkers."""
    return History(scheduler, seed, kv, Options(**options)).run(CHECKERS)


def choices(scheduler: str, kv: str) -> dict[str, list[Choice]]:
    """Return what a history of a policy and a KV manager may have: what excludes one another is one choice."""
    abilities = KV_MANAGERS.get(kv).abilities
    steps = [PLAIN, OVERLAPS] if scheduler in NOT_IN_STAGES else [PLAIN, OVERLAPS, STAGES]
    choices = {"steps": steps, "forecast": [PLAIN, FORECAST], "drafts": [PLAIN, DRAFTS], "kinds": [PLAIN, KINDS]}
    choices["content"] = [PLAIN, STATES, PREFIXES] if abilities.prefixes else [PLAIN, STATES]
    if abilities.moves:
        choices["memory"] = [PLAIN, CROWDED, HOST_SHORT]
        choices["trouble"] = [PLAIN, FAILURES, DEATH, DEATH_AT_RETURN]
    if scheduler in (preemptible.NAME, preemptible.DEFERRING, "conserve", "conserve-paper"):
        choices["halts"] = [PLAIN, HALTS]
    return choices


def beside(choice: Choice) -> str:
    """Return the name of a goal: requests are preempted, and recomputed, where this choice was made."""
    return f"preemptions beside {choice}"


def goals(scheduler: str, kv: str, *, is_long: bool) -> Counter[str]:
    """Return what the histories of a policy and a KV manager must reach, and how often.

    Of the goals that come seldom, a run that is not long has those of policies with much to do on the host tier.
    """
    abilities, with_admission = KV_MANAGERS.get(kv).abilities, scheduler in WITH_ADMISSION
    goals = ["preemptions", "overtaken", "pending", "stopped", "failed", "reused", "right_drafts", "wrong_drafts"]
    goals += ["scored", "pooled", "impatient", "adapters"]
    goals += ["rejected", "bounded"] if with_admission else []
    goals += REACHED.get(scheduler, ()) if kv == "tiered" else ()
    if abilities.prefixes:
        goals.append("cached")
    if abilities.prefixes and abilities.moves:
        goals += ["came_back", "failed_returns"]
        if is_long or scheduler in ("omniserve", "llumnix", "priority"):
            goals += ["read", "failed_disk_copies"]
        if with_admission or scheduler == "llumnix":  # under the others too few are on the host at a time
            goals.append("shared_on_host")
    if abilities.evictions:
        goals += ["checkpoints", "resumed", "restored"]
        if is_long or scheduler in ("omniserve", "conserve"):
            goals += ["failed_restores", "returns_of_dead"]
    if abilities.sharing:
        goals += ["shared", "overwritten", "relocated"]
    if abilities.moves and scheduler in ("omniserve", "omniserve-paper", "llumnix", "apex"):
        goals += ["late_joins", "missed", "doomed"]
    if scheduler in (preemptible.NAME, preemptible.DEFERRING, "conserve", "conserve-paper"):
        goals.append("halts")
    if scheduler == preemptible.DEFERRING:
        goals += ["deferred", "planned"]
    goals += [beside(choice) for values in choices(scheduler, kv).values() for choice in values if choice is not PLAIN]
    counts = Counter(dict.fromkeys(goals, 1))
    if abilities.moves and scheduler in (("omniserve", "llumnix", "apex") if is_long else ("omniserve",)):
        often = ["right_drafts", "wrong_drafts", "host_drafts", "late_joins", "missed", "preemptions"]
        often += ["dropped_drafts"] if scheduler != "apex" else []  # a cohort's seats are the same at every layer
        counts |= Counter(dict.fromkeys(often, 11))
    return counts


def _cases() -> list[Any]:
    """Return the pairs of a commit, as long as it takes to reach the goals, and all of them, marked slow, for longer.

    A commit has a half of the managers of each policy, in turn with those of other commits.
    """
    quick = []
    for scheduler in dict.fromkeys(scheduler for scheduler, _ in PAIRS):
        managers = [kv for each, kv in PAIRS if each == scheduler]
        chosen = chosen_of([f"{scheduler} {kv}" for kv in managers], (len(managers) + 1) // 2)
        quick += [(scheduler, kv, 1) for kv in managers if f"{scheduler} {kv}" in chosen]
    return quick + [pytest.param(*pair, 100, marks=pytest.mark.slow) for pair in PAIRS]


@pytest.mark.parametrize(("scheduler", "kv", "least"), _cases())
def test_histories_keep_all_promises(scheduler: str, kv: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniserve.sched.prefixes_on_host.LEAST_RESTORED_TOKENS", BLOCK)
    rng = random.Random(f"{scheduler} {kv} {least}")
    first_seed, reached = rng.randrange(1 << 30), Counter[str]()
    missing = wanted = goals(scheduler, kv, is_long=least > 1)
    is_covered = False
    for number, (chosen, num_pairs_left) in enumerate(drawn_pairwise(choices(scheduler, kv), rng)):
        rare = [HELPFUL[goal] for goal in missing if goal in HELPFUL and is_covered]
        made = [choice for choice in (chosen | (rare[0] if rare else {})).values() if choice is not PLAIN]
        options = dict(made)
        try:
            found = run_history(scheduler, first_seed + number, kv=kv, **options)
        except Exception as error:
            error.add_note(f"run_history({scheduler!r}, {first_seed + number}, kv={kv!r}, **{options})")
            raise
        reached += found + Counter({beside(choice): found["preemptions"] for choice in made})
        missing, is_covered = wanted - reached, not num_pairs_left
        if not missing and is_covered and number + 1 >= least:
            return
        assert number < MOST_HISTORIES, f"the histories never reached {missing}"

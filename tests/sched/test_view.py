"""A policy sees requests in a ``RequestView``, and changes them through the batch of a step: its code is read."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import omniserve.sched
from omniserve.sched import SCHEDULERS
from omniserve.sched.away_tokens import AwayTokens
from omniserve.sched.host_slots import HostSlots
from omniserve.sched.memory import MemoryRules
from omniserve.sched.moves import RequestMoves
from omniserve.sched.omniserve import OmniServePolicy
from omniserve.sched.request_queue import RequestQueue
from omniserve.sched.request_table import RequestTable
from omniserve.sched.residents import HostResidents
from omniserve.sched.view import HostView, QueueView, RequestView

SCHED = Path(omniserve.sched.__file__).parent
BESIDE_POLICIES = {"__init__.py", "batch.py", "policy.py", "scheduler.py", "stages.py", "view.py"}
"""Files that use views and batches, but make them for policies."""
HIDDEN_MODULES = {
    "omniserve.sched.request_table",
    "omniserve.sched.moves",
    "omniserve.sched.residents",
    "omniserve.sched.away_tokens",
    "omniserve.sched.host_slots",
    "omniserve.sched.checkpoints",
    "omniserve.sched.sources",
    "omniserve.sched.side_work",
}
HIDDEN_NAMES = {"KVManager", "RequestQueue", "Prefixes", "RequestTable"}
PLACE = {"phase", "token_ids", "num_computed_tokens", "slot", "epoch", "state_slot", "away", "newest", "prefix"}
"""Fields of a ``RequestState`` that say where it is; its table alone sets them."""


def methods(*kinds: type) -> set[str]:
    members = (member for kind in kinds for member in vars(kind).items())
    return {name for name, value in members if inspect.isfunction(value) and not name.startswith("_")}


TABLES = (RequestTable, RequestMoves, HostResidents, AwayTokens, HostSlots, RequestQueue)
CHANGES = methods(*TABLES) - methods(RequestView, HostView, QueueView, MemoryRules) - {"begin", "start", "settle"}
"""Methods that change requests, but for names that parts of policies have, too."""


def policy_files() -> list[Path]:
    """Return the files that work with a view or a batch."""
    paths = (path for path in sorted(SCHED.glob("*.py")) if path.name not in BESIDE_POLICIES)
    modules = ("omniserve.sched.view", "omniserve.sched.batch", "omniserve.sched.policy")
    return [path for path in paths if any(f"from {module} import" in path.read_text() for module in modules)]


def is_view(node: ast.expr) -> bool:
    return ast.unparse(node).rpartition(".")[2] in ("view", "_view")


def faults(source: str) -> Iterator[str]:
    """Yield what a policy's code may not do."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module)):
                names = {alias.name for alias in node.names}
                if any(f"{module}.".startswith(f"{hidden}.") for hidden in HIDDEN_MODULES) or names & HIDDEN_NAMES:
                    yield f"imports {sorted(names)} of {module}"
            case ast.Attribute(attr="_requests" | "requests"):
                yield f"{ast.unparse(node)} is the table"
            case ast.Attribute(value=ast.Attribute(value=view, attr="memory" | "host")) if is_view(view):
                yield f"{ast.unparse(node)} reaches through the view"
            case ast.Attribute(value=receiver, attr=name) if name in CHANGES and ast.unparse(receiver) != "batch":
                yield f"{ast.unparse(node)} changes requests"
            case ast.Attribute(attr=name, ctx=ast.Store()) if name in PLACE:
                yield f"{ast.unparse(node)} is set"


@pytest.mark.parametrize("path", policy_files(), ids=lambda path: path.stem)
def test_policies_and_their_parts_change_requests_through_a_batch_alone(path: Path) -> None:
    assert [*faults(path.read_text())] == []


def test_every_policy_is_read() -> None:
    read = {f"omniserve.sched.{path.stem}" for path in policy_files()}
    policies = {SCHEDULERS.get(name) for name in SCHEDULERS.names()}
    assert {policy.__module__ for policy in policies} | {"omniserve.sched.parking", "omniserve.sched.deferral"} <= read
    assert not any(issubclass(policy, OmniServePolicy) for policy in policies - {OmniServePolicy})


@pytest.mark.parametrize(
    "line",
    [
        "from omniserve.sched.request_table import RequestTable",
        "from omniserve.sched.sources.base import KVLoads",
        "from omniserve.kv.base import KVManager",
        "self.requests.device[LS]",
        "self.view._requests.states",
        "self._view.memory.num_free",
        "view.host.queue",
        "self.view.preempt(state)",
        "self.view.waiting[LS].remove(state)",
        "self.host.enter(state, 1)",
        "state.phase = Phase.WAITING",
        "state.num_computed_tokens += 1",
    ],
)
def test_the_reader_finds_what_is_forbidden(line: str) -> None:
    assert len([*faults(line)]) >= 1


def test_the_reader_passes_what_is_allowed() -> None:
    lines = ("batch.preempt(state)", "self.view.waiting[LS].first", "self.memory.num_free", "state.blocked_since_s = 1")
    assert [*faults("\n".join(lines))] == []

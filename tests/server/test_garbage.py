"""A full collection does not look at what was loaded before service began, and comes when there is time for it."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc, weakref
from omniserve.server.process_settings import GarbageCollector

class Node:
    def __init__(self):
        self.me = self

old, stays = weakref.ref(Node()), Node()
collector = GarbageCollector()
new = weakref.ref(Node())
collected = gc.collect()
print(old() is None, new() is None, collected, len(gc.get_objects()) < gc.get_freeze_count())
"""

FLOOD = """
import gc
from omniserve.server.process_settings import GarbageCollector

class Node:
    def __init__(self):
        self.me = self

now_s, held, full = 0.0, [], []
collector = GarbageCollector(lambda: now_s)
gc.callbacks.append(lambda phase, info: full.append(now_s) if (phase, info["generation"]) == ("start", 2) else None)
for number in range(400_000):
    held.append(Node())  # grows by more than a quarter again and again
    now_s += 1e-5
print(len(full))
before = len(gc.get_objects())
held.clear()
told = []
for now_s, is_idle in ((9.9, True), (9.9, False), (10.0, True), (19.9, True), (20.1, False), (30.2, True)):
    told.append(collector.collect(is_idle=is_idle))
print(*told, before - len(gc.get_objects()) > 399_000)
"""

SHARE = """
from omniserve.server.process_settings import GarbageCollector

ticks = iter([0.0, *(t for now in (10.0,) for t in (now, now + 2.0)), 211.0, *(212.0, 212.5), 222.4, 222.6, 222.7])
collector = GarbageCollector(lambda: next(ticks))
print(*(collector.collect(is_idle=is_idle) for is_idle in (False, False, False, True, True)))
"""


def run(code: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()


def test_only_what_is_new_is_looked_at() -> None:
    old, new, collected, few = run(CODE)[0].split()
    assert (old, new, few) == ("True", "True", "True") and int(collected) >= 1


def test_a_process_that_does_not_serve_is_left_as_it_is() -> None:
    assert run(
        "import gc, omniserve.server.serve, omniserve.server.process_settings; print(gc.get_freeze_count())"
    ) == ["0"]


def test_at_the_end_all_is_let_go() -> None:
    """Regression: a server that was stopped printed pages of what triton's bindings call leaks."""
    code = "import atexit, gc, sys\natexit.register(lambda: print(gc.get_freeze_count()))\n" + CODE
    code = "import importlib.util\nif importlib.util.find_spec('triton'): import triton\n" + code
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split()[-1] == "0" and not result.stderr


def test_growth_causes_no_full_collection_and_the_collector_does() -> None:
    """Regression: in a flood of requests the API process spent much of its time on full collections."""
    num_full, told = run(FLOOD)
    assert num_full == "0"
    assert told == "False False True False True True True"


def test_where_there_is_always_work_collections_take_a_hundredth_of_the_time() -> None:
    """The first takes 2 s, so that the next comes 200 s later; the second half a second, but then nobody waits."""
    assert run(SHARE) == ["True False True False True"]

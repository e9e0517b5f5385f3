"""A full collection does not look at what was loaded before service began, and still finds what comes after."""

from __future__ import annotations

import gc
import subprocess
import sys

CODE = """
import gc, weakref
from omniserve.server.garbage import exempt_what_is_loaded

class Node:
    def __init__(self):
        self.me = self

old, stays = weakref.ref(Node()), Node()
exempt_what_is_loaded()
new = weakref.ref(Node())
collected = gc.collect()
print(old() is None, new() is None, collected, len(gc.get_objects()) < gc.get_freeze_count())
"""


def test_only_what_is_new_is_looked_at():
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    old, new, collected, few = result.stdout.split()
    assert (old, new, few) == ("True", "True", "True") and int(collected) >= 1
    assert gc.get_freeze_count() == 0, "only in processes that serve"


def test_at_the_end_all_is_let_go():
    """Regression: a server that was stopped printed pages of what triton's bindings call leaks."""
    code = "import atexit, gc, sys\natexit.register(lambda: print(gc.get_freeze_count()))\n" + CODE
    code = "import importlib.util\nif importlib.util.find_spec('triton'): import triton\n" + code
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split()[-1] == "0" and not result.stderr

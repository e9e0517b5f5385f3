"""Python's garbage collector, kept from stopping a process that serves."""

from __future__ import annotations

import atexit
import gc


def exempt_what_is_loaded() -> None:
    """Let the collector pass over everything that there is now, to be called when service begins.

    torch and transformers are half a million objects. A full collection looks at them all: a third of a second in which
    nobody gets a token. They stay until the process ends, so there is nothing to be found. Then they are let go: some
    libraries print what is left of them.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)

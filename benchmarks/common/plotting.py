"""Matplotlib, for benchmarks that were asked for a plot; nothing else needs it."""

from __future__ import annotations

import importlib
from typing import Any


def require_matplotlib() -> Any:
    """Return ``matplotlib.pyplot``, drawing into files only.

    Raises:
        RuntimeError: It is not installed.
    """
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"--plot needs matplotlib, which the bench extra brings: pip install 'omniserve[bench]' ({error})"
        ) from error

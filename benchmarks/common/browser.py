"""A headless Chromium that asks no server but the one it is sent to. Needs Playwright (the extra ``dev``)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--no-sandbox",  # inside a container there is often none
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def find_chromium() -> str | None:
    """Return the path of an installed Chromium or Chrome; None if there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run a browser."""
    path = find_chromium()
    if path is None:
        raise RuntimeError(f"no browser found as {', '.join(_NAMES)}; install Chromium (Debian: apt install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_FLAGS))
        yield browser
        browser.close()

"""Pictures of /dashboard under load: light, dark, and on a phone.

Starts the server with the built-in model and too little device memory, sends LS requests that come and go beside a pile
of BE requests and two batch jobs, and takes the pictures while all of it runs.
"""

from __future__ import annotations

import json
import random
import tempfile
import threading
from pathlib import Path

import httpx
from playwright.sync_api import Browser

from benchmarks.common.browser import chromium
from benchmarks.common.client import BE_TIER, LS_TIER, TEXT, LoadRequest, drive, text_request, warm_server
from benchmarks.common.terminal import argument_parser
from omniserve.simulate.load import poisson

SERVER = "--device-kv-gib 0.004 --host-kv-gib 0.5 --served-model-name built-in --limit batch_concurrency=16".split()
# (from, to, LS requests a second): calm, busy, a burst that is too much, busy again.
RATES = ((0, 25, 1.0), (25, 60, 2.0), (60, 66, 8.0), (66, 240, 1.5))
BE_FROM_S = 18.0
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


def make_load(seed: int, num_be: int) -> list[LoadRequest]:
    """Return the requests, which differ in length."""
    rng = random.Random(seed)
    arrivals = [start_s + at_s for start_s, end_s, rate in RATES for at_s in poisson(rate, end_s - start_s, rng)]
    load = [text_request(rng, at_s, rng.randrange(100, 500), rng.randrange(16, 48), LS_TIER) for at_s in arrivals]
    late = [BE_FROM_S + 0.5 * i for i in range(num_be)]
    return load + [text_request(rng, at_s, rng.randrange(400, 1600), rng.randrange(64, 256), BE_TIER) for at_s in late]


def submit_batch(client: httpx.Client, num_requests: int, metadata: dict[str, str]) -> None:
    """Send a batch job of completions."""
    lines = []
    for i in range(num_requests):
        body = {"model": "built-in", "prompt": TEXT[100 * i : 100 * i + 400], "max_tokens": 48}
        lines.append(json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}))
    content = "\n".join(lines).encode()
    file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("night.jsonl", content)})
    batch = {"input_file_id": file.raise_for_status().json()["id"], "endpoint": "/v1/completions",
             "completion_window": "24h", "metadata": metadata}  # fmt: skip
    client.post("/v1/batches", json=batch).raise_for_status()


def take_pictures(browser: Browser, url: str, folder: Path, wait_s: float) -> None:
    """Open the page three times, send a prompt, and save what is to be seen."""
    pages = {}
    for name, scheme, size in (("light", "light", DESKTOP), ("dark", "dark", DESKTOP), ("phone", "light", PHONE)):
        page = browser.new_page(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
        page.goto(f"{url}/dashboard")
        page.select_option("#range", "120")
        pages[name] = page
    pages["light"].wait_for_timeout(wait_s * 1000)
    for name, page in pages.items():
        page.bring_to_front()
        page.select_option("#prompt-api", "completion")
        page.fill("#prompt", "The with statement is used to wrap the execution of a block")
        page.fill("#prompt-tokens", "48")
        while "tokens" not in page.inner_text("#prompt-result"):  # admission may refuse it
            page.click("#prompt-send")
            page.locator("#prompt-send:enabled").wait_for(timeout=60_000)
        page.wait_for_timeout(1500)
        page.screenshot(path=folder / f"dashboard-{name}.png", full_page=True)


def main() -> None:
    parser = argument_parser(
        __doc__, folder=Path("docs"), seconds=(125.0, "how long the load runs before the first picture"),
        be_requests=200, seed=0,
    )  # fmt: skip
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        warm_server("dashboard", [*SERVER, "--data-dir", folder], []) as server,
    ):
        load = make_load(arguments.seed, arguments.be_requests)
        options = {"cutoff_s": arguments.seconds + 30, "may_be_cut_off": True}
        stream = threading.Thread(target=drive, args=(server, load), kwargs=options)
        stream.start()
        with httpx.Client(base_url=server.base_url, timeout=60) as client:
            submit_batch(client, 3000, {"job": "nightly summaries", "owner": "docs"})
            submit_batch(client, 24, {"job": "labels"})
        with chromium() as browser:
            take_pictures(browser, server.base_url, arguments.folder, arguments.seconds)
        stream.join()


if __name__ == "__main__":
    main()

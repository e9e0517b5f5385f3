"""Far more work than there is room for: latency-sensitive calls pass it, and every connection gets its answer."""

from __future__ import annotations

import concurrent.futures
import threading

import httpx
import pytest
from fake_engine import SLOW

from omniserve.server.tokenizing.text import TextCodec


def test_a_flood_of_long_best_effort_prompts_keeps_no_other_call_waiting(server, monkeypatch):
    """The first of the flood is in the middle of being tokenized as long as the test wants."""
    go_on, encode = threading.Event(), TextCodec._encode_all

    def held(codec, texts, *args):
        if texts[0].startswith("long"):
            assert go_on.wait(30)
        return encode(codec, texts, *args)

    monkeypatch.setattr(TextCodec, "_encode_all", held)

    def ask(prompt: str, tier: str) -> int:
        body = {"model": "fake", "prompt": prompt, "max_tokens": 3, "service_tier": tier}
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        flood = [pool.submit(ask, "long" * 300, "flex") for _ in range(8)]
        try:
            assert ask("short", "default") == 200
            assert ask("the " * 300, "default") == 200  # long enough for a thread, as the flood's
            assert ask("short", "flex") == 200
            assert not any(call.done() for call in flood)
        finally:
            go_on.set()
        assert {call.result() for call in flood} <= {200, 400}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_at_ten_times_the_load_every_connection_gets_its_answer(start_process, processes):
    """Some wait, ten times as many are refused, and /health answers all the time."""
    waiting, calls = 16, 192
    server = start_process(
        "--api-processes", str(processes), "--limit", f"max_queued_requests={waiting}"
    ).wait_until_ready()
    body = {"model": "fake", "prompt": [SLOW, *range(100, 300)], "max_tokens": 8}

    def ask(number: int) -> int:
        more = {"stream": number % 2 == 0, "service_tier": "flex" if number % 4 == 0 else "default"}
        return httpx.post(f"{server.url}/v1/completions", json=body | more, timeout=120).status_code

    with concurrent.futures.ThreadPoolExecutor(calls) as pool:
        asked = [pool.submit(ask, number) for number in range(calls)]
        while not all(call.done() for call in asked):
            assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
        codes = [call.result() for call in asked]
    assert set(codes) == {200, 429}
    server.wait_until_free()

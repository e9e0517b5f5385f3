"""Requests of a size, for engines in this process."""

from __future__ import annotations

from typing import Any

from omniserve import Request, SamplingParams


def request(name: str, prompt: int, output: int, vocab_size: int = 1000, **more: Any) -> Request:
    """Return a request for exactly so many tokens; names that begin with ``ls`` are latency-sensitive.

    Its name is its id; prompts of different names differ, and have ids from ``[1, vocab_size)``.
    """
    first = sum(name.encode())
    return Request(
        prompt_token_ids=[1 + (first + 7 * i) % (vocab_size - 1) for i in range(prompt)],
        sampling=SamplingParams(max_tokens=output, ignore_eos=True),
        service_class="LS" if name.startswith("ls") else "BE", request_id=name, **more,
    )  # fmt: skip

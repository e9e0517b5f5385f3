"""GuideLLM's benchmark: synthetic prompts at several rates."""

from __future__ import annotations

import json
from pathlib import Path

from trial import MODEL, MODEL_FOLDER, URL, check, main, run

NUM_REQUESTS = 12


def benchmark(kind: str, profile: str, *flags: str) -> dict:
    """Return the report of a benchmark, whose requests all succeeded."""
    path = Path(f"{kind.strip('/').replace('/', '-')}-{profile}.json").absolute()
    run(
        "guidellm", "benchmark", "run", "--target", URL, "--model", MODEL, "--processor", MODEL_FOLDER,
        "--request-type", kind, "--profile", profile, *flags, "--max-requests", str(NUM_REQUESTS),
        "--data", "prompt_tokens=64,output_tokens=16", "--output-dir", ".", "--outputs", str(path), "--disable-console",
    )  # fmt: skip
    (found,) = json.loads(path.read_text())["benchmarks"]
    return found


def judge(found: dict) -> None:
    """Check a benchmark's counts and figures."""
    requests = found["requests"]
    assert not requests["errored"], requests["errored"][0]
    assert len(requests["successful"]) == NUM_REQUESTS, {name: len(some) for name, some in requests.items()}
    for metric in ("output_token_count", "time_to_first_token_ms", "inter_token_latency_ms"):
        figures = found["metrics"][metric]["successful"]
        assert figures["mean"] > 0, (metric, figures)
    assert found["metrics"]["output_token_count"]["successful"]["mean"] == 16


@check
def chat():
    judge(benchmark("chat_completions", "concurrent", "--rate", "4"))


@check
def completions():
    judge(benchmark("text_completions", "synchronous"))


if __name__ == "__main__":
    main()

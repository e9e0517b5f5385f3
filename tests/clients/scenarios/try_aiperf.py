"""NVIDIA's AIPerf: synthetic prompts at a concurrency."""

from __future__ import annotations

import json
from pathlib import Path

from trial import MODEL, MODEL_FOLDER, URL, beside_best_effort, best_effort, check, compare, main, run

NUM_REQUESTS = 12


def profile(kind: str, *flags: str, concurrency: int = 4) -> dict:
    """Return the figures of a run."""
    folder = Path(f"{kind}-{concurrency}")
    run(
        "aiperf", "profile", "--model", MODEL, "--url", URL, "--endpoint-type", kind, "--streaming",
        "--tokenizer", MODEL_FOLDER, "--request-count", str(NUM_REQUESTS), "--concurrency", str(concurrency),
        "--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16", "--extra-inputs", "ignore_eos:true",
        "--ui", "none", "--output-artifact-dir", str(folder), *flags,
        HF_HUB_OFFLINE="",  # else it looks for the folder of the tokenizer in the cache of the hub
    )  # fmt: skip
    return json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text())


def judge(found: dict) -> None:
    """Check a run's counts and figures."""
    assert found["request_count"]["avg"] == NUM_REQUESTS, found["request_count"]
    assert not found.get("error_summary") and not found.get("error_request_count", {}).get("avg"), found
    assert found["time_to_first_token"]["avg"] > 0 and found["output_token_throughput"]["avg"] > 0
    assert found["output_sequence_length"]["avg"] > 8, found["output_sequence_length"]


@check
def chat():
    judge(profile("chat"))


@check
def completions_as_flex():
    with best_effort(NUM_REQUESTS):
        judge(profile("completions", "--header", "x-omniserve-service-tier:flex"))


@check
def beside_best_effort_work():
    with beside_best_effort() as server:
        found = profile("chat", concurrency=2)
    judge(found)
    compare(found["time_to_first_token"]["avg"], found["inter_token_latency"]["avg"], server)


if __name__ == "__main__":
    main()

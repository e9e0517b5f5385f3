"""GuideLLM's benchmark: synthetic prompts at several rates."""

from __future__ import annotations

import json
from pathlib import Path

from trial import MODEL, MODEL_FOLDER, URL, beside_best_effort, best_effort, check, compare, main, run

NUM_REQUESTS = 12


def benchmark(path: str, profile: str, *backend: str) -> dict:
    """Return the report of a benchmark of a path of the API."""
    report = Path(f"{path.replace('/', '-')}.json").absolute()
    target = ",".join(("kind=openai_http", f"target={URL}", f"model={MODEL}", f"request_format=/v1/{path}", *backend))
    run(
        "guidellm", "run", "--backend", target, "--tokenizer", f"kind=hf_auto,model={MODEL_FOLDER}",
        "--profile", profile, "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16", "--output", f"kind=json,path={report}",
        "--disable-console",
    )  # fmt: skip
    (found,) = json.loads(report.read_text())["benchmarks"]
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
    judge(benchmark("chat/completions", "kind=concurrent,streams=4"))


@check
def completions_as_flex():
    with best_effort(NUM_REQUESTS):
        judge(benchmark("completions", "kind=synchronous", "extras.body.service_tier=flex"))


@check
def beside_best_effort_work():
    with beside_best_effort() as server:
        found = benchmark("chat/completions", "kind=concurrent,streams=2")
    judge(found)
    means = {name: found["metrics"][name]["successful"]["mean"] for name in (
        "time_to_first_token_ms", "inter_token_latency_ms")}  # fmt: skip
    compare(means["time_to_first_token_ms"], means["inter_token_latency_ms"], server)


if __name__ == "__main__":
    main()

"""``vllm bench serve``: random prompts at a concurrency."""

from __future__ import annotations

import json
from pathlib import Path

from trial import MODEL, MODEL_FOLDER, URL, beside_best_effort, check, compare, main, run

NUM_REQUESTS = 12
# `vllm bench serve` without the command, which asks for a package of that name; that of CPUs has another.
PROGRAM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@check
def beside_best_effort_work():
    with beside_best_effort() as server:
        run(
            "python", "-c", PROGRAM, "--backend", "openai-chat", "--base-url", URL, "--endpoint",
            "/v1/chat/completions", "--model", MODEL, "--tokenizer", MODEL_FOLDER,
            "--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "16", "--ignore-eos",
            "--num-prompts", str(NUM_REQUESTS), "--max-concurrency", "2", "--save-result",
            "--result-filename", "found.json",
        )  # fmt: skip
    found = json.loads(Path("found.json").read_text())
    assert found["completed"] == NUM_REQUESTS and found["total_output_tokens"] == 16 * NUM_REQUESTS, found
    compare(found["mean_ttft_ms"], found["mean_tpot_ms"], server)


if __name__ == "__main__":
    main()

"""EleutherAI's lm-evaluation-harness, on tasks that need no download."""

from __future__ import annotations

import json
from pathlib import Path

from scripts import AFTER, PLAIN
from trial import BASE_URL, MODEL, MODEL_FOLDER, best_effort, check, main, run

HEADER = {"x-omniserve-service-tier": "flex"}
SAID = {"plain": PLAIN, "after": AFTER}
KEYS = ("plain", "after") * 6
TASK = """
task: said
dataset_path: json
dataset_kwargs: {data_files: {test: said.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 64, do_sample: false}
metric_list: [{metric: exact_match}]
"""
SCORED = """
task: scored
dataset_path: json
dataset_kwargs: {data_files: {test: scored.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""


def evaluate(kind: str, path: str, task: str, *flags: str, **arguments: object) -> dict[str, float]:
    """Return the results of a task."""
    arguments |= {"model": MODEL, "base_url": f"{BASE_URL}/{path}", "tokenizer": MODEL_FOLDER, "num_concurrent": 4,
                  "max_retries": 1, "header": HEADER}  # fmt: skip
    folder = Path(task)
    with best_effort():
        run("lm_eval", "--model", kind, "--tasks", task, "--include_path", ".", "--output_path", task,
            "--model_args", json.dumps(arguments), *flags)  # fmt: skip
    return json.loads(next(folder.rglob("results_*.json")).read_text())["results"][task]


def write_tasks() -> None:
    """Write the tasks and their data into this folder."""
    Path("said.yaml").write_text(TASK)
    lines = [json.dumps({"question": f"{i} §{key}§", "answer": SAID[key]}) for i, key in enumerate(KEYS)]
    Path("said.jsonl").write_text("\n".join(lines))
    Path("scored.yaml").write_text(SCORED)
    endings = ["Rome ", "other"]  # the first piece of what the model says behind the key, and none
    lines = [json.dumps({"text": f"{i} §plain§", "choices": endings[:: 1 - 2 * (i % 2)], "answer": i % 2})
             for i in range(20)]  # fmt: skip
    Path("scored.jsonl").write_text("\n".join(lines))


@check
def local_completions_scores():
    write_tasks()
    results = evaluate("local-completions", "completions", "scored", "--batch_size", "4")
    assert results["acc,none"] == 1, results


@check
def local_completions_generates():
    results = evaluate("local-completions", "completions", "said", "--batch_size", "4")
    assert results["exact_match,none"] == 1, results


@check
def local_chat_completions():
    results = evaluate("local-chat-completions", "chat/completions", "said", "--apply_chat_template")
    assert results["exact_match,none"] == 1, results


if __name__ == "__main__":
    main()

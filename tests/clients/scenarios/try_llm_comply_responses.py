"""llm-comply's tests of the Open Responses standard."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from trial import BASE_URL, MODEL, check, main

FAIL = {"image-input": "the model takes text only"}
"""Tests that no text model passes."""
WARN = {"compact-response": "advisory: conversations are not compacted here"}


@check
def open_responses():
    program = str(Path(sys.executable).parent / "llm-comply")
    command = [program, "-u", BASE_URL, "-m", MODEL, "-k", "none", "--format", "open-responses", "--json"]
    done = subprocess.run([*command, "--timeout", "120"], text=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    print(done.stdout, flush=True)
    results = {result["id"]: result for result in json.loads(done.stdout)["results"]}
    failed = {name for name, result in results.items() if result["status"] == "failed"}
    assert failed == set(FAIL), {name: results[name] for name in failed ^ set(FAIL)}


if __name__ == "__main__":
    main()

"""Claude Code, Anthropic's agent for the command line, without its network traffic beside that with the model."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from scripts import RAN
from trial import MODEL, URL, best_effort, check, main

# What installs the program may not run on install; this runs it in any case.
_PROGRAM = Path(os.environ.get("TRIAL_ENVIRONMENT", ".")) / "node_modules/@anthropic-ai/claude-code/cli-wrapper.cjs"
_VARIABLES = {
    "ANTHROPIC_BASE_URL": URL,
    "ANTHROPIC_API_KEY": "none",
    "ANTHROPIC_MODEL": MODEL,
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}


def claude(prompt, *flags, **variables):
    """Return the lines that a session without a terminal prints, of JSON; with one tool, as the context is short."""
    done = subprocess.run(
        ["node", str(_PROGRAM), "-p", prompt, "--tools", "Bash", "--allowedTools", "Bash",
         "--system-prompt", "Be brief.", "--output-format", "stream-json", "--verbose", *flags],
        env={**os.environ, **_VARIABLES, **variables}, text=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    print(done.stdout, flush=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def blocks(lines, role):
    return [block for line in lines if line["type"] == role for block in line["message"]["content"]]


@check
def session():
    lines = claude("Run it. §bash§")
    call, text = blocks(lines, "assistant")
    assert (call["type"], call["name"], text["text"]) == ("tool_use", "Bash", RAN)
    [result] = blocks(lines, "user")
    assert "hello" in result["content"] and not result["is_error"]
    assert lines[-1]["result"] == RAN and lines[-1]["num_turns"] == 2
    again = claude("Once more. §bash§", "--resume", lines[-1]["session_id"])
    assert again[-1]["result"] == RAN
    assert again[-1]["usage"]["cache_read_input_tokens"] > lines[-1]["usage"]["cache_read_input_tokens"]


@check
def flex():
    with best_effort():
        assert claude("§ran§", ANTHROPIC_CUSTOM_HEADERS="x-omniserve-service-tier: flex")[-1]["result"] == RAN


@check
def errors():
    last = claude("§ran§", ANTHROPIC_MODEL="other")[-1]
    assert last["is_error"] and "other" in last["result"], last


if __name__ == "__main__":
    main()

"""OpenAI's Codex: a session in which the model calls a tool, and one that goes on with it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from scripts import AFTER, PLAIN
from trial import BASE_URL, MODEL, check, main

PROGRAM = Path(os.environ["TRIAL_ENVIRONMENT"]) / "node_modules" / ".bin" / "codex"
HOME = Path("codex-home").absolute()
CONFIG = f"""\
model = "{MODEL}"
model_provider = "omniserve"
model_context_window = 16384
approval_policy = "never"
sandbox_mode = "danger-full-access"

[model_providers.omniserve]
name = "OmniServe"
base_url = "{BASE_URL}"
wire_api = "responses"
"""


def codex(*arguments: str) -> list[dict]:
    """Run Codex without a terminal; return what it tells as events."""
    command = [str(PROGRAM), "exec", "--skip-git-repo-check", "--json", *arguments]
    done = subprocess.run(
        command, env=os.environ | {"CODEX_HOME": str(HOME)}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=240,
    )  # fmt: skip
    print(done.stdout, flush=True)
    assert not done.returncode, done.stdout[-500:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def items(events: list[dict], kind: str) -> list[dict]:
    return [e["item"] for e in events if e["type"] == "item.completed" and e["item"]["type"] == kind]


@check
def session():
    HOME.mkdir(exist_ok=True)
    (HOME / "config.toml").write_text(CONFIG)
    events = codex("§shell§")
    [command] = items(events, "command_execution")
    assert (command["exit_code"], command["aggregated_output"]) == (0, "§after§\n"), command
    assert [item["text"] for item in items(events, "agent_message")] == [AFTER]
    assert events[-1]["type"] == "turn.completed" and events[-1]["usage"]["output_tokens"] > 5


@check
def resumed():
    events = codex("resume", "--last", "§plain§")
    assert [item["text"] for item in items(events, "agent_message")] == [PLAIN]
    assert events[-1]["usage"]["cached_input_tokens"] > 1000


if __name__ == "__main__":
    main()

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


def run(*arguments: str) -> str:
    done = subprocess.run(
        [str(PROGRAM), *arguments], env=os.environ | {"CODEX_HOME": str(HOME)}, text=True, capture_output=True,
        stdin=subprocess.DEVNULL, timeout=240,
    )  # fmt: skip
    assert not done.returncode, f"{done.stderr[-500:]}{done.stdout[-500:]}"
    return done.stdout


def codex(*arguments: str) -> list[dict]:
    """Run Codex without a terminal; return what it tells as events."""
    told = run("exec", "--skip-git-repo-check", "--json", *arguments)
    print(told, flush=True)
    return [json.loads(line) for line in told.splitlines() if line.startswith("{")]


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


@check
def patched():
    """A custom tool, whose input is text: Codex has it for models that its catalogue says so of."""
    models = json.loads(run("debug", "models"))["models"]
    known = next(model for model in models if model["apply_patch_tool_type"] == "freeform")
    own = known | {"slug": MODEL, "context_window": 16384, "max_context_window": 16384, "use_responses_lite": False}
    for name in ("tool_mode", "multi_agent_version"):  # ways to call tools that only OpenAI's models know
        own.pop(name, None)
    catalogue = HOME / "models.json"
    catalogue.write_text(json.dumps({"models": [own]}))
    events = codex("-c", f'model_catalog_json="{catalogue}"', "§patch§")
    assert Path("§after§.txt").read_text() == "hi\n"
    assert len(items(events, "file_change")) == 1
    assert [item["text"] for item in items(events, "agent_message")] == [AFTER]


if __name__ == "__main__":
    main()

"""The text that the served model writes behind each key (``§key§`` in a prompt); the clients' scripts import this,
too."""

from __future__ import annotations

import json


def call(name: str, /, **arguments: object) -> str:
    """Return a tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def forced_call(name: str, cut: int, /, **arguments: object) -> list[str]:
    """Return a tool call in pieces that a grammar allows: its head, then others that end inside of values.

    They end behind ``cut`` characters of a value, a number that must differ between calls with the same arguments. No
    two calls of one tool can be scripted so.
    """
    head = f'<tool_call>\n{{"name": "{name}", "arguments": {{'
    return [head, *_cut(cut, **arguments)[:-1], _cut(cut, **arguments)[-1] + "}\n</tool_call>"]


def forced_json(cut: int, /, **values: object) -> list[str]:
    """Return a JSON object in pieces that a grammar allows; see ``forced_call``."""
    first, *others = _cut(cut, **values)
    return ["{" + first, *others]


def _cut(cut: int, /, **values: object) -> list[str]:
    pieces, rest = [], ""
    for name, value in values.items():
        text = json.dumps(value)
        pieces.append(f"{rest}{', ' if pieces else ''}{json.dumps(name)}: {text[:cut]}")
        rest = text[cut:]
    return [*pieces, f"{rest}}}"]


PLAIN = "Rome is the capital of Italy, and has been one since 1871."
AFTER = "It is sunny in Rome; take a hat."
THOUGHT = "They ask about Rome. I know enough to answer."
ANSWER = "Rome has about three million people."
CAPITAL = "It is the capital, I think."
RAN = "The command has said hello."
CITY = {"name": "Rome", "people": 2800000}
SCRIPTS: dict[str, str | list[str]] = {
    "plain": PLAIN,
    "after": AFTER,
    # Of which the output ends with the next key.
    "bash": call("Bash", command=r"printf 'hello \302\247ran\302\247'", description="Say hello"),
    "ran": RAN,
    "thinks": ["<think>", f"\n{THOUGHT}\n", "</think>\n\n", CAPITAL],
    "weather": call("weather", city="Rome"),
    "two": call("weather", city="Rome", days=1) + "\n" + call("weather", city="Oslo", days=2),
    "forecast": forced_call("forecast", 2, city="Oslo", days=37),
    "json": forced_json(4, **CITY),
    "prompted": f"{json.dumps(CITY)}\n",
    "json_tool": forced_call("json_tool_call", 1, **CITY),
    "city": forced_call("City", 2, **CITY),
    "partial": forced_call("PartialCity", 2, name="Oslo", people=634000),
    "town": forced_call("Town", 3, **CITY),
    "other": call("ask_other"),
    "cities": call("Place", name="Oslo", people=720000) + "\n" + call("Place", **CITY),
    "patch": call("apply_patch", input="*** Begin Patch\n*** Add File: §after§.txt\n+hi\n*** End Patch"),
    "shell": call("exec_command", cmd="echo §after§"),
    "final": forced_call("final_result", 5, **CITY),
    "get weather": forced_call("get_weather", 8, location="Rome, Italy"),
    "final answer": forced_call("final_answer", 7, answer="Take a hat."),
    "asked": ['{"city": "Ro', 'me", "people": 28000', "00}"],
    "fields": "[[ ## city ## ]]\nRome\n\n[[ ## people ## ]]\n2800000\n\n[[ ## completed ## ]]",
    "think": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}",
    "think call": "<think>\nI have to look outside.\n</think>\n\n" + call("weather", city="Rome", days=3),
    "think json": ["<think>\nA city, then.", "\n</think>\n\n", *forced_json(6, **CITY)],
    "think forced": ["<think>\nI have to", " ask.\n</think>\n", *forced_call("look_up", 1, city="Oslo", days=58)],
}

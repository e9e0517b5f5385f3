"""What the served model writes behind each key (``§key§`` in a prompt). The clients' own environments import this, too."""

from __future__ import annotations

import json


def call(name: str, /, **arguments: object) -> str:
    """Return a tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


PLAIN = "Rome is the capital of Italy, and has been one since 1871."
AFTER = "It is sunny in Rome; take a hat."
CITY = {"name": "Rome", "people": 2800000}
CITIES = [CITY, {"name": "Oslo", "people": 720000}]
SCRIPTS = {
    "plain": PLAIN,
    "after": AFTER,
    "weather": call("weather", city="Rome"),
    "two": call("weather", city="Rome", days=1) + "\n" + call("weather", city="Oslo", days=2),
    "json": json.dumps(CITY),
    "city": call("City", **CITY),
    "cities": call("City", **CITIES[1]) + "\n" + call("City", **{**CITY, "people": 1}),
    "small": call("City", name="Rome", people=7),
    "days": call("weather", city="Oslo", days=3),
    "other": call("ask_other"),
    "final": call("final_result", **CITY),
    "submit": call("submit", answer="Rome"),
}

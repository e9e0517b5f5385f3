"""llm-comply, which compares messages with Anthropic's specification."""

from __future__ import annotations

from comply import add_checks
from trial import main

add_checks(
    "anthropic",
    "anthropic.json",
    keys={"anth-tool-calling": "get weather", "anth-thinking-display": "think"},
    fails={"anth-image-input": "images are not served: it is told so (400)"},
    auth_header="x-api-key",
    use_bearer_prefix=False,
)

if __name__ == "__main__":
    main()

"""llm-comply, which compares chat completions with OpenAI's specification."""

from __future__ import annotations

from comply import add_checks
from trial import main

add_checks(
    "openai-chat",
    "openai_chat.json",
    keys={"chat-tool-calling": "get weather", "chat-reasoning-summary": "think"},
    fails={
        "chat-image-input": "the model reads texts alone",
        "chat-error-handling": "a request without a model is no error here: it is for the one that is served",
    },
)

if __name__ == "__main__":
    main()

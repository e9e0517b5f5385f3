"""Fields that OpenAI knows and this server cannot honour: refused by name, except for values that ask for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omniserve.server.errors import ApiError

# Field -> (values that ask for nothing, why it is refused and what to do).
_USE_TOOLS = "{name} is not supported; use tools and tool_choice"
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "audio output is not supported; remove {name}"),
    "function_call": (("none",), _USE_TOOLS),
    "functions": (([],), _USE_TOOLS),
    "modalities": ((["text"],), "only text is supported; remove {name}"),
    "moderation": ((), "{name} is not supported; remove it"),
    "prediction": ((), "{name} is not supported; remove it"),
    "prompt_cache_retention": ((), "{name} is not supported; remove it"),
    "reasoning_effort": (("none",), "{name} is not supported; remove it"),
    "store": ((False,), "answers are not stored; remove {name} or set it to false"),
    "suffix": (("",), "insertion is not supported; remove {name}"),
    "verbosity": (("medium",), "{name} is not supported; remove it"),
    "web_search_options": ((), "web search is not supported; remove {name}"),
}


def refuse_unsupported(fields: dict[str, Any]) -> None:
    """Take fields that ask for nothing out of a request's body, in place.

    Raises:
        ApiError: A field asks for something that is not supported.
    """
    for name in fields.keys() & REFUSED.keys():
        harmless, message = REFUSED[name]
        if fields[name] not in harmless:
            raise ApiError(message.format(name=name), param=name, code="unsupported_parameter")
        del fields[name]

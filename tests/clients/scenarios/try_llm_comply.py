"""llm-comply, which compares answers with OpenAI's specification."""

from __future__ import annotations

from pathlib import Path

import llm_comply
from llm_comply.config import ComplianceConfig
from llm_comply.result import TestStatus
from llm_comply.runner import TestRunner
from llm_comply.schema import SpecLoader
from llm_comply.tests import get_tests
from trial import BASE_URL, MODEL, check, main

FORMATS = {"openai-chat": "openai_chat.json"}
"""Files of the specifications by the names of the formats."""
FAILS = {
    "chat-image-input": "the model reads texts alone",
    "chat-error-handling": "a request without a model is no error here: it is for the one that is served",
}
"""Tests that are expected to fail, and why."""
KEYS = {"chat-tool-calling": "get weather", "chat-reasoning-summary": "think"}


def add(case, runner):
    def function():
        result = runner.run_one(case)
        told = [*result.errors, *result.warnings]
        if case.id in FAILS:
            assert result.status == TestStatus.FAILED, "it passes: it is no longer to be listed among those that fail"
        else:
            assert result.status == TestStatus.PASSED and not told, f"{result.status.value}: {told}"

    function.__name__ = case.id.replace("-", "_")
    check(function)


def keyed(build_request, key):
    """Return a request's builder with a key of what the scripted model is to say."""

    def build(config):
        body = build_request(config)
        body["messages"][-1]["content"] += f" §{key}§"
        return body

    return build


for name, file in FORMATS.items():
    spec = SpecLoader(str(Path(llm_comply.__file__).parent / "specs" / file))
    config = ComplianceConfig(base_url=BASE_URL, api_key="none", model=MODEL, timeout=600.0)
    runner = TestRunner(config, [], spec)
    for case in get_tests(name):
        if case.id in KEYS:
            case.build_request = keyed(case.build_request, KEYS[case.id])
            case.skip_reason = None  # by the name of the model
        add(case, runner)

if __name__ == "__main__":
    main()

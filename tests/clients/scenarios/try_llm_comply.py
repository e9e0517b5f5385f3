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


def thinking(build_request):
    """Return a request's builder to whose answer the scripted model thinks."""

    def build(config):
        body = build_request(config)
        body["messages"][-1]["content"] += " §think§"
        return body

    return build


for name, file in FORMATS.items():
    spec = SpecLoader(str(Path(llm_comply.__file__).parent / "specs" / file))
    runner = TestRunner(ComplianceConfig(base_url=BASE_URL, api_key="none", model=MODEL), [], spec)
    for case in get_tests(name):
        if case.id == "chat-reasoning-summary":  # which is otherwise skipped, by the name of the model
            case.skip_reason, case.build_request = None, thinking(case.build_request)
        add(case, runner)

if __name__ == "__main__":
    main()

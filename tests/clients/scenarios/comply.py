"""llm-comply's tests of an API, each as a check of its own; the scripted model is told what a test has it say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import llm_comply
from llm_comply.config import ComplianceConfig
from llm_comply.result import TestStatus
from llm_comply.runner import TestRunner
from llm_comply.schema import SpecLoader
from llm_comply.tests import get_tests
from trial import BASE_URL, MODEL, check


def add_checks(
    api: str, specification: str, *, keys: Mapping[str, str], fails: Mapping[str, str], **settings: object
) -> None:
    """Add a check for each test of an API.

    Args:
        api: The API, by llm-comply's name.
        specification: The file with its schemas.
        keys: Tests that need a certain answer, and the keys of the scripts that the model then follows.
        fails: Tests that are expected to fail, and why.
        settings: Of llm-comply.
    """
    schemas = SpecLoader(str(Path(llm_comply.__file__).parent / "specs" / specification))
    config = ComplianceConfig(base_url=BASE_URL, api_key="none", model=MODEL, timeout=600.0, **settings)
    runner = TestRunner(config, [], schemas)
    for case in get_tests(api):
        if case.id in keys:
            case.build_request = _keyed(case.build_request, keys[case.id])
            case.skip_reason = None  # by the name of the model
        _add(case, runner, case.id in fails)


def _add(case, runner, fails):
    def function():
        result = runner.run_one(case)
        told = [*result.errors, *result.warnings]
        if fails:
            assert result.status == TestStatus.FAILED, "it passes: it is no longer to be listed among those that fail"
        else:
            assert result.status == TestStatus.PASSED and not told, f"{result.status.value}: {told}"

    function.__name__ = case.id.replace("-", "_")
    check(function)


def _keyed(build_request, key):
    """Return a request's builder with a key of what the scripted model is to say."""

    def build(config):
        body = build_request(config)
        body["messages"][-1]["content"] += f" §{key}§"
        return body

    return build

"""ARCHITECTURE.md is short, and what it quotes is the source."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

from omniserve.engine.stepping import Stepper
from omniserve.runner.runner import ModelRunner

TEXT = (Path(__file__).parents[1] / "ARCHITECTURE.md").read_text()
MOST_LINES = 160


def code_of(function: object) -> str:
    """Return a method's source without its decorators and its docstring."""
    source = inspect.getsource(function)  # type: ignore[arg-type]
    source = source[source.index("    def ") :]
    return textwrap.dedent(re.sub(r' {8}""".*?"""\n', "", source, count=1, flags=re.DOTALL)).rstrip()


def test_it_fits_in_so_many_lines() -> None:
    assert len(TEXT.splitlines()) <= MOST_LINES


def test_what_is_quoted_is_the_source() -> None:
    (quoted,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert quoted.rstrip() == "\n\n\n".join((code_of(Stepper.step), code_of(ModelRunner.launch)))
    assert all(len(code_of(each).splitlines()) <= 25 for each in (Stepper.step, ModelRunner.launch)), "a screen"

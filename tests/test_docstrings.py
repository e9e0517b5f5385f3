"""The English of docstrings, as far as a program can read it. ``make lint`` runs this file as a program.

A docstring is a sentence, or a noun, about the thing that it documents. One that begins with a word for something else
has no such subject: it is read with the line above it, if at all, and stands alone in a command's help.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECKED = ("omniserve", "benchmarks", "examples")
WITHOUT_SUBJECT = re.compile(r"\s*(Of|So|Those|They|It)\b")


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the docstrings of modules, classes and functions, and the literals below assignments."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if not isinstance(body, list):
                continue
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            for before, statement in zip([node if documented else None, *body], body, strict=False):
                is_literal = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                if is_literal and (before is node or isinstance(before, ast.Assign | ast.AnnAssign)):
                    if isinstance(statement.value.value, str):
                        yield statement.value


def faults(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the first words of each docstring without a subject."""
    for literal in docstrings(ast.parse(source)):
        if WITHOUT_SUBJECT.match(literal.value):
            yield literal.lineno, " ".join(literal.value.split()[:8])


def all_faults() -> list[str]:
    paths = [path for folder in CHECKED for path in sorted((ROOT / folder).rglob("*.py"))]
    return [
        f"{path.relative_to(ROOT)}:{line}: docstring without a subject: {words!r}"
        for path in paths
        for line, words in faults(path.read_text())
    ]


def test_docstrings_have_a_subject() -> None:
    assert not all_faults()


def test_a_docstring_without_a_subject_is_found_wherever_it_stands() -> None:
    source = '''
"""Of a module."""
LIMIT = 1
"""So many."""
class Thing:
    """It is a class."""
    field: int
    """Those of others."""
    def method(self):
        """They return nothing."""
        if self.field:
            self.one = 1
        else:
            self.other = 2
            """Of the other branch."""
        print("""So this is no docstring.""")
'''
    assert sorted(line for line, _ in faults(source)) == [2, 4, 6, 8, 10, 15]


if __name__ == "__main__":
    sys.exit("\n".join(all_faults()) or None)

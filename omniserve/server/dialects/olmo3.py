"""The calls of OLMo 3, Python's calls on lines of their own, between two tags.

::

    <function_calls>
    weather(city="Köln", days=2)
    time()
    </function_calls>
"""

from __future__ import annotations

from collections.abc import Sequence

from omniserve.server.dialects.base import Finder, Group, MarkFinder, RawCall, Schemas
from omniserve.server.dialects.pythonic import Pythonic, python_calls

_BEGIN, _END = "<function_calls>", "</function_calls>"


class Olmo3(Pythonic):
    """A call of Python's a line between two tags."""

    begins = (_BEGIN,)
    end = _END
    opening = closing = ""
    only_at_start = False
    group = Group(f"{_BEGIN}\n", "\n", f"\n{_END}")

    @staticmethod
    def is_of(template: str) -> bool:
        return _BEGIN in template

    def finder(self, begin: str) -> Finder:
        return MarkFinder(self, self.end)

    def may_end(self, body: str) -> bool:
        return body.rstrip().endswith((")", "]"))

    def calls(self, begin: str, body: str, tools: Schemas) -> Sequence[RawCall]:
        return python_calls(body.strip())

"""DeepSeek's calls since V3.2, arguments between tags of its markup (DSML), each of which says whether it is a text.

::

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="weather">
    <｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>
"""

from __future__ import annotations

from omniserve.server.dialects.base import Group
from omniserve.server.dialects.json_text import dumps, value_of
from omniserve.server.dialects.parameters import ParameterForm

_DSML = "｜DSML｜"


class DeepSeekV32(ParameterForm):
    """An invocation's tag with a tag for each parameter in it."""

    begins = (f'<{_DSML}invoke name="',)
    end = f"</{_DSML}invoke>"
    opening, closing = f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"
    more_marks = (_DSML,)
    group = Group(f"{opening}\n{begins[0]}", f"\n{begins[0]}", f"\n{closing}")
    head = ("", '">\n')
    key = (f'<{_DSML}parameter name="', '" string="true">')
    json_key_end = '" string="false">'
    value_end = f"</{_DSML}parameter>\n"
    tail = end

    @staticmethod
    def is_of(template: str) -> bool:
        return _DSML in template and "function_calls>" in template

    @property
    def key_end_pattern(self) -> str:
        """A pattern of what is behind an argument's name; models leave out the attribute at times."""
        return r'"(?:\s+string="(?P<kind>true|false)")?\s*>'

    def is_text(self, types: frozenset[str] | None, kind: str | None) -> bool:
        return kind == "true" or (kind is None and super().is_text(types, kind))

    def json_of(self, written: str, types: frozenset[str] | None, kind: str | None) -> str:
        if kind == "true":
            return dumps(written)
        if kind == "false":
            try:
                value_of(written)
            except ValueError:
                return super().json_of(written, types, kind)
            return written.strip()
        return super().json_of(written, types, kind)


class DeepSeekV4(DeepSeekV32):
    """The calls of DeepSeek V4: those of V3.2, but the group's tag is ``tool_calls``."""

    opening, closing = f"<{_DSML}tool_calls>", f"</{_DSML}tool_calls>"
    group = Group(f"{opening}\n{DeepSeekV32.begins[0]}", DeepSeekV32.group.separator, f"\n{closing}")

    @staticmethod
    def is_of(template: str) -> bool:
        return _DSML in template and "tool_calls>" in template and "function_calls>" not in template


class DeepSeekV41(DeepSeekV32):
    """The calls of DeepSeek V4.1: those of V3.2, but a space is in front of each tag's name."""

    begins = (f'<{_DSML} invoke name="',)
    end = f"</{_DSML} invoke>"
    opening, closing = f"<{_DSML} calls>", f"</{_DSML} calls>"
    group = Group(f"{opening}\n{begins[0]}", f"\n{begins[0]}", f"\n{closing}")
    key = (f'<{_DSML} parameter name="', DeepSeekV32.key[1])
    value_end = f"</{_DSML} parameter>\n"
    tail = end

    @staticmethod
    def is_of(template: str) -> bool:
        return _DSML in template and " calls>" in template and "_calls>" not in template

"""The calls of Step 3, arguments between tags.

::

    <｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">
    <steptml:parameter name="city">Köln</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>

There is no line end in it.
"""

from __future__ import annotations

from omniserve.server.dialects.base import Group
from omniserve.server.dialects.parameters import ParameterForm

_BEGIN, _SEPARATOR, _END = "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"
_OPENING, _CLOSING = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"


class Step3(ParameterForm):
    """An invocation's tag with a tag for each parameter in it."""

    begins = (_BEGIN,)
    end = _END
    opening, closing = _OPENING, _CLOSING
    more_marks = (_SEPARATOR,)
    group = Group(_OPENING + _BEGIN, _BEGIN, _CLOSING)
    head = (f'function{_SEPARATOR}<steptml:invoke name="', '">')
    key = ('<steptml:parameter name="', '">')
    value_end = "</steptml:parameter>"
    tail = f"</steptml:invoke>{_END}"

    @staticmethod
    def is_of(template: str) -> bool:
        return "<steptml:" in template

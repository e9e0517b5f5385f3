"""How each dialect writes calls, as the published chat templates do; and what tells these templates apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Calls = Sequence[tuple[str, dict[str, Any]]]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _named(name: str, arguments: dict[str, Any], word: str = "arguments") -> str:
    return f'{{"name": "{name}", "{word}": {dumps(arguments)}}}'


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{_named(*call)}\n</tool_call>" for call in calls)


def qwen3_coder(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{_raw(v)}\n</parameter>\n" for k, v in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def llama3_json(calls: Calls) -> str:
    return "; ".join(_named(name, arguments, "parameters") for name, arguments in calls)


def pythonic(calls: Calls) -> str:
    texts = (f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls)
    return f"[{', '.join(texts)}]"


def mistral(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}" for name, arguments in calls)


def mistral_v3(calls: Calls) -> str:
    return f"[TOOL_CALLS] [{', '.join(_named(*call) for call in calls)}]"


def _message(name: str, arguments: dict[str, Any]) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(arguments)}"


def harmony(calls: Calls) -> str:
    return "<|call|><|start|>assistant".join(_message(*call) for call in calls)


_DEEPSEEK = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"


def deepseek_v3(calls: Calls) -> str:
    texts = (f"function<｜tool▁sep｜>{name}\n```json\n{dumps(arguments)}\n```" for name, arguments in calls)
    return "<｜tool▁calls▁begin｜>" + "\n".join(map(_DEEPSEEK.format, texts)) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Calls) -> str:
    texts = (f"{name}<｜tool▁sep｜>{dumps(arguments)}" for name, arguments in calls)
    return f"<｜tool▁calls▁begin｜>{''.join(map(_DEEPSEEK.format, texts))}<｜tool▁calls▁end｜>"


def _dsml(calls: Calls, group: str, space: str = "") -> str:
    def tag(name: str, more: str = "") -> str:
        return f"<｜DSML｜{space}{name}{more}>"

    def parameter(key: str, value: Any) -> str:
        is_text = "true" if isinstance(value, str) else "false"
        return tag("parameter", f' name="{key}" string="{is_text}"') + f"{_raw(value)}</｜DSML｜{space}parameter>\n"

    texts = (
        tag("invoke", f' name="{name}"') + "\n" + "".join(parameter(*pair) for pair in arguments.items())
        + f"</｜DSML｜{space}invoke>\n"
        for name, arguments in calls
    )  # fmt: skip
    return f"{tag(group)}\n{''.join(texts)}</｜DSML｜{space}{group}>"


def deepseek_v32(calls: Calls) -> str:
    return _dsml(calls, "function_calls")


def deepseek_v4(calls: Calls) -> str:
    return _dsml(calls, "tool_calls")


def deepseek_v41(calls: Calls) -> str:
    return _dsml(calls, "calls", " ")


def glm45(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{_raw(v)}</arg_value>\n" for k, v in arguments.items())
        + "</tool_call>"
        for name, arguments in calls
    )


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(one)}" for key, one in value.items()) + "}"
    return f"[{','.join(map(_gemma, value))}]" if isinstance(value, list) else dumps(value)


def gemma4(calls: Calls) -> str:
    return "".join(f"<|tool_call>call:{name}{_gemma(arguments)}<tool_call|>" for name, arguments in calls)


def functiongemma(calls: Calls) -> str:
    marks = {'<|"|>': "<escape>", "<|tool_call>": "<start_function_call>", "<tool_call|>": "<end_function_call>"}
    text = gemma4(calls)
    for one, other in marks.items():
        text = text.replace(one, other)
    return text


def kimi_k2(calls: Calls) -> str:
    texts = (
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{dumps(arguments)}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"


def granite(calls: Calls) -> str:
    return f"<|tool_call|>[{', '.join(_named(*call) for call in calls)}]"


def phi4_mini(calls: Calls) -> str:
    return f"<|tool_call|>[{', '.join(_named(*call) for call in calls)}]<|/tool_call|>"


def cohere_command3(calls: Calls) -> str:
    texts = (
        f'    {{"tool_call_id": "{i}", "tool_name": "{name}", "parameters": {dumps(arguments)}}}'
        for i, (name, arguments) in enumerate(calls)
    )
    return "<|START_ACTION|>[\n" + ",\n".join(texts) + "\n]<|END_ACTION|>"


def internlm(calls: Calls) -> str:
    texts = (_named(name, arguments, "parameters") for name, arguments in calls)
    return "\n".join(f"<|action_start|><|plugin|>\n{text}<|action_end|>" for text in texts)


def jamba(calls: Calls) -> str:
    return f"<tool_calls>[{', '.join(_named(*call) for call in calls)}]</tool_calls>"


def nemotron_json(calls: Calls) -> str:
    return f"<TOOLCALL>[{', '.join(_named(*call) for call in calls)}]</TOOLCALL>"


def apertus(calls: Calls) -> str:
    texts = (f'{{"{name}": {dumps(arguments)}}}' for name, arguments in calls)
    return f"<|tools_prefix|>[{', '.join(texts)}]<|tools_suffix|>"


def gigachat3(calls: Calls) -> str:
    return "\n".join(f"<|function_call|>{_named(*call)}" for call in calls)


def granite_20b_fc(calls: Calls) -> str:
    return "\n".join(f"<function_call> {_named(*call)}" for call in calls)


def longcat(calls: Calls) -> str:
    return hermes(calls).replace("tool_call>", "longcat_tool_call>")


def lfm2(calls: Calls) -> str:
    return f"<|tool_call_start|>{pythonic(calls)}<|tool_call_end|>"


def olmo3(calls: Calls) -> str:
    return "<function_calls>\n" + "\n".join(pythonic([call])[1:-1] for call in calls) + "\n</function_calls>"


def seed_oss(calls: Calls) -> str:
    return "\n".join(
        f"<seed:tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>{_raw(v)}</parameter>\n" for k, v in arguments.items())
        + "</function>\n</seed:tool_call>"
        for name, arguments in calls
    )


def step3(calls: Calls) -> str:
    texts = (
        f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">'
        + "".join(f'<steptml:parameter name="{k}">{_raw(v)}</steptml:parameter>' for k, v in arguments.items())
        + "</steptml:invoke><｜tool_call_end｜>"
        for name, arguments in calls
    )
    return f"<｜tool_calls_begin｜>{''.join(texts)}<｜tool_calls_end｜>"


def minimax_m2(calls: Calls) -> str:
    texts = (
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{k}">{_raw(v)}</parameter>\n' for k, v in arguments.items())
        + "</invoke>\n"
        for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{''.join(texts)}</minimax:tool_call>"


@dataclass(frozen=True)
class Sample:
    """A form of calls: how it writes some, and what is told of it."""

    write: Callable[[Calls], str]
    template: str
    """What only templates of this dialect have."""
    writes_json: bool = True
    """Arguments are the text that the model wrote."""
    cut: str = ""
    """A begin of a call."""
    only_at_start: bool = False
    others: Sequence[str] = ()
    """Other texts of the call ``weather`` with the city ``Köln``."""


_ARGUMENTS = '{"city": "Köln"}'
_OBJECT = f'{{"name": "weather", "arguments": {_ARGUMENTS}}}'
_DEEPSEEK_BEGIN = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
FORMS: dict[str, Sample] = {
    "hermes": Sample(
        hermes,
        "{{ tools }}<tool_call>",
        cut='<tool_call>\n{"name": "weather", "argu',
        others=[f'<tool_call>{{"name": "weather", "parameters": {_ARGUMENTS}}}</tool_call>'],
    ),
    "qwen3_coder": Sample(
        qwen3_coder,
        "{{ tools }}<tool_call>\n<function=a>\n<parameter=b>",
        writes_json=False,
        cut="<tool_call>\n<function=weather>\n<parameter=city>\nKö",
        others=["<tool_call><function=weather><parameter=city>Köln</parameter></function></tool_call>"],
    ),
    "llama3_json": Sample(
        llama3_json,
        '<|start_header_id|>{{ tools }}{"name": f, "parameters": d}',
        only_at_start=True,
        cut='{"name": "weather", "parameters": {',
        others=[
            f"<|python_tag|>{_OBJECT}",
            f"I look. <|python_tag|>{_OBJECT}",
            f'{{"name": "weather", "parameters": {_ARGUMENTS}}};',
        ],
    ),
    "llama4_pythonic": Sample(
        pythonic,
        "<|python_start|>{{ tools }}[func_name1(params_name1=v)]",
        writes_json=False,
        only_at_start=True,
        cut="[weather(city='Kö",
        others=['<|python_start|>[weather(city="Köln")]<|python_end|>', '[weather(city="K\\u00f6ln"), ]'],
    ),
    "mistral": Sample(
        mistral,
        "[TOOL_CALLS]{{ tools }}[ARGS]",
        cut="[TOOL_CALLS]weather[ARGS]{",
        others=[
            f"[TOOL_CALLS]weather{_ARGUMENTS}",
            f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{_ARGUMENTS}",
            f"[TOOL_CALLS][{_OBJECT}]",
        ],
    ),
    "mistral_v3": Sample(
        mistral_v3,
        "[TOOL_CALLS] [{{ tools }}]",
        cut='[TOOL_CALLS] [{"name": "weather"',
        others=[f'[TOOL_CALLS][{_OBJECT[:-1]}, "id": "abcdefghi"}}]', f"[TOOL_CALLS]weather[ARGS]{_ARGUMENTS}"],
    ),
    "openai": Sample(
        harmony,
        "<|start|>{{ tools }}<|channel|>analysis<|message|>",
        cut="<|channel|>commentary to=functions.wea",
        others=[
            f" to=functions.weather<|channel|>commentary json<|message|>{_ARGUMENTS}<|call|>",
            f"<|channel|>analysis to=functions.weather code<|message|>{_ARGUMENTS}",
        ],
    ),
    "deepseek_v3": Sample(deepseek_v3, "{{ tools }}<｜tool▁sep｜>\n```json", cut=f"{_DEEPSEEK_BEGIN}function<｜tool"),
    "deepseek_v31": Sample(deepseek_v31, "{{ tools }}<｜tool▁sep｜>", cut=f"{_DEEPSEEK_BEGIN}weather<｜tool▁sep｜>{{"),
    "deepseek_v32": Sample(
        deepseek_v32,
        '{{ tools }}<｜DSML｜function_calls>\n<｜DSML｜invoke name="a">',
        writes_json=False,
        cut='<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="ci',
        others=[
            '<｜DSML｜invoke name="weather"><｜DSML｜parameter name="city">Köln</｜DSML｜parameter></｜DSML｜invoke>',
            deepseek_v32([("weather", {"city": "Köln"})]).replace('"true">Köln', '"false">"Köln"'),
        ],
    ),
    "deepseek_v4": Sample(
        deepseek_v4,
        '{{ tools }}<｜DSML｜tool_calls>\n<｜DSML｜invoke name="a">',
        writes_json=False,
        cut='<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Kö',
    ),
    "deepseek_v41": Sample(
        deepseek_v41,
        '{{ tools }}<｜DSML｜ calls>\n<｜DSML｜ invoke name="a">',
        writes_json=False,
        cut='<｜DSML｜ calls>\n<｜DSML｜ invoke name="wea',
    ),
    "gemma4": Sample(
        gemma4,
        "{{ tools }}<|tool_call>call:<tool_call|>",
        writes_json=False,
        cut='<|tool_call>call:weather{city:<|"|>Kö',
        others=['<|tool_call>call:weather{ <|"|>city<|"|> : <|"|>Köln<|"|> }<tool_call|>'],
    ),
    "functiongemma": Sample(
        functiongemma,
        "{{ tools }}<start_function_call>call:",
        writes_json=False,
        cut="<start_function_call>call:weather{city:<escape>Kö",
        others=["<start_function_call>call:weather{city:<escape>Köln<escape>}"],
    ),
    "glm45": Sample(
        glm45,
        "{{ tools }}<tool_call>{f}\n<arg_key>k</arg_key>",
        writes_json=False,
        cut="<tool_call>weather\n<arg_key>city</arg_key>\n<arg_va",
        others=["<tool_call>weather<arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call>"],
    ),
    "kimi_k2": Sample(
        kimi_k2,
        "{{ tools }}<|tool_calls_section_begin|><|tool_call_argument_begin|>",
        cut="<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_arg",
        others=[f"<|tool_call_begin|>functions.weather:3<|tool_call_argument_begin|>{_ARGUMENTS}<|tool_call_end|>"],
    ),
    "granite": Sample(
        granite,
        "{{ tools }}<|tool_call|>",
        cut='<|tool_call|>[{"name": "weather"',
        others=[f"<|tool_call|> [{_OBJECT}]", f"<|tool_call|>{_OBJECT}"],
    ),
    "phi4_mini_json": Sample(
        phi4_mini,
        "{{ tools }}<|tool_call|>x<|/tool_call|>",
        cut='<|tool_call|>[{"name": "weather"',
        others=[f"functools[{_OBJECT}]", f"<|tool_call|>{_OBJECT}<|/tool_call|>"],
    ),
    "minimax_m2": Sample(
        minimax_m2,
        "{{ tools }}<minimax:tool_call>",
        writes_json=False,
        cut='<minimax:tool_call>\n<invoke name="weather">\n<param',
    ),
    "cohere_command3": Sample(
        cohere_command3,
        "{{ tools }}<|START_ACTION|>",
        cut='<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather"',
        others=[
            f'<|START_ACTION|>[{{"tool_call_id":"7","tool_name":"weather","parameters":{_ARGUMENTS}}}]<|END_ACTION|>',
            f'<|START_ACTION|>[{{"tool_name": "weather", "parameters": {_ARGUMENTS}}}]',
        ],
    ),
    "internlm": Sample(
        internlm,
        "{{ tools }}<|action_start|>",
        cut='<|action_start|><|plugin|>\n{"name": "weather", "para',
        others=[f"<|action_start|><|plugin|>{_OBJECT}\n<|action_end|>"],
    ),
    "jamba": Sample(
        jamba,
        "{{ tools }}<tool_calls>",
        cut='<tool_calls>[{"name": "weather"',
        others=[f"<tool_calls>[\n  {_OBJECT}\n]\n</tool_calls>", f"<tool_calls>{_OBJECT}</tool_calls>"],
    ),
    "nemotron_json": Sample(
        nemotron_json,
        "{{ tools }}<TOOLCALL>",
        cut='<TOOLCALL>[{"name": "weather"',
        others=[f"<TOOLCALL>[{_OBJECT}]", f"<TOOLCALL> [ {_OBJECT} ] </TOOLCALL>"],
    ),
    "longcat": Sample(
        longcat,
        "{{ tools }}<longcat_tool_call>",
        cut='<longcat_tool_call>\n{"name": "weather", "argu',
        others=[f"<longcat_tool_call>{_OBJECT}</longcat_tool_call>"],
    ),
    "lfm2": Sample(
        lfm2,
        "{{ tools }}<|tool_call_start|>",
        writes_json=False,
        cut="<|tool_call_start|>[weather(city='Kö",
        others=['<|tool_call_start|>[weather(city="Köln")]', '<|tool_call_start|>[weather( city = "K\\u00f6ln" )]'],
    ),
    "olmo3": Sample(
        olmo3,
        "{{ tools }}<function_calls>",
        writes_json=False,
        cut="<function_calls>\nweather(city='Kö",
        others=[
            '<function_calls>weather(city="Köln")</function_calls>',
            '<function_calls>\n[weather(city="Köln")\n]</function_calls>',
        ],
    ),
    "seed_oss": Sample(
        seed_oss,
        "{{ tools }}<seed:tool_call>\n<function=a>\n<parameter=b>",
        writes_json=False,
        cut="<seed:tool_call>\n<function=weather>\n<parameter=city>Kö",
        others=["<seed:tool_call><function=weather><parameter=city>Köln</parameter></function></seed:tool_call>"],
    ),
    "step3": Sample(
        step3,
        '{{ tools }}<｜tool_calls_begin｜><steptml:invoke name="a">',
        writes_json=False,
        cut='<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="wea',
        others=[step3([("weather", {"city": "Köln"})]).replace("><steptml:parameter", ">\n<steptml:parameter")],
    ),
    "apertus": Sample(
        apertus,
        "{{ tools }}<|tools_prefix|>",
        cut='<|tools_prefix|>[{"weather": {"ci',
        others=[f'<|tools_prefix|>[ {{"weather":{_ARGUMENTS}}} ]'],
    ),
    "gigachat3": Sample(
        gigachat3,
        "{{ tools }}function call<|role_sep|>",
        cut='<|function_call|>{"name": "wea',
        others=[f"function call<|role_sep|>\n{_OBJECT}"],
    ),
    "granite-20b-fc": Sample(
        granite_20b_fc,
        "{{ tools }}<function_call>",
        cut='<function_call> {"name": "wea',
        others=[f"<function_call>{_OBJECT}", f"<function_call>\n[{_OBJECT}]"],
    ),
}

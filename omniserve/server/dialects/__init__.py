"""Dialects: how models write their calls of tools and mark their thinking, each chosen by its chat template or by name.

A new one is a file here, with a ``CallForm`` or a ``Dialect`` (``base.py``), and a line below; another pair of tags
around thinking is a line in ``thinking.py`` and one below. The names are vLLM's.
"""

from __future__ import annotations

from typing import Any

from omniserve.core.registry import Registry
from omniserve.server.dialects.base import CallForm, Dialect
from omniserve.server.dialects.tagged import TaggedDialect
from omniserve.server.dialects.thinking import Thinking

CALL_FORMS: Registry[type[CallForm] | type[Dialect]] = Registry("tool-call parser")
THINKING: Registry[Thinking | type[Dialect]] = Registry("reasoning parser")

_HERE = "omniserve.server.dialects"
CALL_FORMS.register_at("apertus", f"{_HERE}.apertus:Apertus")
CALL_FORMS.register_at("cohere_command3", f"{_HERE}.cohere:CohereCommand3")
CALL_FORMS.register_at("deepseek_v3", f"{_HERE}.deepseek:DeepSeekV3")
CALL_FORMS.register_at("deepseek_v31", f"{_HERE}.deepseek:DeepSeekV31")
CALL_FORMS.register_at("deepseek_v32", f"{_HERE}.dsml:DeepSeekV32")
CALL_FORMS.register_at("deepseek_v4", f"{_HERE}.dsml:DeepSeekV4")
CALL_FORMS.register_at("deepseek_v41", f"{_HERE}.dsml:DeepSeekV41")
CALL_FORMS.register_at("ernie45", f"{_HERE}.hermes:Hermes")
CALL_FORMS.register_at("functiongemma", f"{_HERE}.functiongemma:FunctionGemma")
CALL_FORMS.register_at("gemma4", f"{_HERE}.gemma4:Gemma4")
CALL_FORMS.register_at("gigachat3", f"{_HERE}.gigachat3:GigaChat3")
CALL_FORMS.register_at("glm45", f"{_HERE}.glm45:Glm45")
CALL_FORMS.register_at("glm47", f"{_HERE}.glm45:Glm45")
CALL_FORMS.register_at("granite", f"{_HERE}.granite:Granite")
CALL_FORMS.register_at("granite-20b-fc", f"{_HERE}.granite_20b_fc:Granite20bFunctionCalling")
CALL_FORMS.register_at("granite4", f"{_HERE}.hermes:Hermes")
CALL_FORMS.register_at("hermes", f"{_HERE}.hermes:Hermes")
CALL_FORMS.register_at("hunyuan_a13b", f"{_HERE}.jamba:Jamba")
CALL_FORMS.register_at("internlm", f"{_HERE}.internlm:InternLM")
CALL_FORMS.register_at("jamba", f"{_HERE}.jamba:Jamba")
CALL_FORMS.register_at("kimi_k2", f"{_HERE}.kimi_k2:KimiK2")
CALL_FORMS.register_at("lfm2", f"{_HERE}.lfm2:Lfm2")
CALL_FORMS.register_at("llama3_json", f"{_HERE}.llama3_json:Llama3Json")
CALL_FORMS.register_at("llama4_json", f"{_HERE}.llama3_json:Llama3Json")
CALL_FORMS.register_at("llama4_pythonic", f"{_HERE}.pythonic:Pythonic")
CALL_FORMS.register_at("longcat", f"{_HERE}.longcat:LongCat")
CALL_FORMS.register_at("minimax_m2", f"{_HERE}.minimax_m2:MiniMaxM2")
CALL_FORMS.register_at("mistral", f"{_HERE}.mistral:Mistral")
CALL_FORMS.register_at("mistral_v3", f"{_HERE}.mistral:OldMistral")
CALL_FORMS.register_at("nemotron_json", f"{_HERE}.nemotron:Nemotron")
CALL_FORMS.register_at("olmo3", f"{_HERE}.olmo3:Olmo3")
CALL_FORMS.register_at("openai", f"{_HERE}.harmony:Harmony")
CALL_FORMS.register_at("phi4_mini_json", f"{_HERE}.phi4_mini:Phi4Mini")
CALL_FORMS.register_at("pythonic", f"{_HERE}.pythonic:Pythonic")
CALL_FORMS.register_at("qwen3_coder", f"{_HERE}.qwen3_coder:Qwen3Coder")
CALL_FORMS.register_at("qwen3_json", f"{_HERE}.hermes:Hermes")
CALL_FORMS.register_at("qwen3_xml", f"{_HERE}.qwen3_coder:Qwen3Coder")
CALL_FORMS.register_at("seed_oss", f"{_HERE}.seed_oss:SeedOss")
CALL_FORMS.register_at("step3", f"{_HERE}.step3:Step3")
CALL_FORMS.register_at("step3p5", f"{_HERE}.qwen3_coder:Qwen3Coder")

THINKING.register_at("apertus", f"{_HERE}.thinking:APERTUS")
THINKING.register_at("cohere_command3", f"{_HERE}.thinking:COHERE")
THINKING.register_at("deepseek_r1", f"{_HERE}.thinking:THINK")
THINKING.register_at("deepseek_v3", f"{_HERE}.thinking:THINK")
THINKING.register_at("deepseek_v4", f"{_HERE}.thinking:THINK")
THINKING.register_at("deepseek_v41", f"{_HERE}.thinking:THINK")
THINKING.register_at("ernie45", f"{_HERE}.thinking:GRANITE33")
THINKING.register_at("gemma4", f"{_HERE}.thinking:GEMMA4")
THINKING.register_at("glm45", f"{_HERE}.thinking:THINK")
THINKING.register_at("granite", f"{_HERE}.thinking:GRANITE")
THINKING.register_at("granite33", f"{_HERE}.thinking:GRANITE33")
THINKING.register_at("hunyuan_a13b", f"{_HERE}.thinking:HUNYUAN")
THINKING.register_at("kimi_k2", f"{_HERE}.thinking:KIMI_K2")
THINKING.register_at("longcat", f"{_HERE}.thinking:LONGCAT")
THINKING.register_at("mimo", f"{_HERE}.thinking:THINK")
THINKING.register_at("minimax_m2", f"{_HERE}.thinking:THINK")
THINKING.register_at("mistral", f"{_HERE}.thinking:MISTRAL")
THINKING.register_at("nemotron_v3", f"{_HERE}.thinking:THINK")
THINKING.register_at("olmo3", f"{_HERE}.thinking:THINK")
THINKING.register_at("openai_gptoss", f"{_HERE}.harmony:Harmony")
THINKING.register_at("qwen3", f"{_HERE}.thinking:THINK")
THINKING.register_at("seed_oss", f"{_HERE}.thinking:SEED_OSS")
THINKING.register_at("step3", f"{_HERE}.thinking:THINK")
THINKING.register_at("step3p5", f"{_HERE}.thinking:THINK")

AUTO, NONE = "auto", "none"


def choose(template: str, *, calls: str = AUTO, thinking: str = AUTO) -> Dialect:
    """Return the dialect of a model.

    Args:
        template: Its chat template.
        calls: The name of a form of calls; ``auto`` tells it from the template, ``none`` knows none.
        thinking: The name of a way to mark thinking; ``auto`` and ``none`` as above.

    Raises:
        ValueError: There is no such name, or the two do not go together.
    """
    form, marks = _found(CALL_FORMS, calls, template), _found(THINKING, thinking, template)
    of_calls, of_thinking = _whole(form), _whole(marks)
    if of_calls is None and of_thinking is None:
        made = None if form is None else form()
        for part, kind in ((made, CallForm), (marks, Thinking)):
            if not isinstance(part, kind | None):
                raise ValueError(f"a parser must be a {kind.__name__}, got {part!r}")
        return TaggedDialect(marks, made)
    if {calls, thinking} == {AUTO, NONE}:
        return TaggedDialect(None, None)
    for whole, name in ((of_calls, thinking), (of_thinking, calls)):
        if whole is not None and (of_calls is of_thinking or name == AUTO):
            return whole()
    raise ValueError(
        f"the tool-call parser {calls!r} and the reasoning parser {thinking!r} do not go together: one is a dialect "
        "that has both; leave the other one away"
    )


def _found(registry: Registry[Any], name: str, template: str) -> Any:
    """Return the entry of this name, or the one that says that the template is its own; None if there is none."""
    if name == NONE:
        return None
    if name != AUTO:
        return registry.get(name)
    entries = map(registry.get, registry.names())
    return next((entry for entry in entries if entry.is_of(template)), None)


def _whole(part: object) -> type[Dialect] | None:
    return part if isinstance(part, type) and issubclass(part, Dialect) else None

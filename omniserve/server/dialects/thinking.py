"""Thinking between two tags, as most models mark it: the tags of each, a parser, and rules of grammars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omniserve.server.dialects.base import Opening, num_begun
from omniserve.server.dialects.grammar_text import SpecialTokens


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model marks that it thinks, which it does before all else."""

    begin: str
    end: str
    ends_before: str = ""
    """A mark before which thinking ends, too, such as that of a call."""
    sign: str = ""
    """What a chat template has beside one of the tags if its model marks thinking so."""
    other_signs: Sequence[str] = ()
    """What it does not have then."""
    answer: Thinking | None = None
    """The tags of the answer behind it, for models that mark it, too."""

    @property
    def marks(self) -> Sequence[str]:
        """The texts in which special tokens may stand that have to be seen."""
        of_answer = [] if self.answer is None else self.answer.marks
        return [self.begin, self.end, *([self.ends_before] if self.ends_before else []), *of_answer]

    def is_of(self, template: str) -> bool:
        """Return whether a chat template is of a model that marks thinking so."""
        has_tag = self.begin in template or self.end in template
        return has_tag and self.sign in template and not any(sign in template for sign in self.other_signs)

    def opening(self, prompt: str, continued: str | None) -> Opening:
        """Return the begin of the answer to a prompt; see ``Dialect.opening``."""
        if continued is not None:
            begin, end = continued.rfind(self.begin), continued.rfind(self.end)
            return Opening(self.begin) if begin > end else Opening(may_think=False)
        prompt = prompt.rstrip()
        if prompt.endswith(self.begin.rstrip()):
            return Opening(self.begin)
        return Opening(may_think=not prompt.endswith(self.end.rstrip()))

    def start(self, special: SpecialTokens, opening: Opening, plain: str) -> str:
        """Return an expression of an answer, a rule of that name, behind thinking, a rule ``thought``.

        ``plain`` is the rule of an answer without thinking.
        """
        answer = "answer" if self.answer is None else "marked_answer"
        if opening.prefill:
            return f"thought SPACE {answer}"
        return f"{special.spell(self.begin)} thought SPACE {answer} | {plain}"

    def answer_rules(self, special: SpecialTokens) -> list[str]:
        """Return the rules that ``start`` needs beside those of the answer and of the thinking."""
        if self.answer is None:
            return []
        begin, end = special.spell(self.answer.begin), special.spell(self.answer.end)
        return [f"marked_answer: answer | {begin} SPACE answer SPACE {end}"]


_CALLS_OF_KIMI = "<|tool_calls_section_begin|>"
_RESPONSE, _ANSWER = Thinking("<response>", "</response>"), Thinking("<answer>", "</answer>")
THINK = Thinking("<think>", "</think>", other_signs=(_CALLS_OF_KIMI, _RESPONSE.begin, _ANSWER.begin))
HUNYUAN = Thinking("<think>", "</think>", sign=_ANSWER.begin, other_signs=(_RESPONSE.begin,), answer=_ANSWER)
GRANITE33 = Thinking("<think>", "</think>", sign=_RESPONSE.begin, answer=_RESPONSE)
KIMI_K2 = Thinking("<think>", "</think>", ends_before=_CALLS_OF_KIMI, sign=_CALLS_OF_KIMI)
APERTUS = Thinking("<|inner_prefix|>", "<|inner_suffix|>")
COHERE = Thinking("<|START_THINKING|>", "<|END_THINKING|>", answer=Thinking("<|START_RESPONSE|>", "<|END_RESPONSE|>"))
LONGCAT = Thinking("<longcat_think>", "</longcat_think>")
SEED_OSS = Thinking("<seed:think>", "</seed:think>")
MISTRAL = Thinking("[THINK]", "[/THINK]")
GRANITE = Thinking("Here is my thought process:", "Here is my response:")
GEMMA4 = Thinking("<|channel>thought\n", "<channel|>")


class ThinkingParser:
    """Separates the thinking at the begin of a text from the rest. White space around it belongs to neither."""

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self._held = ""
        self._is_before = True
        """The thinking may still begin."""
        self.is_inside = False
        """True between the tags."""
        self._drops_space = False

    @property
    def may_be_inside(self) -> bool:
        """True between the tags and before the first."""
        return self._is_before or self.is_inside

    def push(self, text: str) -> tuple[str, str]:
        """Add text; return what is certain by now, of the thinking and of the rest."""
        begin = self._thinking.begin
        if self._is_before:
            self._held += text
            stripped = self._held.lstrip()
            if begin.startswith(stripped) and stripped != begin:
                return "", ""
            text, self._held, self._is_before = self._held, "", False
            if stripped.startswith(begin):
                self.is_inside = self._drops_space = True
                text = stripped[len(begin) :]
        if not self.is_inside:
            return "", self._after_space(text)
        self._held += text
        ends = [self._thinking.end, self._thinking.ends_before] if self._thinking.ends_before else [self._thinking.end]
        found = [(at, end) for end in ends if (at := self._held.find(end)) >= 0]
        if not found:
            length = max(num_begun(self._held, end) for end in ends)
            certain = self._held[: len(self._held) - length].rstrip()
            self._held = self._held[len(certain) :]
            return self._after_space(certain), ""
        at, end = min(found)
        thought = self._after_space(self._held[:at].rstrip())
        rest = self._held[at + len(end) if end == self._thinking.end else at :]
        self._held, self.is_inside, self._drops_space = "", False, True
        return thought, self._after_space(rest)

    def flush(self) -> tuple[str, str]:
        """Return what was held back, once no text follows."""
        held, self._held = self._held, ""
        if self.is_inside:
            return self._after_space(held).rstrip(), ""
        return "", held

    def _after_space(self, text: str) -> str:
        if self._drops_space:
            text = text.lstrip()
            self._drops_space = not text
        return text

"""Pieces of grammars, in llguidance's form of Lark: a dialect's texts, spelled with a tokenizer's special tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from omniserve.server.dialects.json_text import dumps

TEXT = r"TEXT: /(.|\n)*/"
"""The rule of any text; it holds no special token."""
SPACE = r"SPACE: /[ \t\n]{0,8}/"
"""The rule of some white space."""


@dataclass(frozen=True)
class SpecialTokens:
    """A tokenizer's special tokens, which are not part of a text, as a dialect and its grammars need them.

    Most tokenizers have no special tokens for tags. There a tag is text, be it one token (Qwen's) or several.
    """

    tags: Mapping[str, int] = field(default_factory=dict)
    """Ids of those that the dialect writes, by their text."""
    others: tuple[int, ...] = ()
    """Ids of all others. They may be anywhere in free text."""

    def spell(self, text: str) -> str:
        """Return an expression for a text that may have tags."""
        return " ".join(f"<[{self.tags[part]}]>" if part in self.tags else dumps(part) for part in self._parts(text))

    def up_to(self, rule: str, text: str, before: str = "TEXT") -> list[str]:
        """Return the rules of anything up to a text, which ends at its first occurrence.

        Args:
            rule: The name of the rule.
            text: What it ends with.
            before: The rule of what is before.
        """
        first, *rest = self._parts(text)
        if first in self.tags:
            return [f"{rule}: {self.skipped}{before} {self.spell(text)}"]
        if rest:  # What is before the special token may be in the text, too.
            end = f"{rule.upper()}_END"
            behind = self.spell(text[len(first) :])
            return [f"{rule}: {self.skipped}{end} {behind}", f"{end}: {before} {dumps(first)}"]
        # Lazy, so that the first occurrence is one, and no text.
        if not self.others:
            return [f"{rule}[lazy]: {before} {dumps(first)}"]
        return [f"{rule}: {self.skipped}{rule}_end", f"{rule}_end[lazy]: {before} {dumps(first)}"]

    def bounded(self, rule: str, text: str, *, before: str = "TEXT", most_tokens: int | None = None) -> list[str]:
        """Return the rules of anything up to a text, but no special token, one of which may end the answer.

        Args:
            rule: The name of the rule.
            text: Ends it at its first occurrence.
            before: The rule of what is before.
            most_tokens: The text comes after so many tokens at the latest, whatever is before; None: after any number.
        """
        first, *rest = self._parts(text)
        if most_tokens is None:
            return replace(self, others=()).up_to(rule, text, before)
        if not most_tokens:
            return [f"{rule}: {self.spell(text)}"]
        cut_off = [f"{rule}: {rule}_text {self.spell(text)}", rf"{rule}_text[max_tokens={most_tokens}]: /(.|\n)*/"]
        if first in self.tags:
            return cut_off
        # Beside the text that is cut off, one that ends by itself. (``stop=`` of one rule for both has llguidance panic
        # where the end is in two tokens, the second of which goes on.)
        lazy = "" if rest else "lazy, "
        ended = rf"{rule}_ended[{lazy}max_tokens={most_tokens}]: /(.|\n)*/ {dumps(first)}"
        behind = f" {self.spell(text[len(first) :])}" if rest else ""
        return [f"{cut_off[0]} | {rule}_ended{behind}", cut_off[1], ended]

    @property
    def any_text(self) -> str:
        """An expression of any text, special tokens included."""
        return f"TEXT{self._more([*self.tags.values(), *self.others])}"

    def other_text(self, begin: str) -> str:
        """Return an expression of a text that begins with a rule, or of none; with special tokens that are no tags."""
        if not self.others:
            return f"{begin}?"
        return f"<[{','.join(map(str, self.others))}]>* ({begin}{self._more(self.others)})?"

    def not_begun(self, rule: str, *texts: str, of: str = "TEXT") -> list[str]:
        """Return the terminal of texts, of another terminal, that begin with none of these, but for white space."""
        firsts = [self._parts(text)[0] for text in texts]
        # No terminal has a special token.
        patterns = [re.escape(one).replace("\n", "n").replace("/", r"\/") for one in firsts if one not in self.tags]
        return [rf"{rule}: {of} & ~/\s*({'|'.join(patterns)})(.|\n)*/" if patterns else f"{rule}: {of}"]

    def text_not_begun(self, rule: str, text: str) -> str:
        """Return an expression of any text that begins with the terminal of ``not_begun``, special tokens included."""
        first = self._parts(text)[0]
        tokens = [token_id for tag, token_id in self.tags.items() if tag != first]
        return f"{rule}{self._more([*tokens, *self.others])}"

    @staticmethod
    def _more(token_ids: Sequence[int]) -> str:
        return f" (<[{','.join(map(str, token_ids))}]> TEXT)*" if token_ids else ""

    @property
    def skipped(self) -> str:
        """The begin of an expression: texts that end with special tokens that are no tags."""
        return "skipped* " if self.others else ""

    @property
    def shared_rules(self) -> list[str]:
        """Rules that expressions made here may need."""
        return [TEXT, SPACE] + ([f"skipped: TEXT <[{','.join(map(str, self.others))}]>"] if self.others else [])

    def _parts(self, text: str) -> list[str]:
        if not self.tags:
            return [text]
        tags = "|".join(map(re.escape, sorted(self.tags, key=len, reverse=True)))
        return [part for part in re.split(f"({tags})", text) if part]


def special_tokens(texts: Mapping[int, str], marks: Collection[str]) -> SpecialTokens:
    """Tell the special tokens that a dialect writes from the others.

    Args:
        texts: The text of each special token.
        marks: What the dialect writes; a special token is a tag if its text is in one of them.
    """
    tags = {text: token_id for token_id, text in texts.items() if text and any(text in mark for mark in marks)}
    return SpecialTokens(tags, tuple(sorted(texts.keys() - tags.values())))

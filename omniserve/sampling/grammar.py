"""Grammars that constrain which tokens may come next in an output. llguidance does the work; torch is not needed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# A space, or a new line with its indentation. Without a limit a model may write white space until its tokens run out.
_WHITESPACE = {"whitespace_pattern": r"[ ]?|\n[ \t]{0,32}"}


def json_value(schema: Mapping[str, Any]) -> str:
    """Return a Lark expression for JSON of a schema, which may have llguidance's ``x-guidance`` options."""
    return f"%json {json.dumps({'x-guidance': _WHITESPACE, **schema})}"


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of one JSON value of a JSON Schema, for ``SamplingParams.grammar``.

    Properties come in the order of the schema. The engine refuses a schema that llguidance cannot enforce.
    """
    return f"start: {json_value(schema)}"


class GrammarFailed(Exception):
    """A grammar could not go on: it is too complex, or no token fits."""


class GrammarState:
    """The state of one output in its grammar, which ``accept`` moves on by a token; it begins with a new matcher.

    A preempted request keeps its tokens, and so this state.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        """Return the tokens that may come next as a bit mask, lowest bit first, at least as long as the vocabulary.

        If the grammar may end here, the model's end-of-sequence tokens are among them.

        Raises:
            GrammarFailed: The computation exceeds llguidance's limits.
        """
        bits = self._matcher.compute_bitmask()
        self._check()
        return bits

    def accept(self, token_id: int) -> None:
        """Append the next token.

        Raises:
            GrammarFailed: The token is not allowed here.
        """
        self._matcher.consume_token(token_id)
        self._check()

    def accept_all(self, token_ids: Sequence[int]) -> int:
        """Append tokens that were allowed one after the other, up to the end of the output; return how many."""
        count = int(self._matcher.try_consume_tokens(list(token_ids)))
        # That takes no end-of-sequence token where nothing else may come.
        if count < len(token_ids) and self._matcher.consume_token(token_ids[count]):
            count += 1
        return count

    def behind(self, token_ids: Sequence[int]) -> GrammarState | None:
        """Return the state behind some tokens, none of which is accepted by this; None if the grammar forbids one."""
        matcher = self._matcher.deep_copy()
        return GrammarState(matcher) if matcher.try_consume_tokens(list(token_ids)) == len(token_ids) else None

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(f"the grammar cannot go on: {_first_line(self._matcher.get_error())}")


class GrammarCompiler:
    """Compiles grammars for one model.

    The tokenizer is a fast one of ``transformers``, or None: then every grammar is refused. The model's ``vocab_size``
    may be larger than the tokenizer's vocabulary.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._built: LLTokenizer | None = None

    def prepare(self) -> LLTokenizer:
        """Build the vocabulary that all grammars share, once; this takes up to a second if it is large.

        Raises:
            ValueError: There is no tokenizer, or llguidance is not installed or cannot work with it and this model.
        """
        if self._built is not None:
            return self._built
        if self._tokenizer is None:
            raise ValueError("a grammar needs a tokenizer; give the engine one")
        try:
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise ValueError("grammars need the package llguidance: pip install llguidance") from None
        if getattr(self._tokenizer, "backend_tokenizer", None) is None:
            raise ValueError("grammars need a fast tokenizer (tokenizer.json), which this model does not have")
        if not self._eos_token_ids:
            raise ValueError("grammars need an end-of-sequence token, which this model does not have")
        self._built = from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
        return self._built

    def start(self, grammar: str) -> GrammarState:
        """Return the start state of a grammar in llguidance's dialect of Lark.

        Raises:
            ValueError: It is malformed, or llguidance cannot enforce a part of it.
        """
        tokenizer = self.prepare()
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if matcher.is_error():
            raise ValueError(f"the grammar or JSON schema is not supported: {_first_line(matcher.get_error())}")
        return GrammarState(matcher)


def _first_line(message: str) -> str:
    # The rest is a position in the grammar, which a client that sent a schema does not know.
    return re.sub(r"^at \d+\(\d+\): ", "", message.strip().partition("\n")[0])

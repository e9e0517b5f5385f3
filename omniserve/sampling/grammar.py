"""Grammars that constrain an output: which tokens may come next. llguidance does the work; no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# A space, or a new line and its indentation. Without a limit a model may say white space until its tokens are used up.
_WHITESPACE = {"whitespace_pattern": r"[ ]?|\n[ \t]{0,32}"}


def json_value(schema: Mapping[str, Any]) -> str:
    """Return a Lark expression for JSON of a schema, for use inside a grammar.

    Args:
        schema: JSON Schema; llguidance's ``x-guidance`` options may be in it.
    """
    return f"%json {json.dumps({'x-guidance': _WHITESPACE, **schema})}"


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of one JSON value of a schema, for ``SamplingParams.grammar``.

    Args:
        schema: JSON Schema. Properties come in its order. What llguidance cannot enforce is refused by the engine.
    """
    return f"start: {json_value(schema)}"


class GrammarFailed(Exception):
    """A matcher could not go on: the grammar is too complex, or no token fits."""


class GrammarState:
    """Where one output stands in its grammar.

    It follows the tokens, one ``accept`` each. A preempted request keeps its tokens, and so its grammar's state.

    Args:
        matcher: A fresh one.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        """Return which tokens may come next, a bit each, lowest bit first, at least as many as the vocabulary has.

        Where the grammar may end, the model's end-of-sequence tokens are among them.

        Raises:
            GrammarFailed: That takes more than llguidance's limits.
        """
        bits = self._matcher.compute_bitmask()
        self._check()
        return bits

    def accept(self, token_id: int) -> None:
        """Book the next token.

        Raises:
            GrammarFailed: It is not allowed here.
        """
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(f"the grammar cannot go on: {_first_line(self._matcher.get_error())}")


class GrammarCompiler:
    """Makes grammars for one model.

    Args:
        tokenizer: A fast tokenizer of ``transformers``.
        vocab_size: The model's, at least the tokenizer's.
        eos_token_ids: What ends an output.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._built: LLTokenizer | None = None

    def prepare(self) -> LLTokenizer:
        """Build what all grammars share, once; takes up to a second with a large vocabulary.

        Raises:
            ValueError: llguidance is not installed, or cannot work with this model and tokenizer.
        """
        if self._built is None:
            self._built = self._build()
        return self._built

    def start(self, grammar: str) -> GrammarState:
        """Return the beginning of a grammar.

        Args:
            grammar: In llguidance's dialect of Lark.

        Raises:
            ValueError: It is malformed, or has something that llguidance cannot enforce.
        """
        tokenizer = self.prepare()
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if matcher.is_error():
            raise ValueError(f"the grammar or JSON schema is not supported: {_first_line(matcher.get_error())}")
        return GrammarState(matcher)

    def _build(self) -> LLTokenizer:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise ValueError("grammars need the package llguidance: pip install llguidance") from None
        if getattr(self._tokenizer, "backend_tokenizer", None) is None:
            raise ValueError("grammars need a fast tokenizer (tokenizer.json), which this model does not have")
        if not self._eos_token_ids:
            raise ValueError("grammars need an end-of-sequence token, which this model does not have")
        return from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)


def _first_line(message: str) -> str:
    # The rest is where in the grammar, of which a client that sent a schema knows nothing.
    return re.sub(r"^at \d+\(\d+\): ", "", message.strip().partition("\n")[0])

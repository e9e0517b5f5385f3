"""Grammars that constrain which tokens may come next in an output. llguidance does the work; torch is not needed."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from omniserve.sampling.json_schema import enforceable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

# A space, or a new line with its indentation. Without a limit a model may write white space until its tokens run out.
_WHITESPACE = {"whitespace_pattern": r"[ ]?|\n[ \t]{0,32}"}

# Compiled grammars that are kept. One takes at most some 30 MB, as a rule far less than one.
_MAX_KEPT, _MAX_KEPT_CHARACTERS = 64, 1 << 20
# As one that takes long must not keep the others waiting. They leave the processor to the steps.
_NUM_THREADS, _NICENESS = 2, 10
# Up to four items for each property that may come next, all looked at for each token. llguidance's own limits, 2,000
# and 50,000, end an output at the begin of an object with 500 properties. These here are reached after tens of ms.
_MAX_ITEMS_IN_ROW, _MAX_ITEMS_IN_STEP = 20_000, 1_000_000


def json_value(schema: Mapping[str, Any]) -> str:
    """Return a Lark expression for JSON of a schema, which may have llguidance's ``x-guidance`` options."""
    return f"%json {json.dumps({'x-guidance': _WHITESPACE, **schema})}"


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of one JSON value of a JSON Schema, for ``SamplingParams.grammar``.

    Properties come in the order of the schema. The engine refuses a schema that llguidance cannot enforce.

    Raises:
        UnsupportedSchema: It is known beforehand that a part cannot be enforced; a ValueError.
    """
    return f"start: {json_value(enforceable(schema))}"


class GrammarFailed(Exception):
    """A grammar could not go on: it is too complex, or no token fits."""


class GrammarState:
    """The state of one output in its grammar, which ``accept`` moves on by a token; it begins with a new matcher.

    A preempted request keeps its tokens, and so this state.
    """

    def __init__(self, matcher: LLMatcher, of: Grammar) -> None:
        self._matcher, self._grammar = matcher, of

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
        takes = matcher.try_consume_tokens(list(token_ids)) == len(token_ids)
        return GrammarState(matcher, self._grammar) if takes else None

    def _check(self) -> None:
        if self._matcher.is_error():
            why = _first_line(self._matcher.get_error())
            self._grammar.is_broken |= "panic" in why
            raise GrammarFailed(f"the grammar cannot go on: {why}")


class Grammar:
    """A compiled grammar, with which any number of outputs can begin."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.is_broken = False
        """True once llguidance has panicked in an output: no other can begin, as all share its lexer."""

    def start(self) -> GrammarState:
        """Return the state of a new output."""
        return GrammarState(self._matcher.deep_copy(), self)


class GrammarCompiler:
    """Compiles grammars for one model, in threads of its own; those that were used last are kept.

    The tokenizer is a fast one of ``transformers``, or None: then every grammar is refused. The model's ``vocab_size``
    may be larger than the tokenizer's vocabulary.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._built: LLTokenizer | None = None
        self._building = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._kept: OrderedDict[str, Future[Grammar]] = OrderedDict()
        """Grammars by text, the one used last at the end; some are still being compiled, or were refused."""

    def prepare(self) -> LLTokenizer:
        """Build the vocabulary that all grammars share, once; this takes up to a second if it is large.

        Raises:
            ValueError: There is no tokenizer, or llguidance is not installed or cannot work with it and this model.
        """
        with self._building:
            if self._built is None:
                self._built = self._build()
            return self._built

    def compile(self, grammar: str) -> Future[Grammar]:
        """Begin to compile a grammar in llguidance's dialect of Lark, unless it is kept from before; return at once.

        One thread calls this. The future has a ValueError if the grammar is malformed, if llguidance cannot enforce a
        part of it or if it exceeds llguidance's limits, and whatever ``prepare`` raises.
        """
        if (kept := self._kept.get(grammar)) is not None and not _is_broken(kept):
            self._kept.move_to_end(grammar)
            return kept
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar", initializer=_give_way)
        future = self._kept[grammar] = self._threads.submit(self._compile, grammar)
        self._kept.move_to_end(grammar)
        num_characters = sum(map(len, self._kept))
        while len(self._kept) > 1 and (len(self._kept) > _MAX_KEPT or num_characters > _MAX_KEPT_CHARACTERS):
            num_characters -= len(self._kept.popitem(last=False)[0])
        return future

    def close(self) -> None:
        """End the threads once they have done what they are at."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> Grammar:
        tokenizer = self.prepare()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            verbose_errors=False, max_items_in_row=_MAX_ITEMS_IN_ROW, step_max_items=_MAX_ITEMS_IN_STEP
        )
        # Both without the GIL.
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(f"the grammar or JSON schema is not supported: {_first_line(matcher.get_error())}")
        matcher.compute_bitmask()  # the first mask may take longer than all others, and copies have what it built
        if matcher.is_error():
            logger.debug("the first mask failed: %s", matcher.get_error())
            raise ValueError(
                "the grammar or JSON schema is too large: too much may come next at its begin; write fewer "
                "alternatives, and fewer properties that are not required"
            )
        return Grammar(matcher)

    def _build(self) -> LLTokenizer:
        if self._tokenizer is None:
            raise ValueError("a grammar needs a tokenizer; give the engine one")
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise ValueError("grammars need the package llguidance: pip install llguidance") from None
        if getattr(self._tokenizer, "backend_tokenizer", None) is None:
            raise ValueError("grammars need a fast tokenizer (tokenizer.json), which this model does not have")
        if not self._eos_token_ids:
            raise ValueError("grammars need an end-of-sequence token, which this model does not have")
        known = from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_token_ids, slices=[])
        vocabulary = _Vocabulary(self._tokenizer, known, self._eos_token_ids)
        return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=self._eos_token_ids)


class _Vocabulary:
    """A model's tokens as llguidance's ``TokenizerWrapper`` takes them: each is bytes of text, or special.

    llguidance takes every added token of the form ``<...>`` for special, so that no text may have it. But many, such as
    Qwen's ``<tool_call>`` and ``<think>``, are text in the output. Tokens that are no text are special here.
    """

    def __init__(self, tokenizer: Any, known: LLTokenizer, eos_token_ids: Collection[int]) -> None:
        from tokenizers import Tokenizer

        self.bos_token_id = None
        self.eos_token_id = next(iter(eos_token_ids))
        self.tokens = [known.decode_bytes([i]) for i in range(known.vocab_size)]
        special = {i for i in range(known.vocab_size) if known.is_special_token(i)} | set(eos_token_ids)
        for i, token in tokenizer.added_tokens_decoder.items():
            if i in special and not token.special and i not in eos_token_ids:
                text = tokenizer.backend_tokenizer.decode([i])
                if "\N{REPLACEMENT CHARACTER}" not in text:  # a byte-level decoder may read it as bytes
                    self.tokens[i] = text.encode()
                    special.discard(i)
        self.special_token_ids = sorted(special)
        self._special = special
        self._greedy = known.greedy_tokenize
        self._tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True  # as the text that they look like

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of a text that must come: as the model would have it, if these are that very text."""
        if isinstance(text, bytes):
            text = text.decode()
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        written = b"".join(self.tokens[i] for i in token_ids)
        if written == text.encode() and self._special.isdisjoint(token_ids):
            return token_ids
        return self._greedy(text)  # a tokenizer may normalize a text, or put a space before it


def _is_broken(kept: Future[Grammar]) -> bool:
    return kept.done() and kept.exception() is None and kept.result().is_broken


def _give_way() -> None:
    """Make this thread alone nicer than the process."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)
    except OSError as error:
        logger.warning("grammars are compiled at the priority of the steps: %s", error)


def _first_line(message: str) -> str:
    # The rest is a position in the grammar, which a client that sent a schema does not know.
    return re.sub(r"^at \d+\(\d+\): ", "", message.strip().partition("\n")[0])

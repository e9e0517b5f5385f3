"""A choice of an answer: text, tokens and times of the outputs that the engine gives one request."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from omniserve.core.request import SLO, FinishReason, Request, RequestOutput, RequestTimes, Stay, TokenLogprob, add_stay
from omniserve.server.dialects.base import AnswerParser, ParsedCall, Said, joined
from omniserve.server.tokenizing.text import TextCodec

# Tokens of an answer that is read as a whole become text in such parts: each decoding keeps other requests waiting.
_TOKENS_PER_PART = 1024


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt, as the answer repeats it."""

    text: str
    first_token_id: int
    logprobs: tuple[TokenLogprob, ...]
    """Log-probabilities of the tokens after the first; empty if none were asked for."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice."""

    index: int
    text: str
    logprobs: Sequence[TokenLogprob]
    """Log-probabilities of the tokens since the last delta; empty if none were asked for."""
    finish_reason: str | None
    echo: Echo | None = None
    """The prompt's part, in the first delta only, of an answer that begins with the prompt."""
    tool_calls: Sequence[ParsedCall] = ()
    reasoning: str = ""
    """New text of the thinking, which is before all other."""
    num_tokens: int = 0
    """Number of tokens since the last delta."""
    token_ids: Sequence[int] = ()
    """Ids of these tokens, if they were asked for; a stop token is among them."""
    prompt_token_ids: Sequence[int] | None = None
    """Ids of the prompt's tokens, in the first delta only, if they were asked for."""
    num_reasoning_tokens: int = 0
    """Number of tokens since the last delta that are reasoning, with the mark that ends it: the first of them."""
    stop_string: str | None = None
    """The stop string that ended the choice, if one did; in the last delta only."""
    embedding: Sequence[float] = ()
    """The pooled hidden states of the prompt, in the last delta, if they were asked for."""


def merge(deltas: Sequence[Delta]) -> Delta:
    """Return deltas of one choice, which follow one another, as one."""
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        deltas[0].index,
        "".join([delta.text for delta in deltas]),
        [entry for delta in deltas for entry in delta.logprobs],
        deltas[-1].finish_reason,
        deltas[0].echo,
        joined([call for delta in deltas for call in delta.tool_calls]),
        "".join([delta.reasoning for delta in deltas]),
        sum(delta.num_tokens for delta in deltas),
        [token_id for delta in deltas for token_id in delta.token_ids],
        deltas[0].prompt_token_ids,
        sum(delta.num_reasoning_tokens for delta in deltas),
        deltas[-1].stop_string,
        deltas[-1].embedding,
    )


@dataclass(slots=True)
class Times:
    """Times at which a request's tokens passed through the API process; monotonic seconds."""

    arrival_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None: there is none yet."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None: there are none yet."""
        if self.first_token_s is None or self.last_token_s is None or self.num_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_tokens - 1)

    def add(self, num_tokens: int) -> None:
        """Note tokens that came now."""
        self.last_token_s = time.monotonic()
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s
        self.num_tokens += num_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class TextForm:
    """What an API call wants of the text of its outputs."""

    stop: Sequence[str] = ()
    """Strings that end an output; they are not part of the text."""
    at_once: bool = False
    """The answer is read when it is complete."""
    parser: Callable[[], AnswerParser] | None = None
    """Makes what tells reasoning and calls from the text of an output; None: all is text."""
    shown: Collection[int] = ()
    """Special tokens that the parser has to see."""
    with_reasoning: bool = True
    """The answer has the reasoning."""
    several_calls: bool = True
    """The text goes on after a call."""
    include_stop: bool = False
    """What ends an output, a stop string or a stop token, is a part of its text."""
    skip_special_tokens: bool = True
    """The text has no special tokens."""
    with_token_ids: bool = False
    """Deltas have the ids of their tokens, and the first of a choice those of the prompt."""


class Choice:
    """Follows one engine request.

    Args:
        request: The request as the engine gets it, so without stop strings.
        arrival_s: Arrival of the call in monotonic seconds.
        form: What the text is to be like.
        echo: Text of the prompt, which the answer begins with; None: it does not.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        codec: TextCodec,
        *,
        slo: SLO,
        arrival_s: float,
        form: TextForm,
        echo: str | None,
    ) -> None:
        self.index = index
        self.request = request
        self.times = Times(arrival_s)
        self.finish_reason: str | None = None
        self.predicted_ttft_s: float | None = None
        """The TTFT that the engine predicted when it accepted the request, in seconds from its arrival."""
        self.scaled_slo: SLO | None = None
        """The objectives that hold if admission has scaled those of the class."""
        self._slo = slo
        self.engine_times: RequestTimes | None = None
        """The times of the request as of its last output; None before its first one."""
        self.host_stays: list[Stay] = []
        """Stays on the host tier that are over; see ``add_stay``."""
        self.num_host_tokens = 0
        """Number of output tokens with attention computed on the host tier."""
        self.num_cached_tokens = 0
        """Number of prompt tokens that the prefix cache had."""
        self.num_accepted_drafts = 0
        """Number of output tokens that were guessed right."""
        self.num_rejected_drafts = 0
        """Number of guesses that were computed and are not in the output."""
        self.num_reasoning_tokens = 0
        """Number of output tokens that are reasoning, with the mark that ends it."""
        self._detokenizer = codec.detokenizer(
            form.stop,
            skip_special_tokens=form.skip_special_tokens,
            min_tokens=request.sampling.min_tokens,
            include_stop=form.include_stop,
            shown=form.shown,
        )
        self._include_stop = form.include_stop
        self._num_told_tokens = 0
        """Number of tokens in deltas so far."""
        self._num_told_reasoning_tokens = 0
        self._new_token_ids: list[int] | None = [] if form.with_token_ids else None
        self._prompt_token_ids = request.prompt_token_ids if form.with_token_ids else None
        self._logprobs: list[TokenLogprob] = []
        self._echo = echo
        self._parser = None if form.parser is None else form.parser()
        self._with_reasoning = form.with_reasoning
        self._total_logprob, self._num_logprobs = 0.0, 0
        self._in_large_parts = form.at_once and not form.stop and form.several_calls
        self._token_ids: list[int] = []

    @property
    def slo(self) -> SLO:
        """The objectives that hold."""
        return self.scaled_slo or self._slo

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the tokens so far, a stop token included; 0 if none were asked for."""
        return self._total_logprob / max(1, self._num_logprobs)

    def advance(self, output: RequestOutput) -> Delta | None:
        """Take what a step produced; return the text that is certain by now, if any or if the choice is complete."""
        said: Said | None = None
        text: str | None
        if self._parser is None:
            text, finish_reason, num_unused = self._read(output)
        else:
            said, finish_reason, num_unused = self._read_parsed(output, self._parser)
            text = None if said is None else said.text
        output = output.without_last(num_unused)
        token_ids, logprobs = output.new_token_ids, output.new_logprobs
        self.engine_times, self.num_host_tokens = output.times, output.num_host_tokens
        self.num_cached_tokens = output.num_cached_tokens
        for stay in output.host_stays:
            add_stay(self.host_stays, stay)
        if token_ids or self.request.sampling.max_tokens == 0:
            self.times.add(len(token_ids))
        self.num_accepted_drafts += output.num_accepted_drafts
        self.num_rejected_drafts += output.num_rejected_drafts
        if logprobs:
            self._total_logprob += sum(entry.logprob for entry in logprobs)
            self._num_logprobs += len(logprobs)
            ends_at_token = output.finish_reason is FinishReason.STOP and not num_unused
            self._logprobs += logprobs[:-1] if ends_at_token and not self._include_stop else logprobs
        if self._new_token_ids is not None:
            self._new_token_ids += token_ids
        if text is None:
            return None
        echo = None
        if self._echo is not None:
            echo = Echo(self._echo, self.request.prompt_token_ids[0], output.prompt_logprobs)
            self._echo = None
        elif not text and finish_reason is None and (said is None or not (said.calls or said.reasoning)):
            return None
        return self._delta(text, finish_reason, said, echo, output.embedding)

    def advance_by(self, token_id: int) -> Delta | None:
        """Take a token that is all that a step produced, and not the first; return what ``advance`` does."""
        if self._parser is not None:
            return self.advance(
                RequestOutput(
                    request_id=self.request.request_id or "",
                    service_class=self.request.service_class,
                    new_token_ids=(token_id,),
                    num_host_tokens=self.num_host_tokens,
                    num_cached_tokens=self.num_cached_tokens,
                    times=self.engine_times,
                )
            )
        self.times.add(1)
        if self._new_token_ids is not None:
            self._new_token_ids.append(token_id)
        token_ids: Sequence[int] = (token_id,)
        if self._in_large_parts:
            self._token_ids.append(token_id)
            if len(self._token_ids) < _TOKENS_PER_PART:
                return None
            token_ids, self._token_ids = self._token_ids, []
        text, finish_reason, _ = self._detokenizer.advance(token_ids, None)
        return self._delta(text, finish_reason) if text or finish_reason is not None else None

    def _delta(
        self,
        text: str,
        finish_reason: FinishReason | None,
        said: Said | None = None,
        echo: Echo | None = None,
        embedding: Sequence[float] = (),
    ) -> Delta:
        reasoning, calls = ("", ()) if said is None else (said.reasoning, said.calls)
        new_logprobs, self._logprobs = self._logprobs, []
        reason = self.finish_reason = None if finish_reason is None else str(finish_reason)
        if self._parser is not None and self._parser.num_calls and finish_reason is FinishReason.STOP:
            reason = "tool_calls"
        num_tokens, self._num_told_tokens = self.times.num_tokens - self._num_told_tokens, self.times.num_tokens
        num_thought = self.num_reasoning_tokens - self._num_told_reasoning_tokens
        self._num_told_reasoning_tokens = self.num_reasoning_tokens
        prompt_token_ids, self._prompt_token_ids = self._prompt_token_ids, None
        new_ids: Sequence[int] = ()
        if self._new_token_ids is not None:
            new_ids, self._new_token_ids = self._new_token_ids, []
        stop_string = None if finish_reason is None else self._detokenizer.stopped
        return Delta(
            self.index,
            text,
            new_logprobs,
            reason,
            echo,
            calls,
            reasoning,
            num_tokens,
            new_ids,
            prompt_token_ids,
            num_thought,
            stop_string,
            embedding,
        )

    def _text_tokens(self, output: RequestOutput) -> Sequence[int]:
        """Return the tokens that are text."""
        if output.finish_reason is FinishReason.STOP and not self._include_stop:
            # The engine ends a request so at a stop token only, and that is no part of the text.
            return output.new_token_ids[:-1]
        return output.new_token_ids

    def _read(self, output: RequestOutput) -> tuple[str | None, FinishReason | None, int]:
        """Return new text, or None as it is read in larger parts; why it ends; and how many tokens are behind its end.

        A step may bring several tokens, and one before the last may complete a stop string.
        """
        token_ids = self._text_tokens(output)
        if self._in_large_parts:
            self._token_ids += token_ids
            if output.finish_reason is None and self._echo is None and len(self._token_ids) < _TOKENS_PER_PART:
                return None, None, 0
            token_ids = tuple(self._token_ids)
            self._token_ids.clear()
        text, finish_reason, num_read = self._detokenizer.advance(token_ids, None)
        if finish_reason is not None:
            return text, finish_reason, len(output.new_token_ids) - num_read
        if output.finish_reason is None:
            return text, None, 0
        rest, finish_reason, _ = self._detokenizer.advance((), output.finish_reason)
        return text + rest, finish_reason, 0

    def _read_parsed(self, output: RequestOutput, parser: AnswerParser) -> tuple[Said | None, FinishReason | None, int]:
        """Return what ``_read`` does, with the text in its parts.

        Tokens that may be reasoning are read one by one, so that they can be counted.
        """
        said: list[Said] = []
        num_read = 0
        finish_reason: FinishReason | None = None
        for token_id in self._text_tokens(output) if parser.may_think else ():
            was_thinking = parser.is_thinking
            text, finish_reason, _ = self._detokenizer.advance((token_id,), None)
            said.append(parser.push(text))
            self.num_reasoning_tokens += was_thinking or parser.is_thinking
            num_read += 1
            if finish_reason is not None or not parser.may_think:
                break
        num_unused = len(output.new_token_ids) - num_read
        if finish_reason is None and (not num_read or num_unused or output.finish_reason is not None):
            if num_read:
                output = dataclasses.replace(output, new_token_ids=output.new_token_ids[num_read:])
            rest, finish_reason, num_unused = self._read(output)
            if rest is not None:
                said.append(parser.push(rest))
        if parser.is_over:
            finish_reason = FinishReason.STOP
        if finish_reason is not None:
            said.append(parser.flush())
        if not said:
            return None, None, 0
        reasoning = "".join([part.reasoning for part in said]) if self._with_reasoning else ""
        calls = [call for part in said for call in part.calls]
        return Said(reasoning, "".join([part.text for part in said]), calls), finish_reason, num_unused

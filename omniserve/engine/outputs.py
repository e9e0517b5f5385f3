"""OutputCollector: stop strings and text of the requests of an engine that has a tokenizer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omniserve.core.request import Completion, Request, RequestOutput, TokenLogprob
from omniserve.sampling.detokenizer import Detokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class _Open:
    detokenizer: Detokenizer | None
    kept: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    text: list[str] = field(default_factory=list)
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0


class OutputCollector:
    """Follows each unfinished request's output; without a tokenizer there is no text, and there are no stop strings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._open: dict[str, _Open] = {}
        self._ended: dict[str, _Open] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def open(self, request_id: str, request: Request) -> None:
        """Begin to follow a request."""
        wanted = self._tokenizer is not None and bool(request.sampling.stop)
        detokenizer = None
        if wanted:
            sampling = request.sampling
            detokenizer = Detokenizer(self._tokenizer, sampling.stop, min_tokens=sampling.min_tokens)
        self._open[request_id] = _Open(detokenizer)

    def keep(self, request_id: str) -> None:
        """Collect the whole output of a request, for ``completion``."""
        entry = self._open[request_id]
        entry.kept = True
        if entry.detokenizer is None and self._tokenizer is not None:
            entry.detokenizer = Detokenizer(self._tokenizer, ())

    def push(self, output: RequestOutput, now_s: float) -> RequestOutput:
        """Take a step's output; return it, finished if a stop string was completed."""
        entry = self._open[output.request_id]
        if entry.detokenizer is not None:
            text, finish_reason, num_tokens = entry.detokenizer.advance(output.new_token_ids, output.finish_reason)
            if entry.detokenizer.stopped is not None:
                output = output.without_last(len(output.new_token_ids) - num_tokens)
                times, stays = output.times, output.host_stays
                if times is not None:
                    if times.host_since_s is not None:
                        stays = (*stays, (times.host_since_s, now_s))
                    times = dataclasses.replace(times, finished_s=now_s, host_since_s=None)
                output = dataclasses.replace(
                    output,
                    finish_reason=finish_reason,
                    stop_reason=entry.detokenizer.stopped,
                    times=times,
                    host_stays=stays,
                )
            if entry.kept:
                entry.text.append(text)
        if entry.kept:
            entry.token_ids += output.new_token_ids
            entry.logprobs += output.new_logprobs
            entry.prompt_logprobs += output.prompt_logprobs
            entry.num_accepted_drafts += output.num_accepted_drafts
            entry.num_rejected_drafts += output.num_rejected_drafts
        if output.finished:
            self.close(output.request_id)
            if entry.kept:
                self._ended[output.request_id] = entry
        return output

    def close(self, request_id: str) -> None:
        """Stop following a request; nothing of it is kept."""
        del self._open[request_id]

    def completion(self, output: RequestOutput) -> Completion:
        """Return, once, the whole result of a kept request; ``output`` is its last one."""
        entry = self._ended.pop(output.request_id)
        text = None if entry.detokenizer is None else "".join(entry.text)
        assert output.finish_reason is not None and output.times is not None
        return Completion(
            request_id=output.request_id,
            token_ids=tuple(entry.token_ids),
            text=text,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            logprobs=tuple(entry.logprobs),
            prompt_logprobs=entry.prompt_logprobs,
            embedding=output.embedding,
            num_prompt_tokens=output.num_prompt_tokens,
            num_host_tokens=output.num_host_tokens,
            num_cached_tokens=output.num_cached_tokens,
            num_accepted_drafts=entry.num_accepted_drafts,
            num_rejected_drafts=entry.num_rejected_drafts,
            times=output.times,
        )

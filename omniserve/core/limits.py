"""Limits that hold for every request of an engine at any load. Plain numbers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from omniserve.core.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """The limits of one engine, which it checks itself and tells a server in front of it."""

    vocab_size: int
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    pool_tokens: int
    """Tokens that the device KV pool holds."""
    has_tokenizer: bool

    @property
    def max_tokens(self) -> int:
        """Most tokens of a request, prompt and output together."""
        return min(self.max_model_len, self.pool_tokens)

    def unknown_token(self, token_ids: Collection[int]) -> int | None:
        """Return a token id that is outside the vocabulary; None: there is none."""
        ends = (max(token_ids), min(token_ids)) if token_ids else ()
        return next((token_id for token_id in ends if not 0 <= token_id < self.vocab_size), None)

    def check(self, request: Request) -> None:
        """Refuse what can never be served.

        Raises:
            ValueError: A token is outside the vocabulary, the prompt plus output is longer than the model or the KV
                pool allows, or there are stop strings and no tokenizer.
        """
        num_prompt, sampling = len(request.prompt_token_ids), request.sampling
        biased = [token_id for token_id, _ in sampling.logit_bias]
        for name, token_ids in (("prompt", request.prompt_token_ids), ("logit_bias's", biased)):
            if (unknown := self.unknown_token(token_ids)) is not None:
                raise ValueError(f"{name} token {unknown} is outside the vocabulary of {self.vocab_size} tokens")
        total = num_prompt + sampling.max_tokens
        if total > self.max_model_len:
            raise ValueError(
                f"the prompt has {num_prompt} tokens and max_tokens is {sampling.max_tokens}: {total} in all, but the "
                f"context is {self.max_model_len} tokens; shorten the prompt or lower max_tokens"
            )
        if total > self.pool_tokens:
            raise ValueError(
                f"the prompt and max_tokens are {total} tokens, but the device KV pool holds {self.pool_tokens}; "
                f"raise device_kv_bytes or lower max_tokens"
            )
        if sampling.stop and not self.has_tokenizer:
            raise ValueError("stop strings need a tokenizer: give Engine(..., tokenizer=...) or use stop_token_ids")

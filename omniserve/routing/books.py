"""EngineBooks: what the front of several engines knows of one of them.

The engine's own words (``EngineLoad``) come every few steps; what was sent since is added to them here.
"""

from __future__ import annotations

import bisect
import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from omniserve.core.load import PROMPT_SIZES, EngineLoad
from omniserve.core.request import ServiceClass
from omniserve.routing.prefixes import SentPrefixes, block_hashes

# A best-effort rate is measured over so many seconds at least, and weighs so much in its running mean. Over less time
# it tells prompts, of which a step has many tokens, from decodes, not a fast engine from a slow one.
_RATE_OVER_S, _RATE_WEIGHT = 5.0, 0.3


@dataclass(frozen=True, kw_only=True)
class Call:
    """An API call that is to be routed: some requests with one prompt, or several prompts that go together."""

    kind: ServiceClass
    service_class: str
    prompts: Sequence[Sequence[int]]
    """The token ids of each prompt; at least one."""
    num_samples: int = 1
    """Outputs of each prompt."""
    max_tokens: int = 1
    """Most tokens of each output."""
    ttft_s: float | None = None
    """The objective of its time to first token, in seconds; None: it has none."""
    salt: str = ""
    """Keeps prompts apart whose caches are."""

    @functools.cached_property
    def num_prompt_tokens(self) -> int:
        """Tokens of all its prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_requests(self) -> int:
        """Requests that it consists of."""
        return self.num_samples * len(self.prompts)

    @functools.cached_property
    def hashes(self) -> Sequence[int]:
        """The blocks of its first prompt."""
        return block_hashes(self.prompts[0], self.salt)


@dataclass(slots=True)
class Sent:
    """A call that an engine has, as its books have it."""

    kind: ServiceClass
    num_tokens: int
    """Tokens of its prompts that it is likely to compute."""
    num_output_tokens: int
    num_requests: int


class EngineBooks:
    """What the front knows of an engine.

    Args:
        number: The engine's number, from 0.
        cache_tokens: Tokens that its prefix cache holds, if that is known.
    """

    def __init__(self, number: int, cache_tokens: int = 0) -> None:
        self.number = number
        self.load: EngineLoad | None = None
        """The engine's last word; None before the first."""
        self.num_requests = {kind: 0 for kind in ServiceClass}
        """Requests that it has, by kind."""
        self.num_tokens = {kind: 0 for kind in ServiceClass}
        """Tokens of the prompts, and most output tokens, of these requests."""
        self.num_routed = 0
        """Calls that were sent to it since the front began."""
        self._prefixes = SentPrefixes(cache_tokens)
        self._num_sent = 0  # requests since its start
        self._unseen: deque[tuple[int, int]] = deque()  # of LS: number of the last request, tokens
        self._num_unseen_tokens = 0
        self._rate: float | None = None
        self._rate_since: tuple[float, int] | None = None

    def num_cached(self, call: Call) -> int:
        """Return how many tokens of a call's prompt it is likely to have."""
        return self._prefixes.num_cached(call.hashes)

    def expect(self, call: Call) -> Sent:
        """Note a call that is to be sent; ``send`` and ``end`` take what this returns."""
        computed = max(call.num_prompt_tokens - self.num_cached(call), 1)
        sent = Sent(call.kind, computed, call.max_tokens * call.num_requests, call.num_requests)
        self.num_requests[call.kind] += sent.num_requests
        self.num_tokens[call.kind] += sent.num_tokens + sent.num_output_tokens
        return sent

    def send(self, call: Call, sent: Sent) -> None:
        """Note that the requests of a call were sent."""
        self._prefixes.add(call.hashes)
        self.num_routed += 1
        self._num_sent += sent.num_requests
        if call.kind is ServiceClass.LS:
            self._unseen.append((self._num_sent, sent.num_tokens))
            self._num_unseen_tokens += sent.num_tokens

    def end(self, sent: Sent) -> None:
        """Note that a call has ended, was refused, or is not sent after all."""
        self.num_requests[sent.kind] -= sent.num_requests
        self.num_tokens[sent.kind] -= sent.num_tokens + sent.num_output_tokens

    def hear(self, load: EngineLoad, now_s: float) -> None:
        """Take an engine's word on its load."""
        self.load = load
        while self._unseen and self._unseen[0][0] <= load.num_taken:
            self._num_unseen_tokens -= self._unseen.popleft()[1]
        if self._rate_since is None:
            self._rate_since = now_s, load.be_tokens
            return
        since_s, before = self._rate_since
        if now_s - since_s >= _RATE_OVER_S:
            rate = (load.be_tokens - before) / (now_s - since_s)
            self._rate = rate if self._rate is None else self._rate + _RATE_WEIGHT * (rate - self._rate)
            self._rate_since = now_s, load.be_tokens

    def have_cache(self, num_tokens: int) -> None:
        """Note how many tokens the engine's prefix cache holds."""
        self._prefixes = SentPrefixes(num_tokens)

    def forget_prompts(self) -> None:
        """Note that its cache was cleared."""
        self._prefixes.clear()

    def forget(self) -> None:
        """Note that the engine has died: the next one has nothing of what it had."""
        self.load, self._rate, self._rate_since = None, None, None
        self._prefixes.clear()
        self._unseen.clear()
        self._num_unseen_tokens = self._num_sent = 0

    @property
    def be_rate(self) -> float | None:
        """Best-effort tokens a second of late; None before it is known."""
        return self._rate

    def ttft_s(self, call: Call, num_cached: int) -> float | None:
        """Return the TTFT in seconds that a call would have here, with so many tokens cached; None: none is predicted.

        The engine's forecast for a prompt that is longer by what was sent since: prompts are computed in their order.
        """
        forecast = None if self.load is None else self.load.ttft_s.get(call.service_class)
        if forecast is None:
            return None
        num_tokens = max(call.num_prompt_tokens - num_cached, 1) + self._num_unseen_tokens
        return interpolated(forecast, num_tokens)


def interpolated(forecast: Sequence[float], num_tokens: int) -> float:
    """Return the forecast for a prompt of any size, from those for ``PROMPT_SIZES``; beyond the last, in proportion."""
    i = min(max(bisect.bisect_left(PROMPT_SIZES, num_tokens), 1), len(forecast) - 1)
    low, high = PROMPT_SIZES[i - 1], PROMPT_SIZES[i]
    return forecast[i - 1] + (forecast[i] - forecast[i - 1]) * (num_tokens - low) / (high - low)

"""Loads whose prompts begin alike: system prompts of tenants, turns of chats, few-shot evaluations, batch templates.

Lengths and times come from elsewhere (a trace or a generator); what is drawn here is what stands in front of each
prompt. All of it is drawn from a seed.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.common.client import LoadRequest


@dataclass(frozen=True, kw_only=True)
class PrefixStructure:
    """The prefixes in front of the prompts of one class.

    A *front* is a tenant's system prompt, the examples of an evaluation, the template of a batch. A *chat* begins with
    a front, and each of its turns with all that was said before.
    """

    fronts: int = 0
    """The number of different fronts, each prompt begins with one of them; 0: none."""
    front_tokens: int = 0
    """Length of a front."""
    chats: int = 0
    """The number of open chats, each prompt is the next turn of one of them; 0: there are none."""
    chat_tokens: int = 1024
    """A chat that would be longer with its next turn is over, and another one takes its place."""

    def __post_init__(self) -> None:
        if min(self.fronts, self.front_tokens, self.chats) < 0 or self.chat_tokens < 1:
            raise ValueError(f"numbers of prefixes must not be negative, got {self}")
        if (self.fronts > 0) != (self.front_tokens > 0):
            raise ValueError("give both the number of fronts and their length in tokens, or none of them")

    @property
    def is_plain(self) -> bool:
        """Prompts have nothing in front of them."""
        return not (self.fronts or self.chats)

    def put_before(
        self, requests: Sequence[LoadRequest], rng: random.Random, *, vocab_size: int
    ) -> list[LoadRequest]:  # fmt: skip
        """Return the requests with what stands in front; their own prompts are what is new in each.

        What a chat's earlier turns were answered is drawn, too, as many tokens as they asked for: requests are sent at
        their times, whether or not these turns have been answered.
        """
        if self.is_plain:
            return list(requests)
        fronts = [_tokens(rng, self.front_tokens, vocab_size) for _ in range(self.fronts)] or [[]]
        open_chats: list[_Chat] = []
        longer: list[LoadRequest] = []
        for request in sorted(requests, key=lambda request: request.send_at_s):
            assert not isinstance(request.prompt, str), "what stands in front is token ids"
            if not self.chats:
                longer.append(dataclasses.replace(request, prompt=[*rng.choice(fronts), *request.prompt]))
                continue
            if len(open_chats) < self.chats:
                open_chats.append(_Chat(list(rng.choice(fronts))))
            place = rng.randrange(len(open_chats))
            if len(open_chats[place].tokens) + len(request.prompt) + request.max_tokens > self.chat_tokens:
                open_chats[place] = _Chat(list(rng.choice(fronts)))
            chat = open_chats[place]
            chat.tokens += request.prompt
            longer.append(dataclasses.replace(request, prompt=list(chat.tokens)))
            chat.tokens += _tokens(rng, request.max_tokens, vocab_size)
        return longer


@dataclass
class _Chat:
    tokens: list[int] = field(default_factory=list)


def _tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(1, vocab_size) for _ in range(count)]

"""Placement: which prompts go to a prefill engine. Subclass it, write ``choose``, and register it.

Paper: omniserve 5.4.4 (prefill and decode on instances of their own).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from omniserve.core.registry import Registry
from omniserve.core.request import ServiceClass


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt that waits."""

    kind: ServiceClass
    num_tokens: int
    """Tokens that a prefill engine would compute; the last few of the prompt are computed here."""
    local_s: float | None
    """Predicted seconds to the first token if the prompt is computed here; None: nothing is predicted."""
    left_s: float | None = None
    """Seconds until the first token is due, some headroom left; None: the request has no such objective."""
    rest_s: float = 0.0
    """Recent gap in seconds between an engine's predicted finish and the first token: the KV is copied to the device,
    and the last tokens are computed in a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillEngine:
    """A prefill engine that can be asked."""

    number: int
    ls_tokens: int
    """Tokens of latency-sensitive prompts that the engine has been given and has not computed."""
    tokens: int
    """Tokens of all prompts that the engine has been given and has not computed."""
    token_s: float | None
    """Recent seconds of the engine for a token, hand-over included; None: it has computed nothing yet."""

    def seconds(self, num_tokens: int) -> float:
        """Return when it is predicted to be done with a latency-sensitive prompt; 0 if nothing is known of it yet."""
        return (self.ls_tokens + num_tokens) * (self.token_s or 0.0)


class Placement:
    """Chooses an engine for each prompt.

    Args:
        max_step_tokens: Tokens of the largest step of an engine.
    """

    waits_for_room: ClassVar[bool] = False
    """A prompt for whose KV the host has no room waits until it has; False: it is computed here."""

    def __init__(self, max_step_tokens: int) -> None:
        self.max_step_tokens = max_step_tokens

    def choose(self, prompt: Prompt, engines: Sequence[PrefillEngine]) -> PrefillEngine | None:
        """Return the engine that is to compute a prompt, of those that can be asked; None: it is computed here.

        A best-effort prompt is asked about again in each step as long as it waits, a latency-sensitive one once.
        """
        raise NotImplementedError


PLACEMENTS: Registry[type[Placement]] = Registry("placement", package="omniserve.sched")


@PLACEMENTS.register("always")
class Always(Placement):
    """Sends prompts to the engine that has least to do.

    A few best-effort ones are asked for in a step, and as many as the host has room for: the next ones may be admitted
    and computed here.
    """

    def choose(self, prompt: Prompt, engines: Sequence[PrefillEngine]) -> PrefillEngine | None:
        return min(engines, key=lambda engine: engine.tokens, default=None)


@PLACEMENTS.register("disaggregated")
class Disaggregated(Always):
    """Sends all prompts to the engine that has least to do; none is computed here while an engine can be asked.

    So decodes and prompts are on machines of their own, as in DistServe. If the host is full of KV that requests wait
    for, or that waits for the device, the next prompts wait for room: the decodes hold up the prefill engines.

    Paper: conserve 6.1 (DistServe-P), 6.2.
    """

    waits_for_room = True


@PLACEMENTS.register("sooner")
class Sooner(Placement):
    """Sends a latency-sensitive prompt to where its first token is predicted sooner; best-effort ones fill the engines.

    An engine computes latency-sensitive prompts first, in their order. Of best-effort ones it has two steps of work
    ahead at most: the others are computed by whichever engine has time first, this one included.
    """

    def choose(self, prompt: Prompt, engines: Sequence[PrefillEngine]) -> PrefillEngine | None:
        if prompt.kind is ServiceClass.BE:
            free = [engine for engine in engines if engine.tokens < 2 * self.max_step_tokens]
            return min(free, key=lambda engine: engine.tokens, default=None)
        best = min(engines, key=lambda each: (each.seconds(prompt.num_tokens), each.tokens), default=None)
        if best is None:
            return None
        there_s = best.seconds(prompt.num_tokens) + (prompt.rest_s if best.token_s is not None else 0.0)
        return best if self.accepts(prompt, there_s) else None

    def accepts(self, prompt: Prompt, there_s: float) -> bool:
        """Tell whether a latency-sensitive prompt goes to an engine if its first token comes in ``there_s`` seconds."""
        return prompt.local_s is None or there_s < prompt.local_s


@PLACEMENTS.register("in-time")
class InTime(Sooner):
    """Sends a latency-sensitive prompt away if its first token is predicted in time there, or sooner than here.

    So steps here have more time for decodes and best-effort work, up to what objectives allow and no further.
    """

    def accepts(self, prompt: Prompt, there_s: float) -> bool:
        is_in_time = prompt.left_s is not None and there_s <= prompt.left_s
        return is_in_time or super().accepts(prompt, there_s)

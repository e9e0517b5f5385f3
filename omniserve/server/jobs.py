"""The work of an API call, and the token counts of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from omniserve.core.request import SLO, SamplingParams
from omniserve.server.choice import TextForm


@dataclass(frozen=True, kw_only=True, slots=True)
class Fallback:
    """The best-effort class of a call that admission refuses in its own, and what belongs to that class."""

    service_class: str
    tier: str
    """The ``service_tier`` by which the answer names the class."""
    slo: SLO
    """The class's objectives."""
    interval_s: float
    """As in ``Job``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The work of an API call: every prompt is continued once per sampling."""

    call_id: str
    arrival_s: float
    """Arrival of the call in monotonic seconds."""
    prompts: Sequence[Sequence[int]]
    samplings: Sequence[SamplingParams]
    """Sampling parameters without stop strings, which are looked for here, where the text is."""
    form: TextForm = field(default_factory=TextForm)
    """The form of the outputs' text."""
    service_class: str
    slo: SLO
    """The call's own or its class's default."""
    brings_slo: bool = True
    """The objectives are the call's own, so admission does not scale them."""
    deadline_s: float | None = None
    """The deadline for each whole output, as in ``Request``."""
    max_queue_s: float | None = None
    """The longest time in the queue, as in ``Request``."""
    fallback: Fallback | None = None
    """The way to serve the call if admission refuses it; None: it is refused."""
    echoes: Sequence[str] | None = None
    """Text of each prompt, which its answers begin with; None: they do not."""
    prediction: Sequence[int] = ()
    """Token ids of what each output will be, about."""
    cache_salt: str = ""
    """The salt of the prompts' prefixes, as in ``Request``."""
    session: str = ""
    """The session that the call belongs to, as in ``Request``."""
    session_ttl_s: float | None = None
    """The time for which it may be unused, as in ``Request``."""
    tenant: str = ""
    """Whose call it is, as in ``Request``."""
    weight: float = 1.0
    """The tenant's weight, as in ``Request``."""
    lora: str | None = None
    """The adapter that continues the prompts, as in ``Request``."""
    speculation: bool | None = None
    """The call's word on speculative decoding, as in ``Request``."""
    num_kept: int | None = None
    """Number of outputs of each prompt that are in the answer, the likeliest ones; None: all."""
    max_unread_tokens: int | None = None
    """Per choice, on average: a stream whose reader leaves more than these unread ends; None: no limit."""
    interval_s: float = 0.0
    """Seconds between two reads, but for the first text and the end, which are read at once."""


@dataclass(slots=True)
class Usage:
    """Token counts of an API call."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache had: of each prompt, for the sample of it that found the most."""
    num_accepted_drafts: int = 0
    """Output tokens that were guessed right."""
    num_rejected_drafts: int = 0
    """Guesses that were computed and are not in the output."""
    num_reasoning_tokens: int = 0
    """Output tokens that are reasoning."""

    def as_dict(self) -> dict[str, Any]:
        """Return OpenAI's usage object, with details of reasoning and of drafts if there were any."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
        details = {}
        if self.num_reasoning_tokens:
            details["reasoning_tokens"] = self.num_reasoning_tokens
        if self.num_accepted_drafts or self.num_rejected_drafts:
            details["accepted_prediction_tokens"] = self.num_accepted_drafts
            details["rejected_prediction_tokens"] = self.num_rejected_drafts
        return usage | {"completion_tokens_details": details} if details else usage

"""Requests, their parameters, their outputs, and the limits that hold for all of them. Plain data, no torch."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


class ServiceClass(enum.StrEnum):
    """Latency-sensitive or best-effort: the two ways to treat a request, and the names of the two default classes."""

    LS = "LS"
    BE = "BE"


INPUT_COST, OUTPUT_COST = 1.0, 2.0
"""Cost of a prompt token and of an output token where tenants share a class, as in VTC's experiments."""


class FinishReason(enum.StrEnum):
    """The reason why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"
    """The request waited for longer than its ``max_queue_s``."""


class Pooling(enum.StrEnum):
    """The way to one vector from the hidden states of a prompt's tokens, which are those behind the last norm."""

    LAST = "last"
    """The last token's."""
    MEAN = "mean"
    """Their mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SLO:
    """Latency objectives of one request, in seconds; None means no objective."""

    ttft_s: float | None = None
    """Time to first token: arrival to first output token."""
    tpot_s: float | None = None
    """Time per output token after the first, averaged over the request."""

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            _check_seconds(f"SLO.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassSpec:
    """A class of requests. Paper: omniserve 6 (multiple priority levels).

    Raises:
        ValueError: The name is empty, or a field is of the wrong type.
    """

    name: str
    """The name in requests and in ``service_tier``."""
    kind: str
    """The kind of its requests, a ``ServiceClass``; a string is converted."""
    slo: SLO = field(default_factory=SLO)
    """Objectives of its requests that bring none of their own."""
    speculation: bool = False
    """Requests of the class that do not say otherwise are decoded speculatively."""
    thinking_token_budget: int | None = None
    """Most tokens of reasoning in answers to its chats that do not say otherwise; None: any number."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a class's name must be a non-empty string, got {self.name!r}")
        budget = self.thinking_token_budget
        if budget is not None and not (type(budget) is int and 0 <= budget < 2**31):
            raise ValueError(f"the thinking budget of class {self.name!r} must be 0 to {2**31 - 1}, got {budget!r}")
        try:
            object.__setattr__(self, "kind", ServiceClass(self.kind))
        except ValueError:
            raise ValueError(f"the kind of class {self.name!r} must be 'LS' or 'BE', got {self.kind!r}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Parameters of sampling and of the end. The defaults are greedy, like ``generate()`` of Hugging Face."""

    max_tokens: int = 16
    """Largest number of output tokens; 0 only reads the prompt, for ``prompt_logprobs`` or ``pooling``."""
    temperature: float = 0.0
    """0 is greedy, as is less than 1e-5; otherwise logits are divided by it. Of equal tokens greedy takes the one with
    the lowest id."""
    top_k: int = 0
    """Keep the k likeliest tokens, of equal ones those with the lowest ids; 0 keeps all, 1 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches top_p, in (0, 1], of equal ones those with
    the lowest ids; as it goes to 0, that is greedy."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the likeliest, in [0, 1]; 1 is greedy."""
    seed: int | None = None
    """Seed of this request: the same one gives the same tokens, whatever else runs. None draws a fresh one."""
    repetition_penalty: float = 1.0
    """> 1 makes tokens of prompt and output less likely (multiplicative, as in Hugging Face), in [0.01, 100]."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token of the output, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output, in [-2, 2]."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; they are not part of the text. Needs a tokenizer."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, besides the model's end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    min_tokens: int = 0
    """Number of tokens before which no stop string counts, and no token that ends the output is taken unless a grammar
    leaves nothing else."""
    logprobs: int | None = None
    """Return the log-probability of each output token and of this many likeliest ones (0 to 20); None for none."""
    prompt_logprobs: int | None = None
    """Return the same for each token of the prompt but the first, which nothing predicts."""
    pooling: str | None = None
    """Return an embedding of the prompt and no tokens, a ``Pooling``; needs ``max_tokens=0``. None: no embedding."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit, in [-100, 100]); a mapping is taken, too. A token with -100 never comes.
    While one with 100 may come, none without does."""
    grammar: str | None = None
    """Grammar of the output, in llguidance's dialect of Lark; see ``omniserve.json_grammar``. Needs a tokenizer."""

    def __post_init__(self) -> None:
        # Sequences are accepted for convenience; the stored value is hashable.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        bias = self.logit_bias
        object.__setattr__(self, "logit_bias", tuple(bias.items() if isinstance(bias, Mapping) else bias))
        _check_int("max_tokens", self.max_tokens, 0, None)
        _check_int("min_tokens", self.min_tokens, 0, None)
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be <= max_tokens, which is {self.max_tokens}, got {self.min_tokens}")
        _check_int("top_k", self.top_k, 0, None)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, 20)
        if self.pooling is not None:
            try:
                object.__setattr__(self, "pooling", Pooling(self.pooling))
            except ValueError:
                raise ValueError(f"pooling must be 'last', 'mean' or None, got {self.pooling!r}") from None
            if self.max_tokens or self.prompt_logprobs is not None:
                raise ValueError("pooling gives an embedding alone: it needs max_tokens=0 and no prompt_logprobs")
        elif self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError("max_tokens must be >= 1, got 0; it may be 0 only with prompt_logprobs or pooling")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ValueError(f"stop must hold non-empty strings, got {self.stop!r}")
        if self.grammar is not None and (not isinstance(self.grammar, str) or not self.grammar):
            raise ValueError(f"grammar must be a non-empty string or None, got {self.grammar!r}")
        if self.grammar is not None and self.ignore_eos:
            raise ValueError("grammar and ignore_eos contradict each other: where a grammar ends, the output must end")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, None)
        for token_id, added in self.logit_bias:
            _check_int("logit_bias's token id", token_id, 0, None)
            _check_float("logit_bias", added, -100.0, 100.0)


_LONGEST_TTL_S = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt to be continued.

    Raises:
        ValueError: The prompt is empty, or it or the prediction holds something else than non-negative ints.
    """

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    service_class: str = ServiceClass.LS
    """The name of one of the engine's classes; ``LS`` and ``BE`` are there by default."""
    slo: SLO | None = None
    """The objectives; None takes those of the class from the engine's config."""
    deadline_s: float | None = None
    """Seconds from the arrival within which the whole output is wanted; None: there is no such wish."""
    max_queue_s: float | None = None
    """Seconds from the arrival after which a request that no step has had ends as TIMEOUT; None: it waits on."""
    request_id: str | None = None
    """Unique among unfinished requests; None lets the engine choose."""
    cache_salt: str = ""
    """The prefix cache keeps requests of different salts apart: none can find out, by its times, what others ask."""
    session: str = ""
    """Name of a session, such as a chat; empty: none. Of a session the prefix cache keeps what its newest request
    begins with, and forgets first what only older ones did."""
    session_ttl_s: float | None = None
    """Seconds after which the session ends if no other request has its name; None: as the engine's config says."""
    speculation: bool | None = None
    """Guess the next tokens from the text, and check several in one step; the output is the same. None: as the class
    has it, but yes if there is a prediction."""
    predicted_token_ids: Sequence[int] = ()
    """Rough prediction of the output: the next tokens are guessed from it, too."""
    lora: str | None = None
    """Name of the LoRA adapter that computes it (``Engine.load_lora``); None: the model alone."""
    tenant: str = ""
    """Whose request it is: the tenants of a class share it by weight (``sched/fairness.py``)."""
    weight: float = 1.0
    """The weight of the tenant, from 0.001 to 1000; that of its newest request holds."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_token_ids", tuple(self.prompt_token_ids))
        object.__setattr__(self, "predicted_token_ids", tuple(self.predicted_token_ids))
        if self.lora is not None and (not isinstance(self.lora, str) or not self.lora):
            raise ValueError(f"lora must be the name of an adapter or None, got {self.lora!r}")
        for name in ("deadline_s", "max_queue_s"):
            _check_seconds(f"Request.{name}", getattr(self, name))
        if not isinstance(self.tenant, str):
            raise ValueError(f"tenant must be a string, got {self.tenant!r}")
        _check_float("weight", self.weight, 0.001, 1000.0)
        if not isinstance(self.cache_salt, str):
            raise ValueError(f"cache_salt must be a string, got {self.cache_salt!r}")
        if not isinstance(self.session, str):
            raise ValueError(f"session must be a string, got {self.session!r}")
        if self.session_ttl_s is not None:
            _check_float("session_ttl_s", self.session_ttl_s, 0.0, _LONGEST_TTL_S, open_low=True)
        if not self.prompt_token_ids:
            raise ValueError("the prompt is empty: prompt_token_ids needs at least one token id")
        for name in ("prompt_token_ids", "predicted_token_ids"):
            token_ids = getattr(self, name)
            if set(map(type, token_ids)) <= {int} and min(token_ids, default=0) >= 0:
                continue  # prompts are long, and this takes a tenth of the time of the loop
            for token_id in token_ids:
                if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                    raise ValueError(f"{name} must be non-negative ints, got {token_id!r}")
        if not isinstance(self.service_class, str) or not self.service_class:
            raise ValueError(f"service_class must be the name of a class, such as 'LS', got {self.service_class!r}")

    @property
    def num_rows_to_score(self) -> int:
        """Rows of the prompt: the log-probabilities of the tokens that follow them are asked for."""
        return 0 if self.sampling.prompt_logprobs is None else len(self.prompt_token_ids) - 1


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that has come and was not added to the engine yet."""

    request: Request
    arrival_s: float | None = None
    """Time of its arrival, on the engine's clock; None: now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """Log-probability (natural) of one token under the unmodified model distribution."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest (token id, log-probability) pairs, best first; as many as were asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTimes:
    """Times at which things happened to a request, seconds on the engine's monotonic clock; None: not yet."""

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    predicted_ttft_s: float | None = None
    """The TTFT that admission control predicted at arrival; None without prediction."""
    host_since_s: float | None = None
    """Time since which the request has been on the host tier, or on its way there or back; None: it is not."""


Stay = tuple[float, float]
"""Times at which a request left the device, and was back or had given way; seconds on the engine's monotonic clock."""
_MAX_STAYS = 64


def add_stay(stays: list[Stay], stay: Stay) -> None:
    """Append a request's next stay on the host tier.

    Of more than 64, the two with the least time between them become one.
    """
    stays.append(stay)
    if len(stays) > _MAX_STAYS:
        first = min(range(len(stays) - 1), key=lambda i: stays[i + 1][0] - stays[i][1])
        stays[first : first + 2] = [(stays[first][0], stays[first + 1][1])]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """The output of one step for one request."""

    request_id: str
    service_class: str
    new_token_ids: tuple[int, ...]
    new_logprobs: tuple[TokenLogprob, ...] = ()
    """A log-probability for each of ``new_token_ids``; empty if none were asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities of the prompt's tokens from the second on, once, in the request's first output; empty if not
    asked for."""
    embedding: tuple[float, ...] = ()
    """The pooled hidden states, not normalised, in the last output of a request with ``SamplingParams.pooling``."""
    finish_reason: FinishReason | None = None
    """The reason of the end; None while the request goes on."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the request."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_host_tokens: int = 0
    """Number of output tokens so far with attention computed on the host tier."""
    num_cached_tokens: int = 0
    """Number of prompt tokens whose KV the prefix cache had when the request began."""
    times: RequestTimes | None = None
    host_stays: tuple[Stay, ...] = ()
    """Stays on the host tier that ended since the last output."""
    num_accepted_drafts: int = 0
    """Number of ``new_token_ids``, from the first on, that were guessed right; see ``Request.speculation``."""
    num_rejected_drafts: int = 0
    """Guesses that the step computed for the request and that are not among ``new_token_ids``."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def without_last(self, count: int) -> RequestOutput:
        """Return it without its last tokens: they came in the same step as the end of the output, but behind it."""
        if count == 0:
            return self
        num_left = len(self.new_token_ids) - count
        num_rejected = max(0, self.num_accepted_drafts - num_left)
        return dataclasses.replace(
            self,
            new_token_ids=self.new_token_ids[:num_left],
            new_logprobs=self.new_logprobs[:num_left],
            num_output_tokens=self.num_output_tokens - count,
            num_accepted_drafts=self.num_accepted_drafts - num_rejected,
            num_rejected_drafts=self.num_rejected_drafts + num_rejected,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A finished request, as ``Engine.generate`` returns it."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str | None
    """The text; None if the engine has no tokenizer."""
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    """Log-probabilities of the prompt's tokens from the second on; empty if not asked for."""
    embedding: tuple[float, ...]
    """The pooled hidden states, not normalised; empty without ``SamplingParams.pooling``."""
    num_prompt_tokens: int
    num_host_tokens: int
    times: RequestTimes
    num_accepted_drafts: int = 0
    """Output tokens that were guessed right; see ``Request.speculation``."""
    num_rejected_drafts: int = 0
    """Guesses that were computed and are not in the output."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV the prefix cache had when the request began."""


def _check_int(name: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an int, got {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be >= {low}{f' and <= {high}' if high is not None else ''}, got {value}")


def _check_seconds(name: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number of seconds or None, got {value!r}")


def _check_float(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    if value > high or value < low or (open_low and value == low):
        raise ValueError(f"{name} must be in {'(' if open_low else '['}{low}, {high}], got {value}")


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
        """Refuse a request that can never be served.

        Raises:
            ValueError: A token is outside the vocabulary, the prompt plus output is longer than the model or the KV
                pool allows, or there are stop strings and no tokenizer.
        """
        num_prompt, sampling = len(request.prompt_token_ids), request.sampling
        biased = [token_id for token_id, _ in sampling.logit_bias]
        given = (
            ("prompt", request.prompt_token_ids),
            ("predicted", request.predicted_token_ids),
            ("logit_bias's", biased),
        )
        for name, token_ids in given:
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

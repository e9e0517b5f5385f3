"""The prompts of a request as token ids, and what its output is to be: its grammar, its form, its sampling."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from omniserve.core.request import ClassSpec, RequestLimits, SamplingParams
from omniserve.server.choice import TextForm
from omniserve.server.completions.constraints import GrammarWriter
from omniserve.server.completions.messages import text_of
from omniserve.server.completions.protocol import ChatRequest, CompletionRequest, GenerationRequest
from omniserve.server.dialects.base import Dialect, Opening
from omniserve.server.dialects.tagged import TaggedDialect
from omniserve.server.errors import ApiError, ContextExceeded
from omniserve.server.generation_defaults import GenerationDefaults
from omniserve.server.tokenizing.text import TextCodec, TooManyTokens

# As many tokens as /v1/completions of OpenAI gives when the request does not say.
_DEFAULT_COMPLETION_TOKENS = 16
# Prompts that are looked at before others have their turn.
_PROMPTS_AT_ONCE = 64
# Of completions, which are text and no more.
_NO_DIALECT = TaggedDialect(None, None)


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat as a prompt."""

    text: str
    add_special_tokens: bool
    """The tokenizer adds some."""
    dialect: Dialect
    """The dialect of the answer."""
    opening: Opening
    """The begin of the answer."""


async def num_chat_tokens(codec: TextCodec, request: ChatRequest, *, most: int) -> int:
    """Return the number of tokens of a chat's prompt.

    Raises:
        ApiError: As ``TextCodec.write_chat``.
        TooManyTokens: There are more than ``most``, by far perhaps.
    """
    tokens = await codec.encode_chat(
        [message.for_template() for message in request.messages],
        tools=[tool.for_template() for tool in request.offered_tools],
        options=request.template_options,
        add_special_tokens=request.add_special_tokens,
        most=most,
    )
    return len(tokens)


class PromptWriter:
    """Writes the prompts of requests for one model.

    Args:
        codec: Its tokenizer and chat templates.
        limits: What the engine takes.
        defaults: What holds for requests that do not say.
    """

    def __init__(self, codec: TextCodec, limits: RequestLimits, defaults: GenerationDefaults) -> None:
        self._codec, self._limits, self._defaults = codec, limits, defaults
        self._grammars = GrammarWriter(codec)

    def check_token_ids(self, token_ids: Collection[int], complaint: str, *, param: str) -> None:
        """Raise ApiError if the model does not know one of the ids; ``{}`` in the complaint stands for that id."""
        if (unknown := self._limits.unknown_token(token_ids)) is not None:
            known = f"this model's ids are 0 to {self._limits.vocab_size - 1}"
            raise ApiError(f"{complaint.format(unknown)} {known}", param=param)

    async def token_ids(
        self, request: GenerationRequest, chat: Chat | None = None, *, is_urgent: bool = False
    ) -> list[list[int]]:
        """Return the token ids of each prompt; those of urgent requests go before others.

        Raises:
            ApiError: A prompt is empty or too long, or has ids that the model does not know.
        """
        try:
            prompts = await self._encoded(request, chat, is_urgent)
        except TooManyTokens as error:
            raise self._too_long(request, error.num_tokens, is_exact=error.is_exact) from None
        _check_none_empty(request, prompts)
        for i, prompt in enumerate(prompts):
            if i % _PROMPTS_AT_ONCE == _PROMPTS_AT_ONCE - 1:
                await asyncio.sleep(0)  # millions of ids must not hold up others
            self.max_tokens(request, len(prompt))  # first: it takes less time than to look at all ids
            self.check_token_ids(prompt, "the prompt has the token id {}, but", param=request.prompt_field)
        return prompts

    async def chat(self, request: ChatRequest, is_urgent: bool) -> Chat:
        """Write a chat's prompt.

        Raises:
            ApiError: As ``TextCodec.write_chat``, or the thinking is to be bounded of a model that marks none.
        """
        tools = [tool.for_template() for tool in request.offered_tools]
        text = await self._codec.write_chat(
            [message.for_template() for message in request.messages],
            tools=tools,
            options=request.template_options,
            is_urgent=is_urgent,
        )
        dialect = self._codec.dialect(with_tools=bool(tools))
        if request.thinking_budget is not None and not dialect.thinks:
            raise ApiError(
                "it is not known here how this model marks its reasoning, so it cannot be bounded; remove "
                "thinking_token_budget, or have the server started with --reasoning-parser",
                param="thinking_token_budget",
                code="unsupported_parameter",
            )
        continued = text_of(request.messages[-1].content) if request.continue_final_message else None
        opening = dataclasses.replace(dialect.opening(text, continued), budget=request.thinking_budget)
        return Chat(text, request.add_special_tokens, dialect, opening)

    async def _encoded(self, request: GenerationRequest, chat: Chat | None, is_urgent: bool) -> list[list[int]]:
        most = self._limits.max_tokens
        if chat is not None:
            prompt = await self._codec.encode(
                chat.text, add_special_tokens=chat.add_special_tokens, is_urgent=is_urgent, most=most
            )
            return [prompt]
        assert isinstance(request, CompletionRequest)
        _check_none_empty(request, request.prompt)
        if not isinstance(request.prompt[0], str):
            return request.prompt
        return await self._codec.encode_all(
            request.prompt, add_special_tokens=request.add_special_tokens, is_urgent=is_urgent, most=most
        )

    async def prediction(self, text: str, is_urgent: bool) -> list[int]:
        """Return the token ids of what an output will be, about.

        Raises:
            ApiError: They are more than an output may have.
        """
        most = self._limits.max_tokens
        try:
            return await self._codec.encode(text, add_special_tokens=False, is_urgent=is_urgent, most=most)
        except TooManyTokens as error:
            number = error.num_tokens if error.is_exact else f"at least {error.num_tokens}"
            raise ApiError(
                f"the prediction has {number} tokens, but no output has more than {most}; shorten it",
                param="prediction",
            ) from None

    async def echoes(self, request: GenerationRequest, prompts: Sequence[list[int]], is_urgent: bool) -> list[str]:
        """Return the prompts as answers repeat them: what was sent, and the text of what was sent as token ids."""
        assert isinstance(request, CompletionRequest)
        return [
            sent if isinstance(sent, str) else await self._codec.decode(ids, is_urgent=is_urgent)
            for sent, ids in zip(request.prompt, prompts, strict=True)
        ]

    async def grammar(self, request: GenerationRequest, chat: Chat | None) -> str | None:
        """Return the grammar that the output keeps; None: it may be anything.

        Raises:
            ApiError: As ``GrammarWriter.grammar``.
        """
        constraint = request.constraint
        if constraint is None:
            return None
        if chat is None:
            return await self._grammars.grammar(constraint, _NO_DIALECT, Opening())
        return await self._grammars.grammar(constraint, chat.dialect, chat.opening)

    def form(self, request: GenerationRequest, chat: Chat | None, more_stops: Sequence[str]) -> TextForm:
        """Return the form of the outputs' text; ``more_stops`` end it as the request's own stop strings do."""
        form = TextForm(
            stop=[*request.stop, *more_stops],
            at_once=not request.stream,
            include_stop=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            with_token_ids=request.return_token_ids,
        )
        if chat is None or not isinstance(request, ChatRequest) or not (chat.dialect.thinks or request.offered_tools):
            return form
        tools = {tool.function.name: tool.arguments_schema for tool in request.offered_tools}
        several = request.parallel_tool_calls
        return dataclasses.replace(
            form,
            parser=functools.partial(
                chat.dialect.parser, tools, opening=chat.opening, several=several, streams=request.stream
            ),
            shown=frozenset(self._codec.special_tokens(chat.dialect).tags.values()),
            with_reasoning=request.include_reasoning,
            several_calls=several,
        )

    def max_tokens(self, request: GenerationRequest, num_prompt: int) -> int:
        """Return the most tokens of the output to a prompt of ``num_prompt`` tokens.

        Raises:
            ApiError: There is no room for what is asked for.
        """
        limit = self._limits.max_tokens
        room, wanted = limit - num_prompt, request.output_limit
        if room >= 1 and wanted is None:
            room = room if self._defaults.max_tokens is None else min(room, self._defaults.max_tokens)
            return room if isinstance(request, ChatRequest) else min(room, _DEFAULT_COMPLETION_TOKENS)
        if wanted is None or room < min(wanted, 1):
            raise self._too_long(request, num_prompt)
        if wanted > room and request.may_end_with_context:
            return room
        if wanted > room:
            raise self._context_exceeded(
                request,
                num_prompt,
                f"the prompt has {num_prompt} tokens and max_tokens asks for {wanted}; shorten the prompt or set "
                f"max_tokens to at most {room}",
            )
        return wanted

    def _too_long(self, request: GenerationRequest, num_prompt: int, *, is_exact: bool = True) -> ApiError:
        number = num_prompt if is_exact else f"at least {num_prompt}"
        return self._context_exceeded(request, num_prompt, f"the prompt has {number} tokens; shorten it")

    def _context_exceeded(self, request: GenerationRequest, num_prompt: int, problem: str) -> ApiError:
        limits = self._limits
        is_context = limits.max_tokens == limits.max_model_len
        bound = "" if is_context else " here (the server's KV pool, --device-kv-gib, holds no more)"
        # OpenAI's words come first: some clients know the error by them, and not by its code.
        message = (
            f"this model's maximum context length is {limits.max_tokens} tokens{bound}, output included; {problem}"
        )
        return ContextExceeded(message, num_tokens=num_prompt, max_tokens=limits.max_tokens, param=request.prompt_field)


def _check_none_empty(request: GenerationRequest, prompts: Sequence[str | list[int]]) -> None:
    if not all(prompts):
        raise ApiError("the prompt is empty; give it at least one token", param=request.prompt_field)


def samplings_of(
    request: GenerationRequest, max_tokens: int, grammar: str | None, more_stop_token_ids: Sequence[int]
) -> Sequence[SamplingParams]:
    """Return the sampling of each of the n choices; they differ in their seeds."""
    return [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=request.temperature,
            top_k=max(request.top_k, 0),
            top_p=request.top_p,
            min_p=request.min_p,
            seed=None if request.seed is None else _int64(request.seed + i),
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            stop_token_ids=(*request.stop_token_ids, *more_stop_token_ids),
            ignore_eos=request.ignore_eos,
            min_tokens=request.min_tokens,
            logit_bias=tuple(request.logit_bias),
            grammar=grammar,
            # What is best is told by log-probabilities.
            logprobs=0 if request.num_logprobs is None and request.num_samples > request.n else request.num_logprobs,
            prompt_logprobs=_num_prompt_logprobs(request),
        )
        for i in range(request.num_samples)
    ]


def _num_prompt_logprobs(request: GenerationRequest) -> int | None:
    # A request for no output is one for its prompt: the engine has nothing else to do for it.
    if not request.echoes or (request.num_logprobs is None and request.output_limit != 0):
        return None
    return request.num_logprobs or 0


def _int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def with_budget(request: GenerationRequest, spec: ClassSpec) -> GenerationRequest:
    """Return a request with the thinking budget of its class, unless it brings its own or never ends its answer."""
    budget = spec.thinking_token_budget
    if budget is None or not isinstance(request, ChatRequest):
        return request
    if request.thinking_token_budget is not None or request.ignore_eos:
        return request
    return request.model_copy(update={"thinking_token_budget": budget})

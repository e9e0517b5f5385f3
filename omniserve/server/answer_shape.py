"""What every endpoint that generates has of its own: how its requests are read and its answers are written."""

from __future__ import annotations

import abc
import asyncio
import functools
from collections.abc import Sequence
from typing import Any

from omniserve.server.choice import Delta
from omniserve.server.completions.protocol import GenerationRequest, parse
from omniserve.server.errors import ApiError
from omniserve.server.fields import ignored_header
from omniserve.server.header_fields import NO_HEADERS, HeaderFields
from omniserve.server.jobs import Usage
from omniserve.server.output_stream import OutputStream
from omniserve.server.service import Service

MAX_INLINE_BODY = 1 << 18
"""Larger bodies may take longer to read than other requests should wait; in bytes."""
# JSON has no infinity, and no client can do anything with one.
_LOWEST_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """Return a log-probability as JSON can have it."""
    return max(logprob, _LOWEST_LOGPROB)


class CallShape(abc.ABC):
    """An endpoint, and the answer of one of its calls.

    Args:
        service: The service that the call is of.
        request: As ``read`` returned it, perhaps in another service tier.
        call_id: The answer's id.
    """

    request_kind: type[Any]
    """The fields of a request, a ``CallRequest``."""
    id_prefix: str
    """The begin of an answer's id."""

    def __init__(self, service: Service, request: Any, call_id: str) -> None:
        self.headers = ignored_header(request)
        """Headers of the answer."""

    @classmethod
    async def read(
        cls, service: Service, body: bytes, *, caller: str | None = None, headers: HeaderFields = NO_HEADERS
    ) -> Any:
        """Return what the body of a request asks for.

        Args:
            service: The service that is asked.
            body: JSON.
            caller: The name of the request's API key.
            headers: What its headers say of fields that the body may leave out.

        Raises:
            ApiError: As ``protocol.parse``.
        """
        defaults = service.defaults.fields if issubclass(cls.request_kind, GenerationRequest) else {}
        read = functools.partial(
            parse, cls.request_kind, body, service.unknown_fields, headers=headers, defaults=defaults
        )
        return read() if len(body) <= MAX_INLINE_BODY else await asyncio.to_thread(read)

    @classmethod
    def check_open(cls, service: Service) -> None:
        """Raise ApiError unless new calls of the endpoint are taken."""
        service.check_open()

    @classmethod
    def check_model(cls, service: Service, name: str | None) -> None:
        """Raise ApiError if there is no such model for the endpoint."""
        service.check_model(name)

    @classmethod
    @abc.abstractmethod
    async def outputs(
        cls, service: Service, request: Any, call_id: str, arrival_s: float, caller: str | None
    ) -> OutputStream:
        """Return a call's outputs, not started; hand them to ``Service.end`` at last.

        Raises:
            ApiError: The request does not fit the model, or too many of its class wait already.
        """

    @abc.abstractmethod
    def use_tier(self, tier: str) -> None:
        """Name another tier than the one that was asked for; called before anything is written."""

    @abc.abstractmethod
    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        """Return the body of an answer that is not streamed; there is one delta per choice."""

    @classmethod
    def error_body(cls, error: ApiError) -> dict[str, Any]:
        """Return the object of an error as the endpoint writes it."""
        return error.body()

    async def written(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        """Return what ``answer`` does; where that takes long, it does not keep others waiting."""
        return self.answer(deltas, usage)


class AnswerShape(CallShape):
    """Writes the answer of one call that generates: ``answer``, or the text of server-sent events.

    A streamed answer is ``first_events``, ``events`` for all that was generated, in order, and at last
    ``last_events`` or ``error_events``.
    """

    request_kind: type[GenerationRequest]
    keep_alive = ": waiting\n\n"
    """The text that a stream sends when it has sent nothing for long: clients skip it."""

    def __init__(self, service: Service, request: GenerationRequest, call_id: str) -> None:
        super().__init__(service, request, call_id)
        self.is_streamed = request.stream

    @classmethod
    async def outputs(
        cls, service: Service, request: GenerationRequest, call_id: str, arrival_s: float, caller: str | None
    ) -> OutputStream:
        return await service.begin(request, call_id, arrival_s, caller=caller)

    def first_events(self, usage: Usage) -> str:
        """Return the events before any output, when the prompts' tokens are known."""
        return ""

    @abc.abstractmethod
    def events(self, deltas: Sequence[Delta]) -> str:
        """Return the events that tell new text."""

    async def settle(self, deltas: Sequence[Delta], usage: Usage) -> None:
        """Keep what is to outlive the call; called when all is generated, before the answer or its last events.

        Args:
            deltas: All that ``events`` was not given.
            usage: Token counts of the call.
        """
        return None

    @abc.abstractmethod
    def last_events(self, usage: Usage) -> str:
        """Return the events after the whole output."""

    @abc.abstractmethod
    def error_events(self, error: ApiError) -> str:
        """Return the events of a stream that ends with an error."""

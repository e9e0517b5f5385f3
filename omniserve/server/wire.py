"""The messages between the API process and the engine process, in MessagePack; of outputs one a step."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct, msgpack

from omniserve.core.errors import RequestRejected
from omniserve.core.request import ClassSpec, Request, RequestLimits, RequestOutput
from omniserve.core.stats import EngineStats


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """The facts about an engine that the API process needs."""

    limits: RequestLimits
    classes: tuple[ClassSpec, ...]
    """Highest priority first."""


class Message(Struct, array_like=True, tag=str.lower):
    """Base of all messages."""


# -- from the API to the engine ----------------------------------------------------------------------------------------


class Add(Message):
    """Take a request."""

    request: Request
    arrival_s: float
    http_request_id: str | None
    """``x-request-id`` of the call that it belongs to."""


class Abort(Message):
    """End a request."""

    request_id: str


class AskStats(Message):
    """Answer with ``Stats``."""


class Close(Message):
    """End the process."""


Command = Add | Abort | AskStats | Close


# -- from the engine to the API ----------------------------------------------------------------------------------------


class Progress(Message):
    """Progress of the engine's start."""

    text: str


class Ready(Message):
    """The engine takes requests from now on."""

    info: EngineInfo


class Failed(Message):
    """The engine could not start, or has to stop."""

    reason: str


class Step(Message):
    """The outputs of a step."""

    accepted: list[tuple[str, float | None]]
    """Ids of requests that were taken before it, and the TTFT that was predicted for each."""
    outputs: list[RequestOutput]


class Load(Message):
    """The fields of ``RequestRejected`` besides its message."""

    retry_after_s: float | None
    predicted_ttft_s: float | None
    required_ttft_s: float | None


class Refused(Message):
    """A request was not taken."""

    request_id: str
    message: str
    load: Load | None
    """None if the request could not be taken at any load."""

    @classmethod
    def of(cls, request_id: str, error: ValueError | RequestRejected) -> Refused:
        """Return the message that tells an error."""
        load = None
        if isinstance(error, RequestRejected):
            load = Load(error.retry_after_s, error.predicted_ttft_s, error.required_ttft_s)
        return cls(request_id, str(error), load)

    @property
    def error(self) -> ValueError | RequestRejected:
        """The error again."""
        if self.load is None:
            return ValueError(self.message)
        return RequestRejected(
            self.message,
            retry_after_s=self.load.retry_after_s,
            predicted_ttft_s=self.load.predicted_ttft_s,
            required_ttft_s=self.load.required_ttft_s,
        )


class Stats(Message):
    """The engine's state."""

    stats: EngineStats


Report = Progress | Ready | Failed | Step | Refused | Stats

encode = msgpack.Encoder(enc_hook=float).encode  # for the float64 of numpy, which predictions are made in
decode_command = msgpack.Decoder[Command](Command).decode
decode_report = msgpack.Decoder[Report](Report).decode

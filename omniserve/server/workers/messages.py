"""The messages between API workers and their owner, in MessagePack, beside those that engines report with."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, msgpack

from omniserve.core.request import Request, ServiceClass
from omniserve.server.engines.messages import Abort, Close, Message, Refused, Step
from omniserve.server.errors import ApiError
from omniserve.server.loras import ServedLoRA
from omniserve.server.telemetry.metrics import Counts


class ErrorFields(Struct, array_like=True):
    """The arguments of an ``ApiError``."""

    message: str
    status: int
    param: str | None
    code: str | None
    retry_after_s: float | None
    details: dict[str, Any]
    is_final: bool

    @classmethod
    def of(cls, error: ApiError) -> ErrorFields:
        """Return those of an error."""
        return cls(
            error.message,
            error.status,
            error.param,
            error.code,
            error.retry_after_s,
            dict(error.details),
            error.is_final,
        )

    @property
    def error(self) -> ApiError:
        """The error again."""
        return ApiError(
            self.message,
            status=self.status,
            param=self.param,
            code=self.code,
            retry_after_s=self.retry_after_s,
            details=self.details,
            is_final=self.is_final,
        )


class Hello(Message):
    """The worker's link is there: messages that were sent to it before are lost. The answer is ``State``."""


class Ready(Message):
    """The worker accepts connections."""


class Failed(Message):
    """The worker could not start."""

    reason: str


class Begin(Message):
    """Place a call, and send its requests to an engine."""

    requests: list[Request]
    arrival_s: float
    http_request_id: str | None
    kind: ServiceClass
    num_samples: int
    ttft_s: float | None
    salt: str


class Admit(Message):
    """Count a call of a key; the answer is ``Admitted`` of the same number."""

    number: int
    key: str


class UseTokens(Message):
    """Count tokens of a key."""

    key: str
    num_tokens: int


class Counted(Message):
    """The answer to ``AskCounts``: what the worker's metrics counted since the last one."""

    counts: Counts


class Drained(Message):
    """No call runs any more, after ``Drain``."""


FromWorker = Hello | Ready | Failed | Begin | Abort | Admit | UseTokens | Counted | Drained


class Denied(Message):
    """A request was not taken, before any engine had it."""

    request_id: str
    error: ErrorFields


class Gone(Message):
    """The engine of a request has stopped."""

    request_id: str
    reason: str


class State(Message):
    """What a worker has to know of the engines; sent when it has changed."""

    failure: str | None
    """The reason why no engine takes requests; None: one does."""
    back_s: float | None
    """When an engine is expected to take requests again, by ``time.monotonic``; None: never."""
    loras: dict[str, ServedLoRA]


class Admitted(Message):
    """The outcome of ``Admit``."""

    number: int
    error: ErrorFields | None
    """The refusal; None: the call may go on."""


class AskCounts(Message):
    """Answer with ``Counted``."""


class Drain(Message):
    """Take no new calls; end those that run after so many seconds; answer with ``Drained``."""

    timeout_s: float


ToWorker = Step | Refused | Denied | Gone | State | Admitted | AskCounts | Drain | Close

encode = msgpack.Encoder(enc_hook=float).encode
decode_from_worker = msgpack.Decoder[FromWorker](FromWorker).decode
decode_to_worker = msgpack.Decoder[ToWorker](ToWorker).decode

"""The messages between the API process and the engine's process, on this machine or another, in MessagePack."""

from __future__ import annotations

from msgspec import Struct, msgpack

from omniserve.core.errors import RequestRejected
from omniserve.core.load import EngineLoad
from omniserve.core.request import SLO, ClassSpec, Request, RequestLimits, RequestOutput
from omniserve.core.stats import EngineStats, FreedKV


class Message(Struct, array_like=True, tag=str.lower):
    """Base of all messages: the API process sends commands, the engine process reports."""


class Add(Message):
    """Take a request."""

    request: Request
    arrival_s: float
    http_request_id: str | None
    """``x-request-id`` of the call that it belongs to."""


class Abort(Message):
    """End a request."""

    request_id: str


class ChangeLoRA(Message):
    """Load a LoRA adapter, or unload it; the answer is ``LoRAChanged`` of the same number."""

    number: int
    name: str
    folder: str | None
    """None: unload it."""


class ClearCache(Message):
    """Free the prefix cache, or that of some sessions; the answers, ``CacheCleared``, come in the same order."""

    sessions: list[str] | None
    """None: all of it."""


class AskStats(Message):
    """Answer with ``Stats``."""


class TellLoad(Message):
    """Tell the load every few steps from now on, with ``Load``."""


class Reset(Message):
    """End the requests of all servers, and answer with ``WasReset``."""


class Close(Message):
    """End the process."""


Command = Add | Abort | ChangeLoRA | ClearCache | AskStats | TellLoad | Reset | Close


class Hello(Message):
    """Ask an engine on another machine to work for this server; it answers with ``EngineInfo`` or ``Failed``."""

    version: str
    """This server's version of OmniServe."""
    server_id: str


class Beat(Message):
    """A sign of life of the server; an engine on another machine answers with ``Pulse``."""

    sent_s: float


class Leave(Message):
    """Let go of an engine on another machine, which goes on without requests."""


class Kill(Message):
    """Kill the process of an engine on another machine, and start it again."""


FrontMessage = Command | Hello | Beat | Leave | Kill
"""What an engine on another machine gets."""


class Progress(Message):
    """Progress of the engine's start."""

    text: str


class EngineInfo(Message):
    """The engine takes requests from now on, within these limits."""

    limits: RequestLimits
    classes: tuple[ClassSpec, ...]
    """Highest priority first."""


class Failed(Message):
    """The engine could not start, or has to stop."""

    reason: str


class Step(Message):
    """The outputs of a step."""

    accepted: list[tuple[str, float | None, SLO | None]]
    """Requests that were taken before it: id, predicted TTFT, and the objectives that hold if they were scaled."""
    outputs: list[RequestOutput | tuple[str, int]]
    """In order; request id and token of those that ``is_bare`` tells of, most of all in number."""


def is_bare(output: RequestOutput) -> bool:
    """Return whether all that an output has to tell is one more token: the request's earlier outputs told the rest."""
    return (
        output.num_output_tokens > 1
        and len(output.new_token_ids) == 1
        and output.finish_reason is None
        and not (output.new_logprobs or output.prompt_logprobs or output.host_stays or output.num_host_tokens)
        and not (output.num_accepted_drafts or output.num_rejected_drafts)
        and (output.times is None or output.times.host_since_s is None)
    )


class Load(Message):
    """The engine's load, after ``TellLoad``."""

    load: EngineLoad


class Refused(Message):
    """A request was not taken."""

    request_id: str
    message: str
    load: dict[str, float | None] | None
    """The attributes of ``RequestRejected``; None if the request could not be taken at any load."""

    @property
    def error(self) -> ValueError | RequestRejected:
        """The engine's error again."""
        return ValueError(self.message) if self.load is None else RequestRejected(self.message, **self.load)


class LoRAChanged(Message):
    """The outcome of ``ChangeLoRA``."""

    number: int
    error: str | None
    """The reason why it was refused; None: it was done."""


class CacheCleared(Message):
    """The outcome of ``ClearCache``."""

    freed: FreedKV


class Stats(Message):
    """The engine's state."""

    stats: EngineStats


class WasReset(Message):
    """The outcome of ``Reset``: what is reported later is of requests that came later."""


class Alive(Message):
    """A sign of life, several a second, whatever the engine does."""


class Pulse(Message):
    """The answer to ``Beat``."""

    sent_s: float
    """That of the ``Beat``."""
    clock_s: float
    """The other machine's ``time.monotonic``."""


OfRequests = Step | Load | Refused | LoRAChanged | CacheCleared | Stats | WasReset
"""Reports that are passed on to a server on another machine."""
Report = OfRequests | Progress | EngineInfo | Failed | Alive | Pulse

encode = msgpack.Encoder(enc_hook=float).encode  # for the float64 of numpy, which predictions are made in
decode_command = msgpack.Decoder[Command](Command).decode
decode_front = msgpack.Decoder[FrontMessage](FrontMessage).decode
decode_report = msgpack.Decoder[Report](Report).decode

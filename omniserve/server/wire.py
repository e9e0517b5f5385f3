"""What goes between the API process and the engine process: msgpack of plain lists, one message a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import msgpack

from omniserve.errors import RequestRejected
from omniserve.request import (
    SLO,
    FinishReason,
    Request,
    RequestOutput,
    RequestTimes,
    SamplingParams,
    ServiceClass,
    TokenLogprob,
)
from omniserve.stats import EngineStats

# API -> engine: ("add", request), ("abort", request_id), ("stats", number), ("close",)
# engine -> API: ("progress", text), ("ready", info), ("failed", text)     while it starts
#                ("step", accepted ids, outputs), ("refused", request_id, error), ("stats", number, stats),
#                ("fatal", text)
Message = tuple[Any, ...]

_SAMPLING_FIELDS = tuple(f.name for f in dataclasses.fields(SamplingParams))
_STATS_FIELDS = tuple(f.name for f in dataclasses.fields(EngineStats))
_CLASS_FIELDS = ("waiting", "running", "output_tokens", "prompt_tokens")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """What the API process has to know of the engine."""

    vocab_size: int
    max_model_len: int
    kv_pool_tokens: int
    """Tokens that the device KV pool holds: no request can be longer."""
    eos_token_ids: tuple[int, ...]
    slos: Mapping[ServiceClass, SLO]


def pack(message: Message) -> bytes:
    """Encode a message of plain data."""
    return msgpack.packb(message)


def unpack(data: bytes) -> Message:
    """Decode a message; sequences come back as tuples."""
    return msgpack.unpackb(data, use_list=False, strict_map_key=False)


def encode_request(request: Request) -> Message:
    """Return a request as plain data."""
    slo = None if request.slo is None else (request.slo.ttft_s, request.slo.tpot_s)
    sampling = tuple(getattr(request.sampling, name) for name in _SAMPLING_FIELDS)
    return request.request_id, request.prompt_token_ids, str(request.service_class), slo, sampling


def decode_request(data: Message) -> Request:
    """Return the request again.

    Raises:
        ValueError: As ``Request`` does.
    """
    request_id, prompt_token_ids, service_class, slo, sampling = data
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        service_class=service_class,
        slo=None if slo is None else SLO(ttft_s=slo[0], tpot_s=slo[1]),
        sampling=SamplingParams(**dict(zip(_SAMPLING_FIELDS, sampling, strict=True))),
    )


def encode_outputs(outputs: Iterable[RequestOutput]) -> list[Message]:
    """Return a step's outputs as plain data."""
    return [
        (
            out.request_id,
            str(out.service_class),
            out.new_token_ids,
            tuple((entry.token_id, entry.logprob, entry.top) for entry in out.new_logprobs),
            None if out.finish_reason is None else str(out.finish_reason),
            out.stop_reason,
            out.num_prompt_tokens,
            out.num_output_tokens,
            out.num_host_tokens,
            None if out.times is None else dataclasses.astuple(out.times),
        )
        for out in outputs
    ]


def decode_output(data: Message) -> RequestOutput:
    """Return one output again."""
    request_id, service_class, token_ids, logprobs, finish_reason, stop_reason, prompt, output, host, times = data
    return RequestOutput(
        request_id=request_id,
        service_class=ServiceClass(service_class),
        new_token_ids=token_ids,
        new_logprobs=tuple(TokenLogprob(token_id=i, logprob=lp, top=top) for i, lp, top in logprobs),
        finish_reason=None if finish_reason is None else FinishReason(finish_reason),
        stop_reason=stop_reason,
        num_prompt_tokens=prompt,
        num_output_tokens=output,
        num_host_tokens=host,
        times=None
        if times is None
        else RequestTimes(arrival_s=times[0], first_scheduled_s=times[1], first_token_s=times[2], finished_s=times[3]),
    )


def encode_error(error: ValueError | RequestRejected) -> Message:
    """Return why a request was refused as plain data."""
    if isinstance(error, RequestRejected):
        return "rejected", str(error), error.retry_after_s
    return "invalid", str(error), None


def decode_error(data: Message) -> ValueError | RequestRejected:
    """Return the error again."""
    kind, message, retry_after_s = data
    return RequestRejected(message, retry_after_s=retry_after_s) if kind == "rejected" else ValueError(message)


def encode_stats(stats: EngineStats) -> dict[str, Any]:
    """Return statistics as plain data."""
    values = {name: getattr(stats, name) for name in _STATS_FIELDS}
    return values | {name: {str(c): n for c, n in values[name].items()} for name in _CLASS_FIELDS}


def decode_stats(data: dict[str, Any]) -> EngineStats:
    """Return the statistics again."""
    return EngineStats(**(data | {name: {ServiceClass(c): n for c, n in data[name].items()} for name in _CLASS_FIELDS}))


def encode_info(info: EngineInfo) -> dict[str, Any]:
    """Return the engine's description as plain data."""
    values = {f.name: getattr(info, f.name) for f in dataclasses.fields(EngineInfo)}
    return values | {"slos": {str(c): (slo.ttft_s, slo.tpot_s) for c, slo in info.slos.items()}}


def decode_info(data: dict[str, Any]) -> EngineInfo:
    """Return the engine's description again."""
    slos = {ServiceClass(c): SLO(ttft_s=slo[0], tpot_s=slo[1]) for c, slo in data["slos"].items()}
    return EngineInfo(**(data | {"slos": slos}))

"""What goes between the API process and the engine process: msgpack of plain lists, one message a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import msgpack

from omniserve.core.errors import RequestRejected
from omniserve.core.limits import RequestLimits
from omniserve.core.request import (
    SLO,
    ClassSpec,
    FinishReason,
    Request,
    RequestOutput,
    RequestTimes,
    SamplingParams,
    TokenLogprob,
)
from omniserve.core.stats import EngineStats

# API -> engine: ("add", request, arrival_s, x-request-id or None), ("abort", request_id), ("stats",), ("close",)
# engine -> API: ("progress", text), ("ready", info), ("failed", text)     while it starts
#                ("step", [(accepted id, predicted_ttft_s or None)], outputs), ("refused", request_id, error),
#                ("stats", stats), ("fatal", text)
Message = tuple[Any, ...]

_SAMPLING_FIELDS = tuple(f.name for f in dataclasses.fields(SamplingParams))
_TIMES_FIELDS = tuple(f.name for f in dataclasses.fields(RequestTimes))
_times_of = attrgetter(*_TIMES_FIELDS)  # for each token; dataclasses.astuple would copy deeply
_STATS_FIELDS = tuple(f.name for f in dataclasses.fields(EngineStats))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """What the API process has to know of the engine."""

    limits: RequestLimits
    classes: tuple[ClassSpec, ...]
    """Highest priority first."""


def pack(message: Message) -> bytes:
    """Encode a message of plain data."""
    return msgpack.packb(message)


def unpack(data: bytes) -> Message:
    """Decode a message; sequences come back as tuples."""
    return msgpack.unpackb(data, use_list=False, strict_map_key=False)


def encode_request(request: Request) -> Message:
    """Return a request as plain data."""
    sampling = tuple(getattr(request.sampling, name) for name in _SAMPLING_FIELDS)
    return request.request_id, request.prompt_token_ids, str(request.service_class), _encode_slo(request.slo), sampling


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
        slo=_decode_slo(slo),
        sampling=SamplingParams(**dict(zip(_SAMPLING_FIELDS, sampling, strict=True))),
    )


def encode_outputs(outputs: Iterable[RequestOutput]) -> list[Message]:
    """Return a step's outputs as plain data."""
    return [
        (
            out.request_id,
            str(out.service_class),
            out.new_token_ids,
            _encode_logprobs(out.new_logprobs),
            _encode_logprobs(out.prompt_logprobs),
            None if out.finish_reason is None else str(out.finish_reason),
            out.stop_reason,
            out.num_prompt_tokens,
            out.num_output_tokens,
            out.num_host_tokens,
            None if out.times is None else _times_of(out.times),
            out.host_stays,
        )
        for out in outputs
    ]


def decode_output(data: Message) -> RequestOutput:
    """Return one output again."""
    request_id, service_class, token_ids, logprobs, prompt_logprobs, *rest = data
    finish_reason, stop_reason, prompt, output, host, times, host_stays = rest
    return RequestOutput(
        request_id=request_id,
        service_class=service_class,
        new_token_ids=token_ids,
        new_logprobs=_decode_logprobs(logprobs),
        prompt_logprobs=_decode_logprobs(prompt_logprobs),
        finish_reason=None if finish_reason is None else FinishReason(finish_reason),
        stop_reason=stop_reason,
        num_prompt_tokens=prompt,
        num_output_tokens=output,
        num_host_tokens=host,
        times=None if times is None else RequestTimes(**dict(zip(_TIMES_FIELDS, times, strict=True))),
        host_stays=host_stays,
    )


def encode_error(error: ValueError | RequestRejected) -> Message:
    """Return why a request was refused as plain data."""
    if isinstance(error, RequestRejected):
        return "rejected", str(error), (error.retry_after_s, error.predicted_ttft_s, error.required_ttft_s)
    return "invalid", str(error), None


def decode_error(data: Message) -> ValueError | RequestRejected:
    """Return the error again."""
    kind, message, seconds = data
    if kind == "invalid":
        return ValueError(message)
    retry_after_s, predicted_ttft_s, required_ttft_s = seconds
    return RequestRejected(
        message,
        retry_after_s=retry_after_s,
        predicted_ttft_s=predicted_ttft_s,
        required_ttft_s=required_ttft_s,
    )


def encode_stats(stats: EngineStats) -> dict[str, Any]:
    """Return statistics as plain data."""
    return {name: getattr(stats, name) for name in _STATS_FIELDS}


def decode_stats(data: dict[str, Any]) -> EngineStats:
    """Return the statistics again."""
    return EngineStats(**data)


def encode_info(info: EngineInfo) -> dict[str, Any]:
    """Return the engine's description as plain data."""
    classes = [(spec.name, str(spec.kind), _encode_slo(spec.slo)) for spec in info.classes]
    return {"limits": dataclasses.asdict(info.limits), "classes": classes}


def decode_info(data: dict[str, Any]) -> EngineInfo:
    """Return the engine's description again."""
    classes = tuple(
        ClassSpec(name=name, kind=kind, slo=SLO(ttft_s=slo[0], tpot_s=slo[1])) for name, kind, slo in data["classes"]
    )
    return EngineInfo(limits=RequestLimits(**data["limits"]), classes=classes)


def _encode_logprobs(entries: tuple[TokenLogprob, ...]) -> Message:
    return tuple((entry.token_id, entry.logprob, entry.top) for entry in entries) if entries else ()


def _decode_logprobs(data: Message) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token_id=i, logprob=lp, top=top) for i, lp, top in data) if data else ()


def _encode_slo(slo: SLO | None) -> Message | None:
    return None if slo is None else (slo.ttft_s, slo.tpot_s)


def _decode_slo(data: Message | None) -> SLO | None:
    return None if data is None else SLO(ttft_s=data[0], tpot_s=data[1])

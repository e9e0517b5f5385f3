"""The command line of ``python -m omniserve.server``."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omniserve.config import GIB, EngineConfig
from omniserve.request import SLO, ServiceClass
from omniserve.server.loading import BUILTIN_MODEL_NAME, DEVICES, DTYPES, EngineLoader, builtin_model_path

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """How to serve, whatever the engine."""

    tokenizer: str
    """Folder or hub id of the tokenizer."""
    model_name: str
    """The name that the model is served under."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    shutdown_timeout_s: float = 30.0
    """How long running requests may go on after SIGTERM."""
    log_level: str = "info"


def _integer(low: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"must be >= {low}, got {value}")
        return value

    return integer


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"must be a number >= 0, got {text}")
    return value


def _gib(text: str) -> int:
    return int(_number(text) * GIB)


# Flag, field of EngineConfig, type, help. Defaults are the fields' own.
_ENGINE_FLAGS: tuple[tuple[str, str, Callable[[str], Any], str], ...] = (
    ("--scheduler", "scheduler", str, "scheduling policy: a name or package.module:Class"),
    ("--kv", "kv", str, "KV manager: a name or package.module:Class"),
    ("--attention", "attention", str, "device attention: a name or auto"),
    ("--device-kv-gib", "device_kv_bytes", _gib, "GiB for the device tier's KV pool"),
    ("--host-kv-gib", "host_kv_bytes", _gib, "GiB for the host tier's KV pool; 0 switches the host tier off"),
    ("--host-kv-dtype", "host_kv_dtype", str, "auto (the model's) or int8 (twice the tokens, outputs not exact)"),
    ("--block-size", "block_size", _integer(1), "tokens per KV block, a power of two"),
    ("--max-model-len", "max_model_len", _integer(1), "longest prompt plus output in tokens"),
    ("--max-step-tokens", "max_step_tokens", _integer(1), "most device rows in a step"),
    ("--max-num-requests", "max_num_requests", _integer(1), "most requests that hold device KV at a time"),
    ("--max-host-requests", "max_host_requests", _integer(1), "most requests that decode on the host tier at a time"),
    ("--max-piggyback-slots", "max_piggyback_slots", _integer(1), "most piggyback rows a layer"),
    ("--device-threads", "device_threads", _integer(1), "CPU threads of the device tier while the host tier is idle"),
    ("--host-threads", "host_threads", _integer(1), "threads of the host tier"),
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; its defaults for the engine are EngineConfig's."""
    parser = argparse.ArgumentParser(
        prog="python -m omniserve.server", description="Serve a model behind OpenAI's API, for two service classes."
    )
    parser.add_argument("--model", metavar="PATH_OR_HUB_ID", help="model folder or hub id (default: the built-in one)")
    parser.add_argument("--served-model-name", metavar="NAME", help="name in the API (default: as --model)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto takes the model's own")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto takes a GPU if there is one")
    server = {field.name: field.default for field in dataclasses.fields(ServerOptions)}
    parser.add_argument("--host", default=server["host"], help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=_integer(0), default=server["port"], help="0 takes a free one (default: %(default)s)"
    )
    defaults = EngineConfig()
    for flag, field, kind, text in _ENGINE_FLAGS:
        default = getattr(defaults, field)
        shown = default / GIB if kind is _gib else default
        note = "" if default is None else f" (default: {shown:g})" if kind is not str else f" (default: {shown})"
        parser.add_argument(flag, dest=field, type=kind, default=default, help=text + note)
    parser.add_argument("--no-compile", action="store_true", help="run the layers eagerly")
    slo = defaults.slos[ServiceClass.LS]
    parser.add_argument(
        "--ls-ttft-slo", type=_number, default=slo.ttft_s, help="LS time to first token, seconds (default: %(default)s)"
    )
    parser.add_argument(
        "--ls-tpot-slo", type=_number, default=slo.tpot_s, help="LS time per token, seconds (default: %(default)s)"
    )
    parser.add_argument(
        "--shutdown-timeout",
        type=_number,
        default=server["shutdown_timeout_s"],
        help="seconds that running requests may go on after SIGTERM (default: %(default)s)",
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, default=server["log_level"])
    return parser


def parse_args(arguments: Sequence[str] | None = None) -> tuple[ServerOptions, EngineLoader]:
    """Read the command line; a bad flag ends the program with status 2 and a message."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    if args.port > 65535:
        parser.error(f"argument --port: must be <= 65535, got {args.port}")
    try:
        config = EngineConfig(
            **{field: getattr(args, field) for _, field, _, _ in _ENGINE_FLAGS},
            compile=not args.no_compile,
            # A plain dict, because the config travels to another process.
            slos=dict(EngineConfig().slos) | {ServiceClass.LS: SLO(ttft_s=args.ls_ttft_slo, tpot_s=args.ls_tpot_slo)},
        )
        model = builtin_model_path() if args.model is None else args.model
    except ValueError as error:
        parser.error(_with_flag_names(str(error)))
    options = ServerOptions(
        tokenizer=model,
        model_name=args.served_model_name or args.model or BUILTIN_MODEL_NAME,
        host=args.host,
        port=args.port,
        shutdown_timeout_s=args.shutdown_timeout,
        log_level=args.log_level,
    )
    return options, EngineLoader(model=model, dtype=args.dtype, device=args.device, config=config)


def _with_flag_names(message: str) -> str:
    flags = {field: flag for flag, field, _, _ in _ENGINE_FLAGS}
    flags |= {"SLO.ttft_s": "--ls-ttft-slo", "SLO.tpot_s": "--ls-tpot-slo"}
    return re.sub(r"[\w.]+", lambda word: flags.get(word[0], word[0]), message)

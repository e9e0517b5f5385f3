"""The command line flags that say which model, on what, with which EngineConfig."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

from omniserve.core.config import GIB, EngineConfig
from omniserve.core.registry import Registry
from omniserve.core.request import SLO, ClassSpec, ServiceClass
from omniserve.kv import KV_MANAGERS
from omniserve.latency import LATENCY_MODELS
from omniserve.launch.loading import DTYPES
from omniserve.sched import SCHEDULERS, policy_of
from omniserve.sched.options import CoServingOptions, LayerPreemptionOptions, named_value


def integer(low: int) -> Callable[[str], int]:
    """Return an argparse type: an int of at least ``low``."""

    def integer(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"must be >= {low}, got {value}")
        return value

    return integer


def number(text: str) -> float:
    """Read a finite number >= 0; an argparse type."""
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"must be a number >= 0, got {text}")
    return value


def positive(text: str) -> float:
    """Read a finite number > 0; an argparse type."""
    value = number(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text}")
    return value


def device(text: str) -> str:
    """Read the name of a device; an argparse type."""
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", text) is None:
        raise argparse.ArgumentTypeError(f"must be auto, cpu, cuda or cuda:N, got {text!r}")
    return text


def _gib(text: str) -> int:
    return int(number(text) * GIB)


def _cores(text: str) -> tuple[int, ...]:
    """Read ``0-3,8``: cores, and ranges of them."""
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True)) or int(last or first) < int(first):
            raise argparse.ArgumentTypeError(f"must be cores and ranges of them, such as 0-3,8, got {text!r}")
        cores += range(int(first), int(last or first) + 1)
    return tuple(cores)


def _switch(text: str) -> bool:
    """Read ``on`` or ``off``, which YAML makes ``true`` and ``false``."""
    if text.lower() not in ("on", "off", "true", "false"):
        raise argparse.ArgumentTypeError(f"must be on or off, got {text!r}")
    return text.lower() in ("on", "true")


def _class(text: str) -> ClassSpec:
    """Read ``NAME:KIND`` or ``NAME:KIND:TTFT:TPOT``; an objective left empty is none."""
    name, *rest = text.split(":")
    if len(rest) not in (1, 3):
        raise argparse.ArgumentTypeError(f"must be NAME:KIND or NAME:KIND:TTFT:TPOT, got {text!r}")
    try:
        objectives = [float(seconds) if seconds else None for seconds in rest[1:]] or [None, None]
        return ClassSpec(name=name, kind=rest[0], slo=SLO(ttft_s=objectives[0], tpot_s=objectives[1]))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} in {text!r}") from None


def _names(registry: Registry[Any]) -> str:
    return f"{', '.join(registry.names())} or package.module:Class"


# Flag, field of EngineConfig, type, help. Defaults are the fields' own. DEVICE_ATTENTION's names are typed, as reading
# them takes torch, for which --help need not wait; a test compares them.
_FLAGS: tuple[tuple[str, str, Callable[[str], Any], str], ...] = (
    ("--scheduler", "scheduler", str, f"scheduling policy: {_names(SCHEDULERS)}"),
    ("--kv", "kv", str, f"KV manager: {_names(KV_MANAGERS)}"),
    (
        "--attention",
        "attention",
        str,
        "device attention: cpu, flex, sdpa, triton, xformers or auto (the best that the device has)",
    ),
    ("--device-kv-gib", "device_kv_bytes", _gib, "GiB for the device tier's KV pool"),
    ("--host-kv-gib", "host_kv_bytes", _gib, "GiB for the host tier's KV pool; 0 switches the host tier off"),
    ("--host-kv-dtype", "host_kv_dtype", str, "auto (the model's) or int8 (twice the tokens, outputs not exact)"),
    ("--block-size", "block_size", integer(1), "tokens per KV block, a power of two"),
    ("--max-model-len", "max_model_len", integer(1), "longest prompt plus output in tokens"),
    ("--max-num-batched-tokens", "max_num_batched_tokens", integer(1), "most device rows in a step"),
    ("--max-num-seqs", "max_num_seqs", integer(1), "most requests that hold device KV at a time"),
    ("--max-host-requests", "max_host_requests", integer(1), "most requests that decode on the host tier at a time"),
    ("--max-piggyback-seats", "max_piggyback_seats", integer(1), "most piggyback rows a layer"),
    ("--trace-steps", "trace_steps", str, "file that gets a line a step, for python -m omniserve.explain"),
    ("--device-threads", "device_threads", integer(1), "CPU threads of the device tier while the host tier is idle"),
    ("--host-threads", "host_threads", integer(1), "threads of the host tier"),
    ("--host-cores", "host_cores", _cores, "cores that host threads are pinned to, such as 0-3,8"),
    ("--step-graphs", "step_graphs", str, "auto (CUDA graphs on a GPU), on (constant shapes anywhere) or off"),
    ("--step-graphs-time-limit", "step_graphs_limit_s", number, "most seconds for capturing CUDA graphs at the start"),
    ("--step-graphs-gib", "step_graphs_bytes", _gib, "most GiB of device memory for CUDA graphs"),
    ("--async-steps", "async_steps", _switch, "on or off: launch a step while the last one runs (default: with a GPU)"),
    ("--seed", "seed", int, "seeds the sampling of requests that bring no seed"),
)

_NAMED = ("scheduler", "kv", "attention")

FORMER_FLAGS = {
    f"--{flag}": f"--scheduler-option {option}"
    for flag, option in (
        ("be-order", "be_order=..."), ("checkpoint-kv", "checkpoint_kv=true"),
        ("drop-halted", "keep_halted=false"), ("latency-model", "latency_model=..."),
        ("ls-reserve-fraction", "ls_reserve_fraction=..."), ("max-piggyback-rows", "max_piggyback_rows=..."),
        ("min-residence", "min_residence_s=..."), ("no-admission", "admission=false"),
        ("offload-for-time", "offload_for_time=true"), ("slack", "slack=..."), ("swap-in-delay", "swap_in_delay_s=..."),
    )
} | {
    "--max-step-tokens": "--max-num-batched-tokens",
    "--max-num-requests": "--max-num-seqs",
    "--max-piggyback-slots": "--max-piggyback-seats",
}  # fmt: skip
"""Flags that are gone, and what to give instead."""


class _FormerFlag(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        (flag,) = self.option_strings
        parser.error(f"{flag} is gone: give {FORMER_FLAGS[flag]}")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags; their defaults are EngineConfig's."""
    parser.add_argument("--model", metavar="PATH_OR_HUB_ID", help="model folder or hub id (default: the built-in one)")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="auto takes the model's own, or float32 on a CPU that has no products of it",
    )
    parser.add_argument(
        "--device",
        type=device,
        default="auto",
        help="auto (a GPU if there is one), cpu, cuda or cuda:N, the GPU of that number (default: auto)",
    )
    defaults = EngineConfig()
    for flag, field, kind, text in _FLAGS:
        default = getattr(defaults, field)
        shown = default / GIB if kind is _gib else default
        note = "" if default is None else f" (default: {shown:g})" if kind is not str else f" (default: {shown})"
        metavar = "GIB" if kind is _gib else "NAME" if field in _NAMED else None
        parser.add_argument(flag, dest=field, type=kind, default=default, metavar=metavar, help=text + note)
    parser.add_argument("--no-compile", action="store_true", help="run the layers eagerly")
    _add_scheduler_option(parser)
    for flag in FORMER_FLAGS:
        parser.add_argument(flag, action=_FormerFlag, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument(
        "--class",
        dest="classes",
        action="append",
        type=_class,
        metavar="NAME:KIND[:TTFT:TPOT]",
        help="a class of requests, kind LS or BE, objectives in seconds or empty; repeat it, highest priority first, "
        f"LS kinds before BE kinds (default: {' '.join(map(_class_text, defaults.classes))})",
    )
    for flag, dest, text in (("--ls-ttft-slo", "ttft_s", "to first token"), ("--ls-tpot-slo", "tpot_s", "per token")):
        parser.add_argument(flag, dest=dest, type=number, help=f"objective of the class LS: time {text}, seconds")


def _add_scheduler_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--scheduler-option``; it becomes a list of names and values."""
    kinds = (CoServingOptions, LayerPreemptionOptions)
    names = dict.fromkeys(field.name for kind in kinds for field in dataclasses.fields(kind))
    parser.add_argument(
        "--scheduler-option",
        action="append",
        type=named_value,
        metavar="NAME=VALUE",
        help="an option of the scheduling policy, such as be_order=prefill; repeat it. A policy has some of "
        f"{', '.join(names)} (see omniserve/sched/options.py); latency_model is {_names(LATENCY_MODELS)}",
    )


def flag_value(action: argparse.Action, value: Any) -> Any:
    """Return what a flag has to be given to have this value."""
    if action.type is _gib:
        return value / GIB
    if action.type is _cores:
        return ",".join(map(str, value))
    if action.type is _switch:
        return "on" if value else "off"
    if action.type is named_value:
        return "=".join(value)
    return _class_text(value) if action.type is _class else value


def config_from(args: argparse.Namespace) -> EngineConfig:
    """Return the settings that the flags ask for.

    Raises:
        ValueError: Flags do not fit together; the message names them.
    """
    try:
        config = EngineConfig(
            **{field: getattr(args, field) for _, field, _, _ in _FLAGS},
            scheduler_options=dict(args.scheduler_option or ()),
            compile=not args.no_compile,
            classes=_with_ls_objectives(tuple(args.classes or EngineConfig().classes), args.ttft_s, args.tpot_s),
        )
        options = policy_of(config)[1]
        typed = {name: getattr(options, name) for name in config.scheduler_options}
        return dataclasses.replace(config, scheduler_options=typed)
    except ValueError as error:
        raise ValueError(_with_flag_names(str(error))) from None


def _with_ls_objectives(
    classes: tuple[ClassSpec, ...], ttft_s: float | None, tpot_s: float | None
) -> tuple[ClassSpec, ...]:
    given = {name: value for name, value in (("ttft_s", ttft_s), ("tpot_s", tpot_s)) if value is not None}
    if given and all(spec.name != ServiceClass.LS for spec in classes):
        raise ValueError("--ls-ttft-slo and --ls-tpot-slo need a class named LS; give --class NAME:KIND:TTFT:TPOT")
    return tuple(
        dataclasses.replace(spec, slo=dataclasses.replace(spec.slo, **given)) if spec.name == ServiceClass.LS else spec
        for spec in classes
    )


def _class_text(spec: ClassSpec) -> str:
    objectives = [f"{value:g}" if value is not None else "" for value in (spec.slo.ttft_s, spec.slo.tpot_s)]
    return ":".join([spec.name, spec.kind, *(objectives if any(objectives) else ())])


def _with_flag_names(message: str) -> str:
    flags = {field: flag for flag, field, _, _ in _FLAGS}
    flags |= {"SLO.ttft_s": "--ls-ttft-slo", "SLO.tpot_s": "--ls-tpot-slo", "classes": "--class"}
    return re.sub(r"[\w.]+", lambda word: flags.get(word[0], word[0]), message)

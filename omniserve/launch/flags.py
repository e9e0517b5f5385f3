"""The command line flags that say which model, on what, with which EngineConfig."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any

from omniserve.core.config import (
    DiskKVConfig,
    EngineConfig,
    ExecutionConfig,
    HostsConfig,
    LoRAConfig,
    ParallelConfig,
    PrefillConfig,
)
from omniserve.core.options import make_options
from omniserve.core.registry import Registry
from omniserve.core.request import SLO, ClassSpec, ServiceClass
from omniserve.kv import KV_MANAGERS
from omniserve.latency import LATENCY_MODELS
from omniserve.launch.dataclass_flags import add_field_flags, add_options_flag, flag_of, flag_value, number
from omniserve.launch.lora_folders import rank_of
from omniserve.launch.models import DTYPES, QUANTIZE, builtin_model_path, checked_model
from omniserve.sched import SCHEDULERS, policy_of
from omniserve.sched.options import CoServingOptions, LayerPreemptionOptions


def _names(registry: Registry[Any]) -> str:
    return f"{', '.join(registry.names())} or package.module:Class"


_OTHERWISE = ("scheduler_options", "execution", "disk_kv", "parallel", "lora", "hosts", "prefill", "classes")
"""Fields of EngineConfig that are given in parts."""
_FIELDS = tuple(field.name for field in dataclasses.fields(EngineConfig) if field.name not in _OTHERWISE)

_DISK_FIELDS = tuple(field.name for field in dataclasses.fields(DiskKVConfig))
_PARALLEL_FIELDS = tuple(field.name for field in dataclasses.fields(ParallelConfig))
_LORA_FIELDS = tuple(field.name for field in dataclasses.fields(LoRAConfig))
_HOSTS_FIELDS = tuple(field.name for field in dataclasses.fields(HostsConfig))
_PREFILL_FIELDS = tuple(field.name for field in dataclasses.fields(PrefillConfig) if field.name != "is_prefill_engine")

_SPECULATE, _THINKING = "speculate", "thinking="
_LORA_SLOTS = 8
"""Slots for adapters where some may be loaded, and nothing says how many."""


def device(text: str) -> str:
    """Read the name of a device; an argparse type."""
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", text) is None:
        raise argparse.ArgumentTypeError(f"must be auto, cpu, cuda or cuda:N, got {text!r}")
    return text


def _class(text: str) -> ClassSpec:
    """Read ``NAME:KIND`` or ``NAME:KIND:TTFT:TPOT``, with any of the options; an objective left empty is none."""
    name, *rest = text.split(":")
    speculation, thinking = False, None
    while rest and (match := re.fullmatch(rf"{_SPECULATE}|{_THINKING}([0-9]+)", rest[-1])):
        rest.pop()
        speculation, thinking = (speculation, int(match[1])) if match[1] else (True, thinking)
    if len(rest) not in (1, 3):
        raise argparse.ArgumentTypeError(
            f"must be NAME:KIND or NAME:KIND:TTFT:TPOT, and behind it :{_THINKING}TOKENS or :{_SPECULATE}, got {text!r}"
        )
    try:
        objectives = [float(seconds) if seconds else None for seconds in rest[1:]] or [None, None]
        slo = SLO(ttft_s=objectives[0], tpot_s=objectives[1])
        return ClassSpec(name=name, kind=rest[0], slo=slo, speculation=speculation, thinking_token_budget=thinking)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} in {text!r}") from None


def _lora(text: str) -> tuple[str, str]:
    """Read ``NAME=FOLDER``; an argparse type."""
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"must be NAME=FOLDER, got {text!r}")
    return name, folder


def loras_from(args: argparse.Namespace) -> dict[str, str]:
    """Return the folders of the adapters that the flags name.

    Raises:
        ValueError: Two have one name.
    """
    given = args.lora_modules or []
    if len(dict(given)) < len(given):
        raise ValueError("--lora-modules names two adapters alike; each needs a name of its own")
    return {name: str(Path(folder).expanduser()) for name, folder in given}


def add_profile_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that says where the latency profile comes from."""
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="latency profile (default: the cached one, or made now); none: no latency is predicted, and no objective "
        "enforced",
    )


def profile_from(args: argparse.Namespace) -> tuple[Path | None, bool]:
    """Return an ``EngineLoader``'s ``profile`` and ``with_profile``."""
    with_profile = args.profile != "none"
    return (Path(args.profile) if args.profile is not None and with_profile else None), with_profile


def model_from(args: argparse.Namespace) -> str:
    """Return the model that ``--model`` names, or the built-in one.

    Raises:
        ValueError: It is no folder with a model, and cannot be a hub id.
    """
    if args.model is not None:
        return checked_model(args.model, args.gguf_file, args.revision)
    if args.revision is not None:
        raise ValueError(f"--revision {args.revision}: give the hub id of the repository as --model, too")
    if args.gguf_file is not None:
        raise ValueError(f"--gguf-file {args.gguf_file}: give the folder or the repository that has it as --model, too")
    return builtin_model_path()


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags; their defaults are EngineConfig's."""
    parser.add_argument(
        "--model", metavar="PATH_OR_HUB_ID", help="model folder, GGUF file or hub id (default: the built-in one)"
    )
    parser.add_argument("--gguf-file", metavar="NAME", help="the GGUF file of the model's folder or repository")
    parser.add_argument(
        "--revision",
        metavar="NAME",
        help="branch, tag or commit of the model's repository on the hub, with its tokenizer and configs",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="auto takes the model's own, or float32 on a CPU that has no products of it",
    )
    parser.add_argument(
        "--quantize",
        choices=QUANTIZE,
        help="quantise the weights when they are loaded, on a CPU; python -m omniserve.perplexity says what it costs",
    )
    parser.add_argument(
        "--device",
        type=device,
        default="auto",
        help="auto (a GPU if there is one), cpu, cuda or cuda:N, the GPU of that number (default: auto)",
    )
    notes = {"scheduler": _names(SCHEDULERS), "kv": _names(KV_MANAGERS)}
    add_field_flags(parser, EngineConfig, _FIELDS, notes=notes)
    add_field_flags(parser, DiskKVConfig, _DISK_FIELDS, prefix="disk_kv_")
    add_field_flags(parser, ParallelConfig, _PARALLEL_FIELDS)
    parser.add_argument(
        "--lora-modules",
        action="append",
        type=_lora,
        metavar="NAME=FOLDER",
        help="a LoRA adapter, as PEFT saves it, that requests can name as their model; repeat it",
    )
    add_field_flags(parser, LoRAConfig, _LORA_FIELDS)
    add_field_flags(parser, HostsConfig, _HOSTS_FIELDS)
    add_field_flags(parser, PrefillConfig, _PREFILL_FIELDS)
    classes = " ".join(map(_class_text, EngineConfig().classes))
    parser.add_argument(
        "--class",
        dest="classes",
        action="append",
        type=_class,
        metavar=f"NAME:KIND[:TTFT:TPOT][:{_THINKING}TOKENS][:{_SPECULATE}]",
        help="a class of requests, kind LS or BE, objectives in seconds or empty; with thinking, chats that bring no "
        "thinking_token_budget have this one; with speculate, their next tokens are guessed from the text and checked, "
        f"several in a step; repeat it, highest priority first, LS kinds before BE kinds (default: {classes})",
    )
    for flag, dest, text in (("--ls-ttft-slo", "ttft_s", "to first token"), ("--ls-tpot-slo", "tpot_s", "per token")):
        parser.add_argument(flag, dest=dest, type=number, help=f"objective of the class LS: time {text}, seconds")
    # DEVICE_ATTENTION's names are typed, as reading them takes torch, for which --help need not wait; a test compares.
    text = "how steps run, such as compile=false; attention is auto, cpu, flex, latent, sdpa, triton or xformers"
    add_options_flag(parser, "--execution", [ExecutionConfig], text)
    text = (
        "an option of the scheduling policy, such as be_order=prefill; a policy has some of these "
        f"(omniserve/sched/options.py says which); latency_model is {_names(LATENCY_MODELS)}"
    )
    add_options_flag(parser, "--scheduler-option", [CoServingOptions, LayerPreemptionOptions], text)


def flag_text(action: argparse.Action, value: Any) -> Any:
    """Return what a flag has to be given to have this value."""
    return _class_text(value) if action.type is _class else flag_value(action, value)


def config_from(args: argparse.Namespace) -> EngineConfig:
    """Return the settings that the flags ask for.

    Raises:
        ValueError: Flags do not fit together; the message names them.
    """
    try:
        config = EngineConfig(
            **{name: getattr(args, name) for name in _FIELDS},
            scheduler_options=dict(args.scheduler_option or ()),
            disk_kv=DiskKVConfig(**{name: getattr(args, f"disk_kv_{name}") for name in _DISK_FIELDS}),
            parallel=ParallelConfig(**{name: getattr(args, name) for name in _PARALLEL_FIELDS}),
            lora=_lora_config(args),
            hosts=HostsConfig(**{name: getattr(args, name) for name in _HOSTS_FIELDS}),
            prefill=PrefillConfig(**{name: getattr(args, name) for name in _PREFILL_FIELDS}),
            execution=make_options(ExecutionConfig, dict(args.execution or ()), owner="--execution"),
            classes=_with_ls_objectives(tuple(args.classes or EngineConfig().classes), args.ttft_s, args.tpot_s),
        )
        options = policy_of(config)[1]
        typed = {name: getattr(options, name) for name in config.scheduler_options}
        return dataclasses.replace(config, scheduler_options=typed)
    except ValueError as error:
        raise ValueError(_with_flag_names(str(error))) from None


def _lora_config(args: argparse.Namespace) -> LoRAConfig:
    """Return slots for the adapters that the flags name, and for some more if others may be loaded."""
    given = loras_from(args)
    max_loras = args.max_loras or max(len(given), _LORA_SLOTS if getattr(args, "lora_dir", None) else 0)
    ranks = [rank_of(Path(folder)) for folder in given.values()]
    return LoRAConfig(max_loras=max_loras, max_lora_rank=max([args.max_lora_rank, *ranks]))


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
    budget = [] if spec.thinking_token_budget is None else [f"{_THINKING}{spec.thinking_token_budget}"]
    options = [*budget, *([_SPECULATE] if spec.speculation else [])]
    return ":".join([spec.name, spec.kind, *(objectives if any(objectives) else ()), *options])


def _with_flag_names(message: str) -> str:
    flags = {name: flag_of(name) for name in (*_FIELDS, *_PARALLEL_FIELDS, *_LORA_FIELDS, *_HOSTS_FIELDS)}
    flags |= {f"disk_kv.{name}": flag_of(f"disk_kv_{name}") for name in _DISK_FIELDS}
    flags |= {"SLO.ttft_s": "--ls-ttft-slo", "SLO.tpot_s": "--ls-tpot-slo", "classes": "--class"}
    return re.sub(r"[\w.]+", lambda word: flags.get(word[0], word[0]), message)

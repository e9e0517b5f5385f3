"""The command line of ``python -m omniserve.server``: its flags, and what they say how to serve.

A flag wins over the environment, that over a YAML file, and that over the default.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import re
import ssl
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import configargparse
import yaml

from omniserve.core.arguments import ArgumentParser, nearest
from omniserve.core.config import EngineConfig
from omniserve.core.options import make_options
from omniserve.core.request import ClassSpec
from omniserve.launch.dataclass_flags import add_field_flags, add_options_flag
from omniserve.launch.flags import (
    add_engine_flags,
    add_profile_flag,
    config_from,
    flag_text,
    loras_from,
    model_from,
    profile_from,
)
from omniserve.launch.loading import EngineLoader
from omniserve.launch.models import BUILTIN_MODEL_NAME
from omniserve.server.access.keys import ApiKey, KeyRing, digest_of, read_key_file
from omniserve.server.access.limits import Limits
from omniserve.server.access.origins import checked_origin
from omniserve.server.access.tiers import class_of_tier
from omniserve.server.batches.files import BatchSettings
from omniserve.server.engines.sources import RemoteEngines, read_engines_file
from omniserve.server.errors import ApiError
from omniserve.server.telemetry.traces import checked_endpoint

logger = logging.getLogger("omniserve.server")

ENVIRONMENT_PREFIX = "OMNISERVE_"
# Not settings, but what to do with them.
_NO_SETTINGS = ("help", "config", "print_config")
_FILE_OR_ENVIRONMENT = ("config_file", "environment_variables")
_FLAGS_ALONE = ("--help", "--print-config")
OTHER_VARIABLES = ("OMNISERVE_ISA", "OMNISERVE_RANK_SECRET", "OMNISERVE_CPU_HOST_SECRET", "OMNISERVE_PREFILL_SECRET")
"""Variables that are no settings of the server, but are read here or by the programs that it works with."""
# Where a service is called omniserve, Kubernetes tells each container where that is.
_OF_KUBERNETES = re.compile(r"OMNISERVE_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_\w+)")
_SECRETS = ("api_key", "database_url")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """Options of a server that do not concern its engine."""

    tokenizer: str
    """Folder or hub id of the tokenizer."""
    trust_remote_code: bool = False
    """Run code that comes with it."""
    model_names: tuple[str, ...]
    """The names that the model is served under; answers have the first unless a request gives another."""
    chat_template: str | None = None
    """Write chats with this template: the name of one of the model's, or a Jinja file (default: the model's own)."""
    tool_call_parser: str = "auto"
    """How the model writes calls of tools: a name as vLLM has it, such as hermes or qwen3_coder; auto: as its chat
    template says; none: no tools."""
    reasoning_parser: str = "auto"
    """How the model marks its reasoning: a name as vLLM has it, such as deepseek_r1 or openai_gptoss; auto: as its chat
    template says; none: reasoning stays in the text."""
    generation_config: str = "auto"
    """The source of temperature, top_p, top_k, min_p, repetition_penalty and length for requests that do not give them:
    auto (the model's generation_config.json), none (OpenAI's defaults), or the path of another such file."""
    embedding_model: str | None = None
    """Folder or hub id of a second model, which reads texts on the CPU for /v1/embeddings, /v1/score and /v1/rerank: an
    encoder such as BERT, or a cross-encoder (default: the served model reads them)."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    replicas: int = 1
    """Engines that serve the model on this machine, each with its part of the cores or GPUs and with its own memory:
    --device-kv-gib and --host-kv-gib are those of one. 0: those of --engines alone."""
    ray_address: str | None = None
    """Have Ray place the --replicas on the nodes of its cluster at this address (auto: the one that this machine is a
    node of), and start them again (default: they are on this machine)."""
    num_ranks: int = 1
    """Processes of an engine, each of which needs a GPU where there are any."""
    engines: RemoteEngines | None = None
    """Engines on other machines; None: only those of this one are used."""
    router: Literal["predicted", "least-loaded", "fewest-requests", "round-robin", "prefix"] = "predicted"
    """How requests are divided among the replicas."""
    api_processes: int = 1
    """Processes that answer requests, on one port: where one core for HTTP and text is the limit, not the engines."""
    keys: KeyRing | None = None
    """Keys of those that may call; None: calls need no key."""
    root_path: str = ""
    """The path under which a proxy shows this server, such as /llm for /llm/v1/models; it may cut it off or not."""
    ssl_certfile: str | None = None
    """Serve HTTPS, with the certificate, and those that vouch for it, of this PEM file."""
    ssl_keyfile: str | None = None
    """The private key of the certificate, a PEM file without a password (default: in the certificate's)."""
    guard_all: bool = False
    """Ask for a key for /health and /metrics, too."""
    limits: Limits = field(default_factory=Limits)
    """Upper bounds."""
    loras: Mapping[str, str] = field(default_factory=dict)
    """Folders of the LoRA adapters that are there from the start, by name."""
    lora_dirs: tuple[Path, ...] = ()
    """Folders from which calls may load others."""
    cors_origins: tuple[str, ...] = ()
    """Origins of pages that may call from a browser."""
    unknown_fields: Literal["drop", "refuse"] = "drop"
    """Fields of requests that neither OpenAI's nor vLLM's API has: drop them, with a warning for each name and a header
    in the answer; or refuse the request."""
    drop_billing_header: bool = False
    """Leave out the block x-anthropic-billing-header at the begin of a system prompt (/v1/messages): Claude Code writes
    a hash into it, so that no two conversations, or calls, begin alike and share what the prefix cache has."""
    otlp_endpoint: str | None = None
    """Send an OpenTelemetry trace of each request to this collector, such as http://127.0.0.1:4318 (default:
    OTEL_EXPORTER_OTLP_ENDPOINT, if set)."""
    batches: BatchSettings = field(default_factory=BatchSettings)
    """The places where batches are kept."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of what is logged."""
    log_format: Literal["text", "json"] = "text"
    """json: an object a line, and a line for each request."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port must be in 0..65535, got {self.port}")
        has_others = self.engines is not None and self.engines.addresses
        if self.replicas < (0 if has_others else 1):
            raise ValueError(f"--replicas must be at least 1, or 0 beside --engines that has some, got {self.replicas}")
        if self.api_processes < 1:
            raise ValueError(f"--api-processes must be at least 1, got {self.api_processes}")
        if self.guard_all and self.keys is None:
            raise ValueError("--guard-all needs keys; give --api-key or --api-key-file")
        if self.root_path and not re.fullmatch(r"(/[^/?#\s]+)+", self.root_path):
            raise ValueError(f"--root-path must be a path such as /llm, got {self.root_path!r}")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("--ssl-keyfile needs --ssl-certfile, the certificate of the key")
        if self.otlp_endpoint is not None:
            checked_endpoint(self.otlp_endpoint)


_FIELDS = (
    "chat_template",
    "tool_call_parser",
    "reasoning_parser",
    "generation_config",
    "replicas",
    "ray_address",
    "router",
    "api_processes",
    "embedding_model",
    "host",
    "port",
    "root_path",
    "ssl_certfile",
    "ssl_keyfile",
    "guard_all",
    "unknown_fields",
    "drop_billing_header",
    "otlp_endpoint",
    "log_level",
    "log_format",
)
_BATCH_FIELDS = ("data_dir", "database_url")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; its defaults are those of EngineConfig and ServerOptions."""
    parser = _settings_parser(
        prog="python -m omniserve.server", description="Serve a model behind OpenAI's API, for classes of requests."
    )
    add_engine_flags(parser)
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names in the API, of which answers have the first (default: as --model)",
    )
    add_profile_flag(parser)
    add_field_flags(parser, ServerOptions, _FIELDS)
    parser.add_argument(
        "--engines",
        type=Path,
        metavar="FILE",
        help="YAML: engines, addresses of engines on other machines (tcp://HOST:PORT); allowed, those of others that "
        "/admin/engines may add; keys, the folder of 'omniserve engines keys'",
    )
    add_field_flags(parser, BatchSettings, _BATCH_FIELDS)
    parser.add_argument(
        "--api-key", action="append", metavar="KEY", help="ask every caller for this key, or another; repeat it"
    )
    parser.add_argument(
        "--api-key-file",
        action="append",
        type=Path,
        metavar="FILE",
        help="YAML or JSON: a list of keys with name, key or its sha256, and if wanted tier (the highest "
        "service_tier), requests_per_minute, tokens_per_minute, weight, private_prefixes and admin; repeat it",
    )
    parser.add_argument(
        "--lora-dir",
        action="append",
        type=Path,
        metavar="FOLDER",
        help="LoRA adapters in this folder may be loaded by POST /v1/load_lora_adapter, with a key that has admin: "
        "true in its file; repeat it",
    )
    parser.add_argument(
        "--cors-origin",
        action="append",
        metavar="ORIGIN",
        help="pages of this origin may call from a browser, * for all; repeat it (default: the server's own; with API "
        "keys, whoever has one, but no page can read the answers)",
    )
    add_options_flag(parser, "--limit", [Limits], "an upper bound, such as max_connections=100")
    return parser


def options_from(
    args: argparse.Namespace, *, tokenizer: str, model_names: tuple[str, ...], config: EngineConfig
) -> ServerOptions:
    """Return the options that the parsed flags ask for, of a server of an engine with these settings.

    Raises:
        ValueError: A flag's value does not fit; the message names it.
    """
    if args.ssl_certfile is not None:
        _check_certificate(args.ssl_certfile, args.ssl_keyfile)
    return ServerOptions(
        tokenizer=tokenizer,
        trust_remote_code=config.execution.trust_remote_code,
        model_names=model_names,
        keys=_keys(args.api_key or (), args.api_key_file or (), config.classes),
        loras=loras_from(args),
        lora_dirs=_folders(args.lora_dir or ()),
        num_ranks=config.parallel.num_ranks,
        engines=None if args.engines is None else read_engines_file(args.engines),
        limits=make_options(Limits, dict(args.limit or ()), owner="--limit"),
        cors_origins=tuple(map(checked_origin, args.cors_origin or ())),
        batches=BatchSettings(**{name: getattr(args, name) for name in _BATCH_FIELDS}),
        **{name: getattr(args, name) for name in _FIELDS},
    )


def _check_certificate(certfile: str, keyfile: str | None) -> None:
    """Raise ValueError if the server could not serve with these files; it reads them once its model is loaded."""
    try:
        # Without a password no one is asked for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password="")
    except OSError as error:  # of ssl, too
        files = f"--ssl-certfile {certfile}" + (f" with --ssl-keyfile {keyfile}" if keyfile is not None else "")
        raise ValueError(f"{files}: {error.strerror or error}") from None


def _folders(given: Sequence[Path]) -> tuple[Path, ...]:
    for folder in given:
        if not folder.is_dir():
            raise ValueError(f"--lora-dir {folder} is no folder")
    return tuple(given)


def _keys(given: Sequence[str], files: Sequence[Path], classes: Sequence[ClassSpec]) -> KeyRing | None:
    if not given and not files:
        return None
    if any(not key.strip() for key in given):
        raise ValueError("--api-key is empty; give a key, or leave the flag away")
    keys = [ApiKey(name=f"--api-key {i}", sha256=digest_of(key.strip())) for i, key in enumerate(given, 1)]
    for file in files:
        keys += read_key_file(file)
    for key in keys:
        if key.tier is not None:
            try:
                class_of_tier(key.tier, classes)
            except ApiError as error:
                raise ValueError(f"--api-key-file: key {key.name!r}: {error}") from None
    if not keys:
        raise ValueError("--api-key-file: there is no key in it, so every call would be refused; add one")
    return KeyRing(keys)


def parse_args(arguments: Sequence[str] | None = None) -> tuple[ServerOptions, EngineLoader]:
    """Read the command line, the environment and the file of settings.

    A bad one ends the program with status 2 and a message, ``--print-config`` with status 0 and the settings.
    """
    parser = build_parser()
    args = parser.parse_args(_with_model_flag(list(sys.argv[1:] if arguments is None else arguments)))
    _warn_of_variables(parser)
    try:
        config = config_from(args)
        model = model_from(args)
        names = tuple(args.served_model_name or [args.model or BUILTIN_MODEL_NAME])
        options = options_from(args, tokenizer=model, model_names=names, config=config)
    except ValueError as error:
        parser.error(str(error))
    if args.print_config:
        print(_settings_text(parser, args), end="")
        parser.exit()
    profile, with_profile = profile_from(args)
    is_several = options.replicas > 1 or options.ray_address is not None
    if is_several and (flag := _of_one_engine(config)) is not None:
        parser.error(f"{flag} is of one engine; leave it out, or --replicas and --ray-address")
    loader = EngineLoader(
        model=model,
        dtype=args.dtype,
        device=args.device,
        config=config,
        profile=profile,
        profile_time_limit_s=options.limits.profile_time_limit_s,
        with_profile=with_profile,
        quantize=args.quantize,
        serves=True,
        profile_start_s=options.limits.profile_start_s,
    )
    return options, loader


def _of_one_engine(config: EngineConfig) -> str | None:
    """Return a flag that several engines of a machine cannot have together, if it is given."""
    flags = {
        "--host-cores": config.host_cores,
        "--cpu-hosts": config.hosts.cpu_hosts,
        "--prefill-engines": config.prefill.prefill_engines,
        "--rank-listen": config.parallel.rank_listen,
        "--disk-kv-keep": config.disk_kv.keep,
    }
    return next((flag for flag, value in flags.items() if value), None)


def _with_model_flag(arguments: list[str]) -> list[str]:
    """Return the command line with a model that stands first, without a flag, behind ``--model``."""
    if not arguments or arguments[0].startswith("-"):
        return arguments
    return ["--model", *arguments]


class _SettingsParser(ArgumentParser, configargparse.ArgumentParser):
    """A parser of settings from flags, environment and files that says where a wrong one stands."""

    def check_parsed(self, parsed: argparse.Namespace) -> None:
        keys = {flag.removeprefix("--"): name.removeprefix("--") for flag, name in self.known_flags().items()}
        for source, settings in self.get_source_to_settings_dict().items():
            kind, _, file = source.partition("|")
            for key, (action, _) in settings.items():
                if kind == "config_file" and action is None:
                    self.error(f"{file}: there is no setting {key!r}{nearest(key.replace('_', '-'), keys)}")

    def source_of(self, message: str) -> str:
        for source, settings in self.get_source_to_settings_dict().items():
            kind, _, file = source.partition("|")
            for key, (action, _) in settings.items():
                if kind in _FILE_OR_ENVIRONMENT and action is not None and _is_about(message, action.option_strings):
                    return f" (in {file or key})"
        return ""


def _is_about(message: str, flags: Sequence[str]) -> bool:
    return any(re.search(rf"{re.escape(flag)}(?![\w-])", message) for flag in flags)


def _warn_of_variables(parser: argparse.ArgumentParser) -> None:
    """Log which variables of the environment look like settings and are none: one may be a slip of the pen."""
    assert isinstance(parser, _SettingsParser)
    variables = [_variable_of(flag) for flag in parser.known_flags() if flag not in _FLAGS_ALONE]
    known = {name.removeprefix(ENVIRONMENT_PREFIX): name for name in variables}
    for name in sorted(os.environ):
        if name in (*variables, *OTHER_VARIABLES) or _OF_KUBERNETES.fullmatch(name):
            continue
        if name.startswith(ENVIRONMENT_PREFIX):
            meant = nearest(name.removeprefix(ENVIRONMENT_PREFIX), known)
            logger.warning("the variable %s is no setting and has no effect%s", name, meant)


def _variable_of(flag: str) -> str:
    return ENVIRONMENT_PREFIX + flag.removeprefix("--").replace("-", "_").upper()


def _settings_parser(*, prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of flags whose values may also come from the environment or a file.

    ``--block-size 16`` is ``OMNISERVE_BLOCK_SIZE=16`` and the line ``block-size: 16`` of the file. A flag without value
    is ``true`` there, and one that may be repeated a list (in the environment as JSON).
    """
    make: Callable[..., _SettingsParser] = _SettingsParser  # its base has no types
    parser = make(
        prog=prog,
        description=description,
        epilog=f"Every flag can be set in the environment, too ({ENVIRONMENT_PREFIX}BLOCK_SIZE for --block-size), and "
        "in the file of --config (block-size: 16). A flag wins over the environment, and that over the file.",
        auto_env_var_prefix=ENVIRONMENT_PREFIX,
        config_file_parser_class=configargparse.YAMLConfigFileParser,
        config_file_open_func=functools.partial(open, encoding="utf-8"),
        add_env_var_help=False,
        add_config_file_help=False,
    )
    add: Callable[..., Any] = parser.add_argument
    add(
        "--config",
        metavar="FILE",
        is_config_file_arg=True,
        env_var=f"{ENVIRONMENT_PREFIX}CONFIG",
        help="YAML file of settings, named as the flags",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print all settings, as a file for --config, and end"
    )
    return parser


def _settings_text(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """Return all settings that have a value as YAML, each with its source; of secrets only that they are there."""
    assert isinstance(parser, _SettingsParser)
    sources = {
        action: "environment" if source == "environment_variables" else source.partition("|")[2]
        for source, settings in parser.get_source_to_settings_dict().items()
        if source not in ("command_line", "defaults")
        for action, _ in settings.values()
    }
    lines = []
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if action.dest in _NO_SETTINGS or value in (None, ()):
            continue
        values = value if isinstance(value, list) else [value]
        texts = [str(text) if isinstance(text, Path) else text for text in (flag_text(action, item) for item in values)]
        name = action.option_strings[-1].removeprefix("--")
        line = f"{name}: {_yaml(texts if isinstance(value, list) else texts[0])}"
        if action.dest in _SECRETS:  # a comment: whatever stood here instead would be one when the text is read again
            line = f"# {name}: not shown"
        lines.append(f"{line}  # {sources.get(action, 'default' if value == action.default else 'flag')}\n")
    return "".join(lines)


def _yaml(value: Any) -> str:
    """Return a value on one line; in a list, because a document of its own ends with more than itself."""
    return yaml.safe_dump([value], default_flow_style=True, width=10_000).strip()[1:-1]

"""The command line of ``python -m omniserve.server``: its flags, and the options and the engine that they ask for."""

from __future__ import annotations

import argparse
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

from omniserve.core.config import EngineConfig
from omniserve.core.options import make_options
from omniserve.core.request import ClassSpec
from omniserve.launch.dataclass_flags import add_field_flags, add_options_flag
from omniserve.launch.flags import add_engine_flags, add_profile_flag, config_from, loras_from, model_from, profile_from
from omniserve.launch.loading import EngineLoader
from omniserve.launch.models import BUILTIN_MODEL_NAME
from omniserve.server.access.keys import ApiKey, KeyRing, digest_of, read_key_file
from omniserve.server.access.limits import Limits
from omniserve.server.access.origins import checked_origin
from omniserve.server.access.tiers import class_of_tier
from omniserve.server.batches.files import BatchSettings
from omniserve.server.engines.sources import read_engines_file
from omniserve.server.errors import ApiError
from omniserve.server.options import ServerOptions
from omniserve.server.settings_parser import settings_parser, settings_text, warn_of_variables

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
    parser = settings_parser(
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
    warn_of_variables(parser)
    try:
        config = config_from(args)
        model = model_from(args)
        names = tuple(args.served_model_name or [args.model or BUILTIN_MODEL_NAME])
        options = options_from(args, tokenizer=model, model_names=names, config=config)
    except ValueError as error:
        parser.error(str(error))
    if args.print_config:
        print(settings_text(parser, args), end="")
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

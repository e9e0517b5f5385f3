"""Reads settings: a flag wins over the environment, that over a YAML file, and that over the default."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import configargparse
import yaml

ENVIRONMENT_PREFIX = "OMNISERVE_"
# Not settings, but what to do with them.
_NO_SETTINGS = ("help", "config", "print_config")
_SECRETS = ("api_key", "database_url")


def settings_parser(*, prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of flags whose values may also come from the environment or a file.

    ``--block-size 16`` is ``OMNISERVE_BLOCK_SIZE=16`` and the line ``block-size: 16`` of the file. A flag without value
    is ``true`` there, and one that may be repeated a list (in the environment as JSON).
    """
    parser: argparse.ArgumentParser = configargparse.ArgumentParser(
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


def settings_text(
    parser: argparse.ArgumentParser, args: argparse.Namespace, as_text: Callable[[argparse.Action, Any], Any]
) -> str:
    """Return all settings that have a value as YAML, each with where it came from; of secrets only that they are there.

    Args:
        parser: Made by ``settings_parser``, after it parsed.
        args: What it parsed.
        as_text: Turns a flag's parsed value into what the flag takes.
    """
    return "".join(f"{line}  # {source}\n" for line, source in _lines(parser, args, as_text))


def _lines(
    parser: argparse.ArgumentParser, args: argparse.Namespace, as_text: Callable[[argparse.Action, Any], Any]
) -> Iterator[tuple[str, str]]:
    assert isinstance(parser, configargparse.ArgumentParser)
    sources = {
        action: "environment" if source == "environment_variables" else source.partition("|")[2]
        for source, settings in parser.get_source_to_settings_dict().items()
        if source not in ("command_line", "defaults")
        for action, _ in settings.values()
    }
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if action.dest in _NO_SETTINGS or value is None:
            continue
        values = value if isinstance(value, list) else [value]
        texts: list[Any] = [_plain(as_text(action, item)) for item in values]
        name = action.option_strings[-1].removeprefix("--")
        line = f"{name}: {_yaml(texts if isinstance(value, list) else texts[0])}"
        if action.dest in _SECRETS:  # a comment: whatever stood here instead would be one when the text is read again
            line = f"# {name}: not shown"
        yield line, sources.get(action, "default" if value == action.default else "flag")


def _yaml(value: Any) -> str:
    """Return a value on one line; in a list, because a document of its own ends with more than itself."""
    return yaml.safe_dump([value], default_flow_style=True, width=10_000).strip()[1:-1]


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value

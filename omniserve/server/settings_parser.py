"""A parser of settings from flags, the environment or a YAML file, and how all of them are written as such a file.

A flag wins over the environment, that over a file, and that over the default.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import configargparse
import yaml

from omniserve.core.arguments import ArgumentParser, nearest
from omniserve.launch.flags import flag_text

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


def settings_parser(*, prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of flags whose values may also come from the environment or a file.

    ``--block-size 16`` is ``OMNISERVE_BLOCK_SIZE=16`` and the line ``block-size: 16`` of the file. A flag without value
    is ``true`` there, and one that may be repeated a list (in the environment as JSON).
    """
    make: Callable[..., SettingsParser] = SettingsParser  # its base has no types
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


class SettingsParser(ArgumentParser, configargparse.ArgumentParser):
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


def warn_of_variables(parser: argparse.ArgumentParser) -> None:
    """Log which variables of the environment look like settings and are none: one may be a slip of the pen."""
    assert isinstance(parser, SettingsParser)
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


def settings_text(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """Return all settings that have a value as YAML, each with its source; of secrets only that they are there."""
    assert isinstance(parser, SettingsParser)
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

"""Command lines of the programs: a mistake is one line, which says what was meant."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

command: str | None = None
"""What the program was called by, such as ``omniserve serve``; None: ``python -m`` and its module."""


class ArgumentParser(argparse.ArgumentParser):
    """An argparse parser that ends the program with one line, without the usage, which ``--help`` prints.

    A flag that does not exist is told with the nearest one that does.
    """

    def __init__(self, prog: str | None = None, **options: Any) -> None:
        if prog is not None and command is not None:
            prog = re.sub(r"^python -m omniserve\.\w+", command, prog)
        super().__init__(prog=prog, **options)

    def error(self, message: str) -> NoReturn:
        """End the program with status 2 and a line on standard error."""
        if "required" in message and (unknown := self._unknown_flags()):  # a flag that is missing may be one of these
            message = _about(unknown, self.known_flags())
        print(f"{self.prog}: error: {message}{self.source_of(message)} (--help lists the flags)", file=sys.stderr)
        sys.exit(2)

    def source_of(self, message: str) -> str:
        """Return what to say of where the value came from that a message is about."""
        return ""

    def parse_args(self, args: Any = None, namespace: Any = None, **options: Any) -> Any:
        """Parse the arguments; end the program if there are unknown ones."""
        self._given = list(sys.argv[1:] if args is None else args)
        parsed, unknown = self.parse_known_args(args, namespace, **options)
        self.check_parsed(parsed)
        if unknown:
            self.error(_about(unknown, self.known_flags(parsed)))
        return parsed

    def _unknown_flags(self) -> list[str]:
        flags = (argument.partition("=")[0] for argument in vars(self).get("_given", ()) if argument.startswith("--"))
        known = self.known_flags()
        return [flag for flag in flags if not any(name.startswith(flag) for name in known)]

    def check_parsed(self, parsed: argparse.Namespace) -> None:
        """End the program if what was parsed is wrong in a way that argparse does not see."""

    def known_flags(self, parsed: argparse.Namespace | None = None) -> dict[str, str]:
        """Return what to give instead of each text that may be meant: flags, and options that a flag takes by name.

        Flags of a subcommand are among them if it was chosen.
        """
        flags = dict(vars(self).get("named_options", {}))
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                chosen = [value for value in vars(parsed or argparse.Namespace()).values() if isinstance(value, str)]
                for name, parser in action.choices.items():
                    flags |= parser.known_flags() if name in chosen else {}
            elif action.help != argparse.SUPPRESS:
                flags |= {flag: flag for flag in action.option_strings if flag.startswith("--")}
        return flags


def name_options(parser: argparse.ArgumentParser, flag: str, names: Iterable[str]) -> None:
    """Note that a flag takes ``NAME=VALUE``: the error for NAME as a flag names it."""
    options = vars(parser).setdefault("named_options", {})
    options |= {f"--{name.replace('_', '-')}": f"{flag} {name}=..." for name in names}


def nearest(given: str, known: Mapping[str, str]) -> str:
    """Return the question whether a known text was meant, or nothing if none is near."""
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.7)
    return f"; did you mean {known[near[0]]}?" if near else ""


def _about(unknown: Sequence[str], known: Mapping[str, str]) -> str:
    flags = [argument.partition("=")[0] for argument in unknown if argument.startswith("-")]
    if not flags:
        return f"unexpected argument {unknown[0]!r}: a value follows its flag, and lists are separated by commas"
    return f"there is no flag {flags[0]}{nearest(flags[0].replace('_', '-'), known)}"

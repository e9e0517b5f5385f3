"""The command line of a benchmark: a flag for each setting, of the type of its default."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def argument_parser(doc: str | None, record: str | None = None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser whose description is a module's docstring.

    Args:
        doc: The docstring.
        record: Name of the benchmark, for the default of ``--record``; None: there is no such flag.
        **defaults: By name: a default, or a pair of it and a help text. A list takes several values, False is a switch.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, given in defaults.items():
        default, text = given if isinstance(given, tuple) else (given, "")
        options: dict[str, Any] = {"help": f"{text} (default: %(default)s)".strip()}
        if default is False:
            options = {"action": "store_true", "help": text}
        elif isinstance(default, list):
            options |= {"nargs": "+", "type": type(default[0]), "default": default}
        else:
            options |= {"type": type(default), "default": default}
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    if record is not None:
        parser.add_argument("--record", type=Path, default=Path(f".cache/{record}.json"), help="file of the record")
    return parser

"""Script: what the scripts of this folder share: arguments, a device, and a record that grows case by case."""

from __future__ import annotations

import argparse
import functools
import logging
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.common import arguments
from benchmarks.common.record import ROOT, write_record
from benchmarks.common.tables import table

if TYPE_CHECKING:
    from benchmarks.gpu.limits import Limits

NO_GPU = 3
"""Exit status of a script that needs a GPU which torch can use, and found none."""


class NotHere(Exception):
    """A case cannot run on this machine; the message says why."""


@dataclass(kw_only=True)
class Case:
    """One check, or one figure."""

    case: str
    outcome: str = "PASS"
    """``PASS``, ``FAIL`` or ``SKIP``; ``note`` says why."""
    measured: float | None = None
    unit: str = ""
    limit: float | None = None
    """What the hardware allows, or what this one is compared with, in the same unit."""
    goal: str = ""
    """Of the ratio of ``measured`` to ``limit``, or of ``measured`` where there is no limit."""
    met: bool | None = None
    note: str = ""
    seconds: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Measured over limit."""
        return self.measured / self.limit if self.measured is not None and self.limit else None

    def figure(
        self,
        measured: float,
        unit: str,
        *,
        limit: float | None = None,
        at_most: float | None = None,
        at_least: float | None = None,
        note: str = "",
        **details: Any,
    ) -> None:
        """Set what was measured, its limit and its goal (``at_most`` or ``at_least``)."""
        self.measured, self.unit, self.limit, self.note = measured, unit, limit, note
        self.details |= details
        compared = measured if self.ratio is None else self.ratio
        if at_most is not None:
            self.goal, self.met = f"<= {at_most:g}", compared <= at_most
        if at_least is not None:
            self.goal, self.met = f">= {at_least:g}", compared >= at_least


def argument_parser(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with what all scripts take, and a flag for each further default."""
    parser = arguments.argument_parser(
        doc, dry=(False, "tiny sizes, on the CPU where there is no GPU"), **defaults
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder of the record (default: $OUT, or benchmarks/results/gpu)")
    return parser


def folder_of(out: Path | None, *, dry: bool) -> Path:
    """Return where records go."""
    default = ROOT / ".cache" / "gpu-dry" if dry else ROOT / "benchmarks" / "results" / "gpu"
    return Path(out or os.environ.get("OUT") or default)


class Script:
    """One script's run.

    The record is written after every case, so that what a time limit or a crash cuts off is only the rest.

    Args:
        name: Of its record.
        args: From ``argument_parser``.

    Raises:
        SystemExit: There is no GPU, and this is no dry run.
    """

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        logging.basicConfig(level="WARNING", format="%(levelname)s %(name)s %(message)s")
        self.name, self.dry = name, bool(args.dry)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.cases: list[Case] = []
        self._config = {key: value for key, value in vars(args).items() if key != "out"}
        self._record = folder_of(args.out, dry=self.dry) / f"gpu_{name}.json"
        if not self.on_gpu and not self.dry and name != "machine":
            print("there is no GPU that torch can use; --dry runs tiny sizes on the CPU", file=sys.stderr)
            raise SystemExit(NO_GPU)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @functools.cached_property
    def limits(self) -> Limits:
        """What the hardware does, measured when first asked for."""
        from benchmarks.gpu.limits import Limits  # loads the extension, which may be what is broken

        return Limits(self.device, dry=self.dry)

    @contextmanager
    def case(self, name: str, *, only_failure: bool = False) -> Iterator[Case]:
        """Run the body as one case: what it raises is this case's outcome, and the script goes on.

        Args:
            name: What the case is called.
            only_failure: One of many: it is shown and recorded only if it fails.
        """
        case, began_s = Case(case=name), time.perf_counter()
        try:
            yield case
        except NotHere as reason:
            case.outcome, case.note = "SKIP", str(reason)
        except Exception as error:
            case.outcome, case.note = "FAIL", scrubbed(f"{type(error).__name__}: {error}").strip()
            case.details["traceback"] = scrubbed(traceback.format_exc()).splitlines()[-60:]
            traceback.print_exc()
        case.seconds = time.perf_counter() - began_s
        if only_failure and case.outcome != "FAIL":
            return
        self.cases.append(case)
        print(line_of(case), flush=True)
        results = {"cases": [_as_json(case) for case in self.cases]}
        write_record(self._record, name=f"gpu_{self.name}", config=self._config, seed=0, results=results)

    def end(self) -> int:
        """Print the table if there are figures; return the exit status, 1 if a case failed."""
        if any(case.measured is not None for case in self.cases):
            print("\n" + markdown([_as_json(case) for case in self.cases]), flush=True)
        return int(any(case.outcome == "FAIL" for case in self.cases))


def line_of(case: Case) -> str:
    """Return a case's line on the terminal."""
    value = "" if case.measured is None else f": {short(case.measured)} {case.unit}"
    if case.ratio is not None:
        value += f" ({short(case.ratio)} x {short(case.limit)})"
    note = f": {case.note.splitlines()[0]}" if case.note else ""
    return f"{case.outcome}  {case.case}{value}{note} [{case.seconds:.1f} s]"


def markdown(cases: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of cases as records hold them."""
    lines = [["", "case", "measured", "limit", "ratio", "goal", "met", "note"]]
    for case in cases:
        values = ["" if case[key] is None else f"{short(case[key])} {case['unit']}" for key in ("measured", "limit")]
        met, note = {None: "", True: "yes", False: "NO"}[case["met"]], case["note"].partition("\n")[0]
        row = [case["outcome"], case["case"], *values, short(case["ratio"]), case["goal"], met, note.replace("|", "/")]
        lines.append(row)
    return table(lines)


def short(value: float | None) -> str:
    """Return a number with as many digits as mean something."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def scrubbed(text: str) -> str:
    """Return a text whose absolute paths begin at the repository's root, or are a file's name alone."""
    text = text.replace(f"{ROOT}/", "")
    return re.sub(r"(?<![\w./])/(?:[\w.+@~-]+/)+", ".../", text)


def _as_json(case: Case) -> dict[str, Any]:
    record = vars(case) | {"ratio": case.ratio}
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in record.items()}

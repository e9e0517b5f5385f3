"""Cases of a benchmark: each compares arms that take turns; one command line lists, runs and records the cases.

    python -m benchmarks.MODULE --list
    python -m benchmarks.MODULE late_joins drafts --repeats 3 --record benchmarks/results/MODULE.json

A case is a generator of trials, pairs of a label and its arms. An arm is a function without arguments which serves a
load with one configuration, and returns its figures by name. The others are compared with the first arm.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.bandwidth import allowed_cpus
from benchmarks.common.record import write_record
from benchmarks.common.summary import medians
from benchmarks.common.terminal import add_sizes, table_of
from benchmarks.common.timing import in_turn, median_ratio
from omniserve.ops.isa import instruction_set_in_use

Arm = Callable[[], Mapping[str, Any]]
Trials = Generator[tuple[str, Mapping[str, Arm]], dict[str, Any], None]
"""Trials of a case; ``yield`` returns what ``compared`` returns, and the case may add entries to it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is compared, and with which sizes."""

    name: str
    about: str
    measure: Callable[[argparse.Namespace], Trials]
    sizes: Mapping[str, Any]
    """By name: a default, or a pair of it and a help text (see ``terminal.argument_parser``)."""
    tiny: Mapping[str, Any]
    """Sizes with which the case takes seconds; its figures then mean nothing."""
    uncounted: int
    """Rounds that are not counted."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that must be set before the process starts."""

    def arguments(self, given: Mapping[str, Any], *, tiny: bool = False) -> argparse.Namespace:
        """Return all sizes: those given, else those of a tiny run, else the defaults."""
        values = {name: size[0] if isinstance(size, tuple) else size for name, size in self.sizes.items()}
        values |= self.tiny if tiny else {}
        return argparse.Namespace(**values | {name: value for name, value in given.items() if name in values})

    def run(self, args: argparse.Namespace, *, shown: Callable[[str], object] = print) -> dict[str, Any]:
        """Measure all trials, show a table of each, and return their results by label."""
        results: dict[str, Any] = {}
        trials = self.measure(args)
        try:
            label, arms = next(trials)
            while True:
                results[label] = compared(in_turn(arms, getattr(args, "repeats", 1), warm_up=self.uncounted))
                try:
                    following = trials.send(results[label])
                finally:
                    shown(table_of_arms(label, results[label]))
                label, arms = following
        except StopIteration:
            return results

    def write(self, path: Path, benchmark: str, args: argparse.Namespace, results: Mapping[str, Any]) -> None:
        """Record results in a row of its own; single samples go to the file beside it."""
        config = vars(args) | {"isa": instruction_set_in_use(), "cpus": allowed_cpus()}
        kept = {label: {key: value for key, value in each.items() if key != "raw"} for label, each in results.items()}
        raw = {label: each["raw"] for label, each in results.items()}
        seed = getattr(args, "seed", 0)
        write_record(path, name=benchmark, case=self.name, config=config, seed=seed, results=kept, raw=raw)


def compared(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the medians of each arm's figures, the median ratios of pairs to the first arm's, and all samples."""
    first, *others = found
    ratios: dict[str, dict[str, float]] = {}
    for arm in others:
        ratios[arm] = {}
        for name in medians(found[arm]):
            pairs = [(own[name], base.get(name, math.nan)) for own, base in zip(found[arm], found[first], strict=True)]
            if all(_has_ratio(*pair) for pair in pairs):
                ratios[arm][name] = median_ratio([own for own, _ in pairs], [base for _, base in pairs])
    return {"medians": {arm: medians(runs) for arm, runs in found.items()}, "ratios": ratios, "raw": found}


def _has_ratio(own: Any, base: Any) -> bool:
    """Tell whether both are finite numbers, and the one that is divided by is not 0."""
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (own, base))
    return are_numbers and bool(base) and math.isfinite(own) and math.isfinite(base)


def table_of_arms(label: str, result: Mapping[str, Any]) -> str:
    """Return a line for each figure: medians, in brackets the ratios to the first arm; then what the case added."""
    of_arms, ratios = result["medians"], result["ratios"]
    lines = []
    for name in dict.fromkeys(name for figures in of_arms.values() for name in figures):
        line = {label: name}
        for arm, figures in of_arms.items():
            ratio = f" ({ratios[arm][name]:.3g})" if name in ratios.get(arm, ()) else ""
            line[arm] = f"{figures[name]:.4g}{ratio}" if name in figures else ""
        lines.append(line)
    more = [f"{name}: {value}" for name, value in result.items() if name not in ("medians", "ratios", "raw")]
    return "\n".join([table_of(lines), *more, ""])


class Benchmark:
    """Cases with one command line and one record.

    Args:
        name: Name of the module or package.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.cases: dict[str, Case] = {}

    def case(
        self, *, tiny: Mapping[str, Any], uncounted: int = 1, environment: Mapping[str, str] | None = None, **sizes: Any
    ) -> Callable[[Callable[[argparse.Namespace], Trials]], Callable[[argparse.Namespace], Trials]]:
        """Register a generator of trials as a case of its own name, which its docstring describes."""

        def register(measure: Callable[[argparse.Namespace], Trials]) -> Callable[[argparse.Namespace], Trials]:
            about = inspect.getdoc(measure) or ""
            self.cases[measure.__name__] = Case(
                name=measure.__name__, about=about, measure=measure, sizes=sizes, tiny=tiny, uncounted=uncounted,
                environment=environment or {},
            )  # fmt: skip
            return measure

        return register

    def parse(self, arguments: Sequence[str]) -> tuple[list[Case], argparse.Namespace]:
        """Return the cases that are named first, all if none is, and the flags behind them."""
        count = next((i for i, text in enumerate(arguments) if text.startswith("-")), len(arguments))
        named, flags = arguments[:count], arguments[count:]
        chosen = [self.cases[name] for name in named or self.cases if name in self.cases]
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{self.name} [CASE ...]", formatter_class=argparse.RawDescriptionHelpFormatter,
            description="\n\n".join(f"{case.name}: {case.about}" for case in chosen),
        )  # fmt: skip
        if unknown := [name for name in named if name not in self.cases]:
            parser.error(f"there is no case {', '.join(unknown)}; there are {', '.join(self.cases)}")
        parser.add_argument("--list", action="store_true", help="list all cases, and measure nothing")
        parser.add_argument("--tiny", action="store_true", help="sizes that take seconds and say nothing about speed")
        parser.add_argument("--record", type=Path, default=Path(f".cache/{self.name}.json"), help="file of the record")
        sizes: dict[str, Any] = {}
        for case in chosen:
            sizes = {**case.sizes, **sizes}
        add_sizes(parser, sizes, argument_default=argparse.SUPPRESS)
        return chosen, parser.parse_args(flags)

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run the program; several cases run in a process each, for an engine leaves its settings of torch."""
        arguments = sys.argv[1:] if arguments is None else arguments
        chosen, args = self.parse(arguments)
        if args.list:
            for case in self.cases.values():
                print(f"{case.name}: {case.about.splitlines()[0]}")
            return 0
        program = [sys.executable, "-m", f"benchmarks.{self.name}"]
        if len(chosen) > 1:
            status = 0
            for case in chosen:
                print(f"\n## {case.name}\n", flush=True)
                status |= subprocess.run([*program, case.name, *_flags(case, args)], check=False).returncode
            return int(status != 0)
        (case,) = chosen
        if missing := {name: value for name, value in case.environment.items() if name not in os.environ}:
            os.execve(sys.executable, [*program, *arguments], os.environ | missing)
        sizes = case.arguments(vars(args), tiny=args.tiny)
        case.write(args.record, self.name, sizes, case.run(sizes))
        return 0


def _flags(case: Case, args: argparse.Namespace) -> list[str]:
    """Return the flags that were given and that a case has."""
    flags = ["--record", str(args.record), *["--tiny"] * args.tiny]
    for name, value in vars(args).items():
        if name in case.sizes:
            values = value if isinstance(value, list) else [] if value is True else [value]
            flags += [f"--{name.replace('_', '-')}", *map(str, values)]
    return flags

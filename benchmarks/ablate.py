"""What each mechanism of a policy brings: a row for each, with that one switched off and all else equal.

    python -m benchmarks.ablate                                # every policy of a paper, simulated
    python -m benchmarks.ablate conserve bros --seeds 5 --jobs 2
    python -m benchmarks.ablate omniserve --on engine          # this machine, on the load of `make coserve`

The simulator runs points of the policy's own paper (``ABLATIONS``), a run for each seed; the engine serves the load of
``benchmarks.coserve`` on a new server for each row and repeat, in turns. A mechanism is an option of the policy
(docs/policies.md), or a setting of the engine. The table has medians over the seeds, and in brackets the median of the
ratios to the whole policy with the same seed, and their smallest and largest.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from benchmarks import coserve
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser, table_of
from benchmarks.paper.cases import Case, Experiment, with_settings
from benchmarks.paper.loads import LoadSpec
from benchmarks.reproduction import EXPERIMENTS, Unit
from omniserve.core.config import EngineConfig
from omniserve.simulate.load import Load

WHOLE = "all of it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mechanism:
    """A mechanism of a policy, and how it is switched off."""

    name: str
    off: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Options of the policy and settings of the engine, as a case of an experiment has them."""
    under: str = ""
    """A key of ``CONDITIONS``: what the mechanism is tried under; the whole policy is tried so, too."""
    off_is_plain: bool = False
    """The mechanism is off without that condition."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ablation:
    """The points of the papers' experiments at which a policy's mechanisms are tried, and these."""

    points: tuple[tuple[str, str], ...]
    """(experiment, x): the policy runs on the machine and load of such a point."""
    mechanisms: tuple[Mechanism, ...]
    more: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Settings of every run, beside those of the point."""
    system: str = ""
    """The system whose settings the policy has at these points, where it is not among them; "": the policy itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedDocuments(LoadSpec):
    """A load whose BE requests ask about a few documents: nine tenths of a prompt are of one of them, at random."""

    num_documents: int = 32

    def make(self, duration_s: float, *, warm_up: float, seed: int, trace_dir: Path | None = None) -> Load:
        """Draw the load as always, and a document for each BE request."""
        load = LoadSpec.make(self, duration_s, warm_up=warm_up, seed=seed, trace_dir=trace_dir)
        rng = random.Random(f"{seed} documents")
        alike = []
        for request in load.best_effort:
            first_id = rng.randrange(self.num_documents) << 20
            ids = tuple(first_id + piece for piece in range(request.input_tokens * 9 // 10 // load.hash_tokens))
            alike.append(dataclasses.replace(request, hash_ids=ids))
        return dataclasses.replace(load, best_effort=alike)

    @classmethod
    def of(cls, load: LoadSpec) -> Self:
        """Return a load like another, with documents."""
        return cls(**{field.name: getattr(load, field.name) for field in dataclasses.fields(load)})


CONDITIONS: dict[str, Callable[[Case], Case]] = {
    "steps with a noise of 0.2": lambda case: dataclasses.replace(case, noise=0.2),
    "drafts, 60 % right": lambda case: dataclasses.replace(case, drafts_right=0.6),
    "BE prompts of 32 documents": lambda case: dataclasses.replace(case, load=SharedDocuments.of(case.load)),
}
"""What makes a case one under a condition, by a word for it."""
NOISY, DRAFTED, ALIKE = CONDITIONS
_CORRECTION = Mechanism(name="correction of the model", off={"correct_model": False}, under=NOISY)
_LAYERS = Mechanism(name="layer preemption", off={"layer_preemption": False})
_CHECKPOINTS = Mechanism(name="checkpoints (incremental KV)", off={"kv": "tiered", "checkpoint_kv": False})
_STEP_SIZE = Mechanism(name="best step size", off={"best_step_size": False})
_REPLACEMENT = Mechanism(name="replacement", off={"replace_ls": False})
_BATCH_SIZE = Mechanism(name="adaptive batch size", off={"adapt_batch": False})
_BIDIRECTIONAL = Mechanism(name="bidirectional blocks", off={"kv": "tiered"})
_CO_SERVING = (
    Mechanism(name="headrooms", off={"headrooms": False}, under=NOISY),
    Mechanism(name="time for a newcomer", off={"newcomer_bound": False}),
    Mechanism(name="late joins", off={"late_joins": False}),
    _CORRECTION,
)
_SHORT_MEMORY = ("omniserve-15-memory", "1 hosts")
_HEAVY = ("omniserve-10-15-yi", "6")
_OVERLOAD = ("bros-10-13b", "9")
ABLATIONS: dict[str, Ablation] = {
    "omniserve": Ablation(
        points=(_HEAVY, _SHORT_MEMORY, _OVERLOAD), more={"admission": True}, mechanisms=(
            *_CO_SERVING,
            Mechanism(name="decodes lend their lead", off={"slack": "step"}),
            Mechanism(name="decodes before prompts", off={"be_order": "prefill"}),
            Mechanism(name="seats by rate", off={"seat_objective": False}),
            Mechanism(name="prompts that begin alike together", off={"be_prefix_order": False}, under=ALIKE),
            Mechanism(name="admission", off={"admission": False}),
            Mechanism(name="host tier", off={"kv": "paged"}),
            Mechanism(name="drafts", under=DRAFTED, off_is_plain=True),
        ),
    ),
    "omniserve-paper": Ablation(
        points=(_HEAVY, _SHORT_MEMORY, _OVERLOAD), more={"admission": True}, mechanisms=(
            Mechanism(name="late joins", off={"late_joins": False}),
            Mechanism(name="admission", off={"admission": False}),
            Mechanism(name="host tier", off={"kv": "paged"}),
            _CORRECTION,
        ),
    ),
    "neo": Ablation(
        points=(_SHORT_MEMORY, _OVERLOAD), system="omniserve", mechanisms=(
            *_CO_SERVING, Mechanism(name="partial progress first", off={"partial_progress_first": False}),
        ),
    ),
    "neo-paper": Ablation(
        points=(_SHORT_MEMORY, _OVERLOAD), system="omniserve", mechanisms=(_CORRECTION,),
    ),
    "apex": Ablation(
        points=(("apex-5-t4", "200 out"), ("apex-5-a10", "azure")), mechanisms=(
            Mechanism(name="choice of a strategy: pipelined alone", off={"strategy": "pipelined"}),
            Mechanism(name="choice of a strategy: overlapped alone", off={"strategy": "overlapped"}),
            Mechanism(name="cohorts of eight times the device's", off={"min_host_per_device": 0}),
            Mechanism(name="partial progress first", off={"partial_progress_first": False}),
            Mechanism(name="watch on the host's speed", off={"watch_host": False}, under=NOISY),
            Mechanism(name="late joins", off={"late_joins": False}),
        ),
    ),
    "conserve": Ablation(
        points=(("conserve-6-8b", "2/s"),), mechanisms=(
            _LAYERS,
            Mechanism(name="halted rows go on", off={"keep_halted": False}),
            Mechanism(name="a safepoint at each layer (every 4th)", off={"safepoint_every": 4}),
            _STEP_SIZE, _CHECKPOINTS, _CORRECTION,
        ),
    ),
    "conserve-paper": Ablation(
        points=(("conserve-6-8b", "2/s"),), system="conserve", mechanisms=(
            _LAYERS,
            Mechanism(name="halted rows begin anew", off={"keep_halted": True}),
            Mechanism(name="a safepoint at every 4th layer (each)", off={"safepoint_every": 1}),
            _STEP_SIZE, _CHECKPOINTS, _CORRECTION,
        ),
    ),
    "bros": Ablation(
        points=(("bros-10-13b", "6"), ("bros-10-13b", "9")), mechanisms=(
            _REPLACEMENT, _BATCH_SIZE,
            Mechanism(name="the batch size spares LS", off={"batch_limits_ls": True}),
            _BIDIRECTIONAL, _CORRECTION,
        ),
    ),
    "bros-paper": Ablation(
        points=(("bros-10-13b", "6"), ("bros-10-13b", "9")), system="bros", mechanisms=(
            _REPLACEMENT, _BATCH_SIZE,
            Mechanism(name="the batch size limits LS", off={"batch_limits_ls": False}),
            Mechanism(name="swap term", off={"swap_term": False}),
            _BIDIRECTIONAL, _CORRECTION,
        ),
    ),
}  # fmt: skip
"""The mechanisms of each policy. Admission is off at the papers' points, and on for ``omniserve``."""
FIGURES = {
    "LS attained": ("attainment", 100), "TTFT p99, ms": ("ttft_p99_s", 1000), "TPOT p99, ms": ("tpot_p99_s", 1000),
    "BE tokens/s": ("be_tokens_per_s", 1), "BE output/s": ("be_output_per_s", 1),
}  # fmt: skip
"""Columns of the simulator's table: a figure of ``figures_of``, and its factor."""
_HEADS = ("BE tokens/s", "BE output/s")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table: a case, and the row that it is compared with."""

    name: str
    case: Case
    beside: str
    """Name of the row of the whole policy under the same conditions."""


def rows_at(policy: str, point: tuple[str, str]) -> tuple[Experiment, list[Row]]:
    """Return the experiment of a point, and its rows: the whole policy, and the policy without each mechanism."""
    ablation = ABLATIONS[policy]
    experiment = EXPERIMENTS[point[0]]
    wanted = (point[1], ablation.system or policy, "")
    plain = next(case for case in experiment.cases if (case.x, case.system, case.variant) == wanted)
    plain = with_settings(dataclasses.replace(plain, system=policy), "", **ablation.more)
    rows = [Row(WHOLE, plain, WHOLE)]
    for word in sorted({one.under for one in ablation.mechanisms} - {""}):
        rows.append(Row(_whole(word), CONDITIONS[word](plain), _whole(word)))
    for one in ablation.mechanisms:
        case = with_settings(plain, "", **one.off)
        if one.under and not one.off_is_plain:
            case = CONDITIONS[one.under](case)
        rows.append(Row(one.name, case, _whole(one.under)))
    return experiment, rows


def _whole(under: str) -> str:
    return f"{WHOLE}, {under}" if under else WHOLE


def simulate(
    policy: str, point: tuple[str, str], *, minutes: float, seeds: int, jobs: int, bar: tqdm[Any]
) -> dict[str, list[dict[str, Any]]]:
    """Simulate a policy whole and without each mechanism; return the figures of each row, in the order of the seeds."""
    experiment, rows = rows_at(policy, point)
    cases = tuple(row.case for row in rows)
    alone = next((c for c in experiment.cases if c.system == experiment.slo_from and c.x == point[1]), None)
    units = [
        Unit(experiment=experiment, cases=group, minutes=minutes, seed=seed, trace_dir=None)
        for seed in range(seeds)
        for group in ([(alone, *cases)] if alone is not None else [(case,) for case in cases])
    ]  # fmt: skip
    found: dict[str, list[dict[str, Any]]] = {row.name: [] for row in rows}
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        done = [one for part in _counted(pool.map(Unit.run, units), bar) for one in part]
    ours = [one["figures"] for one in done if alone is None or one["case"].get("system") != alone.system]
    for number, figures in enumerate(ours):
        found[rows[number % len(rows)].name].append({name: figures[name] for name, _ in FIGURES.values()})
    return found


def _counted(parts: Iterator[list[dict[str, Any]]], bar: tqdm[Any]) -> Iterator[list[dict[str, Any]]]:
    for part in parts:
        bar.update(len(part))
        yield part


def lines_of(
    policy: str, point: tuple[str, str], found: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[dict[str, str]]:
    """Return the lines of a table, each by its columns."""
    beside = {row.name: row.beside for row in rows_at(policy, point)[1]}
    lines = []
    for name, seeds in found.items():
        line = {"without": name}
        for head, (figure, factor) in FIGURES.items():
            values = [one[figure] for one in seeds if one[figure] is not None]
            if not values:
                continue
            line[head] = f"{factor * statistics.median(values):,.{0 if factor != 100 else 1}f}"
            if head in _HEADS and beside[name] != name:
                pairs = zip(seeds, found[beside[name]], strict=True)
                if ratios := [one[figure] / other[figure] for one, other in pairs if other[figure]]:
                    line[head] += f" ({statistics.median(ratios):.2f}; {min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(line)
    return lines


def flags_of(policy: str, mechanism: Mechanism) -> str:
    """Return a policy without a mechanism as ``benchmarks.coserve`` names it."""
    fields = EngineConfig.__dataclass_fields__
    flags = [
        f"{name}={_text(value)}" if name in fields else f"scheduler-option={name}={_text(value)}"
        for name, value in mechanism.off.items()
    ]
    return ",".join([policy, *flags])


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(
        __doc__, minutes=(3.0, "simulated, a run"), seeds=(3, "runs of each row"),
        jobs=(len(os.sched_getaffinity(0)), "processes"),
    )  # fmt: skip
    parser.add_argument("policies", nargs="*", metavar="POLICY", help=f"of {', '.join(ABLATIONS)}; none: all")
    parser.add_argument("--on", choices=("simulator", "engine"), default="simulator")
    parser.add_argument("--record", type=Path, metavar="FILE", help="of the simulator: add a row for each policy")
    args = parser.parse_args(arguments)
    if unknown := [policy for policy in args.policies if policy not in ABLATIONS]:
        parser.error(f"nothing is known of the mechanisms of {', '.join(unknown)}; there are {', '.join(ABLATIONS)}")
    if args.seeds < 1 or args.jobs < 1 or args.minutes <= 0:
        parser.error("--seeds and --jobs must be 1 or more, --minutes more than 0")
    if args.record is not None and args.on == "engine":
        parser.error("--record is for the simulator: the runs of the engine are those of benchmarks.coserve")
    args.policies = args.policies or list(ABLATIONS)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    return on_engine(args.policies, args.seeds) if args.on == "engine" else on_simulator(args)


def on_engine(policies: Sequence[str], repeats: int) -> int:
    """Serve the load of ``benchmarks.coserve`` on which memory is short, so that all mechanisms have work."""
    for policy in policies:
        rows = [policy, *(flags_of(policy, one) for one in ABLATIONS[policy].mechanisms if one.off)]
        if status := coserve.main(["--load", "memory", "--repeats", str(repeats), "--policies", *rows]):
            return status
    return 0


def on_simulator(args: argparse.Namespace) -> int:
    """Simulate each policy at its points, print their tables, and record them."""
    points = [(policy, point) for policy in args.policies for point in ABLATIONS[policy].points]
    total = args.seeds * sum(len(rows_at(policy, point)[1]) for policy, point in points)
    with tqdm(total=total, disable=None, bar_format="{percentage:3.0f}% |{bar:30}| {elapsed} {desc}") as bar:
        for policy in args.policies:
            results = {}
            for point in ABLATIONS[policy].points:
                bar.set_description_str(f"{policy}, {point[0]}")
                found = simulate(policy, point, minutes=args.minutes, seeds=args.seeds, jobs=args.jobs, bar=bar)
                bar.clear()
                figure = EXPERIMENTS[point[0]].figure
                print(f"\n{policy}, {figure}, {point[1]}:\n{table_of(lines_of(policy, point, found))}", flush=True)
                beside = {row.name: row.beside for row in rows_at(policy, point)[1]}
                results[" ".join(point)] = {"figure": figure, "x": point[1], "rows": found, "beside": beside}
                if args.record is not None:
                    config = {"simulated": True, "minutes": args.minutes, "seeds": args.seeds}
                    write_record(args.record, name="ablate", case=policy, config=config, seed=0, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m omniserve.explain FILE``: what a trace of steps says about predictions, objectives and bounds."""

from __future__ import annotations

import bisect
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from omniserve.core.arguments import ArgumentParser
from omniserve.core.plan import Bound
from omniserve.core.request import ServiceClass
from omniserve.latency import accuracy_of_errors
from omniserve.latency.trace import Outcome, Trace, TracedStep, read_steps

CAUSES = ("waiting", "memory", "LS prefill", "best effort", "misprediction", "own work")
"""The causes of a request's time (see ``causes_of``)."""

_MEMORY_BOUNDS = (Bound.MEMORY, Bound.HOST_MEMORY)
_NUM_TERMS = 3


def causes_of(outcome: Outcome, trace: Trace) -> dict[str, float]:
    """Return the seconds from arrival to first token, or from there to the end, by cause; they add up to all of it.

    ``misprediction``: what steps took longer than predicted, and of the rest ``memory``: steps without the request that
    had no blocks for it; ``LS prefill``: the part of steps, its own or not, that computed prompts of other
    latency-sensitive requests; ``best effort``: the part that best-effort work took; ``waiting``: the remaining time in
    which it was in no step; ``own work``: that in which it was.
    """
    causes = dict.fromkeys(CAUSES, 0.0)
    first = bisect.bisect_right(trace.steps, outcome.from_s, key=lambda step: step.ended_s)
    last = bisect.bisect_left(trace.steps, outcome.to_s, key=lambda step: step.started_s)
    covered_s = 0.0
    for step in trace.steps[first:last]:
        overlap_s = min(step.ended_s, outcome.to_s) - max(step.started_s, outcome.from_s)
        covered_s += overlap_s
        takes_part = _takes_part(outcome.request_id, step)
        if step.predicted_s is not None:
            late_s = min(overlap_s, max(0.0, step.measured_s - step.predicted_s))
            causes["misprediction"] += late_s
            overlap_s -= late_s
        if not takes_part and _stopped_by_memory(outcome, step, trace):
            causes["memory"] += overlap_s
            continue
        best_effort, prefill = _shares(outcome.request_id, step, trace.kinds)
        causes["best effort"] += best_effort * overlap_s
        causes["LS prefill"] += prefill * overlap_s
        causes["own work" if takes_part else "waiting"] += (1 - best_effort - prefill) * overlap_s
    causes["waiting"] += max(0.0, outcome.to_s - outcome.from_s - covered_s)  # no step ran
    return causes


def main_cause(causes: Mapping[str, float]) -> str:
    """Return the cause with the most seconds."""
    return max(causes, key=causes.__getitem__)


def report(trace: Trace, top: int) -> Iterator[str]:
    """Yield the lines of the whole report."""
    yield from _predictions(trace, top)
    yield from _attainment(trace)
    yield from _misses(trace, top)
    yield from _bounds(trace)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status: 2 if the file cannot be explained."""
    parser = ArgumentParser(prog="python -m omniserve.explain", description="Explain a trace of steps.")
    parser.add_argument("file", metavar="FILE", help="written by --trace-steps")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="rows of the worst (default: %(default)s)")
    args = parser.parse_args(arguments)
    if args.top < 1:
        parser.error(f"argument --top: must be >= 1, got {args.top}")
    try:
        trace = read_steps(args.file)
        if not trace.steps:
            raise ValueError(f"{args.file} has no step yet; send the server some requests")
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    for line in report(trace, args.top):
        print(line)
    return 0


def _predictions(trace: Trace, top: int) -> Iterator[str]:
    seconds = trace.steps[-1].ended_s - trace.steps[0].started_s
    yield f"{len(trace.steps)} steps in {seconds:.1f} s"
    partial = sum(not step.is_whole for step in trace.steps)
    if partial:
        yield f"{partial} of them computed a part of their layers (rows left, or came back) and are not judged"
    predicted = [(step, step.predicted_s) for step in trace.steps if step.predicted_s and step.is_whole]
    if not predicted:
        if any(step.predicted_s for step in trace.steps):
            yield "No whole step was predicted."
        else:
            yield "No step was predicted: the engine had no latency model."
        return
    accuracy = accuracy_of_errors([abs(p - step.measured_s) / step.measured_s for step, p in predicted])
    yield f"{len(predicted)} predicted: accuracy {accuracy.mean:.1%} on average, {accuracy.p90:.1%} at P90"
    worst = sorted(predicted, key=lambda pair: -abs(pair[0].measured_s - pair[1]))[:top]
    rows = []
    for step, p in worst:
        terms = sorted(step.terms.items(), key=lambda term: -term[1])[:_NUM_TERMS]
        rows.append(
            (
                str(step.step),
                _ms(p),
                _ms(step.measured_s),
                f"{step.measured_s / p:.2f}",
                f"{(step.measured_s - p) * 1e3:+.1f}",
                ", ".join(f"{name} {_ms(s)}" for name, s in terms),
                " ".join(f"{name}={value:g}" for name, value in step.features.items() if value),
            )
        )
    yield from _table(
        "Worst predictions (ms)",
        ("step", "predicted", "measured", "ratio", "off by", "largest terms", "features"),
        rows,
    )


def _attainment(trace: Trace) -> Iterator[str]:
    rows = []
    for name in trace.kinds:
        for objective in ("ttft", "tpot"):
            seen = [o for o in _outcomes(trace) if (o.service_class, o.objective) == (name, objective)]
            if not seen:
                continue
            judged = [o for o in seen if o.met is not None]
            met = sum(o.met is True for o in judged)
            times = sorted(o.seconds for o in seen)
            rows.append(
                (
                    name,
                    objective,
                    str(len(seen)),
                    f"{met} of {len(judged)}" if judged else "-",
                    f"{met / len(judged):.1%}" if judged else "-",
                    _ms(statistics.median(times)),
                    _ms(times[min(len(times) - 1, int(0.99 * len(times)))]),
                )
            )
    header = ("class", "objective", "requests", "met", "share", "median ms", "P99 ms")
    yield from _table("Objectives", header, rows)


def _misses(trace: Trace, top: int) -> Iterator[str]:
    misses = [(o, causes_of(o, trace)) for o in _outcomes(trace) if o.met is False]
    counts = Counter((o.service_class, o.objective, main_cause(causes)) for o, causes in misses)
    yield from _table(
        "Missed objectives by main cause",
        ("class", "objective", "main cause", "requests"),
        [(*key, str(count)) for key, count in counts.most_common()],
    )
    misses.sort(key=lambda miss: miss[0].seconds / (miss[0].limit_s or 1), reverse=True)
    rows = []
    for o, causes in misses[:top]:
        shares = [f"{causes[name] / max(o.to_s - o.from_s, 1e-9):.0%}" for name in CAUSES]
        times = (_ms(o.seconds), _ms(o.limit_s), _ms(o.predicted_s))
        rows.append((o.request_id, o.service_class, o.objective, *times, *shares, main_cause(causes)))
    header = ("request", "class", "objective", "took ms", "limit", "predicted", *CAUSES, "main cause")
    yield from _table(f"Worst of {len(misses)} misses, and what their time went to", header, rows)


def _bounds(trace: Trace) -> Iterator[str]:
    steps: Counter[tuple[str, str]] = Counter()
    for step in trace.steps:
        steps.update({(work, bound) for work, _, _, bound in step.left_out})
    works, bounds = (list(dict.fromkeys(key[i] for key in sorted(steps))) for i in (0, 1))
    rows = [(work, *(str(steps[work, bound] or "-") for bound in bounds)) for work in works]
    yield from _table("Steps in which a bound stopped work", ("work", *bounds), rows)
    limits = Counter(step.bound_by.split(" of ")[0] for step in trace.steps if step.bound_by)
    yield from _table("What bounded the steps", ("bound", "steps"), [(k, str(n)) for k, n in limits.most_common()])


def _outcomes(trace: Trace) -> Iterator[Outcome]:
    for step in trace.steps:
        yield from step.outcomes


def _takes_part(request_id: str, step: TracedStep) -> bool:
    return (
        any(chunk[0] == request_id for chunk in step.chunks)
        or request_id in step.entries
        or request_id in step.pipelined
        or any(join[0] == request_id for join in step.joins)
    )


def _stopped_by_memory(outcome: Outcome, step: TracedStep, trace: Trace) -> bool:
    """Tell whether memory ran out for the request, or for one of its kind before it. A step names the first only."""
    kind = trace.kinds[outcome.service_class]
    return any(
        bound in _MEMORY_BOUNDS and (first == outcome.request_id or work.startswith(kind))
        for work, _, first, bound in step.left_out
    )


def _shares(request_id: str, step: TracedStep, kinds: Mapping[str, ServiceClass]) -> tuple[float, float]:
    """Return which parts of a step are best-effort work, and prompts of other LS requests; without the request's own.

    Best effort is what the prediction says, or else its share of the rows.
    """
    sensitive = [chunk for chunk in step.chunks if kinds[chunk[1]] == ServiceClass.LS]
    rows, ls_rows = (sum(chunk[3] for chunk in chunks) for chunks in (step.chunks, sensitive))
    prefill = sum(n for other, _, _, n in sensitive if n > 1 and other != request_id)
    if step.predicted_s and step.predicted_ls_s is not None:
        best_effort = min(max(1 - step.predicted_ls_s / step.predicted_s, 0.0), 1.0)
    else:
        best_effort = (rows - ls_rows) / rows if rows else 1.0
    others = [n for other, name, _, n in step.chunks if other != request_id and kinds[name] == ServiceClass.BE]
    away = [*step.entries, *step.pipelined, *(join[0] for join in step.joins)]
    all_best_effort = rows - ls_rows + len(away)
    if all_best_effort:
        best_effort *= (sum(others) + len(away) - away.count(request_id)) / all_best_effort
    return best_effort, (1 - best_effort) * prefill / ls_rows if ls_rows else 0.0


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a plain-text table; numbers to the right."""
    yield ""
    yield title
    lines = [header, *rows]
    if len(lines) == 1:
        yield "  none"
        return
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = [all(cell[:1] in "+-0123456789" for cell in column) for column in zip(*lines[1:], strict=True)]
    for line in lines:
        cells = zip(line, widths, right, strict=True)
        yield ("  " + "  ".join(cell.rjust(w) if to_right else cell.ljust(w) for cell, w, to_right in cells)).rstrip()

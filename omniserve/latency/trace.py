"""A trace of steps: one JSON line for each, written by the engine, read by ``python -m omniserve.explain``."""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from omniserve.core.plan import Decision, StepPlan
from omniserve.core.request import SLO, ClassSpec, FinishReason, RequestOutput, ServiceClass
from omniserve.core.work import DiskCopy, KVMove

logger = logging.getLogger(__name__)

_FORMAT = "omniserve steps 1"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The time of a request to its first token (``ttft``), or per token after that (``tpot``), in seconds."""

    request_id: str
    service_class: str
    objective: str
    """``ttft`` or ``tpot``."""
    seconds: float
    limit_s: float | None
    """The objective in seconds; None if the request had none."""
    met: bool | None
    from_s: float
    """Arrival, or first token."""
    to_s: float
    """First token, or end."""
    first_scheduled_s: float | None
    predicted_s: float | None
    """TTFT that was predicted at arrival."""
    cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache had when the request began; for a ``ttft`` alone."""


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A line of a trace, in seconds; times are on the engine's clock; None where nothing was predicted."""

    step: int
    started_s: float
    measured_s: float
    predicted_s: float | None
    predicted_ls_s: float | None
    """Predicted seconds of the step without its best-effort work."""
    bound_s: float | None
    bound_by: str
    features: dict[str, float]
    """BatchFeatures."""
    terms: dict[str, float]
    """Parts of the prediction; empty without a latency model."""
    scheduled: dict[str, dict[str, Any]]
    """Class -> requests, tokens (device rows), prefill_tokens, joins (layer -> number), entries, pipelined, moves."""
    chunks: list[tuple[str, str, int, int]]
    """(request id, class, position of the first token, number of tokens)."""
    entries: list[str]
    """Request ids of tokens that began their way on the host tier."""
    joins: list[tuple[str, int]]
    """(request id, layer)."""
    moves: list[tuple[str, str, int, bool]]
    """(request id, direction, blocks, is it a checkpoint). Without an id: prefixes that are copied to the host."""
    disk_copies: list[tuple[str, int]] = field(default_factory=list)
    """(``to_disk`` or ``to_host``, blocks)."""
    pipelined: list[str] = field(default_factory=list)
    """Request ids of the second sub-batch."""
    halted: dict[str, int] = field(default_factory=dict)
    """Request id -> first layer that was not computed, of those that were asked to leave."""
    resumed: dict[str, int] = field(default_factory=dict)
    """Request id -> first layer that was computed, of those that had left an earlier step."""
    left_out: list[tuple[str, int, str, str]] = field(default_factory=list)
    """(work, number of requests, id of the first, bound)."""
    outcomes: list[Outcome] = field(default_factory=list)
    """Requests that got their first token or ended in this step."""

    @property
    def ended_s(self) -> float:
        return self.started_s + self.measured_s

    @property
    def is_whole(self) -> bool:
        """True if all rows passed all layers: the others took less than was predicted, rightly."""
        return not (self.halted or self.resumed)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A file that was read."""

    kinds: Mapping[str, ServiceClass]
    """Class name -> how its requests are treated; highest priority first."""
    steps: Sequence[TracedStep]


class StepTracer:
    """Writes a trace over what the file held; each line is on its way to the file when ``record`` returns.

    A write that fails (a full disk) is logged once and ends the trace, never the serving.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, path: str | Path, *, classes: Sequence[ClassSpec]) -> None:
        self._path = path
        self._file: TextIO | None = open(path, "w", encoding="utf-8", buffering=1)
        self._write({"format": _FORMAT, "classes": [(spec.name, str(spec.kind)) for spec in classes]})

    def record(
        self,
        plan: StepPlan,
        *,
        started_s: float,
        seconds: float,
        features: Mapping[str, float],
        terms: Mapping[str, float],
        halted: Mapping[str, int],
        outputs: Sequence[RequestOutput],
        slos: Mapping[str, SLO],
        classes: Mapping[str, str],
    ) -> None:
        """Append a line.

        Args:
            terms: Parts of its prediction; empty without a latency model.
            halted: Request id -> first layer that was not computed, of those that left it.
            slos: Request id -> objectives; of the outputs' requests at least.
            classes: Request id -> name of its class; of all requests of the plan at least.
        """
        if self._file is None:
            return
        decision = plan.decision or Decision()
        predicted_s = decision.predicted_s
        if predicted_s is None and terms:
            predicted_s = sum(terms.values())
        step = TracedStep(
            step=plan.step_id,
            started_s=started_s,
            measured_s=seconds,
            predicted_s=predicted_s,
            predicted_ls_s=decision.predicted_ls_s,
            bound_s=decision.bound_s,
            bound_by=decision.bound_by,
            features=dict(features),
            terms=dict(terms),
            scheduled=_scheduled(plan, classes),
            chunks=[(c.request_id, classes[c.request_id], c.start, len(c.token_ids)) for c in plan.chunks],
            entries=[entry.request_id for entry in plan.entries],
            pipelined=[row.request_id for row in plan.pipelined],
            joins=[(join.request_id, join.layer) for join in plan.joins],
            halted=dict(halted),
            resumed={chunk.request_id: chunk.from_layer for chunk in plan.chunks if chunk.from_layer},
            moves=[
                (m.request_id, str(m.direction), len(m.src_block_ids), m.is_checkpoint) for m in plan.side_work(KVMove)
            ],
            disk_copies=[
                ("to_disk" if copy.to_disk else "to_host", len(copy.slots)) for copy in plan.side_work(DiskCopy)
            ],
            left_out=[(o.work, o.num_requests, o.first_request_id, str(o.bound)) for o in decision.left_out],
            outcomes=[outcome for output in outputs for outcome in _outcomes(output, slos[output.request_id])],
        )
        self._write(vars(step))

    def close(self) -> None:
        """End the trace. A second call does nothing."""
        file, self._file = self._file, None
        if file is not None:
            file.close()  # writes nothing: every line was written at its end

    def _write(self, line: dict[str, Any]) -> None:
        assert self._file is not None
        try:
            self._file.write(json.dumps(line, default=vars, separators=(",", ":")) + "\n")
        except OSError as error:
            logger.error("no more steps are traced: %s cannot be written: %s", self._path, error)
            with contextlib.suppress(OSError):  # the same error: closing tries to write the line again
                self._file.close()
            self._file = None


def read_steps(path: str | Path) -> Trace:
    """Read a trace; a last line that is not complete (the engine still writes, or was killed) is left out.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no trace, or a line of it is damaged; the message says where.
    """
    not_a_trace = f"{path} is no trace of steps; make one with --trace-steps (EngineConfig.trace_steps)"
    try:
        head, *lines = Path(path).read_text(encoding="utf-8").split("\n")[:-1] or [""]
        header = json.loads(head)
    except ValueError:
        raise ValueError(not_a_trace) from None
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise ValueError(not_a_trace)
    steps = []
    for number, line in enumerate(lines, start=2):
        try:
            fields = json.loads(line)
            steps.append(TracedStep(**fields | {"outcomes": [Outcome(**o) for o in fields["outcomes"]]}))
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path}, line {number}: this is no traced step; the file is damaged") from None
    return Trace(kinds={name: ServiceClass(kind) for name, kind in header["classes"]}, steps=steps)


def _scheduled(plan: StepPlan, classes: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    ids: dict[str, set[str]] = {}
    counts: dict[str, Counter[str]] = {}
    joins: dict[str, Counter[int]] = {}

    def of(request_id: str) -> Counter[str]:
        name = classes[request_id]
        ids.setdefault(name, set()).add(request_id)
        return counts.setdefault(name, Counter(tokens=0, prefill_tokens=0, entries=0, pipelined=0, moves=0))

    for chunk in plan.chunks:
        num_tokens = len(chunk.token_ids)
        is_prefill = num_tokens > 1 and not chunk.num_drafts
        of(chunk.request_id).update(tokens=num_tokens, prefill_tokens=num_tokens if is_prefill else 0)
    for entry in plan.entries:
        of(entry.request_id).update(entries=1)
    for row in plan.pipelined:
        of(row.request_id).update(pipelined=1)
    for move in plan.side_work(KVMove):
        if move.request_id:  # else it is of a prefix
            of(move.request_id).update(moves=1)
    for join in plan.joins:
        of(join.request_id)
        joins.setdefault(classes[join.request_id], Counter())[join.layer] += 1
    return {name: {"requests": len(ids[name]), **counts[name], "joins": joins.get(name, {})} for name in counts}


def _outcomes(output: RequestOutput, slo: SLO) -> Iterator[Outcome]:
    times = output.times
    if times is None or times.first_token_s is None:
        return
    spans = []
    if output.new_token_ids and output.num_output_tokens == len(output.new_token_ids):
        spans.append(("ttft", times.arrival_s, times.first_token_s, 1, slo.ttft_s))
    ended_by_itself = output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    if ended_by_itself and times.finished_s is not None and output.num_output_tokens > 1:
        spans.append(("tpot", times.first_token_s, times.finished_s, output.num_output_tokens - 1, slo.tpot_s))
    for objective, from_s, to_s, count, limit_s in spans:
        seconds = (to_s - from_s) / count
        yield Outcome(
            request_id=output.request_id,
            service_class=output.service_class,
            objective=objective,
            seconds=seconds,
            limit_s=limit_s,
            met=None if limit_s is None else seconds <= limit_s,
            from_s=from_s,
            to_s=to_s,
            first_scheduled_s=times.first_scheduled_s,
            predicted_s=times.predicted_ttft_s if objective == "ttft" else None,
            cached_tokens=output.num_cached_tokens if objective == "ttft" else 0,
        )

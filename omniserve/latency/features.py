"""BatchFeatures: what a step's latency depends on. Counts from a StepPlan, no tensors.

Symbols as in the papers: n(t) rows, c_PA(t) and c_DA(t) attention loads, g(t) decoding requests (omniserve 3.3.1).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from omniserve.core.plan import PiggybackJoin, StepPlan
from omniserve.core.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFeatures:
    """The load of one step. A chunk of one row counts as a decode, whatever the row is: it costs the same."""

    prefill_requests: int = 0
    prefill_tokens: int = 0
    """Rows of the chunks that have more than one."""
    prefill_context: int = 0
    """Tokens whose KV these requests had before the step."""
    prefill_load: float = 0.0
    """c_PA: keys seen by all these rows together, the mean over the layers (layers may have windows)."""
    decode_requests: int = 0
    """g."""
    decode_context: int = 0
    """Tokens whose KV the decoding requests had before the step."""
    decode_load: float = 0.0
    """c_DA: keys seen by the decoding rows, the mean over the layers."""
    sampled_rows: int = 0
    """Rows that become logits."""
    seats: int = 0
    """P: rows that the step has for piggyback tokens, occupied or not."""
    piggyback_rows: int = 0
    """Tokens that enter or join, over all layers."""
    piggyback_layers: int = 0
    """Layers that somebody joins or enters at."""
    dense_layers: float = 0.0
    """Layers whose dense halves run: all of them with device rows, else those that a piggyback row is at."""
    host_works: bool = False
    """The host tier works during the step (without a GPU it then has a share of the cores)."""
    pipelined_rows: int = 0
    """Rows of the second sub-batch, whose host attention the step waits for."""
    pipelined_load: float = 0.0
    """Keys that they see in a layer, together."""
    pipelined_layers: float = 0.0
    """Layers that they have left, on average."""
    swap_bytes: int = 0
    """KV that must have come from the host before the step can run; 0 in this engine, whose moves run beside steps."""

    @property
    def device_rows(self) -> int:
        """Rows whose attention is on the device."""
        return self.prefill_tokens + self.decode_requests

    @property
    def rows(self) -> int:
        """n: rows of the dense modules."""
        return self.prefill_tokens + self.decode_requests + self.seats


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What features need to know of a model."""

    num_layers: int
    windows: tuple[tuple[int, int], ...]
    """(sliding window or 0, number of layers that have it)."""

    @classmethod
    def of(cls, spec: ModelSpec) -> ModelShape:
        """Take it from a model's spec."""
        windows = Counter(layer.window for layer in spec.attention)
        return cls(num_layers=spec.num_layers, windows=tuple(sorted(windows.items())))

    def load(self, start: int, count: int) -> float:
        """Return the keys that ``count`` rows see, the first at position ``start``; the mean over the layers."""
        total = 0
        for window, layers in self.windows:
            total += layers * _keys_seen(start, count, window)
        return total / self.num_layers


def _keys_seen(start: int, count: int, window: int) -> int:
    """Sum of min(i, window) over i in ``[start + 1, start + count]``; window 0 is none."""
    if window == 0 or start + count <= window:
        return count * start + count * (count + 1) // 2
    inside = max(0, window - start)  # rows that see less than a whole window, or just that
    return inside * start + inside * (inside + 1) // 2 + (count - inside) * window


def features_of(plan: StepPlan, shape: ModelShape, *, host_works: bool = False, swap_bytes: int = 0) -> BatchFeatures:
    """Return the features of a plan.

    Args:
        plan: The step.
        shape: The model's.
        host_works: The host tier works during the step; a plan with piggyback rows says so by itself.
        swap_bytes: See BatchFeatures.
    """
    prefill_requests = prefill_tokens = prefill_context = decode_requests = decode_context = sampled = 0
    prefill_load = decode_load = 0.0
    for chunk in plan.chunks:
        count = len(chunk.token_ids)
        if count == 1:
            decode_requests += 1
            decode_context += chunk.start
            decode_load += shape.load(chunk.start, 1)
        else:
            prefill_requests += 1
            prefill_tokens += count
            prefill_context += chunk.start
            prefill_load += shape.load(chunk.start, count)
        sampled += chunk.samples
        if chunk.scores is not None:
            sampled += len(chunk.scores.token_ids)
    join_layers = {join.layer for join in plan.joins}
    layers_left = [shape.num_layers - (row.layer if isinstance(row, PiggybackJoin) else 0) for row in plan.pipelined]
    last = shape.num_layers - 1
    if plan.chunks:
        dense_layers = float(shape.num_layers)
    else:
        # Post-attention runs where somebody joins, pre-attention one layer on, and at layer 0 for those that enter.
        dense_layers = (2 * len(join_layers) - (last in join_layers) + bool(plan.entries)) / 2
    return BatchFeatures(
        prefill_requests=prefill_requests,
        prefill_tokens=prefill_tokens,
        prefill_context=prefill_context,
        prefill_load=prefill_load,
        decode_requests=decode_requests,
        decode_context=decode_context,
        decode_load=decode_load,
        sampled_rows=sampled + sum(join.layer == last for join in plan.joins) + len(plan.pipelined),
        seats=plan.num_piggyback_slots,
        piggyback_rows=len(plan.joins) + len(plan.entries),
        piggyback_layers=len(join_layers) + bool(plan.entries),
        dense_layers=dense_layers,
        host_works=host_works or bool(plan.joins or plan.entries or plan.pipelined),
        pipelined_rows=len(plan.pipelined),
        pipelined_load=sum(shape.load(row.position, 1) for row in plan.pipelined),
        pipelined_layers=sum(layers_left) / len(layers_left) if layers_left else 0.0,
        swap_bytes=swap_bytes,
    )

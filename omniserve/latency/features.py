"""The quantities that a step's latency depends on: counts of rows and of the keys that they see, no tensors.

Symbols as in the papers: n(t) rows, c_PA(t) and c_DA(t) attention loads, g(t) decoding requests (omniserve 3.3.1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from omniserve.core.plan import PiggybackJoin, StepPlan
from omniserve.core.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The shape of a model, as far as features depend on it."""

    num_layers: int
    windows: tuple[tuple[int, int], ...]
    """(sliding window or 0, number of layers that have it). Layers with chunks are not among them."""
    chunks: tuple[tuple[int, int], ...] = ()
    """(size of the chunks within which a layer attends, number of layers that have it)."""

    @classmethod
    def of(cls, spec: ModelSpec) -> ModelShape:
        """Take it from a model's spec."""
        windows = Counter(layer.window for layer in spec.attention if not layer.chunk)
        chunks = Counter(layer.chunk for layer in spec.attention if layer.chunk)
        return cls(
            num_layers=spec.num_layers, windows=tuple(sorted(windows.items())), chunks=tuple(sorted(chunks.items()))
        )

    def keys_seen(self, start: int, count: int) -> float:
        """Return the keys that ``count`` rows see, the first at position ``start``; the mean over the layers."""
        keys = sum(layers * _keys_seen(start, count, window) for window, layers in self.windows)
        keys += sum(layers * _keys_seen_in_chunks(start, count, chunk) for chunk, layers in self.chunks)
        return keys / self.num_layers


def _keys_seen(start: int, count: int, window: int) -> int:
    """Return the sum of min(i, window) over i in ``[start + 1, start + count]``; window 0 is none."""
    if window == 0 or start + count <= window:
        return count * start + count * (count + 1) // 2
    inside = max(0, window - start)  # rows that see less than a whole window, or just that
    return inside * start + inside * (inside + 1) // 2 + (count - inside) * window


def _keys_seen_in_chunks(start: int, count: int, chunk: int) -> int:
    """Return the sum of p % chunk + 1 over p in ``[start, start + count)``."""

    def up_to(end: int) -> int:
        whole, rest = divmod(end, chunk)
        return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2

    return up_to(start + count) - up_to(start)


@dataclass(kw_only=True)
class BatchFeatures:
    """The contents of a step as counts."""

    prefill_requests: int = 0
    prefill_tokens: int = 0
    """Rows of the chunks that have more than one."""
    prefill_context: int = 0
    """Tokens that these requests had the KV of before the step."""
    prefill_load: float = 0.0
    """c_PA: keys seen by all these rows together, the mean over the layers (layers may have windows)."""
    decode_requests: int = 0
    """g."""
    decode_context: int = 0
    """Tokens that the decoding requests had the KV of before the step."""
    decode_load: float = 0.0
    """c_DA: keys seen by the decoding rows, the mean over the layers."""
    sampled_rows: int = 0
    """Rows that become logits."""
    seats: int = 0
    """P: rows that the step has for piggyback tokens, occupied or not."""
    piggyback_rows: int = 0
    """Tokens that enter or join, over all layers."""
    piggyback_layers: int = 0
    """Layers that tokens join or enter at."""
    dense_layers: float = 0.0
    """Layers that run their dense halves: all of them with device rows, else those that tokens are at."""
    host_works: bool = False
    """The host tier works during the step (without a GPU it then has a share of the cores)."""
    pipelined_rows: int = 0
    """Rows of the second sub-batch, and of a hybrid first one: the step waits for their host attention."""
    pipelined_load: float = 0.0
    """Keys that they see in a layer, together."""
    pipelined_layers: float = 0.0
    """Layers that they have left, on average."""
    hybrid_rows: int = 0
    """Number of these rows that are in the first sub-batch, not in the second."""
    swap_bytes: int = 0
    """KV that must have come from the host before the step can run. Measured steps have none, as copies run beside
    them; the policy ``bros-paper`` asks what such a step would take."""

    @property
    def device_rows(self) -> int:
        """Rows with their attention on the device."""
        return self.prefill_tokens + self.decode_requests

    @property
    def rows(self) -> int:
        """n: rows of the dense modules."""
        return self.prefill_tokens + self.decode_requests + self.seats + self.hybrid_rows

    @property
    def second_rows(self) -> int:
        """Rows of the second sub-batch that are not in the first."""
        return self.pipelined_rows - self.hybrid_rows

    @property
    def is_empty(self) -> bool:
        """True if the step has no rows."""
        return not (self.prefill_tokens or self.decode_requests or self.piggyback_rows or self.pipelined_rows)


class StepRows:
    """The rows of a step as they are added: ``features`` grow with them."""

    __slots__ = ("features", "shape")

    def __init__(self, shape: ModelShape, features: BatchFeatures) -> None:
        self.shape = shape
        self.features = features

    def add_chunk(self, start: int, count: int, *, samples: int) -> None:
        """Add device rows at positions ``[start, start + count)`` of a request, ``samples`` of which become logits.

        A chunk of one row counts as a decode, whatever the row is: it costs the same.
        """
        keys_seen = self.shape.keys_seen(start, count)
        if count == 1:
            self.add_decodes(1, start, keys_seen, samples=samples)
            return
        features = self.features
        features.prefill_requests += 1
        features.prefill_tokens += count
        features.prefill_context += start
        features.prefill_load += keys_seen
        features.sampled_rows += samples
        features.dense_layers = float(self.shape.num_layers)

    def add_decodes(self, count: int, context: int, keys_seen: float, *, samples: int) -> None:
        """Add single device rows of several requests; ``context`` tokens of them together have their KV."""
        if count == 0:
            return
        features = self.features
        features.decode_requests += count
        features.decode_context += context
        features.decode_load += keys_seen
        features.sampled_rows += samples
        features.dense_layers = float(self.shape.num_layers)

    def add_drafts(self, start: int, count: int) -> None:
        """Add ``count`` draft rows behind a decode at ``start`` that the step has; they become logits, too."""
        features = self.features
        features.decode_requests -= 1
        features.decode_context -= start
        features.decode_load -= self.shape.keys_seen(start, 1)
        features.sampled_rows -= 1
        self.add_chunk(start, 1 + count, samples=1 + count)

    def add_piggyback(self, seats: int, num_entries: int, joins: Sequence[int]) -> None:
        """Add the step's piggyback rows, once: tokens that enter at layer 0, and how many join at each layer."""
        features = self.features
        num_layers = sum(count > 0 for count in joins)
        features.seats = seats
        features.piggyback_rows = num_entries + sum(joins)
        features.piggyback_layers = num_layers + (num_entries > 0)
        features.sampled_rows += joins[-1]
        features.host_works |= features.piggyback_rows > 0
        if not features.device_rows:
            # Post-attention runs where a token joins, pre-attention one layer on, and at layer 0 for those that enter.
            features.dense_layers = (2 * num_layers - (joins[-1] > 0) + (num_entries > 0)) / 2

    def add_host_drafts(self, seats: int, num_rows: int, num_sampled: int) -> None:
        """Add drafts to piggyback rows that the step has: their rows, and how many of these become logits."""
        features = self.features
        features.seats = seats
        features.piggyback_rows += num_rows
        features.sampled_rows += num_sampled

    def add_pipelined(self, rows: Sequence[tuple[int, int]], num_hybrid: int = 0) -> None:
        """Add rows that wait for the host tier: the position of each token, and the first layer that it has left.

        ``num_hybrid`` of them are in the first sub-batch, the others in the second.
        """
        if not rows:
            return
        features, shape = self.features, self.shape
        num_layers = features.pipelined_layers * features.pipelined_rows
        features.pipelined_rows += len(rows)
        features.hybrid_rows += num_hybrid
        features.pipelined_load += sum(shape.keys_seen(position, 1) for position, _ in rows)
        num_layers += sum(shape.num_layers - layer for _, layer in rows)
        features.pipelined_layers = num_layers / features.pipelined_rows
        features.sampled_rows += len(rows)
        features.host_works = True


def features_of(plan: StepPlan, shape: ModelShape, *, host_works: bool = False) -> BatchFeatures:
    """Return the features of a plan; one with piggyback rows says by itself that the host tier works."""
    step = StepRows(shape, BatchFeatures(host_works=host_works))
    for chunk in plan.chunks:
        num_scored = len(chunk.scores.token_ids) if chunk.scores is not None else 0
        step.add_chunk(chunk.start, len(chunk.token_ids), samples=chunk.num_sampled_rows + num_scored)
    joins = [0] * shape.num_layers
    for join in plan.joins:
        joins[join.layer] += join.num_rows
    step.add_piggyback(plan.num_piggyback_seats, sum(entry.num_rows for entry in plan.entries), joins)
    pipelined = [(row.position, row.layer if isinstance(row, PiggybackJoin) else 0) for row in plan.pipelined]
    step.add_pipelined(pipelined, len(plan.hybrid))
    return step.features


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """Seconds of sending something: ``alpha_s + beta_s * size``, 0 for nothing (omniserve 3.3.1, gamma)."""

    alpha_s: float = 0.0
    """Latency."""
    beta_s: float = 0.0
    """Seconds per unit of size (rows or bytes)."""

    def __call__(self, size: float) -> float:
        return self.alpha_s + self.beta_s * size if size > 0 else 0.0

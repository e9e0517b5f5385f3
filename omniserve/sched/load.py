"""StepLoad: what a step consists of while a policy puts it together, and how long it would take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from omniserve.latency import BatchFeatures, HostSpeed, ModelShape, Predictor
from omniserve.latency.profile import Profile

_SEARCH_ROUNDS = 6
_CLOSE_ENOUGH = 0.02  # of the bound: a chunk that fills the step to 98 % is not searched further


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a policy asks for latencies."""

    predictor: Predictor
    shape: ModelShape
    host_has_own_cores: bool = False
    """The host tier's threads take nothing from the device tier."""
    host: HostSpeed | None = None
    """What the host tier's attention takes; None: there is no host tier."""

    @classmethod
    def of_profile(cls, profile: Profile, predictor: Predictor) -> Self:
        """Return the forecast of a profiled machine by one of the models that were fitted to its profile."""
        return cls(
            predictor,
            profile.shape,
            host_has_own_cores=profile.fingerprint.host_has_own_cores,
            host=HostSpeed.from_profile(profile),
        )

    def load(self, *, host_works: bool = False) -> StepLoad:
        """Return an empty step."""
        return StepLoad(self, host_works=host_works)


class StepLoad:
    """A step's load, growing. The counts are BatchFeatures' (omniserve 3.3.1: c_PA, c_DA, g, n).

    Args:
        forecast: The latency model and the model's shape.
        host_works: The host tier is at work already.
    """

    __slots__ = (
        "_forecast", "_host_works", "decode_context", "decode_load", "decode_requests", "joins_at_last_layer",
        "piggyback_halves", "piggyback_layers", "piggyback_rows", "pipelined_layers", "pipelined_load",
        "pipelined_rows", "prefill_context", "prefill_load",
        "prefill_requests", "prefill_tokens", "sampled_rows", "seats",
    )  # fmt: skip

    def __init__(self, forecast: Forecast, *, host_works: bool) -> None:
        self._forecast = forecast
        self._host_works = host_works
        self.prefill_requests = self.prefill_tokens = self.prefill_context = 0
        self.decode_requests = self.decode_context = self.sampled_rows = 0
        self.prefill_load = self.decode_load = 0.0
        self.seats = self.piggyback_rows = self.piggyback_layers = self.joins_at_last_layer = 0
        self.piggyback_halves = self.pipelined_rows = 0
        self.pipelined_load = self.pipelined_layers = 0.0

    def copy(self) -> StepLoad:
        """Return an independent copy."""
        twin = StepLoad(self._forecast, host_works=self._host_works)
        for name in StepLoad.__slots__:
            setattr(twin, name, getattr(self, name))
        return twin

    def add_chunk(self, start: int, count: int, *, samples: int) -> None:
        """Add device rows at positions ``[start, start + count)`` of a request, ``samples`` of which become logits."""
        load = self._forecast.shape.load(start, count)
        if count == 1:
            self.add_decodes(1, start, load, num_sampled=samples)
            return
        self.prefill_requests += 1
        self.prefill_tokens += count
        self.prefill_context += start
        self.prefill_load += load
        self.sampled_rows += samples

    def add_decodes(self, count: int, context: int, load: float, *, num_sampled: int) -> None:
        """Add single rows of several requests.

        Args:
            count: Requests.
            context: Tokens whose KV they have, together.
            load: Keys that their rows see, together.
            num_sampled: Rows of them that become logits.
        """
        self.decode_requests += count
        self.decode_context += context
        self.decode_load += load
        self.sampled_rows += num_sampled

    def set_piggyback(self, seats: int, rows: int, layers: int, *, at_last_layer: int, halves: int) -> None:
        """Say which piggyback rows the step has.

        Args:
            seats: P.
            rows: Tokens that enter or join.
            layers: Layers that somebody joins or enters at.
            at_last_layer: Joins that become logits.
            halves: Dense halves that run for them (counts only without device rows).
        """
        self.seats, self.piggyback_rows, self.piggyback_layers = seats, rows, layers
        self.joins_at_last_layer, self.piggyback_halves = at_last_layer, halves

    def set_pipelined(self, rows: int, load: float, layers: float) -> None:
        """Say what the second sub-batch is.

        Args:
            rows: Its tokens.
            load: Keys that they see in a layer, together.
            layers: Layers that they have left, on average.
        """
        self.pipelined_rows, self.pipelined_load, self.pipelined_layers = rows, load, layers

    def keys_seen(self, position: int) -> float:
        """Return how many keys a row at a position sees, the mean over the layers."""
        return self._forecast.shape.load(position, 1)

    @property
    def is_empty(self) -> bool:
        return not (self.prefill_tokens or self.decode_requests or self.piggyback_rows or self.pipelined_rows)

    def features(self) -> BatchFeatures:
        """Return the features of the step as it is."""
        has_device_rows = self.prefill_tokens or self.decode_requests
        layers = float(self._forecast.shape.num_layers) if has_device_rows else self.piggyback_halves / 2
        return BatchFeatures(
            prefill_requests=self.prefill_requests,
            prefill_tokens=self.prefill_tokens,
            prefill_context=self.prefill_context,
            prefill_load=self.prefill_load,
            decode_requests=self.decode_requests,
            decode_context=self.decode_context,
            decode_load=self.decode_load,
            sampled_rows=self.sampled_rows + self.joins_at_last_layer + self.pipelined_rows,
            seats=self.seats,
            piggyback_rows=self.piggyback_rows,
            piggyback_layers=self.piggyback_layers,
            dense_layers=layers,
            host_works=self._host_works or self.piggyback_rows > 0 or self.pipelined_rows > 0,
            pipelined_rows=self.pipelined_rows,
            pipelined_load=self.pipelined_load,
            pipelined_layers=self.pipelined_layers,
        )

    def seconds(self) -> float:
        """Return the predicted seconds of the step as it is; 0 for nothing."""
        return 0.0 if self.is_empty else self._forecast.predictor.step_s(self.features())

    def seconds_with(self, start: int, count: int, *, samples: int) -> float:
        """Return the seconds with one more chunk."""
        twin = self.copy()
        twin.add_chunk(start, count, samples=samples)
        return twin.seconds()

    def largest_chunk(self, start: int, most: int, bound_s: float, *, samples: Callable[[int, int], int]) -> int:
        """Return the most tokens, up to ``most``, that a chunk may have within the bound; 0 if none (3.3.4).

        Args:
            start: Position of its first token.
            most: At least 1.
            bound_s: Longest step, in seconds.
            samples: How many rows of a chunk, by its start and count, become logits.
        """
        return largest(lambda n: self.seconds_with(start, n, samples=samples(start, n)), most, bound_s)


def largest(seconds: Callable[[int], float], most: int, bound_s: float) -> int:
    """Return the largest count in ``[0, most]`` (to within 2 % of the bound) whose seconds are within the bound.

    Latency is nearly linear, so the next guess is interpolated; what is returned was evaluated, unless it is 0.

    Args:
        seconds: Does not fall with the count.
        most: At least 1.
        bound_s: The bound.
    """
    at_most = seconds(most)
    if at_most <= bound_s:
        return most
    low, high, at_low, at_high = 0, most, 0.0, at_most
    for round_ in range(_SEARCH_ROUNDS + most.bit_length()):
        if high - low <= 1 or (low and at_low >= (1 - _CLOSE_ENOUGH) * bound_s):
            break
        if low == 0 and round_ == 0:
            guess = 1  # what one costs is the other end of the line
        elif round_ < _SEARCH_ROUNDS and at_high > at_low:
            guess = low + int((high - low) * (bound_s - at_low) / (at_high - at_low))
        else:
            guess = (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
        at_guess = seconds(guess)
        if at_guess <= bound_s:
            low, at_low = guess, at_guess
        else:
            high, at_high = guess, at_guess
    return low

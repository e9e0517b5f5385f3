"""The phases of the comparison: what is sent in each, and which figures come of it."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.common.client import (
    BE_TIER,
    LS_TIER,
    LoadRequest,
    RequestRecord,
    backlog,
    drive,
    poisson_stream,
    random_tokens,
)
from benchmarks.common.machine_speed import MachineSpeed
from benchmarks.common.prefixes import PrefixStructure
from benchmarks.common.server import Server
from benchmarks.common.summary import summarize, summarize_co_serving
from benchmarks.peers.engines import OBJECTIVES, Contender
from benchmarks.peers.floor import ModelCost
from omniserve.simulate.load import fixed_lengths
from omniserve.simulate.load import requests as requests_of

PHASES = ("start", "decode", "prefill", "ls", "be", "shared", "coserve")
CUTOFF_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the loads; tokens, unless a name says otherwise."""

    decode_batches: tuple[int, ...] = (1, 8, 32)
    decode_prompt: int = 16
    decode_output: int = 128
    prefill_prompts: tuple[int, ...] = (128, 512)
    prefill_samples: int = 5
    """Prompts of a round, one after the other."""
    ls_rate: float = 1.0
    """Requests a second."""
    ls_seconds: float = 60.0
    ls_prompt: int = 128
    ls_output: int = 32
    be_requests: int = 64
    be_prompt: int = 512
    be_output: int = 64
    shared_requests: int = 64
    shared_front: int = 512
    """The tokens that all prompts of the phase begin with."""
    shared_prompt: int = 64
    """The tokens of a prompt behind the shared ones."""
    shared_output: int = 32


QUICK = Sizes(
    decode_batches=(1, 4), decode_output=24, prefill_prompts=(32, 128), prefill_samples=2, ls_rate=3.0, ls_seconds=6.0,
    ls_prompt=32, ls_output=8, be_requests=8, be_prompt=128, be_output=16, shared_requests=8, shared_front=64,
    shared_prompt=16, shared_output=8,
)  # fmt: skip
"""Shows that everything runs, and nothing else."""


class Case(Protocol):
    """A load of a phase, on which the contenders take turns."""

    @property
    def phase(self) -> str:
        """The name of the phase, one of PHASES."""

    @property
    def name(self) -> str:
        """Name of the load within its phase."""

    def measure(self, server: Server, contender: Contender, seed: int) -> dict[str, Any]:
        """Send the load of this seed and return figures; the same seed sends the same tokens to every contender."""

    def floor(self, cost: ModelCost, speed: MachineSpeed) -> dict[str, float]:
        """Return what the figures of the same names would be on a machine that does nothing else; empty if nothing is
        said of any."""


def cases(phase: str, sizes: Sizes, vocab_size: int) -> list[Case]:
    """Return the loads of a phase; ``start`` has none."""
    if phase == "decode":
        return [Decode(sizes=sizes, vocab_size=vocab_size, batch=batch) for batch in sizes.decode_batches]
    if phase == "prefill":
        return [Prefill(sizes=sizes, vocab_size=vocab_size, prompt=prompt) for prompt in sizes.prefill_prompts]
    single: dict[str, list[Case]] = {
        "ls": [Stream(sizes=sizes, vocab_size=vocab_size)],
        "be": [Backlog(sizes=sizes, vocab_size=vocab_size)],
        "shared": [SharedFront(sizes=sizes, vocab_size=vocab_size)],
        "coserve": [CoServing(sizes=sizes, vocab_size=vocab_size)],
    }
    return single.get(phase, [])


def warm_up(sizes: Sizes, vocab_size: int) -> list[LoadRequest]:
    """Return four requests of each kind and of usual size, within a second."""
    rng = random.Random(77)
    ls = requests_of([0.25 * i for i in range(4)], fixed_lengths(sizes.ls_prompt, sizes.ls_output), rng)
    return [
        *random_tokens(ls, rng, tier=LS_TIER, vocab_size=vocab_size, slo=(600.0, 600.0)),
        *backlog(rng, count=4, prompt=sizes.be_prompt, output=sizes.be_output, vocab_size=vocab_size),
    ]


def decode_rate(records: Sequence[RequestRecord]) -> float:
    """Return the tokens a second after the first of each request, from the earliest first token to the last one.

    Raises:
        ValueError: No request has two tokens.
    """
    tokens = sum(max(0, record.num_output_tokens - 1) for record in records)
    firsts = [record.first_token_s for record in records if record.first_token_s is not None]
    lasts = [record.last_token_s for record in records if record.last_token_s is not None]
    if not tokens or max(lasts) <= min(firsts):
        raise ValueError("a decode rate needs a request with two tokens or more that came at different times")
    return tokens / (max(lasts) - min(firsts))


@dataclass(frozen=True, kw_only=True)
class _Load:
    sizes: Sizes
    vocab_size: int

    def ls_stream(self, seed: int, slo: tuple[float, float] | None) -> list[LoadRequest]:
        return poisson_stream(
            random.Random(seed), rate=self.sizes.ls_rate, seconds=self.sizes.ls_seconds, prompt=self.sizes.ls_prompt,
            output=self.sizes.ls_output, tier=LS_TIER, vocab_size=self.vocab_size, slo=slo,
        )  # fmt: skip

    def be_pile(self, seed: int) -> list[LoadRequest]:
        return backlog(
            random.Random(seed + 10_000), count=self.sizes.be_requests, prompt=self.sizes.be_prompt,
            output=self.sizes.be_output, vocab_size=self.vocab_size,
        )  # fmt: skip

    def floor(self, cost: ModelCost, speed: MachineSpeed) -> dict[str, float]:
        return {}


@dataclass(frozen=True, kw_only=True)
class Decode(_Load):
    """Short prompts, ``batch`` at once, with long outputs: tokens a second."""

    batch: int
    phase: str = "decode"

    @property
    def name(self) -> str:
        return f"{self.batch} at once"

    def measure(self, server: Server, contender: Contender, seed: int) -> dict[str, Any]:
        rows = requests_of(
            [0.0] * self.batch, fixed_lengths(self.sizes.decode_prompt, self.sizes.decode_output), random.Random(seed)
        )
        sent = random_tokens(
            rows, random.Random(seed), tier=LS_TIER, vocab_size=self.vocab_size, slo=contender.slo
        )  # fmt: skip
        records, _ = drive(server, sent, cutoff_s=CUTOFF_S, wire=contender.wire)
        _check_lengths(records, self.sizes.decode_output)
        return {"tokens_per_s": decode_rate(records)}

    def floor(self, cost: ModelCost, speed: MachineSpeed) -> dict[str, float]:
        context = self.sizes.decode_prompt + self.sizes.decode_output / 2
        return {"tokens_per_s": self.batch / cost.decode_step_s(speed, self.batch, context)}


@dataclass(frozen=True, kw_only=True)
class Prefill(_Load):
    """Prompts one at a time, one token out: TTFT."""

    prompt: int
    phase: str = "prefill"

    @property
    def name(self) -> str:
        return f"{self.prompt} tokens"

    def measure(self, server: Server, contender: Contender, seed: int) -> dict[str, Any]:
        rng, ttfts = random.Random(seed), []
        for _ in range(self.sizes.prefill_samples):
            rows = requests_of([0.0], fixed_lengths(self.prompt, 1), rng)
            sent = random_tokens(rows, rng, tier=LS_TIER, vocab_size=self.vocab_size, slo=contender.slo)
            (record,), _ = drive(server, sent, cutoff_s=CUTOFF_S, wire=contender.wire)
            assert record.first_token_s is not None and record.sent_s is not None
            ttfts.append(record.first_token_s - record.sent_s)
        return {"ttft_s": statistics.median(ttfts), "each_ttft_s": ttfts}

    def floor(self, cost: ModelCost, speed: MachineSpeed) -> dict[str, float]:
        return {"ttft_s": cost.prefill_s(speed, self.prompt)}


@dataclass(frozen=True, kw_only=True)
class Stream(_Load):
    """LS requests alone, as they come."""

    phase: str = "ls"
    name: str = "alone"

    def measure(self, server: Server, contender: Contender, seed: int) -> dict[str, Any]:
        sent = self.ls_stream(seed, contender.slo)
        records, end_s = drive(server, sent, cutoff_s=CUTOFF_S, wire=contender.wire)
        return dataclasses.asdict(summarize([record for record in records if not record.rejected], end_s)) | {
            "rejected": sum(record.rejected for record in records)
        }


@dataclass(frozen=True, kw_only=True)
class Backlog(_Load):
    """BE requests alone, all at once: tokens a second, in and out."""

    phase: str = "be"
    name: str = "alone"

    def measure(self, server: Server, contender: Contender, seed: int) -> dict[str, Any]:
        records, end_s = drive(server, self.be_pile(seed), cutoff_s=CUTOFF_S, wire=contender.wire)
        _check_lengths(records, self.sizes.be_output)
        return summarize_co_serving(records, None, end_s=end_s)

    def floor(self, cost: ModelCost, speed: MachineSpeed) -> dict[str, float]:
        sizes = self.sizes
        tokens = sizes.be_requests * (sizes.be_prompt + sizes.be_output)
        least_s = cost.batch_s(speed, count=sizes.be_requests, prompt=sizes.be_prompt, output=sizes.be_output)
        return {"be_tokens_per_s": tokens / least_s}


@dataclass(frozen=True, kw_only=True)
class SharedFront(_Load):
    """BE requests alone, all at once, whose prompts begin alike: tokens a second, in and out."""

    phase: str = "shared"
    name: str = "one front"

    def measure(self, server: Server, contender: Contender, seed: int) -> dict[str, Any]:
        sizes, rng = self.sizes, random.Random(seed + 20_000)
        own = backlog(
            rng, count=sizes.shared_requests, prompt=sizes.shared_prompt, output=sizes.shared_output,
            vocab_size=self.vocab_size,
        )  # fmt: skip
        structure = PrefixStructure(fronts=1, front_tokens=sizes.shared_front)
        sent = structure.put_before(own, rng, vocab_size=self.vocab_size)
        records, end_s = drive(server, sent, cutoff_s=CUTOFF_S, wire=contender.wire)
        _check_lengths(records, sizes.shared_output)
        return summarize_co_serving(records, None, end_s=end_s)


@dataclass(frozen=True, kw_only=True)
class CoServing(_Load):
    """LS requests beside BE work; LS figures are of the requests that came while BE work was left."""

    phase: str = "coserve"
    name: str = "LS and BE"

    def measure(self, server: Server, contender: Contender, seed: int) -> dict[str, Any]:
        sent = [*self.ls_stream(seed, contender.slo), *self.be_pile(seed)]
        records, end_s = drive(server, sent, cutoff_s=CUTOFF_S, wire=contender.wire)
        _check_lengths([record for record in records if record.service_tier == BE_TIER], self.sizes.be_output)
        figures = summarize_co_serving(records, OBJECTIVES["loose"], end_s=end_s, stream_s=self.sizes.ls_seconds)
        for name, slo in OBJECTIVES.items():
            attained = summarize_co_serving(records, slo, end_s=end_s).get("attained_of_all")
            figures[f"attained_{name}"] = attained
        return figures


def _check_lengths(records: Sequence[RequestRecord], output: int) -> None:
    """Raise ValueError unless every request brought all its tokens: a server that stops early is not faster."""
    lengths = {record.num_output_tokens for record in records}
    if lengths != {output}:
        raise ValueError(f"requests asked for {output} tokens and got {sorted(lengths)}: the rates would be of others")

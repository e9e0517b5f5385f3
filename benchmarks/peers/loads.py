"""The phases of the comparison: what is sent in each, and which figures come of it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from benchmarks.peers.model import ModelCost
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


@dataclass(frozen=True, kw_only=True)
class Case:
    """A load of a phase, on which the contenders take turns."""

    phase: str
    """One of PHASES."""
    name: str
    """Name of the load within its phase."""
    measure: Callable[[Server, Contender, int], dict[str, Any]]
    """Sends the load of a seed and returns figures; the same seed sends the same tokens to every contender."""
    floor: Callable[[ModelCost, MachineSpeed], dict[str, float]] = lambda cost, speed: {}
    """Returns what the figures of the same names would be on a machine that does nothing else."""


def cases(phase: str, sizes: Sizes, vocab_size: int) -> list[Case]:
    """Return the loads of a phase; ``start`` has none."""
    loads = Loads(sizes, vocab_size)
    found: dict[str, list[tuple[Any, ...]]] = {
        "decode": [
            (f"{batch} at once", partial(loads.decode, batch), partial(loads.decode_floor, batch))
            for batch in sizes.decode_batches
        ],
        "prefill": [
            (f"{prompt} tokens", partial(loads.prefill, prompt), partial(loads.prefill_floor, prompt))
            for prompt in sizes.prefill_prompts
        ],
        "ls": [("alone", loads.stream)],
        "be": [("alone", loads.backlog, loads.backlog_floor)],
        "shared": [("one front", loads.shared_front)],
        "coserve": [("LS and BE", loads.co_serving)],
    }
    return [
        Case(phase=phase, **dict(zip(("name", "measure", "floor"), case, strict=False)))
        for case in found.get(phase, [])
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


class Loads:
    """Sends the loads of all phases and returns their figures; the floors are those of a machine without overhead."""

    def __init__(self, sizes: Sizes, vocab_size: int) -> None:
        self._sizes, self._vocab_size = sizes, vocab_size

    def _send(
        self, server: Server, contender: Contender, sent: Sequence[LoadRequest]
    ) -> tuple[list[RequestRecord], float]:
        return drive(server, sent, cutoff_s=CUTOFF_S, wire=contender.wire)

    def _at_once(
        self, count: int, prompt: int, output: int, rng: random.Random, contender: Contender
    ) -> list[LoadRequest]:
        rows = requests_of([0.0] * count, fixed_lengths(prompt, output), rng)
        return random_tokens(rows, rng, tier=LS_TIER, vocab_size=self._vocab_size, slo=contender.slo)

    def _ls_stream(self, seed: int, slo: tuple[float, float] | None) -> list[LoadRequest]:
        sizes = self._sizes
        return poisson_stream(
            random.Random(seed), rate=sizes.ls_rate, seconds=sizes.ls_seconds, prompt=sizes.ls_prompt,
            output=sizes.ls_output, tier=LS_TIER, vocab_size=self._vocab_size, slo=slo,
        )  # fmt: skip

    def _be_pile(self, seed: int) -> list[LoadRequest]:
        sizes = self._sizes
        return backlog(
            random.Random(seed + 10_000), count=sizes.be_requests, prompt=sizes.be_prompt, output=sizes.be_output,
            vocab_size=self._vocab_size,
        )  # fmt: skip

    def decode(self, batch: int, server: Server, contender: Contender, seed: int) -> dict[str, Any]:
        """Send short prompts, ``batch`` at once, with long outputs: tokens a second."""
        sizes = self._sizes
        sent = self._at_once(batch, sizes.decode_prompt, sizes.decode_output, random.Random(seed), contender)
        records, _ = self._send(server, contender, sent)
        _check_lengths(records, sizes.decode_output)
        return {"tokens_per_s": decode_rate(records)}

    def decode_floor(self, batch: int, cost: ModelCost, speed: MachineSpeed) -> dict[str, float]:
        """Return the rate of decodes that take no longer than the machine needs."""
        context = self._sizes.decode_prompt + self._sizes.decode_output / 2
        return {"tokens_per_s": batch / cost.decode_step_s(speed, batch, context)}

    def prefill(self, prompt: int, server: Server, contender: Contender, seed: int) -> dict[str, Any]:
        """Send prompts one at a time, one token out: TTFT."""
        rng, ttfts = random.Random(seed), []
        for _ in range(self._sizes.prefill_samples):
            (record,), _ = self._send(server, contender, self._at_once(1, prompt, 1, rng, contender))
            assert record.first_token_s is not None and record.sent_s is not None
            ttfts.append(record.first_token_s - record.sent_s)
        return {"ttft_s": statistics.median(ttfts), "each_ttft_s": ttfts}

    def prefill_floor(self, prompt: int, cost: ModelCost, speed: MachineSpeed) -> dict[str, float]:
        """Return the TTFT of a prompt that takes no longer than the machine needs."""
        return {"ttft_s": cost.prefill_s(speed, prompt)}

    def stream(self, server: Server, contender: Contender, seed: int) -> dict[str, Any]:
        """Send LS requests alone, as they come."""
        records, end_s = self._send(server, contender, self._ls_stream(seed, contender.slo))
        admitted = [record for record in records if not record.rejected]
        return vars(summarize(admitted, end_s)) | {"rejected": len(records) - len(admitted)}

    def _best_effort(
        self, server: Server, contender: Contender, sent: Sequence[LoadRequest], output: int
    ) -> dict[str, Any]:
        records, end_s = self._send(server, contender, sent)
        _check_lengths(records, output)
        return summarize_co_serving(records, None, end_s=end_s)

    def backlog(self, server: Server, contender: Contender, seed: int) -> dict[str, Any]:
        """Send BE requests alone, all at once: tokens a second, in and out."""
        return self._best_effort(server, contender, self._be_pile(seed), self._sizes.be_output)

    def backlog_floor(self, cost: ModelCost, speed: MachineSpeed) -> dict[str, float]:
        """Return the rate of the BE requests as if arithmetic alone took time."""
        count, prompt, output = self._sizes.be_requests, self._sizes.be_prompt, self._sizes.be_output
        least_s = cost.batch_s(speed, count=count, prompt=prompt, output=output)
        return {"be_tokens_per_s": count * (prompt + output) / least_s}

    def shared_front(self, server: Server, contender: Contender, seed: int) -> dict[str, Any]:
        """Send BE requests alone, all at once, whose prompts begin alike: tokens a second, in and out."""
        sizes, rng = self._sizes, random.Random(seed + 20_000)
        own = backlog(
            rng, count=sizes.shared_requests, prompt=sizes.shared_prompt, output=sizes.shared_output,
            vocab_size=self._vocab_size,
        )  # fmt: skip
        structure = PrefixStructure(fronts=1, front_tokens=sizes.shared_front)
        sent = structure.put_before(own, rng, vocab_size=self._vocab_size)
        return self._best_effort(server, contender, sent, sizes.shared_output)

    def co_serving(self, server: Server, contender: Contender, seed: int) -> dict[str, Any]:
        """Send LS requests beside BE work; LS figures are of the requests that came while BE work was left."""
        sent = [*self._ls_stream(seed, contender.slo), *self._be_pile(seed)]
        records, end_s = self._send(server, contender, sent)
        _check_lengths([record for record in records if record.service_tier == BE_TIER], self._sizes.be_output)
        figures = summarize_co_serving(records, OBJECTIVES["loose"], end_s=end_s, stream_s=self._sizes.ls_seconds)
        for name, slo in OBJECTIVES.items():
            attained = summarize_co_serving(records, slo, end_s=end_s).get("attained_of_all")
            figures[f"attained_{name}"] = attained
        return figures


def _check_lengths(records: Sequence[RequestRecord], output: int) -> None:
    """Raise ValueError unless every request brought all its tokens: a server that stops early is not faster."""
    lengths = {record.num_output_tokens for record in records}
    if lengths != {output}:
        raise ValueError(f"requests asked for {output} tokens and got {sorted(lengths)}: the rates would be of others")

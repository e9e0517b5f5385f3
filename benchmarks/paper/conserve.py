"""ConServe's figures 6 to 9 and its ablation (section 6) as experiments."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from benchmarks.paper.cases import COMMON, Case, Experiment, MachineSpec, with_settings
from benchmarks.paper.loads import LoadSpec
from omniserve.core.config import PrefillConfig

SYSTEMS = ("online-only", "conserve", "sarathi", "non-preemptive")
LLAMA_8B = MachineSpec(model="llama-3.1-8b", device="1xH100-80GB", hosts="1xXeon-8480")
QWEN_14B = replace(LLAMA_8B, model="qwen-2.5-14b")
LLAMA_70B = MachineSpec(
    model="llama-3-70b", device="4xH100-80GB", hosts="1xXeon-8480", max_model_len=131072
)  # 3.1 has its sizes
DISTSERVE = "distserve-p"
RATIOS = ((2, 1), (1, 1), (1, 2))
"""Prefill engines to engines that decode (6.1)."""
ONE_TO_ONE = ((1, 1),)
"""The ratio with most offline throughput at 2 LS/s on the 8B model; the paper reports the best one. With the 70B model
it is the only one for which a server of eight H100 has room."""
NVLINK_GB_PER_S = 450.0
SYNTHETIC = LoadSpec(ls_rate=2.0, ls_cv=0.5, ls_lengths="4096:256", be_lengths="multinews")
BACKLOG = 64


def _case(machine: MachineSpec, x: str, system: str, load: LoadSpec, slo_scale: float = 1.0) -> Case:
    settings: tuple[tuple[str, object], ...] = (("max_num_batched_tokens", 8192),)
    if system == "conserve":
        settings += (("kv", "incremental"),)  # its own manager (4.4), which always makes checkpoints
    return Case(
        x=x, system=system, machine=machine, slo_scale=slo_scale, settings=(*COMMON, *settings),
        load=replace(load, backlog=0 if system == "online-only" else BACKLOG),
    )  # fmt: skip


def _experiment(
    name: str, figure: str, says: str, machine: MachineSpec, loads: dict[str, LoadSpec], *, cell: str = "harvest",
    scales: dict[str, float] | None = None,
) -> Experiment:  # fmt: skip
    cases = tuple(
        _case(machine, x, system, load, 1.0 if scales is None else scales[x])
        for x, load in loads.items() for system in SYSTEMS
    )  # fmt: skip
    return Experiment(
        name=name, figure=figure, says=says, x_name="LS load", cases=cases, cell=cell, slo_from="online-only"
    )


def _apart(case: Case, num_prefill: int, num_decode: int) -> Case:
    """Return Sarathi-P's case as DistServe-P's: prompts and decodes have machines of their own (6.1).

    It has more machines than the other systems, and as many times their load.
    """
    machine = replace(
        case.machine, prefill_engines=num_prefill, num_engines=num_decode, network_gb_per_s=NVLINK_GB_PER_S
    )
    prefill = PrefillConfig(prefill_placement="disaggregated")
    return replace(
        case, name=DISTSERVE, variant=f"{num_prefill}:{num_decode}", machine=machine, per_machine=True,
        settings=(*case.settings, ("prefill", prefill)),
    )  # fmt: skip


def _distserve(
    of: str, says: str, ratios: Mapping[str, Iterable[tuple[int, int]]] = MappingProxyType({}), *,
    only: Container[str] | None = None, slo_from: str | None = None,
) -> Experiment:  # fmt: skip
    """Return DistServe-P at the loads of an experiment.

    It takes half as long: each row has the load of two or three machines.

    Args:
        ratios: Ratios at an x, if not 1:1 alone.
        only: The x to take; None: all.
        slo_from: As in that experiment, if its figures are of what was attained.
    """
    (base,) = (experiment for experiment in _OTHERS if experiment.name == of)
    cases: list[Case] = []
    for case in base.cases:
        if only is None or case.x in only:
            if case.system == slo_from:
                cases.append(case)
            elif case.system == "sarathi":
                cases += [_apart(case, *ratio) for ratio in ratios.get(case.x, ONE_TO_ONE)]
    return replace(
        base, name=f"{of}-distserve", figure=f"{base.figure}: DistServe-P", says=says, cases=tuple(cases),
        slo_from=slo_from, times=base.times / 2,
    )  # fmt: skip


def _rates(*rates: float) -> dict[str, LoadSpec]:
    return {f"{rate:g}/s": replace(SYNTHETIC, ls_rate=rate) for rate in rates}


def _real(name: str, figure: str, says: str, machine: MachineSpec, rate: float, data: tuple[str, ...]) -> Experiment:
    loads = {
        name: LoadSpec(ls_rate=rate, ls_lengths="burstgpt", be_lengths="mixed" if name == "mixed" else name)
        for name in data
    }
    return _experiment(name, figure, says, machine, loads)


_INPUTS = {
    f"{n} in, {8192 / n:g}/s": replace(SYNTHETIC, ls_rate=8192 / n, ls_lengths=f"{n}:256") for n in (1024, 4096, 16384)
}
_OUTPUTS = {
    f"{n} out, {512 / n:g}/s": replace(SYNTHETIC, ls_rate=512 / n, ls_lengths=f"4096:{n}") for n in (128, 256, 1024)
}
_SCALES = {f"scale {scale:g}": scale for scale in (1.0, 1.25, 1.5, 2.0)}
_ALONE, _FULL, _SARATHI, _ = (_case(LLAMA_8B, "2/s", system, SYNTHETIC) for system in SYSTEMS)
# Without its own KV manager: a preempted request is parked on the host if it has checkpoints, else recomputed.
_PARKED = with_settings(_FULL, "", kv="tiered", checkpoint_kv=True)
_RECOMPUTED = with_settings(_FULL, "", kv="tiered", checkpoint_kv=False)

_OTHERS: tuple[Experiment, ...] = (
    _experiment("conserve-6-8b", "ConServe Fig. 6a: llama-3.1-8b on an H100",
                "P99 TTFT and TBT within 25 % and 19 % of Online-Only; offline 82.3 % of Non-Preemptive, 3.0 times "
                "(up to 7.48) Sarathi-P", LLAMA_8B, _rates(1.0, 2.0, 4.0)),
    _experiment("conserve-6-14b", "ConServe Fig. 6a: qwen-2.5-14b on an H100", "as above", QWEN_14B, _rates(1.0, 2.0)),
    _experiment("conserve-6-70b", "ConServe Fig. 6a: llama-3.1-70b on four H100", "as above", LLAMA_70B,
                _rates(1.0, 2.0)),
    _experiment("conserve-6b-8b", "ConServe Fig. 6b: llama-3.1-8b on an H100, 2 LS/s, objectives of several scales",
                "above 99 % of TTFT and TBT from a scale over 1.0, at least 86 % at 1.0; 93 % of Non-Preemptive's "
                "throughput at 1.5, 2 % more beyond", LLAMA_8B, dict.fromkeys(_SCALES, SYNTHETIC), cell="scales",
                scales=_SCALES),
    _real("conserve-7-70b", "ConServe Fig. 7 and Table 2: llama-3.1-70b on four H100, lengths of BurstGPT, 2 LS/s",
          "mixed: P99 TTFT 1.08, 1.14 (ConServe), 2.91 (Sarathi-P), 15.2 s (Non-Preemptive); TBT 184, 201, 441, 450; "
          "offline 1,553, 895 and 1,995 tokens/s", LLAMA_70B, 2.0, ("mixed", "dureader", "multinews", "vcsum")),
    _real("conserve-8-8b", "ConServe Fig. 8: llama-3.1-8b on an H100, lengths of BurstGPT, 2 LS/s, mixed offline work",
          "88 % of Non-Preemptive's offline throughput", LLAMA_8B, 2.0, ("mixed",)),
    _experiment("conserve-9a", "ConServe Fig. 9a: llama-3.1-8b on an H100, 2 LS/s, burstier arrivals",
                "P99 TTFT and TBT 1.68 and 2.38 times better than the best baseline's, offline 3.62 times", LLAMA_8B,
                {f"CV {cv:g}": replace(SYNTHETIC, ls_cv=cv) for cv in (1.0, 2.0, 4.0)}),
    _experiment("conserve-9b", "ConServe Fig. 9b: llama-3.1-8b on an H100, longer inputs, fewer of them",
                "near Online-Only at most lengths; most is gained between 2K and 16K", LLAMA_8B, _INPUTS),
    _experiment("conserve-9c", "ConServe Fig. 9c: llama-3.1-8b on an H100, longer outputs, fewer of them",
                "near Online-Only at most lengths; most is gained above 128, a little less above 512", LLAMA_8B,
                _OUTPUTS),
    Experiment(
        name="conserve-65", figure="ConServe 6.5: llama-3.1-8b on an H100, 2 LS/s, its parts one by one",
        says="Sarathi-P: TBT 375 ms, TTFT 1,399; with the scheduler 73 and 686; with layer-wise preemption TTFT 523; "
        "with incremental KV offline throughput 1.29 times, 11,366 tokens/s", x_name="LS load", cell="harvest",
        slo_from="online-only",
        cases=(
            _ALONE, _SARATHI,
            with_settings(_RECOMPUTED, "no checkpoints, no layer preemption", layer_preemption=False),
            with_settings(_RECOMPUTED, "no checkpoints, halted rows begin anew", keep_halted=False),
            with_settings(_PARKED, "halted rows begin anew", keep_halted=False), _PARKED,
            replace(_FULL, variant="incremental"),  # plain ``conserve`` in the other figures
        ),
    ),
)  # fmt: skip
"""The experiments without DistServe-P."""

_LESS = "ConServe has more offline throughput than both preemptive baselines, and is near Online-Only at most lengths"
_POOR = "poor TTFT and TBT, the lowest offline throughput in most cases"
EXPERIMENTS: tuple[Experiment, ...] = (
    *_OTHERS,
    _distserve("conserve-6-8b", _POOR, {"2/s": RATIOS}),
    _distserve("conserve-7-70b", "mixed, dureader, multinews, vcsum: P99 TTFT 12.4, 14.9, 11.3, 15.1 s; TBT 1,398, "
               "1,607, 1,384, 1,774 ms; offline 26, 15, 39, 15 tokens/s"),
    _distserve("conserve-8-8b", "slightly more throughput than Sarathi-P; 2.5 times less than ConServe"),
    _distserve("conserve-6-70b", _POOR),
    _distserve("conserve-6b-8b", "high TBT attainment, but below ConServe's in most cases; poor TTFT attainment",
               only=("scale 1", "scale 1.5"), slo_from="online-only"),
    _distserve("conserve-9a", "ConServe is better than the best baseline"),
    _distserve("conserve-9b", _LESS, dict.fromkeys(_INPUTS, RATIOS)),
    _distserve("conserve-9c", _LESS, dict.fromkeys(_OUTPUTS, RATIOS)),
)  # fmt: skip
"""All experiments. Those of DistServe-P are experiments of their own: its rows have loads of several machines."""

"""OmniServe's figures 10 to 19 (section 5) as experiments, and controls that tell the causes of differences apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from benchmarks.paper.cases import COMMON, Case, Experiment, MachineSpec, both_orders, budget, with_settings
from benchmarks.paper.loads import LoadSpec
from omniserve.core.request import SLO

CONTROL = "nothing: not in the paper, to tell the causes of a difference apart"
BASELINES = ("omniserve", "sarathi", "llumnix", "neo")
YI = MachineSpec(model="yi-34b-200k", device="2xA100-80GB-PCIe")
LLAMA = MachineSpec(model="llama-2-70b", device="4xA100-80GB-PCIe", max_model_len=16384)  # of 4,096
SLO_OF = {YI: SLO(ttft_s=2.0, tpot_s=0.2), LLAMA: SLO(ttft_s=3.0, tpot_s=0.25)}
HEADROOM_FRACTION = 0.8
"""Share of the KV memory that Llumnix keeps for LS requests where the paper motivates its own design (2.3, Fig. 2a)."""
HEADROOM = f"{100 * HEADROOM_FRACTION:g} % headroom"
OFFLOADING = "offloading for time"
SHORT = {YI: "yi", LLAMA: "llama"}
BE_RATE = 182.6 / 60
SERVERS = {"1G": "1xXeon-6342", "1G4C": "5xXeon-6342"}


def _case(machine: MachineSpec, hosts: str, x: str, system: str, load: LoadSpec, slo: SLO | None = None) -> Case:
    return Case(
        x=x, system=system, machine=replace(machine, hosts=hosts), load=load,
        slo=slo if slo is not None else SLO_OF[machine], settings=(*COMMON, *budget(system)),
    )  # fmt: skip


def _ordered(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Return the cases, those of ``omniserve`` in both orders, and those of ``llumnix`` with both headrooms."""
    found: list[Case] = []
    for case in cases:
        found += both_orders(case)
        if case.system == "llumnix":
            found.append(with_settings(case, HEADROOM, headroom_fraction=HEADROOM_FRACTION))
    return tuple(found)


def _with_offloading(cases: Iterable[Case]) -> tuple[Case, ...]:
    ordered = _ordered(cases)
    ours = [case for case in ordered if case.system == "omniserve" and not case.variant]
    return (*ordered, *(with_settings(case, OFFLOADING, offload_for_time=True) for case in ours))


def _co_serving(figure: str, name: str, servers: str, data: str, says: str) -> list[Experiment]:
    return [
        Experiment(
            name=f"omniserve-{name}-{SHORT[machine]}",
            figure=f"OmniServe {figure}: {machine.model}, {servers}, {data}", says=says, x_name="LS/s",
            cell="co-serving",
            cases=_ordered(
                _case(machine, SERVERS[servers], f"{rate:g}", system,
                      LoadSpec(ls_rate=rate, be_rate=BE_RATE, be_lengths=data))
                for rate in rates for system in BASELINES
            ),
        )
        for machine, rates in ((YI, (2.0, 6.0)), (LLAMA, (1.0, 4.0)))
    ]  # fmt: skip


def _slo_scales(machine: MachineSpec, rate: float, tpots_s: tuple[float, ...]) -> Experiment:
    cases = [
        _case(
            machine, SERVERS["1G"], f"{tpot_s:g} s", system, LoadSpec(ls_rate=rate, be_rate=BE_RATE),
            replace(SLO_OF[machine], tpot_s=tpot_s),
        )
        for tpot_s in tpots_s for system in BASELINES
    ]  # fmt: skip
    cases += [
        with_settings(case, "256 tokens", max_num_batched_tokens=256) for case in cases if case.system == "sarathi"
    ]
    return Experiment(
        name=f"omniserve-13-{SHORT[machine]}", x_name="TPOT SLO", cell="co-serving", cases=_ordered(cases),
        figure=f"OmniServe Fig. 13: {machine.model}, 1G, longbench, {rate:g} LS/s",
        says="Llama-2-70B at 0.15 s: Llumnix attains 62 %, OmniServe 91.6 % (1.48 times)",
    )  # fmt: skip


def _bursty(machine: MachineSpec, high: float) -> Experiment:
    return Experiment(
        name=f"omniserve-14-{SHORT[machine]}", x_name="rate changes", cell="co-serving",
        figure=f"OmniServe Fig. 14: {machine.model}, 1G, LS at 1 to {high:g} a second at random",
        says="OmniServe up to 1.23 times Llumnix and 1.13 times NEO, nearly identical with Sarathi",
        cases=_ordered(
            _case(machine, SERVERS["1G"], f"every {interval:g} s", system,
                  LoadSpec(ls_rates=(1.0, high, interval), be_rate=BE_RATE))
            for interval in (5.0, 10.0) for system in BASELINES
        ),
    )  # fmt: skip


_STRUGGLES = "struggles to achieve high SLO rates, worse given more CPUs (5.2.1); OmniServe up to 1.13 times (Fig. 14)"


def _neo_of_the_paper(figure: str, experiments: Sequence[Experiment], says: str = _STRUGGLES) -> Experiment:
    """Return the points of a figure with NEO as the paper has it, which decodes LS requests on the CPUs, too (5.1.3 B).

    The other systems are in the figure's own experiments, with the same loads and seeds.
    """
    cases = [
        replace(case, x=f"{experiment.name.rpartition('-')[2]}, {case.x}", system="neo-paper")
        for experiment in experiments
        for case in experiment.cases
        if case.system == "neo"
    ]
    return Experiment(
        name=f"omniserve-{figure}-neo", cell="co-serving", cases=tuple(cases),
        figure=f"OmniServe Fig. {figure}: NEO with the attention of LS requests on the CPUs",
        says=says, x_name=f"model, {experiments[0].x_name}",
    )  # fmt: skip


def _more_cpus(machine: MachineSpec, rate: float) -> Experiment:
    loads = [
        _case(machine, f"{hosts}xXeon-6342", f"{hosts} hosts", "omniserve", LoadSpec(ls_rate=rate, be_rate=BE_RATE))
        for hosts in (1, 5)
    ]
    alone = [replace(case, variant="without BE", load=replace(case.load, be_rate=0.0)) for case in loads]
    return Experiment(
        name=f"omniserve-18-{SHORT[machine]}", x_name="hosts", cell="more-hosts", cases=(*_ordered(loads), *alone),
        figure=f"OmniServe Fig. 18 and 5.3: {machine.model}, {rate:g} LS/s, more CPU hosts",
        says="up to 3.13 times with four more hosts; median TPOT nearly constant, the largest at its objective; "
        "attainment 0.28 to 0.36 points below LS alone",
    )  # fmt: skip


_ADMISSION = _ordered(
    _case(YI, SERVERS["1G4C"], f"{rate:g}", "omniserve", LoadSpec(ls_rate=rate, be_rate=BE_RATE))
    for rate in (8.0, 10.0)
)

_STOCK_SHARE = 0.5
"""Share of the run before LS requests come: BE prompts are prefilled, and as many requests held as both tiers hold."""


def _stock() -> Experiment:
    """A stock of prefilled BE requests, filled while there is no LS load and drained while it is heavy.

    A host token passes a layer in a step, so an output of 136 tokens takes 20 minutes: what the host tier has when the
    LS load comes decides what it brings in the next half hour.
    """
    load = LoadSpec(ls_rate=6.0, ls_after=_STOCK_SHARE, backlog=900)
    sarathi = _case(YI, SERVERS["1G"], "1 host", "sarathi", load)
    cases = [sarathi]
    for x, hosts in (("1 host", "1G"), ("5 hosts", "1G4C")):
        cases += [_case(YI, SERVERS[hosts], x, system, load) for system in ("omniserve", "omniserve-paper")]
    (five,) = (case for case in cases if case.x == "5 hosts" and case.system == "omniserve-paper")
    slow = replace(five.machine, host_share=0.35)
    cases += [
        replace(five, x="5 hosts of half the bandwidth", machine=slow),
        replace(five, x="5 hosts, TPOT 0.1 s", slo=replace(five.slo, tpot_s=0.1)),
    ]
    return Experiment(
        name="omniserve-stock", figure="OmniServe Fig. 15, 18: yi-34b-200k, longbench, BE alone and then 6 LS/s",
        says="BE decode throughput 9.85 times Sarathi's with five hosts, 3.47 times with one; 3.13 times that of one "
        "host with five", x_name="machine", times=10, warm_up=_STOCK_SHARE, cell="stock", cases=tuple(cases),
    )  # fmt: skip


def _changed_stock() -> Experiment:
    """The paper's policy on five hosts with one thing changed: longer steps, or hosts of a tenth of the speed."""
    stock = _stock()
    (five,) = (case for case in stock.cases if case.x == "5 hosts" and case.system == "omniserve-paper")
    return replace(
        stock, name="omniserve-stock-changes", x_name="changed",
        cases=(
            replace(five, x="TPOT 0.3 s", slo=replace(five.slo, tpot_s=0.3)),
            replace(five, x="hosts at 7 %", machine=replace(five.machine, host_share=0.07)),
        ),
    )  # fmt: skip


def _stock_with_drafts() -> Experiment:
    """The stock on five hosts, with best-effort requests that are decoded speculatively."""
    stock = _stock()
    systems = {case.column: case for case in stock.cases if case.x == "5 hosts"}
    systems["sarathi"] = stock.cases[0]
    return replace(
        stock, name="omniserve-stock-drafts", x_name="drafts that are right",
        says="(not in the paper: a trip through the layers takes as many steps with drafts as without)",
        cases=tuple(
            replace(systems[name], x=f"{right:.0%}", drafts_right=right)
            for right in (0.4, 0.6, 0.8)
            for name in ("sarathi", "omniserve", "omniserve-paper")
        ),
    )  # fmt: skip


FILL_MINUTES, DRAIN_MINUTES = 60.0, 15.0


def _long_stock(name: str, x_name: str, cases: Iterable[Case]) -> Experiment:
    """Return the same after an hour of BE work alone, which fills five hosts."""
    minutes = FILL_MINUTES + DRAIN_MINUTES
    share = FILL_MINUTES / minutes
    return Experiment(
        name=f"omniserve-stock-{name}", x_name=x_name, times=minutes / 3, warm_up=share, cell="stock",
        figure=f"OmniServe Fig. 15, 18: yi-34b-200k, longbench, {FILL_MINUTES:g} minutes of BE alone",
        says="BE decode throughput 9.85 times Sarathi's with five hosts, 3.47 times with one",
        cases=tuple(replace(case, load=replace(case.load, ls_after=share)) for case in cases),
    )  # fmt: skip


def _stock_case(rate: float, system: str, hosts: str = "1G4C", variant: str = "") -> Case:
    case = _case(YI, SERVERS[hosts], f"{rate:g}", system, LoadSpec(ls_rate=rate, backlog=900))
    return replace(case, variant=variant)


_STOCK_RATES = tuple(
    case
    for rate in (6.2, 6.8)
    for case in (
        _stock_case(rate, "sarathi", "1G"),
        _stock_case(rate, "omniserve-paper"),
        _stock_case(rate, "omniserve"),
        _stock_case(rate, "omniserve-paper", "1G", "one host"),
    )
)


def _decode_instance() -> Experiment:
    """The decode instance of a prefill-decode pair (5.4.4): prompts come with their KV, so that they take no time."""
    machine = MachineSpec(
        model="llama-2-70b", device="2xA100-80GB-PCIe", max_model_len=16384, prompts_come_computed=True, memory_gb=85.0
    )
    load = LoadSpec(ls_rate=3.0, be_rate=0.25)
    cases = [_case(machine, SERVERS["1G"], "3", system, load, SLO_OF[LLAMA]) for system in BASELINES[:3]]
    return Experiment(
        name="omniserve-pd", figure="OmniServe 5.4.4: llama-2-70b on 2 GPUs, a decode instance, 3 LS/s, 0.25 BE/s",
        says="1.48 times Llumnix's SLO attainment, 6.94 times its BE decode throughput", x_name="LS/s", times=8,
        warm_up=0.5, cell="co-serving",
        cases=tuple(with_settings(case, case.variant, max_num_batched_tokens=16384) for case in _ordered(cases)),
    )  # fmt: skip


def _pair(name: str, rates: Sequence[float], times: int) -> Experiment:
    """A whole prefill-decode pair (5.4.4), both of two GPUs with a host."""
    machine = MachineSpec(
        model="llama-2-70b", device="2xA100-80GB-PCIe", max_model_len=16384, prefill_engines=1, memory_gb=85.0
    )
    cases = [
        _case(machine, SERVERS["1G"], f"{rate:g}", system, LoadSpec(ls_rate=rate, be_rate=0.25), SLO_OF[LLAMA])
        for rate in rates
        for system in BASELINES[:3]
    ]
    return Experiment(
        name=name, figure="OmniServe 5.4.4: llama-2-70b, 2 GPUs that prefill and 2 that decode, 0.25 BE/s",
        says="1.48 times Llumnix's SLO attainment, 6.94 times its BE decode throughput", x_name="LS/s", times=times,
        warm_up=0.5, cell="co-serving", cases=tuple(_ordered(cases)),
    )  # fmt: skip


_FIG_10 = _co_serving(
    "Fig. 10, 15", "10-15", "1G4C", "longbench",
    "SLO within 0.6 points of Sarathi; BE decode throughput 1.2 times the baselines under light LS load, 9.85 times "
    "under heavy load",
)  # fmt: skip
_FIG_11 = _co_serving(
    "Fig. 11, 16", "11-16", "1G", "longbench", "SLO within 0.6 points of Sarathi; BE up to 3.47 times"
)
_FIG_12 = _co_serving("Fig. 12", "12", "1G", "dailymail", "SLO attainment up to 1.42 times the baselines")
_FIG_13 = (_slo_scales(YI, 4.0, (0.15, 0.2)), _slo_scales(LLAMA, 3.0, (0.15, 0.2)))
_FIG_14 = (_bursty(YI, 8.0), _bursty(LLAMA, 5.0))
_FIG_17 = _co_serving("Fig. 17", "17", "1G4C", "dailymail", "BE up to 9.1 times the baselines")

EXPERIMENTS: tuple[Experiment, ...] = (
    _stock(),
    _changed_stock(),
    _stock_with_drafts(),
    _long_stock("60", "LS/s", _STOCK_RATES),
    _decode_instance(),
    _pair("omniserve-pair", (1.0, 1.5, 2.0), times=4),
    _pair("omniserve-pair-long", (2.0,), times=10),
    *_FIG_10,
    Experiment(
        name="omniserve-15-network", figure="OmniServe Fig. 15: yi-34b-200k, 1G4C over 10 Gb/s, longbench",
        says="the advantage persists", x_name="LS/s", cell="co-serving",
        cases=_ordered(
            _case(replace(YI, network_gb_per_s=1.25), SERVERS["1G4C"], f"{rate:g}", system,
                  LoadSpec(ls_rate=rate, be_rate=BE_RATE), SLO_OF[YI])
            for rate in (2.0, 6.0) for system in ("omniserve", "neo")
        ),
    ),
    *_FIG_11,
    *_FIG_12,
    *_FIG_17,
    Experiment(
        name="omniserve-15-long", figure="OmniServe Fig. 15: yi-34b-200k, 1G4C, longbench, five times as long",
        says="BE decode throughput 9.85 times the baselines under heavy load", x_name="LS/s", times=5,
        cell="co-serving",
        cases=_with_offloading(
            _case(YI, SERVERS["1G4C"], "6", system, LoadSpec(ls_rate=6.0, be_rate=BE_RATE))
            for system in ("omniserve", "sarathi")
        ),
    ),
    Experiment(
        name="omniserve-17-long", figure="OmniServe Fig. 17: yi-34b-200k, 1G4C, dailymail, three times as long",
        says="runs of 30 minutes; up to 9.1 times", x_name="LS/s", cell="co-serving", times=3,
        cases=_with_offloading(
            _case(YI, SERVERS["1G4C"], "6", system, LoadSpec(ls_rate=6.0, be_rate=BE_RATE, be_lengths="dailymail"))
            for system in ("omniserve", "sarathi")
        ),
    ),
    Experiment(
        name="omniserve-15-less", figure="As Fig. 15, yi-34b-200k, 1G4C, longbench, 2 LS/s, with less best-effort work",
        says=CONTROL, x_name="BE/s", cell="co-serving",
        cases=_ordered(
            _case(YI, SERVERS["1G4C"], f"{rate:g}", system, LoadSpec(ls_rate=2.0, be_rate=rate))
            for rate in (0.1, 0.25) for system in ("omniserve", "sarathi", "neo")
        ),
    ),
    Experiment(
        name="omniserve-15-memory", figure="As Fig. 17, yi-34b-200k on GPUs of 50 GB, 4 LS/s, 0.5 BE/s",
        says=CONTROL, x_name="hosts", cell="co-serving", times=2,
        cases=_ordered(
            _case(replace(YI, memory_gb=50.0), f"{hosts}xXeon-6342", f"{hosts} hosts", system,
                  LoadSpec(ls_rate=4.0, be_rate=0.5, be_lengths="dailymail"), SLO_OF[YI])
            for hosts in (1, 5) for system in ("omniserve", "sarathi", "llumnix")
        ),
    ),
    *_FIG_13,
    *_FIG_14,
    _neo_of_the_paper("10", _FIG_10),
    _neo_of_the_paper("11", _FIG_11),
    _neo_of_the_paper("12", _FIG_12),
    _neo_of_the_paper("13", _FIG_13),
    _neo_of_the_paper("14", _FIG_14),
    _neo_of_the_paper("17", _FIG_17, "BE throughput is bottlenecked by strict objectives, and above Sarathi's (5.2.2)"),
    _more_cpus(YI, 4.0),
    _more_cpus(LLAMA, 3.0),
    Experiment(
        name="omniserve-19", figure="OmniServe Fig. 19b, 19c: yi-34b-200k, 1G4C, admission control",
        says="TTFT attainment of the admitted 94.1 % with it under aggressive load, up to 43.3 points more than "
        "without; LS decode throughput within 6 %", x_name="LS/s", cell="admission",
        cases=tuple(
            with_settings(case, f"{case.variant}, {word}".removeprefix(", "), admission=word == "with")
            for case in _ADMISSION for word in ("with", "without")
        ),
    ),
)  # fmt: skip
"""The experiments, in the order of the page."""

"""The papers' figures as experiments: machine, model, load, systems, objectives, and what the paper says.

Rates are not the papers' axes, which their text does not print; they lie around what the text names.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from benchmarks.common.paper_loads import LoadSpec
from omniserve.request import SLO

FIXED_BUDGET = 512
"""Tokens of a step of the systems that bound no step's time: what keeps Yi-34B within its TPOT."""
MOST_TOKENS = 2048
"""The same for those that do: the bound decides."""
DECODE_FIRST = "benchmarks.common.decode_first:DecodeFirst"
BOUNDED = ("omniserve", "neo", "apex", "conserve", DECODE_FIRST)


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineSpec:
    """What it runs on, by the simulator's names."""

    model: str
    device: str
    hosts: str | None = None
    memory_gb: float | None = None
    """Of a device, if the paper's has not what the data sheet says."""
    bandwidth_gb_per_s: float | None = None
    """The same of its memory's bandwidth."""
    host_share: float | None = None
    """Of a host's peak bandwidth that its attention reaches, if not the simulator's."""
    max_model_len: int | None = None
    """If requests are longer than the model's own context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One simulation: a point of a figure."""

    x: str
    """Place on the figure's axis: a row of its table."""
    system: str
    """Scheduler, registered or ``package.module:Class``: a column, with ``variant``."""
    variant: str = ""
    machine: MachineSpec
    load: LoadSpec
    slo: SLO = field(default_factory=SLO)
    settings: tuple[tuple[str, object], ...] = ()
    """Of EngineConfig."""

    @property
    def column(self) -> str:
        return f"{self.system.rpartition(':')[2]} {self.variant}".strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """A figure, or a part of it."""

    name: str
    figure: str
    says: str
    """What the paper's text says of it."""
    x_name: str
    cases: tuple[Case, ...] = field(repr=False)
    cell: str
    """Which figures its table shows: see ``paper_report.CELLS``."""
    slo_from: str | None = None
    """The LS objectives are this system's own P99 at the same x (conserve 6.2); it comes first there."""
    times: float = 1.0
    """Length of a run over ``--minutes``."""
    warm_up: float = 0.33


def _budget(system: str, fixed: int = FIXED_BUDGET, most: int = MOST_TOKENS) -> tuple[tuple[str, object], ...]:
    return (("max_step_tokens", most if system in BOUNDED else fixed),)


_COMMON: tuple[tuple[str, object], ...] = (
    ("max_host_requests", 1024), ("max_num_requests", 512), ("max_piggyback_slots", 128), ("admission", False),
)  # fmt: skip

# -- omniserve, section 5 ------------------------------------------------------------------------------------------

_CO_SERVING = ("omniserve", "sarathi", "llumnix", "neo")
_YI = MachineSpec(model="yi-34b-200k", device="2xA100-80GB-PCIe")
_LLAMA_70B = MachineSpec(model="llama-2-70b", device="4xA100-80GB-PCIe", max_model_len=16384)  # of 4,096
_YI_SLO, _LLAMA_SLO = SLO(ttft_s=2.0, tpot_s=0.2), SLO(ttft_s=3.0, tpot_s=0.25)
_BE_RATE = 182.6 / 60
_SERVERS = {"1G": "1xXeon-6342", "1G4C": "5xXeon-6342"}


def _omniserve_case(machine: MachineSpec, hosts: str, x: str, system: str, load: LoadSpec, slo: SLO) -> Case:
    return Case(
        x=x, system=system, machine=replace(machine, hosts=hosts), load=load, slo=slo,
        settings=(*_COMMON, *_budget(system)),
    )  # fmt: skip


def _co_serving(figure: str, name: str, servers: str, data: str, says: str) -> list[Experiment]:
    found = []
    for short, machine, slo, rates in (
        ("yi", _YI, _YI_SLO, (2.0, 6.0)),
        ("llama", _LLAMA_70B, _LLAMA_SLO, (1.0, 4.0)),
    ):
        cases = tuple(
            _omniserve_case(
                machine, _SERVERS[servers], f"{rate:g}", system,
                LoadSpec(ls_rate=rate, be_rate=_BE_RATE, be_lengths=data), slo,
            )
            for rate in rates
            for system in _CO_SERVING
        )  # fmt: skip
        found.append(
            Experiment(
                name=f"omniserve-{name}-{short}", figure=f"OmniServe {figure}: {machine.model}, {servers}, {data}",
                says=says, x_name="LS/s", cases=cases, cell="co-serving",
            )
        )  # fmt: skip
    return found


def _slo_scales() -> Experiment:
    cases = [
        _omniserve_case(
            _LLAMA_70B, _SERVERS["1G"], f"{tpot_s:g} s", system, LoadSpec(ls_rate=3.0, be_rate=_BE_RATE),
            SLO(ttft_s=3.0, tpot_s=tpot_s),
        )
        for tpot_s in (0.15, 0.2)
        for system in ("omniserve", "sarathi", "llumnix")
    ]  # fmt: skip
    cases += [  # whose steps are short enough for 0.15 s
        replace(case, variant="with 256", settings=(*case.settings, ("max_step_tokens", 256)))
        for case in tuple(cases)
        if case.system == "sarathi"
    ]
    return Experiment(
        name="omniserve-13-llama", figure="OmniServe Fig. 13: llama-2-70b, 1G, longbench, 3 LS/s", x_name="TPOT SLO",
        says="at 0.15 s Llumnix attains 62 %, OmniServe 91.6 % (1.48 times)", cases=tuple(cases), cell="co-serving",
    )  # fmt: skip


def _bursty() -> Experiment:
    cases = tuple(
        _omniserve_case(
            _YI, _SERVERS["1G"], f"every {interval:g} s", system,
            LoadSpec(ls_rates=(1.0, 8.0, interval), be_rate=_BE_RATE), _YI_SLO,
        )
        for interval in (5.0,)
        for system in _CO_SERVING
    )  # fmt: skip
    return Experiment(
        name="omniserve-14-yi", figure="OmniServe Fig. 14: yi-34b-200k, 1G, LS at 1 to 8 a second at random",
        says="OmniServe up to 1.23 times Llumnix and 1.13 times NEO, nearly identical with Sarathi",
        x_name="rate changes", cases=cases, cell="co-serving",
    )  # fmt: skip


def _filling() -> Experiment:
    cases = tuple(
        _omniserve_case(
            _YI, _SERVERS["1G4C"], "6", system, LoadSpec(ls_rate=6.0, be_rate=_BE_RATE, be_lengths="dailymail"), _YI_SLO
        )
        for system in ("omniserve", "sarathi")
    )
    return Experiment(
        name="omniserve-17-long", figure="OmniServe Fig. 17: yi-34b-200k, 1G4C, dailymail, five times as long",
        says="runs of 30 minutes; up to 9.1 times", x_name="LS/s", cases=cases, cell="co-serving", times=5,
    )  # fmt: skip


def _less_best_effort() -> Experiment:
    cases = tuple(
        _omniserve_case(_YI, _SERVERS["1G4C"], f"{rate:g}", system, LoadSpec(ls_rate=2.0, be_rate=rate), _YI_SLO)
        for rate in (0.1, 0.25)
        for system in ("omniserve", "sarathi", "neo")
    )
    return Experiment(
        name="omniserve-15-less", figure="As Fig. 15, yi-34b-200k, 1G4C, longbench, 2 LS/s, with less best-effort work",
        says="nothing: not in the paper, to tell the causes of a difference apart", x_name="BE/s", cases=cases,
        cell="co-serving",
    )  # fmt: skip


def _order() -> Experiment:
    cases = tuple(
        _omniserve_case(
            _YI, _SERVERS["1G4C"], f"{rate:g} LS/s, {data}", system,
            LoadSpec(ls_rate=rate, be_rate=_BE_RATE, be_lengths=data), _YI_SLO,
        )
        for data in ("longbench", "dailymail")
        for rate in (2.0, 6.0)
        for system in (DECODE_FIRST,)
    )  # fmt: skip
    return Experiment(
        name="omniserve-15-order", figure="As Fig. 15, 17, yi-34b-200k, 1G4C, with BE decodes before BE prompts",
        says="nothing: not in the paper, to tell the causes of a difference apart", x_name="load", cases=cases,
        cell="co-serving",
    )  # fmt: skip


def _less_memory() -> Experiment:
    cases = tuple(
        _omniserve_case(
            replace(_YI, memory_gb=50.0), f"{hosts}xXeon-6342", f"{hosts} hosts", system,
            LoadSpec(ls_rate=4.0, be_rate=0.5, be_lengths="dailymail"), _YI_SLO,
        )
        for hosts in (1, 5)
        for system in ("omniserve", "sarathi", "llumnix")
    )  # fmt: skip
    return Experiment(
        name="omniserve-15-memory", figure="As Fig. 17, yi-34b-200k on GPUs of 50 GB, 4 LS/s, 0.5 BE/s",
        says="nothing: not in the paper, to tell the causes of a difference apart", x_name="hosts", cases=cases,
        cell="co-serving", times=4,
    )  # fmt: skip


def _more_cpus() -> Experiment:
    cases = [
        _omniserve_case(
            _YI, f"{hosts}xXeon-6342", f"{hosts} hosts", "omniserve", LoadSpec(ls_rate=4.0, be_rate=_BE_RATE), _YI_SLO
        )
        for hosts in (1, 3, 5)
    ]
    cases += [
        replace(case, variant="dailymail", load=replace(case.load, be_lengths="dailymail")) for case in tuple(cases)
    ]
    cases += [
        replace(case, variant="without BE", load=replace(case.load, be_rate=0.0), machine=case.machine)
        for case in cases[:3]
    ]
    return Experiment(
        name="omniserve-18", figure="OmniServe Fig. 18 and 5.3: yi-34b-200k, 4 LS/s, more CPU hosts",
        says="up to 3.13 times with four more hosts; median TPOT nearly constant; attainment 0.28 to 0.36 points below "
        "LS alone", x_name="hosts", cases=tuple(cases), cell="co-serving",
    )  # fmt: skip


def _admission() -> Experiment:
    cases = []
    for rate in (6.0, 8.0, 12.0):
        case = _omniserve_case(
            _YI, _SERVERS["1G4C"], f"{rate:g}", "omniserve", LoadSpec(ls_rate=rate, be_rate=_BE_RATE), _YI_SLO
        )
        on = tuple((name, value) for name, value in case.settings if name != "admission")
        cases += [replace(case, variant="with", settings=on), replace(case, variant="without")]
    return Experiment(
        name="omniserve-19", figure="OmniServe Fig. 19: yi-34b-200k, 1G4C, admission control",
        says="TTFT attainment of the admitted 94.1 % with it under aggressive load, up to 43.3 points more than "
        "without; LS decode throughput within 6 %", x_name="LS/s", cases=tuple(cases), cell="admission",
    )  # fmt: skip


# -- apex, section 5 -----------------------------------------------------------------------------------------------

_A10 = MachineSpec(model="llama-3.1-8b", device="1xA10", hosts="1xXeon-6342-dual")
_T4 = MachineSpec(model="llama-2-7b", device="1xT4", hosts="1xXeon-6130-dual")


def _offline(
    name: str, figure: str, says: str, machine: MachineSpec, loads: dict[str, str], backlog: int, budget: int = 1024
) -> Experiment:
    cases = tuple(
        Case(
            x=x, system=system, machine=machine, load=LoadSpec(backlog=backlog, be_lengths=lengths),
            settings=(*_COMMON, *_budget(system, budget, budget)),
        )
        for x, lengths in loads.items()
        for system in ("apex", "neo", "fcfs", "omniserve")
    )  # fmt: skip
    return Experiment(
        name=name, figure=figure, says=says, x_name="load", cases=cases, cell="offline", times=2.0, warm_up=0.5
    )


# -- conserve, section 6 -------------------------------------------------------------------------------------------

_CONSERVE = ("online-only", "conserve", "sarathi", "non-preemptive")


def _harvest(name: str, figure: str, says: str, model: str, points: tuple[tuple[str, float, float], ...]) -> Experiment:
    machine = MachineSpec(model=model, device="1xH100-80GB", hosts="1xXeon-8480")
    cases = tuple(
        Case(
            x=x, system=system, machine=machine,
            load=LoadSpec(
                ls_rate=rate, ls_cv=cv, ls_lengths="4096:256", backlog=0 if system == "online-only" else 64,
                be_lengths="multinews",
            ),
            settings=(*_COMMON, ("max_step_tokens", 8192), ("checkpoint_kv", system == "conserve")),
        )
        for x, rate, cv in points
        for system in _CONSERVE
    )  # fmt: skip
    return Experiment(
        name=name, figure=figure, says=says, x_name="LS load", cases=cases, cell="harvest", slo_from="online-only"
    )


# -- bros, section 7 -----------------------------------------------------------------------------------------------

_BROS_SLO = SLO(ttft_s=0.4, tpot_s=0.2)


def _hybrid(name: str, machine: MachineSpec, rates: tuple[float, ...]) -> Experiment:
    gpu = "A100-40GB" if machine.memory_gb == 40.0 else "A100-80GB"
    cases = tuple(
        Case(
            x=f"{rate:g}", system=system, machine=machine, slo=_BROS_SLO,
            load=LoadSpec(ls_rate=rate, ls_lengths="bros-rt", backlog=128, be_lengths="bros-be"),
            settings=(*_COMMON, ("max_step_tokens", 1024), ("block_size", 16), ("checkpoint_kv", system == "bros")),
        )
        for rate in rates
        for system in ("bros", "fcfs", "round-robin", "omniserve")
    )  # fmt: skip
    return Experiment(
        name=name, figure=f"BROS Fig. 10, 11: {machine.model} on {machine.device.replace('A100-80GB', gpu)}",
        says="mean over models and rates, ShareGPT: normalized latency 74.2 % below vLLM and 54.3 % below RR; TTFT "
        "attainment 36.4 and 11.8 times, TPOT 1.73 and 1.47 times; BE throughput 11.3 % and 8.8 % below",
        x_name="LS/s", cases=cases, cell="hybrid",
    )  # fmt: skip


_A100_40 = MachineSpec(
    model="opt-13b", device="2xA100-80GB", hosts="1xEPYC-9654", memory_gb=40.0, bandwidth_gb_per_s=1555.0
)

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        *_co_serving("Fig. 10, 15", "10-15", "1G4C", "longbench", "SLO within 0.6 points of Sarathi; BE decode "
                     "throughput 1.2 times the baselines under light LS load, 9.85 times under heavy load"),
        *_co_serving("Fig. 11, 16", "11-16", "1G", "longbench",
                     "SLO within 0.6 points of Sarathi; BE up to 3.47 times")[:1],
        *_co_serving("Fig. 12", "12", "1G", "dailymail", "SLO attainment up to 1.42 times the baselines")[:1],
        *_co_serving("Fig. 17", "17", "1G4C", "dailymail", "BE up to 9.1 times the baselines")[:1],
        _slo_scales(),
        _bursty(),
        _filling(),
        _less_best_effort(),
        _order(),
        _less_memory(),
        _more_cpus(),
        _admission(),
        _offline("apex-5-t4", "APEX Fig. 5a: llama-2-7b on a T4, outputs of several lengths",
                 "over NEO by up to 71 %, over vLLM by up to 96 %", _T4,
                 {f"{n} out": f"300:{n}" for n in (50, 200, 400)}, 48),
        _offline("apex-5-a10", "APEX Fig. 5b: llama-3.1-8b on an A10, Azure conversations",
                 "13 % over NEO, 11 % over vLLM", _A10, {"azure": "azure"}, 160),
        _offline("apex-7-a10", "APEX Fig. 7: llama-3.1-8b on an A10, 1,000 tokens in, outputs of several lengths",
                 "over NEO by 5 % (50 to 200 out), 17 to 31 % (200 to 500), 37 % (above 500)", _A10,
                 {f"{n} out": f"1000:{n}" for n in (100, 400, 800)}, 160),
        _offline("apex-7-slow", "As APEX Fig. 7, with CPU attention at a tenth of its speed",
                 "nothing: not in the paper, to tell the causes of a difference apart", replace(_A10, host_share=0.07),
                 {f"{n} out": f"1000:{n}" for n in (100, 800)}, 160),
        _harvest("conserve-6-8b", "ConServe Fig. 6a: llama-3.1-8b on an H100",
                 "P99 TTFT and TBT within 25 % and 19 % of Online-Only; offline 82.3 % of Non-Preemptive, 3.0 times "
                 "(up to 7.48) Sarathi-P; at one load TBT 73 ms and 375 for Sarathi-P, TTFT 523 ms and 1,399",
                 "llama-3.1-8b", tuple((f"{rate:g}/s", rate, 0.5) for rate in (1.0, 2.0, 4.0))),
        _harvest("conserve-6-14b", "ConServe Fig. 6a: qwen-2.5-14b on an H100", "as above", "qwen-2.5-14b",
                 tuple((f"{rate:g}/s", rate, 0.5) for rate in (1.0, 2.0))),
        _harvest("conserve-9-8b", "ConServe Fig. 9a: llama-3.1-8b on an H100, 2 LS/s, burstier arrivals",
                 "P99 TTFT and TBT 1.68 and 2.38 times better than the best baseline's, offline 3.62 times",
                 "llama-3.1-8b", tuple((f"CV {cv:g}", 2.0, cv) for cv in (1.0, 4.0))),
        _hybrid("bros-10-13b", _A100_40, (3.0, 6.0, 9.0)),
        _hybrid("bros-10-70b", MachineSpec(model="llama-3-70b", device="8xA100-80GB", hosts="1xEPYC-9654"),
                (5.0, 15.0)),
    )
}  # fmt: skip
"""By name, in the order of the page."""

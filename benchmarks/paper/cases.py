"""The parts of an experiment: machine, load, systems, objectives, and what the paper says of its figure."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace

from benchmarks.paper.loads import LoadSpec
from omniserve.core.request import SLO
from omniserve.latency import BatchFeatures, Predictor

FIXED_BUDGET = 512
"""Tokens of a step of the systems that bound no step's time: what keeps Yi-34B within its TPOT."""
MOST_TOKENS = 2048
"""Tokens of a step of the systems that bound a step's time: the bound decides."""
BOUNDED = ("omniserve", "omniserve-paper", "neo", "neo-paper", "apex", "conserve")
PAPER_ORDER = "paper's order"
"""Variant that prefills best-effort prompts before it decodes (omniserve 3.3.2; apex, Algorithm 1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineSpec:
    """The machine of a case, by the simulator's names."""

    model: str
    device: str
    hosts: str | None = None
    memory_gb: float | None = None
    """Memory of a device, if the paper's differs from the data sheet's."""
    bandwidth_gb_per_s: float | None = None
    """Bandwidth of a device's memory, if the paper's differs from the data sheet's."""
    host_share: float | None = None
    """Share of a host's peak bandwidth that its attention reaches, if not the simulator's."""
    network_gb_per_s: float | None = None
    """Bandwidth to a remote host, if not the simulator's."""
    max_model_len: int | None = None
    """Longest context, if requests are longer than the model's own."""
    prompts_come_computed: bool = False
    """The machine is the decode instance of a prefill-decode pair: prompts come with their KV, and take no time."""
    prefill_engines: int = 0
    """Machines like this one, with a host of their own, that compute prompts for it."""
    num_engines: int = 1
    """Engines alike, each on such a machine, which share the load and the prefill engines."""

    @property
    def count(self) -> int:
        """The machines, prefill engines included."""
        return self.num_engines + self.prefill_engines


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A simulation: a point of a figure."""

    x: str
    """Place on the figure's axis: a row of its table."""
    system: str
    """Scheduler, registered or ``package.module:Class``: a column, with ``variant``."""
    variant: str = ""
    name: str = ""
    """The system's name in its column, if it is not the scheduler's."""
    machine: MachineSpec
    load: LoadSpec
    slo: SLO = field(default_factory=SLO)
    slo_scale: float = 1.0
    """Factor of the objectives that come from ``Experiment.slo_from``."""
    settings: tuple[tuple[str, object], ...] = ()
    """Settings of EngineConfig, and options of policies; each policy gets those that it has."""
    drafts_right: float = 0.0
    """Probability that a draft of a best-effort request is right; 0: requests have no drafts."""
    noise: float = 0.0
    """Standard deviation of the noise on steps' times (``SimulationConfig``)."""
    per_machine: bool = False
    """The load is of one machine and is multiplied by their number, and what is done a second is divided by it: so
    systems of different numbers of machines compare."""

    @property
    def num_shares(self) -> int:
        """The machines by which figures are divided."""
        return self.machine.count if self.per_machine else 1

    @property
    def column(self) -> str:
        name = self.name or self.system.rpartition(":")[2]
        return f"{name}, {self.variant}" if self.variant else name


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """A figure, or a part of it."""

    name: str
    figure: str
    says: str
    """The paper's text on the figure."""
    x_name: str
    cases: tuple[Case, ...] = field(repr=False)
    cell: str
    """The figures that the experiment's table shows: a key of ``report.CELLS``."""
    slo_from: str | None = None
    """The LS objectives are this system's own P99 at the same x (conserve 6.2); it comes first there."""
    times: float = 1.0
    """Length of a run over ``--minutes``."""
    warm_up: float = 0.33
    to_the_end: bool = False
    """Runs go on until all requests have ended, best-effort ones too."""


COMMON: tuple[tuple[str, object], ...] = (
    ("max_num_seqs", 512), ("max_piggyback_seats", 128), ("admission", False),
)  # fmt: skip
"""Settings of every system. How many requests the host tier has is limited by its memory alone."""


def budget(system: str, fixed: int = FIXED_BUDGET, most: int = MOST_TOKENS) -> tuple[tuple[str, object], ...]:
    """Return a system's token budget as settings."""
    return (("max_num_batched_tokens", most if system in BOUNDED else fixed),)


def with_settings(case: Case, variant: str, **settings: object) -> Case:
    """Return a variant of a case whose settings differ by these."""
    kept = tuple((name, value) for name, value in case.settings if name not in settings)
    return replace(case, variant=variant, settings=(*kept, *settings.items()))


def both_orders(case: Case, systems: Container[str] = ("omniserve",)) -> list[Case]:
    """Return a case with the engine's order of best-effort work and with the paper's; those but ``systems`` once.

    For ``omniserve`` the latter is ``omniserve-paper``, which follows the paper in all else, too.
    """
    if case.system not in systems:
        return [case]
    if case.system == "omniserve":
        return [case, replace(case, system="omniserve-paper")]
    return [case, with_settings(case, PAPER_ORDER, be_order="prefill")]


class DecodesAlone(Predictor):
    """Predicts steps of a device whose prompts another instance computes: chunks of prompts take no time.

    Each chunk is taken to end its prompt, whose first token comes with its KV. That KV needs memory on this device,
    even if it then moves to a host. Left out are the transfer between the instances and the wait for the other one.
    Paper: omniserve 5.4.4.
    """

    def __init__(self, device: Predictor) -> None:
        self._device = device
        self.term_names, self.num_layers = device.term_names, device.num_layers
        self.layer_terms, self.attention_terms = device.layer_terms, device.attention_terms

    def terms(self, features: BatchFeatures) -> tuple[float, ...]:
        return self._device.terms(
            replace(
                features, prefill_requests=0, prefill_tokens=0, prefill_context=0, prefill_load=0.0,
                sampled_rows=max(0, features.sampled_rows - features.prefill_requests),
            )
        )  # fmt: skip

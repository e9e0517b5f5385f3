"""The papers' figures that have an axis, as curves: the experiment of each, its axis, its panels, what it prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.paper.cases import Case, Experiment


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """A panel of a figure: what its vertical axis shows."""

    figure: str
    """A figure of ``report.figures_of``."""
    label: str
    factor: float = 1.0
    """Factor of the figure to the label's unit."""
    says: str = ""
    """What the paper's text prints of it."""
    is_logarithmic: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperFigure:
    """A figure of a paper: the systems of an experiment over more values of its axis."""

    name: str
    title: str
    experiment: str
    """The experiment whose first row has the systems."""
    xs: tuple[float, ...]
    """Values on the axis. The papers' plots are not in their text, so these lie around what it names."""
    x_label: str
    place: Callable[[Case, float], Case]
    """Puts a case at a value of the axis."""
    panels: tuple[Panel, ...]
    leave_out: tuple[str, ...] = ()
    """Columns of the experiment that the figure does not show."""
    also: tuple[tuple[str, str], ...] = ()
    """Systems that the figure shows beside the experiment's: (a column, the system that has its cases, too)."""

    def experiment_of(self, experiment: Experiment) -> Experiment:
        """Return the experiment with its systems at each value of this figure's axis."""
        first = experiment.cases[0].x
        shown = [case for case in experiment.cases if case.x == first and case.column not in self.leave_out]
        also = [replace(case, system=system) for column, system in self.also for case in shown if case.column == column]
        systems = [*shown, *also]
        cases = tuple(replace(self.place(case, x), x=f"{x:g}") for x in self.xs for case in systems)
        return replace(experiment, name=self.name, figure=self.title, x_name=self.x_label, cases=cases)


def at_ls_rate(case: Case, rate: float) -> Case:
    """Return a case with so many LS requests a second."""
    return replace(case, load=replace(case.load, ls_rate=rate))


def at_be_rate(case: Case, rate: float) -> Case:
    """Return a case with so many best-effort requests a second."""
    return replace(case, load=replace(case.load, be_rate=rate))


def with_outputs_of(prompt: int) -> Callable[[Case, float], Case]:
    """Return what gives a case's best-effort requests prompts of one length, and outputs of the axis's."""
    return lambda case, tokens: replace(case, load=replace(case.load, be_lengths=f"{prompt}:{tokens:g}"))


def at_burstiness(case: Case, cv: float) -> Case:
    """Return a case whose LS arrivals have this coefficient of variation."""
    return replace(case, load=replace(case.load, ls_cv=cv))


def with_hosts(case: Case, hosts: float) -> Case:
    """Return a case with so many CPU hosts."""
    assert case.machine.hosts is not None
    _, _, host = case.machine.hosts.partition("x")
    return replace(case, machine=replace(case.machine, hosts=f"{hosts:g}x{host}"))


_ATTAINED = Panel(figure="attainment", label="LS requests within their objectives, %", factor=100)
_OUT = Panel(figure="be_output_per_s", label="BE output tokens/s")


def _omniserve(
    name: str, number: str, machine: str, experiment: str, xs: tuple[float, ...], says: tuple[str, str]
) -> PaperFigure:
    return PaperFigure(
        name=f"omniserve-{name}", title=f"OmniServe Fig. {number}: {machine}", experiment=experiment, xs=xs,
        x_label="LS requests/s", place=at_ls_rate, leave_out=("llumnix, 80 % headroom",), also=(("neo", "neo-paper"),),
        panels=(replace(_ATTAINED, says=says[0]), replace(_OUT, says=says[1])),
    )  # fmt: skip


_YI_RATES, _LLAMA_RATES = (1, 2, 3, 4, 5, 6, 7), (0.5, 1, 2, 3, 4, 5)
_KEPT, _DAILY = "at most 0.6 points below Sarathi", "up to 1.42 times the baselines"


def _conserve(name: str, number: str, title: str, experiment: str, xs: tuple[float, ...], x_label: str,
              place: Callable[[Case, float], Case], says: tuple[str, str, str]) -> PaperFigure:  # fmt: skip
    return PaperFigure(
        name=f"conserve-{name}", title=f"ConServe Fig. {number}: {title}", experiment=experiment, xs=xs,
        x_label=x_label, place=place, panels=(
            Panel(figure="ttft_p99_s", label="P99 TTFT, ms", factor=1000, is_logarithmic=True, says=says[0]),
            Panel(figure="tbt_p99_s", label="P99 TBT, ms", factor=1000, is_logarithmic=True, says=says[1]),
            Panel(figure="be_tokens_per_s", label="offline tokens/s, in and out", says=says[2]),
        ),
    )  # fmt: skip


_NEAR = ("within 25 % of Online-Only on average", "within 19 % of Online-Only on average",
         "82.3 % of Non-Preemptive, 3.0 times Sarathi-P (up to 7.48)")  # fmt: skip


def _bros(name: str, title: str, experiment: str, xs: tuple[float, ...]) -> PaperFigure:
    return PaperFigure(
        name=f"bros-{name}", title=f"BROS Fig. 10, 11: {title}", experiment=experiment, xs=xs, x_label="LS requests/s",
        place=at_ls_rate, panels=(
            Panel(figure="normalized_s", label="LS latency, ms per output token", factor=1000, is_logarithmic=True,
                  says="74.2 % below vLLM, 54.3 % below RR (mean)"),
            Panel(figure="ttft_attainment", label="TTFT attained, %", factor=100,
                  says="36.4 times vLLM, 11.8 times RR (mean)"),
            Panel(figure="tpot_attainment", label="TPOT attained, %", factor=100,
                  says="1.73 times vLLM, 1.47 times RR (mean)"),
            Panel(figure="be_finished_per_s", label="BE requests/s", says="11.3 % below vLLM, 8.8 % below RR"),
        ),
    )  # fmt: skip


def _apex(
    name: str, number: str, title: str, experiment: str, xs: tuple[float, ...], prompt: int, says: str
) -> PaperFigure:
    return PaperFigure(
        name=f"apex-{name}", title=f"APEX Fig. {number}: {title}", experiment=experiment, xs=xs,
        x_label="output tokens of a request", place=with_outputs_of(prompt),
        panels=(Panel(figure="be_output_per_s", label="output tokens/s", says=says),),
    )  # fmt: skip


FIGURES: dict[str, PaperFigure] = {
    each.name: each
    for each in (
        _omniserve("10-15-yi", "10, 15", "Yi-34B on 2 A100, 5 hosts, LongBench", "omniserve-10-15-yi", _YI_RATES,
                   (_KEPT, "1.2 times the baselines at light load, 9.85 at heavy")),
        _omniserve("10-15-llama", "10, 15", "Llama-2-70B on 4 A100, 5 hosts, LongBench", "omniserve-10-15-llama",
                   _LLAMA_RATES, (_KEPT, "1.2 times the baselines at light load, more at heavy")),
        _omniserve("11-16-yi", "11, 16", "Yi-34B on 2 A100, 1 host, LongBench", "omniserve-11-16-yi", _YI_RATES,
                   (_KEPT, "up to 3.47 times the baselines")),
        _omniserve("11-16-llama", "11, 16", "Llama-2-70B on 4 A100, 1 host, LongBench", "omniserve-11-16-llama",
                   _LLAMA_RATES, (_KEPT, "up to 3.47 times the baselines")),
        _omniserve("12-yi", "12", "Yi-34B on 2 A100, 1 host, DailyMail", "omniserve-12-yi", _YI_RATES, (_DAILY, "")),
        _omniserve("12-llama", "12", "Llama-2-70B on 4 A100, 1 host, DailyMail", "omniserve-12-llama", _LLAMA_RATES,
                   (_DAILY, "")),
        _omniserve("17-yi", "17", "Yi-34B on 2 A100, 5 hosts, DailyMail", "omniserve-17-yi", _YI_RATES,
                   ("", "up to 9.1 times the baselines")),
        _omniserve("17-llama", "17", "Llama-2-70B on 4 A100, 5 hosts, DailyMail", "omniserve-17-llama", _LLAMA_RATES,
                   ("", "up to 9.1 times the baselines")),
        PaperFigure(
            name="omniserve-18-yi", title="OmniServe Fig. 18: Yi-34B on 2 A100, 4 LS/s, more hosts",
            experiment="omniserve-18-yi", xs=(1, 2, 3, 4, 5), x_label="CPU hosts", place=with_hosts,
            leave_out=("omniserve, without BE",), panels=(
                replace(_OUT, says="up to 3.13 times with four more hosts"),
                Panel(figure="tpot_p50_s", label="LS TPOT p50, ms", factor=1000, says="nearly constant"),
            ),
        ),
        PaperFigure(
            name="omniserve-19", title="OmniServe Fig. 19b, c: Yi-34B on 2 A100, admission control",
            experiment="omniserve-19", xs=(4, 5, 6, 7, 8, 10), x_label="LS requests/s", place=at_ls_rate, panels=(
                Panel(figure="admitted_ttft", label="admitted requests within their TTFT, %", factor=100,
                      says="94.1 % with it, up to 43.3 points more"),
                Panel(figure="ls_output_per_s", label="LS output tokens/s", says="within 6 %"),
            ),
        ),
        _apex("5-t4", "5a", "Llama-2-7B on a T4, 300 tokens in", "apex-5-t4", (50, 100, 150, 200, 300, 400), 300,
              "over NEO by up to 71 %, over vLLM by up to 96 %"),
        _apex("7-a10", "7", "Llama-3.1-8B on an A10, 1,000 tokens in", "apex-7-a10", (50, 100, 200, 400, 600, 800),
              1000, "over NEO by 5 % (50 to 200), 17 to 31 % (200 to 500), 37 % (above 500)"),
        PaperFigure(
            name="apex-6-a10", title="APEX Fig. 6b: Llama-3.1-8B on an A10, Azure conversations",
            experiment="apex-6-a10", xs=(0.5, 1, 1.5, 2, 2.5, 3), x_label="requests/s", place=at_be_rate, panels=(
                Panel(figure="be_normalized_s", label="latency, ms per output token", factor=1000,
                      says="slightly below NEO's", is_logarithmic=True),
            ),
        ),
        _conserve("6-8b", "6a", "Llama-3.1-8B on an H100", "conserve-6-8b", (0.5, 1, 1.5, 2, 3, 4), "LS requests/s",
                  at_ls_rate, _NEAR),
        _conserve("6-14b", "6a", "Qwen-2.5-14B on an H100", "conserve-6-14b", (0.5, 1, 1.5, 2, 2.5, 3),
                  "LS requests/s", at_ls_rate, _NEAR),
        _conserve("6-70b", "6a", "Llama-3.1-70B on 4 H100", "conserve-6-70b", (0.5, 1, 1.5, 2, 2.5, 3),
                  "LS requests/s", at_ls_rate, _NEAR),
        _conserve("9a", "9a", "Llama-3.1-8B on an H100, 2 LS/s, burstier arrivals", "conserve-9a",
                  (0.5, 1, 1.5, 2, 3, 4), "coefficient of variation of LS arrivals", at_burstiness,
                  ("1.68 times better than the best baseline", "2.38 times better", "3.62 times")),
        _bros("10-13b", "OPT-13B on 2 A100-40GB, ShareGPT", "bros-10-13b", (2, 4, 6, 8, 9, 10)),
        _bros("10-30b", "OPT-30B on 4 A100-40GB, ShareGPT", "bros-10-30b", (2, 4, 6, 8, 10, 12)),
        _bros("10-70b", "Llama-3-70B on 8 A100-80GB, ShareGPT", "bros-10-70b", (3, 6, 9, 12, 15, 18)),
    )
}  # fmt: skip
"""The figures, in the order of the page."""

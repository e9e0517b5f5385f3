"""Simulates more devices and hosts: the same number of GPUs, used in different ways.

    python -m benchmarks.scaling --record benchmarks/results/scaling.json

Llama-2-70B on eight A100-80GB with NVLink. Each way gets the whole LS rate; of two engines each gets half of it, and
their best-effort output is added. The load is Poisson, with a backlog of best-effort requests that never ends. Steps
are analytic (``simulate.analytic``), so nothing here was measured.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser, table
from omniserve import SLO, ClassSpec
from omniserve.simulate import Load, Machine, SimulationConfig, simulate
from omniserve.simulate.analytic import analytic_machine, engine_config_for
from omniserve.simulate.hardware import find_devices, find_hosts
from omniserve.simulate.load import fixed_lengths, poisson, requests
from omniserve.simulate.models import find_model


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way to use eight devices."""

    engines: int
    devices: int
    """Devices of a stage, tensor parallel."""
    stages: int = 1
    prefill_engines: int = 0


WAYS = {
    "8 ranks": Way(engines=1, devices=8),
    "2 engines of 4 ranks": Way(engines=2, devices=4),
    "4 ranks, 4 that prefill": Way(engines=1, devices=4, prefill_engines=1),
    "2 stages of 4 ranks": Way(engines=1, devices=4, stages=2),
    "4 stages of 2 ranks": Way(engines=1, devices=2, stages=4),
}


def machine_of(way: Way, network_gbps: float) -> Machine:
    """Return the machine of one of a way's engines, with a CPU host."""
    host = dataclasses.replace(find_hosts("Xeon-6342")[1], network_bytes_per_s=network_gbps * 1e9 / 8)
    return analytic_machine(
        find_model("llama-2-70b"), find_devices("A100-80GB")[1], way.devices, num_stages=way.stages, hosts=(host,),
        num_prefill_engines=way.prefill_engines,
    )  # fmt: skip


def run(way: Way, rate: float, tpot_s: float, args: Any) -> dict[str, float]:
    """Simulate a way at an LS rate, and return its figures."""
    machine, rng = machine_of(way, args.network_gbps), random.Random(args.seed)
    slo = SLO(ttft_s=args.ttft, tpot_s=tpot_s)
    config = engine_config_for(
        machine, max_host_requests=256, max_num_batched_tokens=args.step_tokens,
        classes=(ClassSpec(name="LS", kind="LS", slo=slo), ClassSpec(name="BE", kind="BE")),
    )  # fmt: skip
    lengths = fixed_lengths(args.prompt, args.output)
    load = Load(
        latency_sensitive=requests(poisson(rate / way.engines, args.seconds, rng), lengths, rng),
        best_effort=requests([0.0] * 100, lengths, rng), backlog=64, duration_s=args.seconds,
        warm_up_s=0.2 * args.seconds,
    )  # fmt: skip
    result = simulate(SimulationConfig(machine=machine, engine=config, load=load, seed=args.seed))
    ls, be = result.classes["LS"], result.classes["BE"]
    return {
        "attainment": ls.attainment, "ttft_p50_s": ls.ttft_p50_s, "tpot_p50_s": ls.tpot_p50_s,
        "be_output_tokens_per_s": way.engines * be.output_tokens_per_s, "prefilled_share": ls.prefilled_share,
    }  # fmt: skip


def main() -> None:
    parser = argument_parser(
        __doc__, "scaling", rates=[1.0, 2.0, 4.0, 8.0], tpots=[0.2, 0.1, 0.06], ttft=2.0, prompt=1024, output=128,
        step_tokens=512, seconds=300.0, network_gbps=(100.0, "between prefill engine and engine"), seed=0,
    )  # fmt: skip
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    cases = [(tpot, rate, name) for tpot in args.tpots for rate in args.rates for name in WAYS]
    for tpot, rate, name in tqdm(cases, disable=None):
        results[f"TPOT {tpot:g}, {rate:g} LS/s, {name}"] = run(WAYS[name], rate, tpot, args)
    lines = [["TPOT s", "LS/s", *WAYS]]
    for tpot in args.tpots:
        for rate in args.rates:
            found = [results[f"TPOT {tpot:g}, {rate:g} LS/s, {name}"] for name in WAYS]
            cells = [f"{each['be_output_tokens_per_s']:.0f} ({each['attainment']:.0%})" for each in found]
            lines.append([f"{tpot:g}", f"{rate:g}", *cells])
    print("best-effort output tokens/s (LS requests in their SLO)")
    print(table(lines, numbers=True))
    write_record(args.record, name="scaling", config=vars(args), seed=args.seed, results=results)


if __name__ == "__main__":
    main()

"""Steps a layer of a host token, and BE tokens a second, with late joins and without.

    python -m benchmarks.late_joins --record benchmarks/results/late_joins.json

LS requests decode beside BE requests whose attention is on the host tier. Two engines, one with ``late_joins`` and one
without, take turns. A result has time from when its row is sent until the next step reaches that layer; without late
joins only until that step begins, so rows of the last layers have little.
"""

from __future__ import annotations

import functools
import statistics
from contextlib import ExitStack

from benchmarks.common.engine_run import SteadyRun
from benchmarks.common.models import MODELS, token_bytes
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser, table_of
from benchmarks.common.timing import in_turn, median_ratio
from omniserve import Engine, EngineConfig


def main() -> None:
    parser = argument_parser(
        __doc__, "late_joins", models=list(MODELS), ls=(4, "LS requests that decode"), be=(64, "BE requests"),
        be_prompt=200, device_tokens=(1800, "tokens of KV on the device"), window_s=2.0, repeats=7,
    )  # fmt: skip
    args = parser.parse_args()
    results = {}
    for name in args.models:
        model = MODELS[name]()
        with ExitStack() as stack:
            served = {}
            for late in (True, False):
                config = EngineConfig(
                    device_kv_bytes=args.device_tokens * token_bytes(model), host_kv_bytes=1 << 30,
                    scheduler_options={"late_joins": late, "swap_in_delay_s": 1e9},
                )  # fmt: skip
                engine = stack.enter_context(Engine(model, config))
                served[late] = SteadyRun(engine, num_ls=args.ls, num_be=args.be, prompt=args.be_prompt)
            runs = in_turn(
                {
                    "late" if late else "before": functools.partial(each.window, args.window_s)
                    for late, each in served.items()
                },
                args.repeats,
            )
        ratios = {
            key: median_ratio([run[key] for run in runs["late"]], [run[key] for run in runs["before"]])
            for key in runs["late"][0]
        }
        results[name] = {**runs, "ratios": ratios}
        figures = {k: {key: statistics.median(run[key] for run in runs[k]) for key in runs[k][0]} for k in runs}
        rows = [
            {
                name: key, "late joins": f"{figures['late'][key]:.2f}", "without": f"{figures['before'][key]:.2f}",
                "ratio": f"{ratios[key]:.2f}",
            }
            for key in figures["late"]
        ]  # fmt: skip
        print(table_of(rows))
    write_record(args.record, name="late_joins", config=vars(args), seed=0, results=results)


if __name__ == "__main__":
    main()

"""Steps a layer of a host token, and BE tokens a second, with late joins and without.

    python -m benchmarks.late_joins --record benchmarks/results/late_joins.json

LS requests decode beside BE requests whose attention is on the host tier. Two engines, one with ``late_joins`` and one
without, take turns. A result has time from when its row is sent until the next step reaches that layer; without late
joins only until that step begins, so rows of the last layers have little.
"""

from __future__ import annotations

import functools
import statistics
import time
from contextlib import ExitStack

from benchmarks.common.engine_run import request
from benchmarks.common.models import MODELS, token_bytes
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser, table_of
from benchmarks.common.timing import in_turn, median_ratio
from omniserve import Engine, EngineConfig


class Served:
    """An engine whose requests begin anew as they end."""

    def __init__(self, engine: Engine, *, num_ls: int, num_be: int, prompt: int) -> None:
        self.engine = engine
        self._prompts = {"be": prompt, "ls": 16}
        self._num_begun = 0
        for kind in ["be"] * num_be + ["ls"] * num_ls:
            self._begin(kind)
        while engine.stats().waiting["BE"] or engine.stats().host_output_tokens < num_be:
            self._step()

    def _begin(self, kind: str) -> None:
        self.engine.add(request(f"{kind}{self._num_begun}", self._prompts[kind], 1500))
        self._num_begun += 1

    def _step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                self._begin(output.request_id[:2])

    def window(self, seconds: float) -> dict[str, float]:
        """Serve for some seconds; return what the host tier brought."""
        engine = self.engine
        before, began_s = engine.stats(), time.perf_counter()
        while (took_s := time.perf_counter() - began_s) < seconds:
            self._step()
        after = engine.stats()
        host_tokens = after.host_output_tokens - before.host_output_tokens
        steps = after.host_token_steps - before.host_token_steps
        return {
            "steps_per_layer": steps / max(1, host_tokens) / engine.spec.num_layers,
            "host_tokens_per_s": host_tokens / took_s,
            "be_tokens_per_s": (after.output_tokens["BE"] - before.output_tokens["BE"]) / took_s,
            "ls_tokens_per_s": (after.output_tokens["LS"] - before.output_tokens["LS"]) / took_s,
            "rows_per_step": (after.piggyback_rows - before.piggyback_rows) / (after.steps - before.steps),
        }


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
                served[late] = Served(engine, num_ls=args.ls, num_be=args.be, prompt=args.be_prompt)
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

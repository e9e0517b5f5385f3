"""Latency of a light LS stream over HTTP: TTFT and TPOT of the server, and the time from start to first token.

    python -m benchmarks.ls_alone --record benchmarks/results/ls_alone.json

A random-weight bf16 model in SmolLM-135M's shape; Poisson arrivals, 1 request/s, 128 tokens in, 32 out.
"""

from __future__ import annotations

import random
import time

from benchmarks.common.client import LS_TIER, LoadRequest, drive, poisson_stream, warm_server
from benchmarks.common.models import SMOLLM_135M, saved_smollm
from benchmarks.common.record import write_record
from benchmarks.common.summary import summarize
from benchmarks.common.terminal import argument_parser

ONE_TOKEN = LoadRequest(send_at_s=0.0, prompt=[1, 2, 3], max_tokens=1, service_tier=LS_TIER)


def main() -> None:
    parser = argument_parser(__doc__, "ls_alone", rate=1.0, seconds=60.0, prompt=128, output=32, repeats=3, seed=0)
    parser.add_argument("server_args", nargs="*", help="more flags of the server, after --")
    args = parser.parse_args()
    model = saved_smollm()
    results = []
    for repeat in range(args.repeats):
        requests = poisson_stream(
            random.Random(args.seed + repeat), rate=args.rate, seconds=args.seconds, prompt=args.prompt,
            output=args.output, tier=LS_TIER, vocab_size=SMOLLM_135M["vocab_size"],
        )  # fmt: skip
        began_s = time.monotonic()
        with warm_server("ls_alone", ["--model", str(model), *args.server_args], [ONE_TOKEN]) as server:
            start_s = time.monotonic() - began_s
            records, end_s = drive(server, requests, cutoff_s=args.seconds + 30, may_be_cut_off=True)
        summary = summarize(records, end_s)
        results.append({"start_to_first_token_s": start_s, "summary": summary, "requests": records})
        print(
            f"run {repeat}: first token {start_s:.1f} s after start; {summary.num_finished}/{summary.num_requests} "
            f"finished; TTFT p50/p99 {1e3 * summary.ttft_p50_s:.0f}/{1e3 * summary.ttft_p99_s:.0f} ms, "
            f"TPOT {1e3 * summary.tpot_p50_s:.1f}/{1e3 * summary.tpot_p99_s:.1f} ms"
        )
    config = vars(args) | {"model": SMOLLM_135M}
    write_record(args.record, name="ls_alone", config=config, seed=args.seed, results={"runs": results})


if __name__ == "__main__":
    main()

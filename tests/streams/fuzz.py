"""Random histories in random orders without end: more than the test suite has time for.

    python -m tests.streams.fuzz --seconds 600 --first-seed 1

Prints each failing history and exits 1 if there was one.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import sys
import time
from typing import get_args

from tests.streams.device import Eagerness, Order
from tests.streams.runs import CASES, Bench


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--families", nargs="+", default=["llama", "gemma2", "opt"])
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # failures are injected
    bench, num_histories, num_failures = Bench(max_tokens=10), 0, 0
    ends_s = time.monotonic() + args.seconds
    for seed in itertools.count(args.first_seed * 100_000):
        rng = random.Random(seed)
        for case in args.cases:
            if time.monotonic() >= ends_s:
                print(f"{num_histories} histories, {num_failures} failed")
                return int(num_failures > 0)
            num_histories += 1
            main_stream, side = (rng.choice(get_args(Eagerness)) for _ in range(2))
            drawn = {
                "family": rng.choice(args.families),
                "abort_rate": rng.choice((0.0, 0.02, 0.2)),
                "faults": case != "device" and not case.startswith("device,") and rng.random() < 0.5,
                "closes_after": rng.choice((None, None, rng.randrange(40))),
                "device_blocks": rng.choice((9, 12, 18)),
                "max_host_requests": rng.choice((1, 2, 16)),
                "max_num_batched_tokens": rng.choice((4, 16)),
            }
            try:
                bench.run(case, Order(main_stream, side, seed), seed, **drawn)
            except Exception as error:
                num_failures += 1
                print(f"FAILED {case}, history {seed}, {main_stream}/{side}, {drawn}: {error!r}", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())

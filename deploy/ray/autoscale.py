"""Ask a Ray cluster's autoscaler for as many engines as an OmniServe server's load needs.

python deploy/ray/autoscale.py --url http://127.0.0.1:8000 --engine '{"CPU": 8}' --most 8

It reads ``omniserve_replicas_wanted`` and asks for so many bundles of an engine's resources. Ray starts nodes for them,
and takes nodes away that are idle for its ``idle_timeout_minutes``. Run it on a node of the cluster; what it has asked
for holds until it asks again.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.request

import ray
from ray.autoscaler.sdk import request_resources

_GAUGE = re.compile(r"^omniserve_replicas_wanted(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


def wanted(metrics: str) -> int | None:
    """Return the engines that a server wants; None if it does not say yet."""
    found = _GAUGE.search(metrics)
    return None if found is None else int(float(found[1]))


def main() -> None:
    """Ask again and again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    parser.add_argument("--engine", type=json.loads, default={"CPU": 1}, help="an engine's resources, as JSON")
    parser.add_argument("--least", type=int, default=1, help="engines in any case (default: %(default)s)")
    parser.add_argument("--most", type=int, default=8, help="engines at most (default: %(default)s)")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two looks (default: %(default)s)")
    args = parser.parse_args()
    ray.init(address="auto", logging_level="warning")
    asked = None
    while True:
        try:
            with urllib.request.urlopen(f"{args.url}/metrics", timeout=10) as answer:
                number = wanted(answer.read().decode())
        except OSError as error:
            print(f"{args.url} does not answer: {error}", flush=True)  # what was asked for stays
            number = None
        if number is not None and (number := min(max(number, args.least), args.most)) != asked:
            request_resources(bundles=[args.engine] * number)
            asked = number
            print(f"asked for {number} engines", flush=True)
        time.sleep(args.every)


if __name__ == "__main__":
    main()

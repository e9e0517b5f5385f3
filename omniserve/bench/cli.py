"""Load a server through its API, and tell how long answers took.

``omniserve bench serve`` sends random prompts to a server, OmniServe or another one with OpenAI's API, and reports
times to the first token and per token. With ``--best-effort N`` so many best-effort requests (``service_tier: flex``)
are always unfinished beside them. The flags are those of ``vllm bench serve``, as far as they are here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from omniserve.bench.load import Outcome, Shape, calls, run
from omniserve.bench.report import METRICS, figures, table
from omniserve.core.arguments import ArgumentParser

_TIMEOUT_S = 6 * 3600.0


def _rate(text: str) -> float:
    """Read a rate; an argparse type."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0 or inf, got {text}")
    return value


def _count(text: str) -> int:
    """Read a number of requests; an argparse type."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def _count_or_none(text: str) -> int:
    """Read a number of requests, or 0; an argparse type."""
    return 0 if text == "0" else _count(text)


def _names(text: str) -> list[str]:
    """Read metrics with commas between them; an argparse type."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in METRICS]:
        raise argparse.ArgumentTypeError(f"there is no metric {unknown[0]!r}; there are {', '.join(METRICS)}")
    return names


def _percents(text: str) -> list[float]:
    """Read percentiles with commas between them; an argparse type."""
    values = [float(part) for part in text.split(",")]
    if any(not 0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"percentiles are from 0 to 100, got {text}")
    return values


def _objective(text: str) -> tuple[str, float]:
    """Read ``METRIC:MS``; an argparse type."""
    name, colon, ms = text.partition(":")
    if name not in ("ttft", "tpot", "e2el") or not colon:
        raise argparse.ArgumentTypeError(f"must be ttft:MS, tpot:MS or e2el:MS, got {text!r}")
    return name, float(ms) / 1e3


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``omniserve bench``."""
    parser = ArgumentParser(
        "python -m omniserve.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="serve")
    serve = commands.add_parser("serve", help="load a server", description=__doc__)
    add = serve.add_argument
    add(
        "--base-url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="the server, without /v1 (default: %(default)s)",
    )
    add("--endpoint", default="/v1/completions", choices=("/v1/completions", "/v1/chat/completions"))
    add("--model", metavar="NAME", help="the model to name (default: none is named)")
    add("--api-key", metavar="KEY", help="default: OPENAI_API_KEY, if set")
    add("--num-prompts", type=_count, default=100, metavar="N", help="timed requests (default: %(default)s)")
    add("--request-rate", type=_rate, default=math.inf, metavar="R",
        help="timed requests a second, with exponential gaps (default: inf, all at once)")  # fmt: skip
    add("--max-concurrency", type=_count, metavar="N", help="most timed requests at a time (default: any number)")
    add(
        "--random-input-len",
        type=_count,
        default=512,
        metavar="N",
        help="tokens, or words of chats (default: %(default)s)",
    )
    add("--random-output-len", type=_count, default=128, metavar="N", help="(default: %(default)s)")
    add("--random-range-ratio", type=float, default=0.0, metavar="X",
        help="lengths are drawn from 1 - X to 1 + X times these (default: %(default)s)")  # fmt: skip
    add(
        "--random-vocab", type=int, default=400, metavar="N", help="token ids are below this one (default: %(default)s)"
    )
    add("--service-tier", metavar="TIER", help="of the timed requests (default: none is named)")
    add("--best-effort", type=_count_or_none, default=0, metavar="N",
        help="so many requests of tier flex always run beside the timed ones (default: none)")  # fmt: skip
    add("--best-effort-input-len", type=_count, default=512, metavar="N", help="(default: %(default)s)")
    add("--best-effort-output-len", type=_count, default=128, metavar="N", help="(default: %(default)s)")
    add("--percentile-metrics", type=_names, default=["ttft", "tpot", "itl"], metavar="NAMES",
        help=f"of {', '.join(METRICS)} (default: ttft,tpot,itl)")  # fmt: skip
    add(
        "--metric-percentiles", type=_percents, default=[99.0], metavar="NUMBERS", help="such as 50,90,99 (default: 99)"
    )
    add("--goodput", type=_objective, nargs="+", default=[], metavar="METRIC:MS",
        help="objectives, such as ttft:1000 tpot:100; tells how many requests keep all of them")  # fmt: skip
    add("--seed", type=int, default=0)
    add("--save-result", action="store_true", help="write a JSON file with all figures and flags")
    add("--result-filename", type=Path, metavar="FILE", help="its name (default: omniserve-bench.json)")
    return parser


async def _load(args: argparse.Namespace) -> Outcome:
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    shape = Shape(
        endpoint=args.endpoint, model=args.model, service_tier=args.service_tier, input_len=args.random_input_len,
        output_len=args.random_output_len, range_ratio=args.random_range_ratio, below_id=args.random_vocab,
    )  # fmt: skip
    beside = Shape(
        endpoint=args.endpoint, model=args.model, service_tier="flex", input_len=args.best_effort_input_len,
        output_len=args.best_effort_output_len, range_ratio=args.random_range_ratio, below_id=args.random_vocab,
    )  # fmt: skip
    timed = [*islice(calls(shape, random.Random(args.seed), rate=args.request_rate), args.num_prompts)]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=args.base_url, headers=headers, limits=limits, timeout=_TIMEOUT_S) as client:
        with tqdm(total=len(timed), unit="request", disable=not sys.stderr.isatty()) as bar:
            return await run(
                client, timed, background=calls(beside, random.Random(-1 - args.seed)),
                background_concurrency=args.best_effort, max_concurrency=args.max_concurrency,
                on_done=lambda _: bar.update(),
            )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 if no timed request was complete."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    try:
        outcome = asyncio.run(_load(args))
    except ValueError as error:
        parser.error(str(error))
    goodput_s = dict(args.goodput)
    found = figures(outcome, metrics=args.percentile_metrics, percentiles=args.metric_percentiles, goodput_s=goodput_s)
    print(table(found))
    if args.save_result or args.result_filename is not None:
        path = args.result_filename or Path("omniserve-bench.json")
        path.write_text(json.dumps(_saved(args, found), indent=1) + "\n", encoding="utf-8")
        print(f"written to {path}")
    return 0 if found["completed"] else 1


def _saved(args: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """Return what is written: the flags but for the key, and the figures; what is no number is null."""
    flags = {name: value for name, value in vars(args).items() if name not in ("api_key", "command", "result_filename")}
    flags["request_rate"] = "inf" if math.isinf(args.request_rate) else args.request_rate
    figures_ = {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in found.items()}
    return {"flags": flags, **figures_}

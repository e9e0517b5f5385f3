"""The flags of ``python -m omniserve.simulate``, and what their values may be."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from omniserve.core.arguments import ArgumentParser
from omniserve.core.options import named_value
from omniserve.core.request import SLO
from omniserve.routing.routers import ROUTERS
from omniserve.simulate.machines_needed import Offer


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = ArgumentParser(
        prog="python -m omniserve.simulate",
        description="What a load would see: the engine's own scheduler and KV manager on a virtual clock. Times come "
        "from data sheets (--device) or from a measured profile (--profile).",
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument("--model", required=True, help="a known model (llama-2-70b), or a folder with a config.json")
    machine.add_argument("--device", metavar="[N x]NAME", help="such as 4xA100-80GB")
    machine.add_argument(
        "--hosts", metavar="[N x]NAME", help="CPU hosts for best-effort attention, such as 5xXeon-6342"
    )
    machine.add_argument(
        "--pipeline-parallel-size",
        type=_whole(1),
        default=1,
        metavar="M",
        help="stages, each of the devices of --device",
    )
    machine.add_argument(
        "--prefill-engines",
        type=_whole(0),
        default=0,
        metavar="N",
        help="more machines with the same devices and a host, which compute prompts",
    )
    machine.add_argument(
        "--engines",
        type=_whole(1),
        default=1,
        metavar="N",
        help="engines alike, on such a machine each, which share the load and the prefill engines (default: 1)",
    )
    machine.add_argument(
        "--router",
        choices=list(ROUTERS),
        default="fewest-requests",
        help="how requests are divided among --engines (default: %(default)s)",
    )
    machine.add_argument("--profile", type=Path, metavar="FILE", help="a profile of python -m omniserve.profile")
    machine.add_argument(
        "--calibrate-from",
        type=Path,
        nargs="+",
        metavar="FILE",
        default=[],
        help="traces of a server's steps (--trace-steps): how fast and how steady this machine is; any load will do",
    )
    machine.add_argument("--noise", type=_not_negative, default=0.0, help="of step times: sigma of their logarithm")
    machine.add_argument(
        "--drafts-right",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="decode speculatively, with drafts that are right so often (default: 0, without drafts)",
    )
    load = parser.add_argument_group("load")
    load.add_argument("--ls-rate", type=rates, metavar="R,R", help="latency-sensitive requests a second")
    load.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="LS requests: CSV with arrival_s,input_tokens,output_tokens, or a .jsonl of Mooncake's form; with "
        "hash_ids in it, prompts begin alike, and there is a prefix cache",
    )
    load.add_argument("--hash-tokens", type=int, default=512, help="tokens of one of the hash_ids (default: 512)")
    load.add_argument("--ls-lengths", metavar="L", help="IN:OUT, lognormal:IN:OUT[:SIGMA] or CSV (default: 512:128)")
    load.add_argument("--arrivals", default="poisson", metavar="A", help="poisson, gamma:CV or square:RATIO:PERIOD_S")
    load.add_argument("--be", default="64", metavar="B", help="N (so many always unfinished; default: 64), rate:R, CSV")
    load.add_argument("--be-lengths", metavar="L", help="as --ls-lengths (default: 1024:256)")
    load.add_argument(
        "--be-deadline", type=_positive, metavar="S", help="seconds that a best-effort request may take (default: any)"
    )
    load.add_argument("--minutes", type=_positive, default=10.0, help="simulated (default: 10)")
    load.add_argument(
        "--warm-up", type=_share_below_one, default=0.2, metavar="SHARE", help="of the time, left out (default: 0.2)"
    )
    load.add_argument("--seed", type=int, default=0)
    engine = parser.add_argument_group("engine")
    engine.add_argument("--scheduler", default="omniserve", metavar="NAME,NAME", help="default: omniserve")
    engine.add_argument(
        "--prefill-placement", default="in-time", metavar="NAME", help="which prompts go to prefill engines"
    )
    engine.add_argument("--slo", type=_slo, default=SLO(ttft_s=1.0, tpot_s=0.1), metavar="TTFT_S:TPOT_S")
    engine.add_argument("--piggyback-slots", type=int, default=32, metavar="P")
    engine.add_argument("--step-tokens", type=int, default=512, help="token budget of a step (default: 512)")
    engine.add_argument("--max-requests", type=int, default=256, help="requests with KV on the device (default: 256)")
    engine.add_argument("--host-requests", type=int, default=256, help="requests on the host tier (default: 256)")
    engine.add_argument("--device-kv-gb", type=_positive, help="KV pool of all devices (default: what they have left)")
    engine.add_argument("--host-kv-gb", type=_not_negative, help="KV pool of all hosts (default: most of their memory)")
    engine.add_argument(
        "--scheduler-option",
        action="append",
        type=named_value,
        default=[],
        metavar="NAME=VALUE",
        help="an option of policies, such as slack=step, for those that have it; repeat it",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--no-plan", action="store_true", help="the table only")
    output.add_argument(
        "--price",
        type=_offer,
        action="append",
        default=[],
        metavar="KIND=PER_HOUR",
        help="how many machines of this kind, named as for --device, the load needs, and what a million tokens costs "
        "then; repeat it for other kinds (with --profile: one, of any name)",
    )
    output.add_argument(
        "--target", type=_share_above_zero, default=0.95, help="share of LS requests in their SLO (default: 0.95)"
    )
    output.add_argument("--record", type=Path, metavar="FILE", help="JSON with all figures and request times")
    output.add_argument("--plot", type=Path, metavar="FILE", help="attainment and throughput over the rate")
    return parser


def _offer(text: str) -> Offer:
    kind, _, price = text.partition("=")
    if not kind:
        raise argparse.ArgumentTypeError(f"must be KIND=PER_HOUR, such as A100-80GB=1.9; got {text!r}")
    return Offer(kind=kind, per_hour=_positive(price))


def _whole(low: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers from ``low`` on."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"must be a whole number >= {low}, got {text!r}")
        return int(text)

    return read


def rates(text: str) -> list[float]:
    return [_positive(part) for part in text.split(",")]


def _slo(text: str) -> SLO:
    ttft, _, tpot = text.partition(":")
    return SLO(ttft_s=_positive(ttft), tpot_s=_positive(tpot))


def _number(said: str, accepts: Callable[[float], bool]) -> Callable[[str], float]:
    """Return an argparse type for finite numbers that ``accepts`` takes; ``said`` names them in errors."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
        if not (math.isfinite(value) and accepts(value)):
            raise argparse.ArgumentTypeError(f"must be a {said}, got {text!r}")
        return value

    return read


_not_negative = _number("number >= 0", lambda value: value >= 0)
_positive = _number("number > 0", lambda value: value > 0)
_share_above_zero = _number("share in (0, 1]", lambda value: 0 < value <= 1)
_share = _number("share in [0, 1]", lambda value: 0 <= value <= 1)
_share_below_one = _number("share in [0, 1)", lambda value: 0 <= value < 1)

"""``python -m omniserve.profile``: measure a model on this device and write its latency profile.

    python -m omniserve.profile --model PATH_OR_HUB_ID --time-limit 60

The engine's flags are the server's: give those that the model will be served with. Without --output the profile goes
into the cache folder, under a name that a server with the same model, settings and machine finds, unless others kept
the machine busy meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omniserve.core.arguments import ArgumentParser
from omniserve.core.errors import PeerLost, UnsupportedModelError
from omniserve.core.logs import set_up_logs
from omniserve.latency.profile import Profile, default_folder, path_in
from omniserve.launch.dataclass_flags import positive
from omniserve.launch.flags import add_engine_flags, config_from, model_from
from omniserve.launch.loading import EngineLoader

if TYPE_CHECKING:
    from omniserve.parallel.group import RankGroup


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = ArgumentParser(
        prog="python -m omniserve.profile",
        description="Measure a model on this device and write its latency profile. Give the flags that the server "
        "will have: the profile holds for these.",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="profile to write (default: in the cache folder)")
    parser.add_argument(
        "--time-limit", type=positive, default=60.0, metavar="SECONDS", help="about how long to measure (default: 60)"
    )
    parser.add_argument(
        "--steps", choices=("mixed", "grid"), default="mixed", help="whole steps that are measured: of a load of both "
        "classes, or of a grid of rows and contexts, as for the latency models of ConServe and BROS in their papers "
        "(default: mixed)",
    )  # fmt: skip
    add_engine_flags(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status.

    1: the machine was busy, so the profile is not kept. 2: what was asked for cannot be measured or written.
    """
    parser = build_parser()
    args = parser.parse_args(arguments)
    if args.steps == "grid" and args.output is None:
        parser.error("--steps grid: give --output FILE; a profile in the cache folder is taken for one of mixed steps")
    set_up_logs("warning", "text", text="%(levelname)s %(message)s")
    try:
        # Before a minute of measuring, not after it.
        folder = default_folder() if args.output is None else args.output.absolute().parent
        folder.mkdir(parents=True, exist_ok=True)
        if args.output is not None and args.output.is_dir():
            raise ValueError(f"--output {args.output} is a folder; give a file")
        model = model_from(args)
        loader = EngineLoader(
            model=model, dtype=args.dtype, device=args.device, config=config_from(args), quantize=args.quantize
        )
        profile = _measure(loader, args.time_limit, in_grid=args.steps == "grid")
        path = path_in(folder, profile.fingerprint) if args.output is None else args.output
        if is_kept := args.output is not None or not profile.disturbances:
            profile.write(path)
    except (OSError, ValueError, UnsupportedModelError, PeerLost) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    from omniserve.profiling.summary import summarise  # torch, for which --help need not wait

    print(summarise(profile))
    if profile.disturbances:
        print(f"the machine was busy: {'; '.join(profile.disturbances)}", file=sys.stderr)
    if not is_kept:
        print(
            "not kept: stop what else runs here and measure again, or keep it all the same with --output FILE (for the "
            "server's --profile)",
            file=sys.stderr,
        )
        return 1
    print(f"written to {path}")
    return 0


def _measure(loader: EngineLoader, time_limit_s: float, *, in_grid: bool) -> Profile:
    from tqdm import tqdm

    from omniserve.profiling import profile_model

    def tell(message: str) -> None:
        print(message, file=sys.stderr)

    group: RankGroup | None = None
    if loader.config.parallel.num_ranks > 1:
        model, group = loader.start_ranks(tell)
    else:
        model = loader.load_model(tell)
    layout = "{percentage:3.0f}% |{bar:30}| {elapsed} {desc}"
    told: set[str] = set()
    with tqdm(total=1.0, bar_format=layout, mininterval=0.5, file=sys.stderr, disable=None) as bar:

        def show(what: str, spent: float) -> None:
            share = min(spent, 1.0)
            if bar.disable and what not in told:  # no terminal: a line when a thing is measured first
                tell(f"{share:4.0%} of the time limit: {what}")
                told.add(what)
            bar.set_description_str(what, refresh=False)
            bar.update(share - bar.n)

        try:
            profile = profile_model(
                model, loader.config, time_limit_s=time_limit_s, progress=show, in_grid=in_grid, group=group
            )
        finally:
            if group is not None:
                group.close()
        show("done", 1.0)
    return profile

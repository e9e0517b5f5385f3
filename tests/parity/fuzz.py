"""Random histories without end: more than the test suite has time for.

    python -m tests.parity.fuzz --seconds 600 --first-seed 1

Prints each failing (family, seed) and exits 1 if there was one.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import shutil
import sys
import tempfile
import time

import torch
from transformers import PreTrainedModel

from omniserve import patch
from omniserve.core.config import GIB, DiskKVConfig
from omniserve.host.disk_file import DiskFile
from omniserve.sched import SCHEDULERS, prefixes_on_host
from tests.parity.engine_histories import Reference, Tally, run_history
from tests.parity.models import MODELS, tiny_model
from tests.parity.test_disk import damaging_write
from tests.parity.zoo import tiny
from tests.sched import hybrid, preemptible

WITH_STATE = ("qwen3_next", "qwen3_5_moe_text", "nemotron_h", "jamba", "lfm2_moe", "falcon_h1")
"""Types of the zoo whose layers have recurrent state."""


def _model(family: str, seed: int) -> PreTrainedModel:
    return tiny(family) if family in WITH_STATE else tiny_model(family, seed=seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--families", nargs="+", choices=[*MODELS, *WITH_STATE], default=[*MODELS, *WITH_STATE])
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the layers are tiny; the cores are for the host tier
    prefixes_on_host.LEAST_RESTORED_TOKENS = 8  # contexts are short
    models = {}
    for family in args.families:
        model = _model(family, args.first_seed).to(args.device)
        reference = Reference(model, num_prompts=12, max_tokens=24, seed=args.first_seed)
        models[family] = (patch(model, compile=False), reference)
    policies = itertools.cycle(["omniserve", "omniserve", *SCHEDULERS.names(), hybrid.NAME, preemptible.DEFERRING])
    tally, num_histories, num_failures = Tally(), 0, 0
    DiskFile.write = damaging_write(args.first_seed)  # type: ignore[method-assign]
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    ends_s = time.monotonic() + args.seconds
    for seed in itertools.count(args.first_seed * 100_000):
        for family, (model, reference) in models.items():
            if time.monotonic() >= ends_s:
                print(f"{num_histories} histories, {num_failures} failed; {tally}")
                return int(num_failures > 0)
            num_histories += 1
            policy, faults, deaths, overlaps = next(policies), seed % 2 == 0, seed % 5 == 0, seed % 3 > 0
            drawn = dict(
                scheduler=policy, faults=faults, deaths=deaths, async_steps=overlaps, drafts=seed // 2 % 2 == 0
            )  # fmt: skip
            if seed % 7 < 3 and family not in WITH_STATE:
                drawn |= dict(prefix_cache=True, kv=("tiered", "paged", "tiered", "incremental")[seed % 4])
                if seed % 4 == 0:
                    slot_bytes = model.omniserve.spec.kv_block_bytes(8) + 4096
                    gib = (4, 40)[seed % 3 > 0] * slot_bytes / GIB
                    drawn |= dict(disk_kv=DiskKVConfig(gib=gib, dir=folder, keep=seed % 8 == 0))
            if policy == preemptible.DEFERRING:  # models with recurrent states refuse it
                drawn |= dict(classes=preemptible.CLASSES, defer_classes=family not in WITH_STATE, has_profile=True)
                if family not in WITH_STATE:
                    drawn |= dict(defer_tokens=("off", "late", "always")[seed % 3], most_token_steps=2)
            try:
                run_history(model, reference, seed, most_requests=16, tally=tally, **drawn)
            except AssertionError as error:
                num_failures += 1
                print(f"FAILED {family} seed {seed} {drawn}: {error}", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())

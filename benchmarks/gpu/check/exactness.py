"""Greedy tokens in fp32 of random histories on this device, beside Hugging Face on the CPU and on the device.

A history draws arrivals, classes, pools, policies, faults of the host tier, graphs or none, and whether steps overlap
(``tests/parity``). Families take turns until the time is over; each has one history at least.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.script import NotHere, Script, argument_parser
from omniserve import patch
from omniserve.sched import SCHEDULERS
from tests.parity.engine_histories import Reference, Tally, run_history
from tests.parity.models import MODELS, tiny_model


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__, seconds=(70.0, "for all families"), first_seed=1)
    script = Script("exactness", args := parser.parse_args(arguments))
    families = ["llama"] if script.dry else list(MODELS)
    ends_s = time.monotonic() + (0.0 if script.dry else args.seconds)
    policies = itertools.cycle(["omniserve", "omniserve", *SCHEDULERS.names()])
    for number, family in enumerate(families):
        model: Any = tiny_model(family, seed=args.first_seed)
        prompts = 3 if script.dry else 12
        reference = Reference(model, num_prompts=prompts, seed=args.first_seed)  # on the CPU
        model.to(script.device)
        with script.case(f"{family}: Hugging Face gives the same tokens on both devices") as case:
            if not script.on_gpu:
                raise NotHere("needs a GPU")
            case.note = compare(reference, Reference(model, num_prompts=prompts, seed=args.first_seed))
        patch(model, compile=False)
        tally, failed, seeds = Tally(), 0, itertools.count(1000 * args.first_seed)
        until_s = time.monotonic() + (ends_s - time.monotonic()) / (len(families) - number)
        for seed in seeds:
            drawn: dict[str, Any] = {
                "scheduler": next(policies), "faults": seed % 2 == 0, "deaths": seed % 5 == 0,
                "async_steps": seed % 3 > 0,
            }  # fmt: skip
            with script.case(f"{family}: history {seed} {drawn}", only_failure=True):
                run_history(model, reference, seed, tally=tally, **drawn)
            failed = sum(case.outcome == "FAIL" for case in script.cases)
            if time.monotonic() >= until_s or failed > 8:
                break
        with script.case(f"{family}: histories") as case:
            case.details["tally"] = vars(tally)
            case.note = f"{tally.finished} requests finished, {tally.host_tokens} of their tokens by host attention"
    return script.end()


def compare(cpu: Reference, device: Reference) -> str:
    """Compare the prompts that have no near tie on either device, and return how many there were.

    Raises:
        AssertionError: Tokens differ, or there is nothing to compare.
    """
    tokens = dict(zip(cpu.prompts, cpu.tokens, strict=True))
    both = [(prompt, got) for prompt, got in zip(device.prompts, device.tokens, strict=True) if prompt in tokens]
    wrong = [prompt for prompt, got in both if tokens[prompt] != got]
    assert both and not wrong, f"{len(wrong)} of {len(both)} prompts differ"
    return f"{len(both)} prompts"


if __name__ == "__main__":
    sys.exit(main())

"""Speculative decoding on and off, one request at a time, in one interleaved run.

    python -m benchmarks.drafts --record benchmarks/results/drafts.json

With a latency profile, as a server has it, and without objectives. The loads: ``repeating``, what the model writes,
greedily, when it goes on with a text of its own, which repeats itself; ``edited``, the same, with that text as the
prediction, but every 16th token changed, as when a document is rewritten; ``touched up``, the same with every 64th;
``random``, tokens drawn from all of the vocabulary, where no guess is right.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence

import torch

from benchmarks.common.models import MODELS
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser
from benchmarks.common.timing import in_turn, median_ratio
from omniserve import ClassSpec, Engine, EngineConfig, ExecutionConfig, Request, SamplingParams
from omniserve.core.request import Completion
from omniserve.profiling import find_or_make_profile


def edited(token_ids: Sequence[int], every: int = 16) -> list[int]:
    """Return the tokens with every so manyth one replaced by the one before it."""
    return [token_ids[i - 1] if i % every == every - 1 else token for i, token in enumerate(token_ids)]


def rate(engine: Engine, request: Request) -> tuple[float, Completion]:
    """Return the tokens a second, behind the first one, of a request that has the engine to itself; its completion."""
    (done,) = engine.generate([request])
    times = done.times
    assert times.first_token_s is not None and times.finished_s is not None
    return (len(done.token_ids) - 1) / (times.finished_s - times.first_token_s), done


def main() -> None:
    parser = argument_parser(
        __doc__, "drafts", models=list(MODELS), prompt=64, output=192, repeats=7, profile_s=10.0,
        no_compile=False,
    )  # fmt: skip
    args = parser.parse_args()
    results: dict[str, object] = {}
    for name in args.models:
        model = MODELS[name]()
        config = EngineConfig(
            device_kv_bytes=128 << 20, host_kv_bytes=0, execution=ExecutionConfig(compile=not args.no_compile),
            classes=(ClassSpec(name="LS", kind="LS"), ClassSpec(name="BE", kind="BE")),
        )  # fmt: skip
        profile = find_or_make_profile(model, config, time_limit_s=args.profile_s)
        with Engine(model, config, profile=profile) as engine:
            results[name] = measure(engine, args.prompt, args.output, args.repeats)
    config_record = vars(args) | {"threads": torch.get_num_threads()}
    write_record(args.record, name="drafts", config=config_record, seed=0, results=results)


def measure(engine: Engine, num_prompt: int, num_output: int, repeats: int) -> dict[str, object]:
    """Return what each load brings with drafts and without."""
    greedy = SamplingParams(max_tokens=num_output, ignore_eos=True)
    begin = Request(prompt_token_ids=[1 + 7 * i % 499 for i in range(num_prompt)], sampling=greedy)
    (own,) = engine.generate([begin])
    repeating = dataclasses.replace(begin, prompt_token_ids=[*begin.prompt_token_ids, *own.token_ids])
    (text,) = engine.generate([repeating])
    uniform = dataclasses.replace(greedy, temperature=100.0, seed=1)
    loads = {
        "repeating": repeating,
        "edited": dataclasses.replace(repeating, predicted_token_ids=edited(text.token_ids)),
        "touched up": dataclasses.replace(repeating, predicted_token_ids=edited(text.token_ids, every=64)),
        "random": dataclasses.replace(begin, sampling=uniform),
    }
    results: dict[str, object] = {}
    for load, request in loads.items():
        runs: dict[str, Callable[[], tuple[float, Completion]]] = {
            key: functools.partial(rate, engine, dataclasses.replace(request, speculation=on))
            for key, on in (("off", False), ("on", True))
        }
        found = in_turn(runs, repeats)
        outputs = {completion.token_ids for entries in found.values() for _, completion in entries}
        rates = {key: [tokens_per_s for tokens_per_s, _ in entries] for key, entries in found.items()}
        accepted, rejected = (
            statistics.median(getattr(completion, name) for _, completion in found["on"])
            for name in ("num_accepted_drafts", "num_rejected_drafts")
        )
        ratio = median_ratio(rates["on"], rates["off"])
        off, on = (statistics.median(rates[key]) for key in ("off", "on"))
        results[load] = {
            "tokens_per_s": {"off": off, "on": on}, "ratio": ratio,
            "accepted": accepted, "rejected": rejected, "same_output": len(outputs) == 1, "raw": rates,
        }  # fmt: skip
        print(
            f"{load:10s} off {off:6.1f} tok/s, on {on:6.1f} tok/s, ratio {ratio:.2f}; "
            f"drafts right {accepted:.0f}, wrong {rejected:.0f}; same output: {len(outputs) == 1}"
        )
    return results


if __name__ == "__main__":
    main()

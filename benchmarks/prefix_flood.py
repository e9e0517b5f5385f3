"""The prefix cache of LS requests beside a flood of BE requests that have no prefix in common.

    python -m benchmarks.prefix_flood --record benchmarks/results/prefix_flood.json

Some chats go on turn by turn, in random order: a prompt is a system prompt that is the same for all chats of a tenant,
what was said in the chat so far, and new tokens. Beside them so many random BE requests are always unfinished, until
their prompts come to ``--flood`` times the device's KV. ``hit_rate`` is the share of the LS prompts' tokens that the
cache had, ``ttft_ms`` the median time to first token of turns but the first: without an objective, a prompt of which
little is left shares its step with BE prompts. ``ttft_over_predicted`` is the median of what they take over what was
predicted as they came. ``alone`` is without the flood; the others are named by
``ls_prefix_share``.
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable

from transformers import PreTrainedModel

from benchmarks.common.models import MODELS, token_bytes
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser, table_of
from benchmarks.common.timing import in_turn
from omniserve import Engine, EngineConfig, ExecutionConfig, Request, SamplingParams
from omniserve.latency import Profile
from omniserve.profiling import find_or_make_profile


class Chats:
    """Draws the turns of chats, one after another, and goes on with what was answered."""

    def __init__(self, rng: random.Random, *, chats: int, tenants: int, system: int, turn: int, turns: int) -> None:
        self._rng, self._turn, self._turns = rng, turn, turns
        systems = [self._tokens(system) for _ in range(tenants)]
        self._texts = [list(systems[number % tenants]) for number in range(chats)]
        self._turns_left = [turns] * chats
        self.num_turns = chats * turns
        """Turns of all chats together."""

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(1, 400) for _ in range(count)]

    def next(self) -> tuple[int, list[int]]:
        """Return a chat that has not ended, and the prompt of its next turn."""
        number = self._rng.choice([number for number, left in enumerate(self._turns_left) if left])
        self._turns_left[number] -= 1
        self._texts[number] += self._tokens(self._turn)
        return number, list(self._texts[number])

    def is_first(self, number: int) -> bool:
        """Tell whether a chat is at its first turn."""
        return self._turns_left[number] == self._turns - 1

    def answered(self, number: int, token_ids: list[int]) -> None:
        """Continue a chat with an answer."""
        self._texts[number] += token_ids


def run(
    model: PreTrainedModel, profile: Profile, config: EngineConfig, chats: Callable[[], Chats], *, output: int,
    at_once: int, flood_prompt: int, flood_tokens: int,
) -> dict[str, float]:  # fmt: skip
    """Serve the chats to their end, beside BE prompts of so many tokens in all; return what became of them."""
    rng, talks = random.Random(7), chats()
    sampling = SamplingParams(max_tokens=output, ignore_eos=True)
    ttfts_s: list[float] = []
    over_predicted: list[float] = []
    num_flooded = num_turns = 0
    with Engine(model, config, profile=profile) as engine:
        flood: set[str] = set()
        current: tuple[str, int, float] | None = None
        answer: list[int] = []
        predicted_s: float | None = None
        run_began_s = time.perf_counter()
        while current is not None or num_turns < talks.num_turns:
            # The turns are spread over the flood.
            if current is None and num_flooded * talks.num_turns >= num_turns * flood_tokens:
                number, prompt = talks.next()
                num_turns += 1
                request = Request(prompt_token_ids=prompt, sampling=sampling, service_class="LS")
                current, answer = (engine.add(request), number, time.perf_counter()), []
                predicted_s = engine.predicted_ttft_s(current[0])
            while num_flooded < flood_tokens and len(flood) < at_once:
                tokens = [rng.randrange(1, 400) for _ in range(flood_prompt)]
                flood.add(engine.add(Request(prompt_token_ids=tokens, sampling=sampling, service_class="BE")))
                num_flooded += flood_prompt
            for out in engine.step():
                if out.request_id in flood:
                    flood -= {out.request_id} if out.finished else set()
                elif current is not None:
                    _, number, began_s = current
                    if not answer and not talks.is_first(number):
                        ttfts_s.append(time.perf_counter() - began_s)
                        if predicted_s is not None:
                            over_predicted.append(ttfts_s[-1] / predicted_s)
                    answer += out.new_token_ids
                    if out.finished:
                        talks.answered(number, answer)
                        current = None
        stats, took_s = engine.stats(), time.perf_counter() - run_began_s
    return {
        "seconds": took_s,
        "hit_rate": stats.scheduler.cached_tokens["LS"] / stats.scheduler.prompt_tokens["LS"],
        "ttft_ms": 1e3 * statistics.median(ttfts_s),
        "ttft_over_predicted": statistics.median(over_predicted),
        "flood_over_cache": num_flooded / (config.device_kv_bytes / token_bytes(model)),
        "be_tokens": stats.scheduler.output_tokens.get("BE", 0),
    }


def main() -> None:
    parser = argument_parser(
        __doc__, "prefix_flood", model=("built-in", "of benchmarks.common.models"), chats=8, tenants=2,
        system=(192, "tokens of a system prompt"), turn=(24, "new tokens of a turn"), turns=8, output=16,
        at_once=(12, "BE requests that are unfinished"), flood_prompt=(256, "tokens of a BE prompt"),
        flood=(10.0, "tokens of BE prompts over those that the device holds"),
        device_tokens=(12_000, "of KV on the device"), shares=[0.0, 0.25], repeats=3, profile_s=10.0,
    )  # fmt: skip
    args = parser.parse_args()
    model = MODELS[args.model]()

    def config(share: float) -> EngineConfig:
        return EngineConfig(
            device_kv_bytes=args.device_tokens * token_bytes(model), host_kv_bytes=0, block_size=16,
            execution=ExecutionConfig(prefix_cache=True, ls_prefix_share=share),
        )  # fmt: skip

    profile = find_or_make_profile(model, config(0.0), time_limit_s=args.profile_s)

    def chats() -> Chats:
        return Chats(
            random.Random(1), chats=args.chats, tenants=args.tenants, system=args.system, turn=args.turn,
            turns=args.turns,
        )  # fmt: skip

    common = {"output": args.output, "at_once": args.at_once, "flood_prompt": args.flood_prompt}
    flood_tokens = int(args.flood * args.device_tokens)
    runs = {"alone": functools.partial(run, model, profile, config(0.0), chats, flood_tokens=0, **common)} | {
        f"{share:g}": functools.partial(run, model, profile, config(share), chats, flood_tokens=flood_tokens, **common)
        for share in args.shares
    }
    found = in_turn(runs, args.repeats)
    medians = {
        key: {name: statistics.median(each[name] for each in some) for name in some[0]} for key, some in found.items()
    }
    print(table_of([{"": name, **{k: f"{m[name]:.4g}" for k, m in medians.items()}} for name in medians["alone"]]))
    write_record(
        args.record, name="prefix_flood", config=vars(args), seed=1, results={"medians": medians, "raw": found}
    )


if __name__ == "__main__":
    main()

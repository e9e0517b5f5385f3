"""Speculative decoding on and off, on the device and on the host tier."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Sequence
from pydoc_data import topics

import torch
from transformers import AutoTokenizer

from benchmarks.common.cases import Trials
from benchmarks.common.engine_run import request
from benchmarks.common.models import MODELS, builtin_model, token_bytes
from benchmarks.features import FEATURES
from omniserve import SLO, ClassSpec, Engine, EngineConfig, ExecutionConfig, Request, SamplingParams
from omniserve.launch.models import builtin_model_path
from omniserve.profiling import find_or_make_profile

_DRAFTS = {"off": False, "on": True}


def edited(token_ids: Sequence[int], every: int = 16) -> list[int]:
    """Return the tokens with every so manyth one replaced by the one before it."""
    return [token_ids[i - 1] if i % every == every - 1 else token for i, token in enumerate(token_ids)]


@FEATURES.case(
    models=list(MODELS), prompt=64, output=192, repeats=7, profile_s=10.0, no_compile=False,
    tiny={"models": ["built-in"], "prompt": 8, "output": 8, "repeats": 1, "profile_s": 0.5, "no_compile": True},
)  # fmt: skip
def drafts(args: argparse.Namespace) -> Trials:
    """Speculative decoding on and off, one request at a time; tokens a second behind the first one.

    With a latency profile, as a server has it, and without objectives. The loads: ``repeating``, what the model writes,
    greedily, when it goes on with a text of its own, which repeats itself; ``edited``, the same, with that text as the
    prediction, but every 16th token changed, as when a document is rewritten; ``touched up``, the same with every 64th;
    ``random``, tokens drawn from all of the vocabulary, where no guess is right.
    """
    for name in args.models:
        model = MODELS[name]()
        config = EngineConfig(
            device_kv_bytes=128 << 20, host_kv_bytes=0, execution=ExecutionConfig(compile=not args.no_compile),
            classes=(ClassSpec(name="LS", kind="LS"), ClassSpec(name="BE", kind="BE")),
        )  # fmt: skip
        with Engine(model, config, profile=find_or_make_profile(model, config, time_limit_s=args.profile_s)) as engine:
            greedy = SamplingParams(max_tokens=args.output, ignore_eos=True)
            begin = Request(prompt_token_ids=[1 + 7 * i % 499 for i in range(args.prompt)], sampling=greedy)
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
            outputs: set[tuple[int, ...]] = set()

            def rate(asked: Request) -> dict[str, float]:
                (done,) = engine.generate([asked])
                outputs.add(done.token_ids)  # noqa: B023
                times = done.times
                assert times.first_token_s is not None and times.finished_s is not None
                return {
                    "tokens_per_s": (len(done.token_ids) - 1) / (times.finished_s - times.first_token_s),
                    "accepted": done.num_accepted_drafts, "rejected": done.num_rejected_drafts,
                }  # fmt: skip

            for load, asked in loads.items():
                outputs.clear()
                arms = {
                    arm: functools.partial(rate, dataclasses.replace(asked, speculation=on))
                    for arm, on in _DRAFTS.items()
                }
                result = yield f"{name}, {load}", arms
                result["same_output"] = len(outputs) == 1


@FEATURES.case(
    ls=(2, "LS requests that decode"), be=(120, "BE requests"), at_once=(48, "BE requests that are unfinished"),
    prompt=192, output=128, device_tokens=(2000, "tokens of KV on the device"),
    tpot_s=(0.012, "objective of the LS requests"), repeats=5, profile_s=20.0, dtype=("float32", "of the model"),
    tiny={"be": 10, "at_once": 8, "prompt": 64, "output": 8, "device_tokens": 1600, "repeats": 1, "profile_s": 1.0},
)  # fmt: skip
def host_drafts(args: argparse.Namespace) -> Trials:
    """Drafts on the host tier, on and off: best-effort tokens a second beside chats.

    Some LS requests decode all the time. So many BE requests are unfinished at a time, the next one coming as one ends,
    until all have come; the device has memory for a few of them, so most decode on the host tier. With a latency
    profile, as a server has it. The loads: ``continued``, what the built-in model writes, greedily, behind pages of
    Python's documentation, which it was trained on; ``rewritten``, the same, with that text as the prediction, but
    every 16th token changed; ``random``, tokens drawn from all of the vocabulary. Only the BE requests have drafts.
    """
    model = builtin_model().to(getattr(torch, args.dtype))
    config = EngineConfig(
        device_kv_bytes=args.device_tokens * token_bytes(model), host_kv_bytes=1 << 30,
        classes=(ClassSpec(name="LS", kind="LS", slo=SLO(tpot_s=args.tpot_s)), ClassSpec(name="BE", kind="BE")),
        scheduler_options={"swap_in_delay_s": 1e9},
    )  # fmt: skip
    profile = find_or_make_profile(model, config, time_limit_s=args.profile_s)
    greedy = SamplingParams(max_tokens=args.output, ignore_eos=True)
    plain = [
        Request(prompt_token_ids=prompt, sampling=greedy, service_class="BE", speculation=False)
        for prompt in pages(args.be, args.prompt)
    ]
    with Engine(model, config, profile=profile) as engine:
        serving = Serving(engine, num_ls=args.ls, at_once=args.at_once)
        serving.run(plain, to_end=True)
        loads = {
            "continued": plain,
            "rewritten": [
                dataclasses.replace(asked, predicted_token_ids=edited(text))
                for asked, text in zip(plain, serving.texts.pop(), strict=True)
            ],
            "random": [
                dataclasses.replace(asked, sampling=dataclasses.replace(greedy, temperature=100.0, seed=number))
                for number, asked in enumerate(plain)
            ],
        }
        for load, asked in loads.items():
            serving.texts.clear()
            arms = {
                arm: functools.partial(serving.run, [dataclasses.replace(each, speculation=on) for each in asked])
                for arm, on in _DRAFTS.items()
            }
            result = yield load, arms
            first, *others = serving.texts
            result["same_output"] = all(
                a[: len(b)] == b[: len(a)] for some in others for a, b in zip(first, some, strict=False)
            )


def pages(count: int, num_tokens: int) -> list[list[int]]:
    """Return the first tokens of so many pages of the documentation, or of later parts of them."""
    tokenizer = AutoTokenizer.from_pretrained(builtin_model_path())
    parts: list[list[int]] = []
    for _, text in sorted(topics.topics.items()):
        ids = tokenizer(text)["input_ids"]
        parts += [ids[first : first + num_tokens] for first in range(0, len(ids) - num_tokens, num_tokens)]
    return parts[:: max(1, len(parts) // count)][:count]


class Serving:
    """An engine with LS requests that never end, and runs of BE requests beside them, so many at once."""

    def __init__(self, engine: Engine, *, num_ls: int, at_once: int) -> None:
        self._engine, self._at_once, self._num_begun = engine, at_once, 0
        self.texts: list[list[list[int]]] = []
        """Tokens of each request of each run."""
        for _ in range(num_ls):
            self._begin_ls()
        while engine.stats().scheduler.output_tokens.get("LS", 0) < num_ls:
            engine.step()

    def _begin_ls(self) -> None:
        self._num_begun += 1
        self._engine.add(request(f"ls{self._num_begun}", 16, 1500))

    def run(self, requests: Sequence[Request], *, to_end: bool = False) -> dict[str, float]:
        """Serve BE requests until none is left to come; those that are unfinished then are aborted, or served."""
        engine, texts = self._engine, dict[str, list[int]]()
        before, began_s = engine.stats().scheduler, time.perf_counter()
        waiting, running = list(reversed(requests)), set[str]()
        while running if to_end and not waiting else waiting:
            while waiting and len(running) < self._at_once:
                request_id = engine.add(waiting.pop())
                texts[request_id] = []
                running.add(request_id)
            for output in engine.step():
                if output.request_id in texts:
                    texts[output.request_id] += output.new_token_ids
                    if output.finished:
                        running.remove(output.request_id)
                elif output.finished:
                    self._begin_ls()
        took_s, after = time.perf_counter() - began_s, engine.stats().scheduler
        for request_id in running:
            engine.abort(request_id)
        self.texts.append(list(texts.values()))
        num_tokens = sum(map(len, texts.values()))
        return {
            "be_tokens_per_s": num_tokens / took_s,
            "on_host": (after.host_output_tokens - before.host_output_tokens) / num_tokens,
        }

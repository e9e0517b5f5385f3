"""Drafts on the host tier, on and off: best-effort tokens a second beside chats, in one interleaved run.

    python -m benchmarks.host_drafts --record benchmarks/results/host_drafts.json

Some LS requests decode all the time. So many BE requests are unfinished at a time, the next one coming as one ends,
until all have come; the device has memory for a few of them, so most decode on the host tier. With a latency profile,
as a server has it. The loads: ``continued``, what the built-in
model writes, greedily, behind pages of Python's documentation, which it was trained on; ``rewritten``, the same, with
that text as the prediction, but every 16th token changed, as when a document is rewritten; ``random``, tokens drawn
from all of the vocabulary, where no guess is right. Only the BE requests have drafts.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pydoc_data import topics

import torch
from transformers import AutoTokenizer

from benchmarks.common.models import builtin_model, token_bytes
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser, table_of
from benchmarks.common.timing import in_turn, median_ratio
from benchmarks.drafts import edited
from omniserve import SLO, ClassSpec, Engine, EngineConfig, Request, SamplingParams
from omniserve.core.request import ServiceClass
from omniserve.launch.loading import builtin_model_path
from omniserve.profiling import find_or_make_profile


def pages(count: int, num_tokens: int) -> list[list[int]]:
    """Return the first tokens of so many pages of the documentation, or of later parts of them."""
    tokenizer = AutoTokenizer.from_pretrained(builtin_model_path())
    parts: list[list[int]] = []
    for _, text in sorted(topics.topics.items()):
        ids = tokenizer(text)["input_ids"]
        parts += [ids[first : first + num_tokens] for first in range(0, len(ids) - num_tokens, num_tokens)]
    step = max(1, len(parts) // count)
    return parts[::step][:count]


class Serving:
    """An engine with LS requests that never end, and runs of BE requests beside them, so many at once."""

    def __init__(self, engine: Engine, *, num_ls: int, at_once: int) -> None:
        self._engine, self._at_once = engine, at_once
        self._num_begun = 0
        for _ in range(num_ls):
            self._begin_ls()
        while engine.stats().scheduler.output_tokens.get("LS", 0) < num_ls:
            engine.step()

    def _begin_ls(self) -> None:
        self._num_begun += 1
        prompt = [1 + (self._num_begun + 7 * i) % 499 for i in range(16)]
        sampling = SamplingParams(max_tokens=1500, ignore_eos=True)
        self._engine.add(Request(prompt_token_ids=prompt, sampling=sampling, request_id=f"ls{self._num_begun}"))

    def run(self, requests: Sequence[Request], *, to_end: bool = False) -> tuple[dict[str, float], list[list[int]]]:
        """Serve BE requests until none is left to come; return what the run was like, and their tokens.

        Those that are unfinished then are aborted, or served ``to_end``.
        """
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
        accepted = after.accepted_drafts - before.accepted_drafts
        rejected = after.rejected_drafts - before.rejected_drafts
        num_tokens = sum(map(len, texts.values()))
        host_tokens = after.host_output_tokens - before.host_output_tokens
        steps = after.host_token_steps - before.host_token_steps
        ls_tokens = after.output_tokens["LS"] - before.output_tokens["LS"]
        return {
            "be_tokens_per_s": num_tokens / took_s,
            "ls_tokens_per_s": ls_tokens / took_s,
            "drafts_right": accepted / max(1, accepted + rejected),
            "drafts_per_token": (accepted + rejected) / num_tokens,
            "on_host": host_tokens / num_tokens,
            "steps_per_layer_and_token": steps / max(1, host_tokens) / engine.spec.num_layers,
        }, list(texts.values())


def main() -> None:
    parser = argument_parser(
        __doc__, "host_drafts", ls=(2, "LS requests that decode"), be=(120, "BE requests"),
        at_once=(48, "of them unfinished"), prompt=192, output=128, device_tokens=(2000, "tokens of KV on the device"),
        tpot_s=(0.012, "objective of the LS requests"), repeats=5, profile_s=20.0, dtype=("float32", "of the model"),
    )  # fmt: skip
    args = parser.parse_args()
    model = builtin_model().to(getattr(torch, args.dtype))
    config = EngineConfig(
        device_kv_bytes=args.device_tokens * token_bytes(model), host_kv_bytes=1 << 30,
        classes=(
            ClassSpec(name="LS", kind=ServiceClass.LS, slo=SLO(tpot_s=args.tpot_s)),
            ClassSpec(name="BE", kind=ServiceClass.BE),
        ),
        scheduler_options={"swap_in_delay_s": 1e9},
    )  # fmt: skip
    profile = find_or_make_profile(model, config, time_limit_s=args.profile_s)
    prompts = pages(args.be, args.prompt)
    greedy = SamplingParams(max_tokens=args.output, ignore_eos=True)
    plain = [Request(prompt_token_ids=p, sampling=greedy, service_class="BE", speculation=False) for p in prompts]
    results: dict[str, object] = {}
    with Engine(model, config, profile=profile) as engine:
        serving = Serving(engine, num_ls=args.ls, at_once=args.at_once)
        _, texts = serving.run(plain, to_end=True)
        uniform = [
            dataclasses.replace(greedy, temperature=100.0, seed=number) for number in range(len(plain))
        ]  # fmt: skip
        loads = {
            "continued": plain,
            "rewritten": [
                dataclasses.replace(r, predicted_token_ids=edited(text)) for r, text in zip(plain, texts, strict=True)
            ],
            "random": [dataclasses.replace(r, sampling=s) for r, s in zip(plain, uniform, strict=True)],
        }
        for load, requests in loads.items():
            results[load] = compare(serving, requests, load, args.repeats)
    write_record(args.record, name="host_drafts", config=vars(args), seed=0, results=results)


def compare(serving: Serving, requests: Sequence[Request], load: str, repeats: int) -> dict[str, object]:
    """Measure one load with drafts and without, in turn; print and return it."""
    asked = {
        key: [dataclasses.replace(request, speculation=on) for request in requests]
        for key, on in (("off", False), ("on", True))
    }
    runs: dict[str, Callable[[], tuple[dict[str, float], list[list[int]]]]] = {
        key: functools.partial(serving.run, some) for key, some in asked.items()
    }
    found = in_turn(runs, repeats)
    texts = [texts for entries in found.values() for _, texts in entries]
    same_output = all(a[: len(b)] == b[: len(a)] for some in texts for a, b in zip(texts[0], some, strict=False))
    figures = {key: [figures for figures, _ in entries] for key, entries in found.items()}
    medians = {
        key: {name: statistics.median(run[name] for run in some) for name in some[0]} for key, some in figures.items()
    }
    ratios = {
        name: median_ratio([run[name] for run in figures["on"]], [run[name] for run in figures["off"]])
        for name in ("be_tokens_per_s", "ls_tokens_per_s")
    }
    print(load, f"(same output: {same_output})")
    rows = [
        {
            "": name, **{key: f"{some[name]:.3g}" for key, some in medians.items()},
            "ratio": f"{ratios[name]:.2f}" if name in ratios else "",
        }
        for name in medians["on"]
    ]  # fmt: skip
    print(table_of(rows))
    return {"medians": medians, "ratios": ratios, "same_output": same_output, "raw": figures}


if __name__ == "__main__":
    main()

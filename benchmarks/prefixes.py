"""The prefix cache on and off: what it brings, beside a flood of other prompts, what it costs, and the disk tier.

python -m benchmarks.prefixes --list
python -m benchmarks.prefixes prefix_cache disk_prefixes --record benchmarks/results/prefixes.json
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.cases import Benchmark, Trials
from benchmarks.common.dry_scheduler import DryScheduler, smollm_profile
from benchmarks.common.models import MODELS, token_bytes
from omniserve import SLO, DiskKVConfig, Engine, EngineConfig, ExecutionConfig, Request, SamplingParams
from omniserve.core.plan import SampledToken, StepOutput
from omniserve.core.work import DiskCopy
from omniserve.host.disk import DiskTier
from omniserve.host.disk_file import DiskFile
from omniserve.kv import PagedKVManager
from omniserve.latency import Profile
from omniserve.profiling import find_or_make_profile
from omniserve.sched import SCHEDULERS, Scheduler, SchedulerLimits

PREFIXES = Benchmark("prefixes")
_MIB = 1 << 20


def tokens(rng: random.Random, count: int, below: int = 400) -> list[int]:
    """Draw tokens of a prompt."""
    return [rng.randrange(1, below) for _ in range(count)]


@PREFIXES.case(
    model=("SmolLM-135M", "of benchmarks.common.models"), requests=16, shared=512, own=64, output=32,
    templates=(16, "fronts of the third load"), each=(8, "requests per front of the third load"),
    templates_kv=(4.0, "fronts that the device has memory for in the third load"), block_size=16,
    device_kv_gib=1.0, repeats=3, profile_s=20.0, seed=1,
    tiny={"model": "built-in", "requests": 3, "shared": 64, "own": 16, "output": 2, "templates": 3, "each": 2,
          "templates_kv": 2.0, "repeats": 1, "profile_s": 0.5},
)  # fmt: skip
def prefix_cache(args: argparse.Namespace) -> Trials:
    """The prefix cache, on and off: prompts that begin alike, and prompts that do not.

    The loads, each a batch of best-effort requests that come at once: ``shared``, prompts with ``--shared`` tokens in
    front that are the same in all, and ``--own`` random ones; ``own``, as many random tokens; ``templates``, prompts
    like those of ``shared``, but each begins with one of ``--templates`` fronts, drawn at random, and the device has
    memory for a few of these only. ``arrival`` is with the cache, without admission by prefix
    (``be_prefix_order=false``). ``host`` is the last load with ``sarathi``, which takes prompts by arrival, and a host
    tier, which keeps what the device forgets or, with ``off``, does not (``host_prefixes``); it decodes nothing there,
    and there is no prediction. A run has an engine of its own, so nothing is there from the run before.
    """
    model = MODELS[args.model]()
    much, little = int(args.device_kv_gib * 2**30), int(args.templates_kv * args.shared * token_bytes(model))

    def config(arm: str, device_kv_bytes: int, *, has_host: bool = False) -> EngineConfig:
        execution = (
            ExecutionConfig(prefix_cache=True, host_prefixes=arm == "on")
            if has_host
            else ExecutionConfig(prefix_cache=arm != "off")
        )
        options = {} if has_host else {"be_prefix_order": arm != "arrival"}
        return EngineConfig(
            device_kv_bytes=device_kv_bytes, host_kv_bytes=much if has_host else 0, block_size=args.block_size,
            execution=execution, scheduler_options=options, scheduler="sarathi" if has_host else "omniserve",
        )  # fmt: skip

    draw = functools.partial(batch, output=args.output, seed=args.seed)
    templates = draw(args.templates * args.each, shared=args.shared, own=args.own, templates=args.templates)
    loads = {
        "shared": (draw(args.requests, shared=args.shared, own=args.own), much, ("off", "on")),
        "own": (draw(args.requests, shared=0, own=args.own + args.shared), much, ("off", "on")),
        "templates": (templates, little, ("off", "arrival", "on")),
        "host": (templates, little, ("off", "on")),
    }  # fmt: skip
    profile = find_or_make_profile(model, config("off", much), time_limit_s=args.profile_s)
    for load, (requests, device_kv_bytes, arms) in loads.items():
        is_host = load == "host"
        yield load, {
            arm: functools.partial(
                serve_batch, model, None if is_host else profile, requests,
                config(arm, device_kv_bytes, has_host=is_host),
            )
            for arm in arms
        }  # fmt: skip


def batch(count: int, *, shared: int, own: int, output: int, seed: int, templates: int = 1) -> list[Request]:
    """Draw requests whose prompts begin with one of so many fronts, at random."""
    rng = random.Random(seed)
    fronts = [tokens(rng, shared) for _ in range(templates)]
    sampling = SamplingParams(max_tokens=output, ignore_eos=True)
    return [
        Request(prompt_token_ids=[*rng.choice(fronts), *tokens(rng, own)], sampling=sampling, service_class="BE")
        for _ in range(count)
    ]


def serve_batch(
    model: Any, profile: Profile | None, requests: Sequence[Request], config: EngineConfig
) -> dict[str, float]:
    """Serve a batch with a new engine; return what it took."""
    with Engine(model, config, profile=profile) as engine:
        engine.generate(batch(1, shared=0, own=8, output=2, seed=-1))  # what is compiled at the first step
        began_s = time.perf_counter()
        done = engine.generate(requests)
        seconds = time.perf_counter() - began_s
    cached, prompts = (sum(getattr(each, name) for each in done) for name in ("num_cached_tokens", "num_prompt_tokens"))
    return {"seconds": seconds, "cached": cached / prompts}


@PREFIXES.case(
    model=("built-in", "of benchmarks.common.models"), chats=8, tenants=2, system=(192, "tokens of a system prompt"),
    turn=(24, "new tokens of a turn"), turns=8, output=16, at_once=(12, "BE requests that are unfinished"),
    flood_prompt=(256, "tokens of a BE prompt"), flood=(10.0, "tokens of BE prompts over those that the device holds"),
    device_tokens=(12_000, "of KV on the device"), shares=[0.0, 0.25], repeats=3, profile_s=10.0, seed=1,
    tiny={"chats": 2, "tenants": 1, "system": 16, "turn": 8, "turns": 2, "output": 2, "at_once": 2, "flood_prompt": 32,
          "flood": 1.0, "device_tokens": 800, "repeats": 1, "profile_s": 0.5},
)  # fmt: skip
def prefix_flood(args: argparse.Namespace) -> Trials:
    """The prefix cache of LS requests beside a flood of BE requests that have no prefix in common.

    Some chats go on turn by turn, in random order: a prompt is a system prompt that is the same for all chats of a
    tenant, what was said in the chat so far, and new tokens. Beside them so many random BE requests are always
    unfinished, until their prompts come to ``--flood`` times the device's KV. ``hit_rate`` is the share of the LS
    prompts' tokens that the cache had, ``ttft_ms`` the median time to first token of turns but the first: without an
    objective, a prompt of which little is left shares its step with BE prompts. ``alone`` is
    without the flood; the others are named by ``ls_prefix_share``.
    """
    model = MODELS[args.model]()

    def config(share: float) -> EngineConfig:
        return EngineConfig(
            device_kv_bytes=args.device_tokens * token_bytes(model), host_kv_bytes=0, block_size=16,
            execution=ExecutionConfig(prefix_cache=True, ls_prefix_share=share),
        )  # fmt: skip

    profile = find_or_make_profile(model, config(0.0), time_limit_s=args.profile_s)
    serve = functools.partial(serve_chats, model, profile, args)
    flood_tokens = int(args.flood * args.device_tokens)
    yield (
        "chats",
        {
            "alone": functools.partial(serve, config(0.0), 0),
            **{f"{share:g}": functools.partial(serve, config(share), flood_tokens) for share in args.shares},
        },
    )


class Chats:
    """Draws the turns of chats, one after another, and goes on with what was answered."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._rng, self._turn, self._turns = random.Random(args.seed), args.turn, args.turns
        systems = [tokens(self._rng, args.system) for _ in range(args.tenants)]
        self._texts = [list(systems[number % args.tenants]) for number in range(args.chats)]
        self._turns_left = [args.turns] * args.chats

    def next(self) -> tuple[int, list[int]]:
        """Return a chat that has not ended, and the prompt of its next turn."""
        number = self._rng.choice([number for number, left in enumerate(self._turns_left) if left])
        self._turns_left[number] -= 1
        self._texts[number] += tokens(self._rng, self._turn)
        return number, list(self._texts[number])

    def is_first(self, number: int) -> bool:
        """Tell whether a chat is at its first turn."""
        return self._turns_left[number] == self._turns - 1

    def answered(self, number: int, token_ids: list[int]) -> None:
        """Continue a chat with an answer."""
        self._texts[number] += token_ids


def serve_chats(
    model: Any, profile: Profile, args: argparse.Namespace, config: EngineConfig, flood_tokens: int
) -> dict[str, float]:
    """Serve the chats to their end, beside BE prompts of so many tokens in all; return what became of them."""
    rng, chats, all_turns = random.Random(7), Chats(args), args.chats * args.turns
    sampling = SamplingParams(max_tokens=args.output, ignore_eos=True)
    ttfts_s: list[float] = []
    num_flooded = num_turns = 0
    with Engine(model, config, profile=profile) as engine:
        flood: set[str] = set()
        current: tuple[int, float] | None = None
        answer: list[int] = []
        run_began_s = time.perf_counter()
        while current is not None or num_turns < all_turns:
            # The turns are spread over the flood.
            if current is None and num_flooded * all_turns >= num_turns * flood_tokens:
                number, prompt = chats.next()
                num_turns += 1
                current, answer = (number, time.perf_counter()), []
                engine.add(Request(prompt_token_ids=prompt, sampling=sampling, service_class="LS"))
            while num_flooded < flood_tokens and len(flood) < args.at_once:
                prompt = tokens(rng, args.flood_prompt)
                flood.add(engine.add(Request(prompt_token_ids=prompt, sampling=sampling, service_class="BE")))
                num_flooded += args.flood_prompt
            for out in engine.step():
                if out.request_id in flood:
                    flood -= {out.request_id} if out.finished else set()
                elif current is not None:
                    number, began_s = current
                    if not answer and not chats.is_first(number):
                        ttfts_s.append(time.perf_counter() - began_s)
                    answer += out.new_token_ids
                    if out.finished:
                        chats.answered(number, answer)
                        current = None
        stats, took_s = engine.stats(), time.perf_counter() - run_began_s
    return {
        "seconds": took_s,
        "hit_rate": stats.scheduler.cached_tokens["LS"] / stats.scheduler.prompt_tokens["LS"],
        "ttft_ms": 1e3 * statistics.median(ttfts_s),
    }


@PREFIXES.case(
    agents=12, system=(256, "tokens of each agent's system prompt"), turn=(128, "new tokens of a turn"), turns=16,
    burst=(4, "turns of an agent without another in between"), output=32,
    edits=(0.4, "share of turns that go on from an earlier one"), others=(1.0, "random prompts a turn"),
    other=(256, "tokens of such a prompt"), room=[0.5, 0.75, 1.0], block_size=16, repeats=1, seed=1,
    tiny={"agents": 2, "system": 32, "turn": 16, "turns": 3, "output": 2, "other": 32, "room": [1.0]},
)  # fmt: skip
def sessions(args: argparse.Namespace) -> Trials:
    """Agents whose histories have branches, in too little memory, with and without names of sessions.

    An agent, drawn at random, takes some turns (``--burst`` on average), then another one. A turn is the history so far
    and new tokens; a share of them (``--edits``) first goes back to the end of an earlier turn, as a retry or an edited
    history does. Random prompts without a session come in between. Requests run one after another, with the real
    scheduler and its cache and without a model, so nothing here depends on time. The device has memory for ``--room``
    times what the last histories of all agents take. ``hit_rate`` is the share of the turns' tokens that the cache had,
    but for each agent's first turn; ``named``: requests have the name of their agent as session.
    """
    turns = agents_turns(args)
    last = {name: len(prompt) for name, prompt in turns if name}
    for service_class, room in itertools.product(("LS", "BE"), args.room):
        num_blocks = int(room * sum(last.values())) // args.block_size
        serve = functools.partial(serve_turns, args, turns, service_class, num_blocks)
        arms = {"plain": functools.partial(serve, False), "named": functools.partial(serve, True)}
        yield f"{service_class} {room:g}", arms


def agents_turns(args: argparse.Namespace) -> list[tuple[str, list[int]]]:
    """Draw the prompts of agents, in the order in which they come, and random ones, with "" as agent."""
    rng = random.Random(args.seed)
    histories = {f"agent {n}": [tokens(rng, args.system)] for n in range(args.agents)}
    left = dict.fromkeys(histories, args.turns)
    order: list[str] = []
    while left:
        name = rng.choice([*left])
        count = min(left[name], rng.randint(1, 2 * args.burst - 1))
        order += [name] * count
        left[name] -= count
        if not left[name]:
            del left[name]
    drawn: list[tuple[str, list[int]]] = []
    for name in order:
        history = histories[name]
        if len(history) > 2 and rng.random() < args.edits:
            del history[rng.randrange(1, len(history)) :]
        history.append([*history[-1], *tokens(rng, args.turn)])
        drawn.append((name, history[-1]))
        drawn += [("", tokens(rng, args.other)) for _ in range(int(args.others + rng.random()))]
    return drawn


def serve_turns(
    args: argparse.Namespace, turns: Sequence[tuple[str, list[int]]], service_class: str, num_blocks: int,
    is_named: bool,
) -> dict[str, float]:  # fmt: skip
    """Serve turns one after another; return what share of their tokens was found."""
    config = EngineConfig(block_size=args.block_size, max_num_batched_tokens=8192)
    limits = SchedulerLimits(config=config, num_layers=1, max_model_len=1 << 20, num_host_slots=0)
    share = int(config.execution.ls_prefix_share * num_blocks)
    kv = PagedKVManager(
        num_device_blocks=num_blocks, num_host_blocks=0, block_size=args.block_size, prefix_cache=True,
        num_protected_blocks=share,
    )  # fmt: skip
    scheduler = Scheduler(SCHEDULERS.get("sarathi"), limits=limits, kv=kv)
    sampling, seen = SamplingParams(max_tokens=args.output, ignore_eos=True), set[str]()
    num_cached = num_tokens = 0
    for number, (name, prompt) in enumerate(turns):
        session = name if is_named else ""
        request = Request(prompt_token_ids=prompt, sampling=sampling, service_class=service_class, session=session)
        scheduler.add(f"r{number}", request, SLO(), float(number))
        found = 0
        while scheduler.has_unfinished:
            plan = scheduler.schedule(float(number))
            sampled = {chunk.request_id: (SampledToken(token_id=1),) for chunk in plan.chunks if chunk.samples}
            for output in scheduler.update(plan, StepOutput(tokens=sampled), float(number)):
                found = output.num_cached_tokens
        if name in seen:
            num_cached, num_tokens = num_cached + found, num_tokens + len(prompt)
        seen |= {name} - {""}
    return {"hit_rate": num_cached / num_tokens}


@PREFIXES.case(
    requests=1000, prompt=(8000, "tokens"), shared=(2000, "tokens that are the same in all prompts"),
    decodes=(100, "steps without prompts"), repeats=3,
    tiny={"requests": 4, "prompt": 100, "shared": 50, "decodes": 3, "repeats": 1},
)  # fmt: skip
def prefix_lookup(args: argparse.Namespace) -> Trials:
    """What the prefix cache's bookkeeping costs the scheduler: many requests, long prompts, with and without it.

    The real scheduler with the latency model of a measured profile (SmolLM-135M's shape; cached, or made now), driven
    without a device. The requests are there from the start, half of them LS, and there is memory for all.
    ``prefill_ms`` and ``decode_ms`` are medians of ``schedule()`` and ``update()`` of a step with prompts and without;
    ``add_ms`` is of a request's arrival, at which its keys are made.
    """
    profile, block, vocabulary = smollm_profile(), 16, 50_000

    def run(cache: bool) -> dict[str, float]:
        num_blocks = args.requests * (args.prompt + 2 * args.decodes) // block + args.requests
        kv = {"num_device_blocks": num_blocks, "num_host_blocks": 100, "block_size": block, "prefix_cache": cache}
        scheduler = DryScheduler(
            "omniserve", profile, max_model_len=2 * args.prompt, kv=kv, max_num_batched_tokens=8192,
            max_num_seqs=args.requests,
        )  # fmt: skip
        rng = random.Random(0)
        front, sampling = tokens(rng, args.shared, vocabulary), SamplingParams(max_tokens=args.prompt, ignore_eos=True)
        for number in range(args.requests):
            prompt = [*front, *tokens(rng, args.prompt - args.shared, vocabulary)]
            request = Request(prompt_token_ids=prompt, sampling=sampling, service_class=("BE", "LS")[number % 2])
            scheduler.add(f"r{number}", request, SLO(ttft_s=1e9, tpot_s=1e3))
        times_s: dict[bool, list[float]] = {True: [], False: []}
        while len(times_s[False]) < args.decodes:
            plan, schedule_s, update_s, _ = scheduler.step(lambda: rng.randrange(1, vocabulary))
            has_prompts = any(len(chunk.token_ids) > 1 for chunk in plan.chunks)
            times_s[has_prompts].append(schedule_s + update_s)
        return {
            "add_ms": 1e3 * statistics.median(scheduler.adds_s),
            "prefill_ms": 1e3 * statistics.median(times_s[True]), "decode_ms": 1e3 * statistics.median(times_s[False]),
        }  # fmt: skip

    yield "lookup", {"off": functools.partial(run, False), "on": functools.partial(run, True)}


@PREFIXES.case(
    model=("SmolLM-135M", "of benchmarks.common.models"), rate_mib=1024, fronts=6, front=1536, block_size=64,
    kv_gib=0.5, repeats=5, profile_s=20.0, folder=("", "on the disk to be measured"),
    tiny={"model": "built-in", "rate_mib": 4, "fronts": 2, "front": 128, "kv_gib": 0.02, "repeats": 1,
          "profile_s": 0.5},
)  # fmt: skip
def disk_prefixes(args: argparse.Namespace) -> Trials:
    """The disk tier: how fast prefixes come back from it, what a restart finds, and what steps notice of the copies.

    Each file is written, brought to the disk (fsync) and dropped from the kernel's page cache before it is read.

    ``rate``: ``disk`` reads the blocks of ``--rate-mib`` of prefixes, ``sequential`` a file of the same size from its
    begin to its end, in pieces of 1 MiB.

    ``restart``: an engine computes ``--fronts`` fronts of ``--front`` tokens and ends. The next one has a request for
    each front, one after another: the median TTFT, where it finds the front on disk (``disk``), with the file in the
    page cache (``cached``), and where it has no disk tier and computes it (``none``).

    ``beside``: LS requests decode in an engine of their own. ``step_ms`` is the median of their steps while the threads
    of a disk tier read prefixes without a pause (``reading``), write them (``writing``), and do nothing (``idle``).
    """
    model = MODELS[args.model]()
    profile = find_or_make_profile(model, disk_config(args, DiskKVConfig()), time_limit_s=args.profile_s)
    block_bytes = args.block_size * token_bytes(model)
    with tempfile.TemporaryDirectory(dir=args.folder or None) as name:
        folder = Path(name)
        measured = DiskFiles(folder, block_bytes, args.rate_mib * _MIB)
        yield "rate", {"sequential": measured.read_plain, "disk": measured.read}
        measured.tier.close()
        disk = DiskKVConfig(gib=2.0, dir=str(folder / "kept"), keep=True)
        life = functools.partial(serve_fronts, model, profile, args)
        life(disk)  # writes the file
        yield (
            "restart",
            {
                "none": functools.partial(life, DiskKVConfig()),
                "disk": functools.partial(life, disk, is_cold=True),
                "cached": functools.partial(life, disk),
            },
        )
        yield (
            "beside",
            {
                what: functools.partial(decode_beside, folder, block_bytes, model, profile, args, what)
                for what in ("idle", "reading", "writing")
            },
        )


def drop_from_cache(descriptor: int) -> None:
    """Bring a file to the disk, and take it out of the kernel's page cache."""
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class DiskFiles:
    """A tier with prefixes in its file, and another file of the same size."""

    def __init__(self, folder: Path, block_bytes: int, num_bytes: int) -> None:
        count = num_bytes // block_bytes
        self.num_bytes, self._slots = count * block_bytes, tuple(range(count))
        pool = torch.randint(0, 255, (1, count, 1, 2, 1, block_bytes // 2), dtype=torch.uint8)
        self.tier = DiskTier(DiskFile(folder, num_bytes=2 * num_bytes, block_bytes=block_bytes), (pool,))
        self._keys = tuple(slot.to_bytes(32, "little") for slot in self._slots)
        self._copy(to_disk=True)
        self._plain, path = tempfile.mkstemp(dir=folder)
        os.unlink(path)
        for at in range(0, self.num_bytes, _MIB):
            os.pwrite(self._plain, random.randbytes(_MIB), at)

    def start(self, move_id: int = 0, *, to_disk: bool) -> None:
        """Begin to copy all blocks."""
        self.tier.start(
            DiskCopy(move_id=move_id, to_disk=to_disk, host_block_ids=self._slots, slots=self._slots, keys=self._keys)
        )

    def _copy(self, *, to_disk: bool) -> float:
        began_s = time.perf_counter()
        self.start(to_disk=to_disk)
        while self.tier.busy:
            assert not any(event.message for event in self.tier.poll())
            time.sleep(0.0005)
        return time.perf_counter() - began_s

    def read(self) -> dict[str, float]:
        """Return the rate of blocks that come back."""
        drop_from_cache(self.tier.file._descriptor)
        return {"gib_per_s": self.num_bytes / self._copy(to_disk=False) / 2**30}

    def read_plain(self) -> dict[str, float]:
        """Return the rate of a file that is read from its begin to its end."""
        drop_from_cache(self._plain)
        piece, began_s = bytearray(_MIB), time.perf_counter()
        for at in range(0, self.num_bytes, _MIB):
            os.preadv(self._plain, [piece], at)
        return {"gib_per_s": self.num_bytes / (time.perf_counter() - began_s) / 2**30}


def disk_config(args: argparse.Namespace, disk: DiskKVConfig) -> EngineConfig:
    """Return the settings of an engine."""
    size = int(args.kv_gib * 2**30)
    return EngineConfig(device_kv_bytes=size, host_kv_bytes=size, block_size=args.block_size, disk_kv=disk)


def serve_fronts(
    model: Any, profile: Profile, args: argparse.Namespace, disk: DiskKVConfig, *, is_cold: bool = False
) -> dict[str, float]:
    """Serve the fronts, one after another, with a new engine; return the TTFTs and the share that was cached."""
    rng, sampling = random.Random(1), SamplingParams(max_tokens=8, ignore_eos=True)
    slo = SLO(ttft_s=60.0)
    with Engine(model, disk_config(args, disk), profile=profile) as engine:
        warm = Request(prompt_token_ids=[5] * 16, sampling=SamplingParams(max_tokens=2), service_class="LS")
        engine.generate([warm])
        if engine.disk is not None and is_cold:
            drop_from_cache(engine.disk.file._descriptor)
        done = []
        for _ in range(args.fronts):
            prompt = tokens(rng, args.front + 16)
            request = Request(prompt_token_ids=prompt, sampling=sampling, service_class="LS", slo=slo)
            done += engine.generate([request])
    times = [(each.times.first_token_s or math.inf) - each.times.arrival_s for each in done]
    prompts = sum(each.num_prompt_tokens for each in done)
    return {"ttft_s": statistics.median(times), "cached": sum(each.num_cached_tokens for each in done) / prompts}


def decode_beside(
    folder: Path, block_bytes: int, model: Any, profile: Profile, args: argparse.Namespace, what: str
) -> dict[str, float]:
    """Decode some LS requests while copies run; return the median step in milliseconds, and the copies' rate."""
    files = DiskFiles(folder, block_bytes, min(128, args.rate_mib) * _MIB) if what != "idle" else None
    seconds: list[float] = []
    num_bytes = 0
    with Engine(model, disk_config(args, DiskKVConfig()), profile=profile) as engine:
        for first in range(8):
            sampling = SamplingParams(max_tokens=150, ignore_eos=True)
            engine.add(Request(prompt_token_ids=[5 + first] * 32, sampling=sampling))
        engine.on_step = lambda plan, works, step_s: seconds.append(step_s)
        began_s = time.perf_counter()
        while engine.has_unfinished:
            if files is not None:
                files.tier.poll()
                if not files.tier.busy:
                    num_bytes += files.num_bytes
                    if what == "reading":
                        os.posix_fadvise(files.tier.file._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    files.start(len(seconds), to_disk=what == "writing")
            engine.step()
        took_s = time.perf_counter() - began_s
    if files is not None:
        files.tier.close()
    return {"step_ms": 1e3 * statistics.median(seconds[5:]), "gib_per_s": num_bytes / took_s / 2**30}


if __name__ == "__main__":
    sys.exit(PREFIXES.main())

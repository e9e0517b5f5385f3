"""The disk tier: how fast prefixes come back from it, what a restart finds, and what steps notice of the copies.

    python -m benchmarks.disk_prefixes --record benchmarks/results/disk_prefixes.json

Each file is written, brought to the disk (fsync) and dropped from the kernel's page cache before it is read.

``rate``: ``disk`` reads the blocks of ``--rate-mib`` of prefixes, ``sequential`` a file of the same size from its begin
to its end, in pieces of 1 MiB. ``share`` is the ratio of pairs that were measured next to each other.

``restart``: an engine computes ``--fronts`` fronts of ``--front`` tokens and ends. The next one has a request for each
front, one after another: the median TTFT, where it finds the front on disk (``disk``), with the file in the page cache
(``cached``), and where it has no disk tier and computes it (``none``).

``beside``: LS requests decode in an engine of their own. ``step_ms`` is the median of their steps while the threads of
a disk tier read prefixes without a pause (``reading``), write them (``writing``), and do nothing (``idle``).
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchmarks.common.models import MODELS, token_bytes
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser, table_of
from benchmarks.common.timing import in_turn, median_ratio
from omniserve import SLO, DiskKVConfig, Engine, EngineConfig, Request, SamplingParams
from omniserve.core.work import DiskCopy
from omniserve.host.disk import DiskTier
from omniserve.host.disk_file import DiskFile
from omniserve.latency import Profile
from omniserve.profiling import find_or_make_profile

_MIB = 1 << 20


def drop_from_cache(descriptor: int) -> None:
    """Bring a file to the disk, and take it out of the kernel's page cache."""
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class Rate:
    """A tier with prefixes in its file, and another file of the same size."""

    def __init__(self, folder: Path, block_bytes: int, num_bytes: int) -> None:
        count = num_bytes // block_bytes
        self.num_bytes = count * block_bytes
        pool = torch.randint(0, 255, (1, count, 1, 2, 1, block_bytes // 2), dtype=torch.uint8)
        file = DiskFile(folder, num_bytes=2 * num_bytes, block_bytes=block_bytes)
        self.tier = DiskTier(file, pool)
        slots = tuple(range(count))
        self._keys = tuple(slot.to_bytes(32, "little") for slot in slots)
        self._slots = slots
        self.copy(to_disk=True)
        descriptor, path = tempfile.mkstemp(dir=folder)
        os.unlink(path)
        self._plain = descriptor
        for at in range(0, self.num_bytes, _MIB):
            os.pwrite(descriptor, random.randbytes(_MIB), at)

    def copy(self, *, to_disk: bool) -> float:
        """Copy all blocks; return the seconds."""
        began_s = time.perf_counter()
        self.tier.start(
            DiskCopy(move_id=0, to_disk=to_disk, host_block_ids=self._slots, slots=self._slots, keys=self._keys)
        )
        while self.tier.busy:
            assert not any(event.message for event in self.tier.poll())
            time.sleep(0.0005)
        return time.perf_counter() - began_s

    def read(self) -> float:
        """Return the bytes a second of blocks that come back."""
        drop_from_cache(self.tier.file._descriptor)
        return self.num_bytes / self.copy(to_disk=False)

    def read_plain(self) -> float:
        """Return the bytes a second of a file that is read from its begin to its end."""
        drop_from_cache(self._plain)
        piece, began_s = bytearray(_MIB), time.perf_counter()
        for at in range(0, self.num_bytes, _MIB):
            os.preadv(self._plain, [piece], at)
        return self.num_bytes / (time.perf_counter() - began_s)


def rate(folder: Path, model: PreTrainedModel, args: argparse.Namespace) -> dict[str, object]:
    """Measure how fast blocks are read."""
    measured = Rate(folder, args.block_size * token_bytes(model), args.rate_mib * _MIB)
    found = in_turn({"sequential": measured.read_plain, "disk": measured.read}, args.repeats)
    measured.tier.close()
    gib_per_s = {name: statistics.median(rates) / 2**30 for name, rates in found.items()}
    return {"gib_per_s": gib_per_s, "share": median_ratio(found["disk"], found["sequential"]), "raw": found}


def requests(args: argparse.Namespace) -> list[Request]:
    """Return a request for each front."""
    rng = random.Random(1)
    prompts = [[rng.randrange(1, 400) for _ in range(args.front + 16)] for _ in range(args.fronts)]
    sampling, slo = SamplingParams(max_tokens=8, ignore_eos=True), SLO(ttft_s=60.0)
    return [Request(prompt_token_ids=prompt, sampling=sampling, service_class="LS", slo=slo) for prompt in prompts]


def config(args: argparse.Namespace, disk: DiskKVConfig) -> EngineConfig:
    """Return the settings of an engine."""
    size = int(args.kv_gib * 2**30)
    return EngineConfig(device_kv_bytes=size, host_kv_bytes=size, block_size=args.block_size, disk_kv=disk)


def restart(
    model: PreTrainedModel, profile: Profile, args: argparse.Namespace, disk: DiskKVConfig, *, is_cold: bool
) -> dict[str, float]:
    """Serve the fronts, one after another, with a new engine; return the TTFTs and the share that was cached."""
    with Engine(model, config(args, disk), profile=profile) as engine:
        warm = Request(prompt_token_ids=[5] * 16, sampling=SamplingParams(max_tokens=2), service_class="LS")
        engine.generate([warm])
        if engine.disk is not None and is_cold:
            drop_from_cache(engine.disk.file._descriptor)
        done = [engine.generate([request])[0] for request in requests(args)]
    prompts = sum(each.num_prompt_tokens for each in done)
    times = [(each.times.first_token_s or math.inf) - each.times.arrival_s for each in done]
    return {"ttft_s": statistics.median(times), "cached": sum(each.num_cached_tokens for each in done) / prompts}


def beside(
    folder: Path, model: PreTrainedModel, profile: Profile, args: argparse.Namespace, what: str
) -> dict[str, float]:
    """Decode some LS requests while copies run; return the median step in milliseconds, and the copies' rate."""
    measured = Rate(folder, args.block_size * token_bytes(model), 128 * _MIB) if what != "idle" else None
    seconds: list[float] = []
    num_bytes = 0
    with Engine(model, config(args, DiskKVConfig()), profile=profile) as engine:
        for first in range(8):
            prompt = [5 + first] * 32
            engine.add(Request(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=150, ignore_eos=True)))
        engine.on_step = lambda plan, works, step_s: seconds.append(step_s)
        began_s = time.perf_counter()
        copy = functools.partial(
            DiskCopy, to_disk=what == "writing", host_block_ids=measured._slots, slots=measured._slots,
            keys=measured._keys,
        ) if measured is not None else None  # fmt: skip
        while engine.has_unfinished:
            if measured is not None and copy is not None:
                measured.tier.poll()
                if not measured.tier.busy:
                    num_bytes += measured.num_bytes
                    if what == "reading":
                        os.posix_fadvise(measured.tier.file._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    measured.tier.start(copy(move_id=len(seconds)))
            engine.step()
        took_s = time.perf_counter() - began_s
    if measured is not None:
        measured.tier.close()
    return {"step_ms": 1e3 * statistics.median(seconds[5:]), "gib_per_s": num_bytes / took_s / 2**30}


def main() -> None:
    parser = argument_parser(
        __doc__, "disk_prefixes", model=("SmolLM-135M", "of benchmarks.common.models"), rate_mib=1024, fronts=6,
        front=1536, block_size=64, kv_gib=0.5, repeats=5, profile_s=20.0, folder=("", "on the disk to be measured"),
    )  # fmt: skip
    args = parser.parse_args()
    model = MODELS[args.model]()
    profile = find_or_make_profile(model, config(args, DiskKVConfig()), time_limit_s=args.profile_s)
    with tempfile.TemporaryDirectory(dir=args.folder or None) as name:
        folder = Path(name)
        rates = rate(folder, model, args)
        shown = rates["gib_per_s"]
        print(f"rate, GiB/s: {shown}; prefixes over sequential: {rates['share']:.2f}")
        disk = DiskKVConfig(gib=2.0, dir=str(folder / "kept"), keep=True)
        restart(model, profile, args, disk, is_cold=False)  # writes the file
        lives = {
            "none": functools.partial(restart, model, profile, args, DiskKVConfig(), is_cold=False),
            "disk": functools.partial(restart, model, profile, args, disk, is_cold=True),
            "cached": functools.partial(restart, model, profile, args, disk, is_cold=False),
        }
        restarts = in_turn(lives, args.repeats)
        copies = in_turn(
            {what: functools.partial(beside, folder, model, profile, args, what)
             for what in ("idle", "reading", "writing")},
            args.repeats,
        )  # fmt: skip
    results: dict[str, object] = {"rate": rates}
    for part, found, key in (("restart", restarts, "ttft_s"), ("beside", copies, "step_ms")):
        medians = {
            name: {field: statistics.median(each[field] for each in some) for field in some[0]}
            for name, some in found.items()
        }
        first = next(iter(found))
        ratios = {
            name: median_ratio([each[key] for each in some], [each[key] for each in found[first]])
            for name, some in found.items()
        }
        print(f"{part}: " + ", ".join(f"{name} {ratio:.2f} of {first}" for name, ratio in ratios.items()))
        print(table_of([{"": field, **{k: f"{m[field]:.4g}" for k, m in medians.items()}} for field in medians[first]]))
        results[part] = {"medians": medians, "ratios": ratios, "raw": found}
    write_record(args.record, name="disk_prefixes", config=vars(args), seed=1, results=results)


if __name__ == "__main__":
    main()

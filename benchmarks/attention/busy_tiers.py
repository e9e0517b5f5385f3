"""Measures what host attention and dense device work lose when both run: the two tiers of a machine without a GPU.

Attention is a HostTier over a pool far larger than the caches, never out of work; dense work is a chain of bf16 matrix
products, as of a small model's layers, on torch's threads.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.attention.sizes import Size
from benchmarks.common.bandwidth import ReadLimit, Sample, fill, normal_tile
from benchmarks.common.host_tasks import host_tier_of
from benchmarks.common.models import SMOLLM_135M
from benchmarks.common.timing import OtherLoad
from omniserve.core.work import AttentionResult
from omniserve.simulate.results import percentile

BLOCK_SIZE = 32
NUM_LAYERS = 2
POLL_S = 0.004  # work for ten times as long is queued
WARM_UP_S = 0.1


class AttentionLoad:
    """A HostTier on these cores with L8-like attention (32 query heads, 8 KV heads of 128, bf16) whose slots are always
    in flight; each request has blocks of its own in every layer."""

    def __init__(self, size: Size, seed: int, cores: Sequence[int]) -> None:
        self._num_slots, context_len = size.busy
        num_heads, kv_heads, head_size = 32, 8, 128
        blocks_each = -(-context_len // BLOCK_SIZE)
        num_blocks = self._num_slots * blocks_each
        self.tier, _ = host_tier_of(
            f"{num_heads}/{kv_heads}/{head_size}", context_len, dtype=torch.bfloat16, block_size=BLOCK_SIZE,
            num_blocks=num_blocks, least_layers=NUM_LAYERS, num_slots=self._num_slots, num_threads=len(cores),
            cores=tuple(cores),
        )  # fmt: skip
        fill(self.tier.pool_LBK2SH, normal_tile(torch.bfloat16, seed), len(cores))
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(num_blocks, generator=generator).view(self._num_slots, blocks_each).tolist()
        for slot, blocks in enumerate(order):
            self.tier.begin_token(slot, 0, context_len - 1, blocks)
        rows = [torch.randn(self._num_slots, heads, head_size, generator=generator) for heads in (num_heads, kv_heads)]
        self._q, self._k = (heads_PNH.bfloat16() for heads_PNH in rows)
        self._stop = threading.Event()
        self._failure = ""

    def _submit(self, layer: int, slots: Sequence[int]) -> None:
        count = len(slots)
        self.tier.submit(layer, torch.tensor(slots), self._q[:count], self._k[:count], self._k[:count])

    def _resubmit(self) -> None:
        """Give every slot that comes back its next layer, until told to stop and nothing is left."""
        try:
            while not self._stop.is_set() or self.tier.busy:
                by_layer: dict[int, list[int]] = defaultdict(list)
                for event in self.tier.poll():
                    if not (isinstance(event, AttentionResult) and event.ok):
                        raise RuntimeError(f"host attention failed: {event}")
                    by_layer[(event.layer + 1) % NUM_LAYERS].append(event.slot)
                if not self._stop.is_set():
                    for layer, slots in by_layer.items():
                        self._submit(layer, slots)
                time.sleep(POLL_S)
            self.tier.poll()
        except RuntimeError as error:  # for the thread that measures
            self._failure = str(error)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Attend for as long as the context lasts, and until what is queued then is done."""
        self._stop.clear()
        for layer in range(NUM_LAYERS):
            self._submit(layer, range(layer, self._num_slots, NUM_LAYERS))
        thread = threading.Thread(target=self._resubmit, name="resubmit")
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
        if self._failure:
            raise RuntimeError(self._failure)


class DenseWork:
    """Steps of four layers of SmolLM's size over 64 rows: matrix products and SiLU."""

    def __init__(self, seed: int) -> None:
        hidden, inner = SMOLLM_135M["hidden_size"], SMOLLM_135M["intermediate_size"]
        heads = SMOLLM_135M["num_attention_heads"] + 2 * SMOLLM_135M["num_key_value_heads"]
        shapes = ((hidden, heads * 64), (hidden, hidden), (hidden, 2 * inner), (inner, hidden))
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=generator) * rows**-0.5).bfloat16()

        self._layers = [[matrix(*shape) for shape in shapes] for _ in range(4)]
        self._start_TD = matrix(64, hidden)

    def step(self) -> None:
        hidden_TD = self._start_TD
        width = hidden_TD.shape[1]
        for qkv, out, gate_up, down in self._layers:
            hidden_TD = (hidden_TD @ qkv)[:, :width] @ out
            gate, up = (hidden_TD @ gate_up).chunk(2, dim=1)
            hidden_TD = (torch.nn.functional.silu(gate) * up) @ down

    def times_s(self, seconds: float) -> list[float]:
        """Return what each step took, for so many seconds."""
        end_s, times = time.perf_counter() + seconds, []
        while (began_s := time.perf_counter()) < end_s:
            self.step()
            times.append(time.perf_counter() - began_s)
        return times


def measure_busy(limit: ReadLimit, size: Size, seed: int) -> dict[str, Any]:
    """Return, by team, rates alone and together: attention's samples in GB/s, and the dense steps' times."""
    dense, all_ = DenseWork(seed), len(limit.cpus)
    half = max(1, all_ // 2)
    results: dict[str, Any] = {}
    for attention_threads, torch_threads in dict.fromkeys(((half, half), (all_, half), (all_, all_))):
        limit.everywhere()
        # Torch takes the first cores and attention the last, so that they share as few as they can.
        load = AttentionLoad(size, seed, limit.cpus[-attention_threads:])
        try:
            team = _measure_team(limit, size, load, dense, attention_threads, torch_threads)
            results[f"{attention_threads} + {torch_threads}"] = team
        finally:
            load.tier.close()
    return results


def _measure_team(
    limit: ReadLimit, size: Size, load: AttentionLoad, dense: DenseWork, attention_threads: int,
    torch_threads: int,
) -> dict[str, Any]:  # fmt: skip
    def attend(with_dense: bool) -> tuple[float, list[float]]:
        limit.everywhere()  # what `running` starts must not sit on the first core
        with load.running():
            limit.use_threads(torch_threads)
            time.sleep(WARM_UP_S)
            before, began_s = load.tier.stats().kv_bytes_read, time.perf_counter()
            times: list[float] = []
            if with_dense:
                times = dense.times_s(size.seconds)
            else:
                time.sleep(size.seconds)
            rate = (load.tier.stats().kv_bytes_read - before) / (time.perf_counter() - began_s) / 1e9
        return rate, times

    samples: dict[str, list[Sample]] = {"alone": [], "together": []}
    times: dict[str, list[list[float]]] = {"alone": [], "together": []}
    others = OtherLoad()
    for _ in range(size.repeats):
        for name in limit.rng.sample(("attention", "dense", "together"), 3):
            if name == "dense":
                limit.use_threads(torch_threads)
                dense.times_s(WARM_UP_S)
                times["alone"].append(dense.times_s(size.seconds))
                continue
            sample, step_times = limit.bracket(attention_threads, lambda: attend(name == "together"))  # noqa: B023
            samples["together" if name == "together" else "alone"].append(sample)
            if name == "together":
                times["together"].append(step_times)
    return {
        "attention_threads": attention_threads, "torch_threads": torch_threads, "others_busy_cores": others.cores(),
        "attention": {
            name: {
                "gb_per_s": statistics.median(sample.gb_per_s for sample in group),
                "share": statistics.median(sample.share for sample in group),
                "samples": [asdict(sample) for sample in group],
            }
            for name, group in samples.items()
        },
        "dense": {
            name: {
                "steps_per_s": statistics.median(len(group) / sum(group) for group in groups),
                "p50_s": percentile([time_s for group in groups for time_s in group], 50),
                "p99_s": percentile([time_s for group in groups for time_s in group], 99),
                "step_times_s": groups,
            }
            for name, groups in times.items()
        },
    }  # fmt: skip

"""Run every kernel once on its operator's samples, for compute-sanitizer: ``python -m benchmarks.gpu.kernels_once``.

Prints what ran. Results are not compared: the tests do that.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch

from benchmarks.gpu.engines import attentions
from omniserve.config import EngineConfig
from omniserve.host.tier import HostTier
from omniserve.kv.storage import DeviceKVStorage
from omniserve.ops import OPS, Sample
from omniserve.ops.attention import resolve_attention
from omniserve.plan import HostEventKind, KVMove, MoveDirection
from omniserve.spec import AttentionSpec, ModelSpec

_FEW = 2
_BLOCK = 16
_PATIENCE_S = 60.0
_LEFT_OUT = ("flex",)
"""Attention that torch compiles anew for each sample, out of its own kernels."""


def operators(device: torch.device) -> list[str]:
    """Return the operators that run on a device."""
    key = "CUDA" if device.type == "cuda" else "CPU"
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return [name for name in OPS if has_kernel(f"omniserve::{name}", key)]


def samples_of(name: str, device: torch.device, *, few: bool) -> Iterator[Sample]:
    """Yield an operator's samples on a device; ``few``: the last ones, which are the richest."""
    samples = list(OPS[name].samples(device, torch.bfloat16))
    yield from samples[-_FEW:] if few else samples


def run_operators(device: torch.device, *, few: bool) -> list[str]:
    """Run the operators and return what ran."""
    ran = []
    for name in operators(device):
        for sample in samples_of(name, device, few=few):
            getattr(torch.ops.omniserve, name).default(*sample.clone())
            ran.append(f"{name}: {sample.label}")
    return ran


def run_attention(device: torch.device, *, few: bool) -> list[str]:
    """Run implementations of device attention on the samples that they take, and return what ran."""
    ran = []
    for name, reason in attentions(device).items():
        if reason or name in _LEFT_OUT:
            continue
        attend = resolve_attention(name, device)
        for sample in samples_of("paged_attention", device, few=few):
            q, k, v, table, starts, lens, scale, window, softcap, *directions = sample.args
            spec = AttentionSpec(scale=scale, window=window, softcap=softcap)
            reversed_RM = directions[0] if directions else None
            try:
                attend(q, k, v, table, starts, lens, spec, reversed_RM=reversed_RM)
            except (ValueError, NotImplementedError) as error:  # xformers neither soft-caps nor reads blocks backwards
                ran.append(f"attention {name}, refused {sample.label}: {error}")
            else:
                ran.append(f"attention {name}: {sample.label}")
    return ran


def run_moves(device: torch.device) -> list[str]:
    """Move blocks from a device pool to a host pool and back, whatever kernels do that, and return what ran.

    Raises:
        RuntimeError: A move failed or did not end.
    """
    spec = ModelSpec(
        num_layers=2, hidden_size=128, num_heads=4, num_kv_heads=2, head_size=32, vocab_size=8, max_model_len=256,
        eos_token_ids=(), dtype_bytes=2, attention=(AttentionSpec(scale=1.0),) * 2,
    )  # fmt: skip
    dtype, num_blocks, ids = torch.bfloat16, 5, (3, 0, 4)
    config = EngineConfig(block_size=_BLOCK, host_kv_bytes=num_blocks * spec.kv_block_bytes(_BLOCK))
    tier = HostTier.of(config, spec, dtype=dtype, device=device, num_threads=2)
    storage = DeviceKVStorage(spec, num_blocks=num_blocks, block_size=_BLOCK, dtype=dtype, device=device)
    try:
        for move_id, direction in enumerate(MoveDirection):
            move = KVMove(
                request_id="", move_id=move_id, direction=direction, src_block_ids=ids, dst_block_ids=ids[::-1]
            )
            tier.start_move(move, storage.k_LBKSH, storage.v_LBKSH)
            deadline_s = time.monotonic() + _PATIENCE_S
            while not (events := tier.poll()):
                if time.monotonic() > deadline_s:
                    raise RuntimeError(f"a move {direction} was not over after {_PATIENCE_S:.0f} s")
                tier.wait(0.01)
            if events[0].kind is not HostEventKind.MOVE_DONE:
                raise RuntimeError(f"a move {direction} failed: {events[0].message}")
    finally:
        tier.close()
    return [f"move {direction}" for direction in MoveDirection]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true", help="few samples of each: sanitizers are slow")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.inference_mode():
        ran = [*run_operators(device, few=args.few), *run_attention(device, few=args.few), *run_moves(device)]
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(*ran, sep="\n")
    print(f"{len(ran)} calls on {device.type}")


if __name__ == "__main__":
    main()

"""Run every kernel once on its operator's samples, for compute-sanitizer: ``python -m benchmarks.gpu.kernels_once``.

Prints what ran. Results are not compared: the tests do that.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from benchmarks.gpu.engines import attentions
from omniserve.ops import OPS, Sample
from omniserve.ops.attention import resolve_attention
from omniserve.spec import AttentionSpec

_FEW = 2


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
    """Run every implementation of device attention on the samples that it takes, and return what ran."""
    ran = []
    for name, reason in attentions(device).items():
        if reason:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true", help="few samples of each: sanitizers are slow")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.inference_mode():
        ran = [*run_operators(device, few=args.few), *run_attention(device, few=args.few)]
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(*ran, sep="\n")
    print(f"{len(ran)} calls on {device.type}")


if __name__ == "__main__":
    main()

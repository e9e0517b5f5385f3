"""Every kernel once on its operator's samples, alone and under compute-sanitizer: memcheck, then racecheck."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.gpu.check.blocks import Pools
from benchmarks.gpu.engines import attentions
from benchmarks.gpu.program import run_program
from benchmarks.gpu.script import NotHere, Script, argument_parser, scrubbed
from omniserve.core.spec import AttentionSpec
from omniserve.ops import OPS, Sample
from omniserve.ops.attention import AttentionMetadata, resolve_attention

TOOLS = ("memcheck", "racecheck")
_FEW = 2
_LEFT_OUT = ("flex",)
"""Attention that torch compiles anew for each sample, out of its own kernels."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser(
        __doc__, seconds=(75.0, "for each tool"), kernels=(False, "run the kernels on few samples, and nothing else")
    )
    args = parser.parse_args(arguments)
    if args.kernels:
        run_kernels(torch.device("cuda" if torch.cuda.is_available() else "cpu"), few=True)
        return 0
    script = Script("sanitizer", args)
    with ThreadPoolExecutor() as pool:  # all at once: nothing here is timed
        under = {tool: pool.submit(checked, tool, script, args.seconds) for tool in TOOLS}
        with script.case("every kernel once") as case:
            case.note = f"{run_kernels(script.device, few=script.dry)} calls"
        for tool, result in under.items():
            with script.case(f"compute-sanitizer {tool}") as case:
                case.note, case.details["end_of_output"] = result.result()
    return script.end()


def checked(tool: str, script: Script, limit_s: float) -> tuple[str, str]:
    """Run the kernels under a tool and return its summary, and the end of what it said.

    Raises:
        NotHere: There is no compute-sanitizer, or it cannot work with this device.
        RuntimeError: It found errors, or the program did not get to its end.
    """
    if not script.on_gpu:
        raise NotHere("needs a GPU")
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        raise NotHere("there is no compute-sanitizer here")
    status, lines = run_program(
        [
            program, "--tool", tool, "--print-limit", "5",
            sys.executable, "-m", "benchmarks.gpu.check.sanitizer", "--kernels",
        ],
        limit_s=limit_s,
        # The caching allocator hides reads behind the end of a tensor.
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", ".")},
    )  # fmt: skip
    output = scrubbed("\n".join(lines[-200:]))
    if "Device not supported" in output:
        raise NotHere("compute-sanitizer does not support this device, or how it is virtualised")
    if status is None:
        raise NotHere(f"not over after {limit_s:.0f} s: give more --seconds")
    found = re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", output)
    if found is None or status != 0 or int(found[1] or found[2]):
        raise RuntimeError(f"status {status}, {found[0] if found else 'no summary'}: {output[-3000:]}")
    return found[0], output[-2000:]


@torch.inference_mode()
def run_kernels(device: torch.device, *, few: bool) -> int:
    """Run the operators, device attention and block moves on a device, and return the number of calls.

    Results are not compared here: the tests do that.

    Args:
        device: Where.
        few: Of each operator only the last samples, which are the richest: sanitizers are slow.
    """
    calls = 0
    key = "CUDA" if device.type == "cuda" else "CPU"
    for name in OPS:
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"omniserve::{name}", key):
            for sample in samples_of(name, device, few=few):
                getattr(torch.ops.omniserve, name).default(*sample.clone())
                calls += 1
    for name, reason in attentions(device).items():
        if reason or name in _LEFT_OUT:
            continue
        attend = resolve_attention(name, device)
        for sample in samples_of("paged_attention", device, few=few):
            q, k, v, blocks, starts, lens, scale, window, softcap, *directions = sample.args
            spec = AttentionSpec(scale=scale, window=window, softcap=softcap)
            metadata = AttentionMetadata(
                block_table_RM=blocks, query_start_loc_R1=starts, seq_lens_R=lens, reversed_RM=(*directions, None)[0]
            )
            try:
                attend(q, k, v, metadata, spec)
            except (ValueError, NotImplementedError) as error:  # xformers: no soft-caps, no blocks from the right
                print(f"attention {name} refuses {sample.label}: {error}")
            calls += 1
    pools = Pools(device, torch.bfloat16, 4)
    try:
        pools.advance()
        pools.finish()
    finally:
        pools.tier.close()
    return calls + pools.num_moves


def samples_of(name: str, device: torch.device, *, few: bool) -> Iterator[Sample]:
    """Yield an operator's samples on a device."""
    samples = list(OPS[name].samples(device, torch.bfloat16))
    yield from samples[-_FEW:] if few else samples


if __name__ == "__main__":
    sys.exit(main())

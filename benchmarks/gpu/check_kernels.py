"""The tests marked ``gpu``, and every kernel once on its operator's samples, alone and under compute-sanitizer."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.common.record import ROOT
from benchmarks.gpu.check_blocks import Pools
from benchmarks.gpu.engines import attentions
from benchmarks.gpu.script import NotHere, Script, run_program, scrubbed
from omniserve.core.spec import AttentionSpec
from omniserve.ops.attention import AttentionMetadata, resolve_attention
from tests.ops.table import OPS, Sample

_TESTS_S, _TOOL_S = 110.0, 75.0
_OUTCOME = r"(PASSED|FAILED|ERROR|SKIPPED)"
_LINE = re.compile(rf"^(?:\[gw\d+\] \[ *\d+%\] {_OUTCOME} (tests/.+?)|(tests/.+?) {_OUTCOME})(?: +\[ *\d+%\])?\s*$")
"""A test's line of ``pytest -v``, with and without xdist."""
_MARKED = re.compile(r"mark\.gpu|\bDEVICES\b")
"""What a file with tests marked ``gpu`` contains; ``DEVICES`` are parameters of which one is so marked."""


def marked_tests(script: Script) -> None:
    """Run the tests marked ``gpu``; each one that fails is named, also when the time is too short for all."""
    command = [sys.executable, "-m", "pytest", "-v", "-rN", "--tb=short", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors", "-m", "gpu" if script.on_gpu else "not gpu"]
    if importlib.util.find_spec("xdist") is not None and not script.dry:
        command += ["-n", "8"]
    files = [Path("tests/runner/test_shapes.py")] if script.dry else marked_files()
    with script.case(f"tests marked gpu, in {len(files)} files") as case:
        status, lines = run_program([*command, *files], limit_s=_TESTS_S)
        outcomes = outcomes_of(lines)
        counts = Counter(outcomes.values())
        failed = sorted(test for test, outcome in outcomes.items() if outcome in ("FAILED", "ERROR"))
        case.details |= {"failed": failed, "status": status, "end_of_output": scrubbed("\n".join(lines[-400:]))}
        case.note = ", ".join(f"{number} {name.lower()}" for name, number in sorted(counts.items())) or "nothing ran"
        if status is None and not failed:
            raise NotHere(f"{case.note}, then cut after {_TESTS_S:.0f} s")
        assert status == 0 and not failed and counts["PASSED"], f"{case.note}, status {status}: {', '.join(failed)}"


def marked_files() -> list[Path]:
    """Return the files with tests marked ``gpu``."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path.relative_to(ROOT) for path in paths if _MARKED.search(path.read_text())]


def outcomes_of(lines: Iterable[str]) -> dict[str, str]:
    """Return each test's outcome; one that passed and whose end went wrong has failed."""
    outcomes: dict[str, str] = {}
    for line in lines:
        if match := _LINE.match(line):
            outcome, test = (match[1], match[2]) if match[1] else (match[4], match[3])
            if outcomes.get(test) not in ("FAILED", "ERROR"):
                outcomes[test] = outcome
    return outcomes


def sanitizer(script: Script) -> None:
    """Run every kernel once, and meanwhile under compute-sanitizer's memcheck and racecheck: nothing here is timed."""
    with ThreadPoolExecutor() as pool:
        under = {tool: pool.submit(checked, tool, script, _TOOL_S) for tool in ("memcheck", "racecheck")}
        with script.case("every kernel once") as case:
            case.note = f"{run_kernels(script.device, few=script.dry)} calls"
        for tool, result in under.items():
            with script.case(f"compute-sanitizer {tool}") as case:
                case.note, case.details["end_of_output"] = result.result()


def checked(tool: str, script: Script, limit_s: float) -> tuple[str, str]:
    """Run the kernels under a tool and return its summary, and the end of what it said."""
    script.needs_gpu()
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        raise NotHere("there is no compute-sanitizer here")
    kernels = f"import torch, {__name__} as it; it.run_kernels(torch.device('cuda'), few=True)"
    status, lines = run_program(
        [program, "--tool", tool, "--print-limit", "5", sys.executable, "-c", kernels], limit_s=limit_s,
        # The caching allocator hides reads behind the end of a tensor.
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", ".")},
    )  # fmt: skip
    output = scrubbed("\n".join(lines[-200:]))
    if "Device not supported" in output:
        raise NotHere("compute-sanitizer does not support this device, or how it is virtualised")
    if status is None:
        raise NotHere(f"not over after {limit_s:.0f} s: raise _TOOL_S")
    found = re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", output)
    if found is None or status != 0 or int(found[1] or found[2]):
        raise RuntimeError(f"status {status}, {found[0] if found else 'no summary'}: {output[-3000:]}")
    return found[0], output[-2000:]


@torch.inference_mode()
def run_kernels(device: torch.device, *, few: bool) -> int:
    """Run the operators, device attention and block moves on a device, and return the number of calls.

    Results are not compared here: the tests do that. With ``few``, only each operator's last samples run, which are the
    richest: sanitizers are slow.
    """
    calls = 0
    key = "CUDA" if device.type == "cuda" else "CPU"
    for name in OPS:
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"omniserve::{name}", key):
            for sample in samples_of(name, device, few=few):
                getattr(torch.ops.omniserve, name).default(*sample.clone())
                calls += 1
    for name, reason in attentions(device).items():
        if reason or name == "flex":
            continue  # flex: torch compiles it anew for each sample, out of its own kernels
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


def samples_of(name: str, device: torch.device, *, few: bool) -> list[Sample]:
    """Return an operator's samples on a device."""
    return list(OPS[name].samples(device, torch.bfloat16))[-2 if few else 0 :]

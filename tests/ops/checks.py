"""Compare an operator with its reference on its samples; also run as a program, for each instruction set."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from omniserve.core.spec import AttentionSpec
from omniserve.ops.attention import AttentionMetadata, HostLengths
from omniserve.ops.isa import instruction_sets
from tests.ops.table import OPS, Sample, attention_options, cpu_samples
from tests.ops.tolerances import Tolerance, tolerance

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def op_named(name: str) -> Any:
    """Return the operator's only overload."""
    return getattr(torch.ops.omniserve, name).default


def assert_same(
    got: tuple[Any, ...], expected: tuple[Any, ...], name: str, dtype: torch.dtype, within: Tolerance | None = None
) -> None:
    """Compare every tensor of two calls: results and arguments. NaN equals NaN: what is poisoned stays so."""
    rtol, atol = within or tolerance(name, dtype)
    for mine, wanted in zip(got, expected, strict=True):
        if isinstance(wanted, Tensor):
            torch.testing.assert_close(mine, wanted, rtol=rtol, atol=atol, equal_nan=True)
        else:
            assert mine == wanted


def expected_of(name: str, sample: Sample) -> tuple[Any, ...]:
    """Return the result of an operator's reference, and the sample's arguments as it leaves them."""
    args = sample.clone()
    return (OPS[name].reference(*args), *args)


def check_against_reference(
    function: Callable[..., Any],
    name: str,
    sample: Sample,
    dtype: torch.dtype,
    within: Tolerance | None = None,
    expected: tuple[Any, ...] | None = None,
) -> None:
    """Run both on copies of the sample; results finite, results and mutated arguments the same.

    ``expected``: what ``expected_of`` has returned for the sample.
    """
    mine = sample.clone()
    result = function(*mine)
    if isinstance(result, Tensor):
        assert result.isfinite().all(), "poison leaked into the result"
    assert_same((result, *mine), expected or expected_of(name, sample), name, dtype, within)


def attention_call(
    args: Sequence[Any], *, on_host: bool = False, one_query_each: bool = False
) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata, AttentionSpec]:
    """Return what device attention takes for the arguments of the operator ``paged_attention``.

    Args:
        args: The operator's.
        on_host: The lengths are on the host, too.
        one_query_each: See ``AttentionMetadata``.
    """
    q, k, v, table, starts, lens = args[:6]
    options = attention_options(tuple(args))
    lengths = HostLengths(query_lens=tuple(starts.diff().tolist()), seq_lens=tuple(lens.tolist()))
    metadata = AttentionMetadata(
        block_table_RM=table, query_start_loc_R1=starts, seq_lens_R=lens, host_lengths=lengths if on_host else None,
        reversed_RM=options["reversed_RM"], one_query_each=one_query_each,
    )  # fmt: skip
    per_head = (options[name] for name in ("sinks_N", "alibi_slopes_N"))
    sinks, slopes = (None if values is None else tuple(values.tolist()) for values in per_head)
    return q, k, v, metadata, AttentionSpec(
        scale=options["scale"], window=options["window"], softcap=options["softcap"], chunk=options["chunk"],
        sinks=sinks, alibi_slopes=slopes,
    )  # fmt: skip


Case = tuple[str, torch.dtype, Sample, tuple[Any, ...]]
"""An operator's name, a dtype, a sample, and what is expected of it."""


def _outcome(cases: Sequence[Case]) -> str:
    """Check all cases with the set that this process is forced to; return what came of it."""

    def with_threads(*args: Any) -> Any:
        torch.set_num_threads(2)
        try:
            return op_named(name)(*args)
        finally:
            torch.set_num_threads(1)

    try:
        for name, dtype, sample, expected in cases:
            check_against_reference(with_threads, name, sample, dtype, expected=expected)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return "all samples agree"


def main(isas: Sequence[str]) -> None:
    """Print what comes of each instruction set, in a child process for each: a process chooses its set once."""
    torch.set_num_threads(1)  # a process with more than one cannot be forked
    cases = [
        (name, dtype, sample, expected_of(name, sample))
        for name in OPS
        for dtype in DTYPES
        for sample in cpu_samples(name, dtype)
    ]
    for isa in isas:
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0, f"the process for {isa} has crashed"
            continue
        os.environ["OMNISERVE_ISA"] = isa
        print(json.dumps({"isa": isa, "outcome": _outcome(cases), "sets": str(instruction_sets())}), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])

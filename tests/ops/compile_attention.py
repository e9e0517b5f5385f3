"""Compile the attention kernels for Hopper, without a GPU; run as a program: triton must not interpret there.

Prints a line for each shape: bytes of shared memory, bytes a thread spills, whether loads are asynchronous.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from itertools import product
from typing import Any

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
SMS_SHARED_BYTES = 227 << 10


def compile_kernel(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> Any:
    """Compile for compute capability 9.0, all pointers and strides divisible by 16, as torch's and ours are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    loose = ("num_requests", "full_splits", "max_split_keys", "scale", "table_stride", "reversed_stride")
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name] != "constexpr" and name not in loose
    }
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs, divisible)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def attend_types(dtype: str, out_dtype: str) -> dict[str, str]:
    """Return the types of `_attend`'s arguments."""
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), f"*{dtype}")
    pointers |= {"out_ptr": f"*{out_dtype}", "lse_ptr": "*fp32", "table_ptr": "*i32", "reversed_ptr": "*u8"}
    pointers |= {"query_start_ptr": "*i32", "seq_lens_ptr": "*i32"}
    strides = ("q_stride_t", "q_stride_n", "stride_b", "stride_k", "stride_s", "table_stride", "reversed_stride")
    counts = ("num_requests", "full_splits", "max_split_keys")
    return pointers | dict.fromkeys((*counts, *strides), "i32") | {"scale": "fp32"}


def spilled_bytes(compiled: Any) -> int:
    """Return the bytes of a thread's stack: the kernel has nothing to put there but registers that do not fit."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+)", done.stdout)
    assert found, f"cuobjdump says nothing of a stack: {done.stdout}"
    return int(found[1])


def compile_shape(dtype: str, num_tokens: int, head_size: int, group: int, block_size: int, **features: Any) -> None:
    """Compile what `paged_attention` would launch for 8 requests of up to 8192 tokens on 8 KV heads, and print it."""
    from omniserve.ops.kernels import attention
    from omniserve.ops.kernels.attention_launch import choose_launch

    one_query_each = num_tokens == 8
    launch = choose_launch(
        num_tokens=num_tokens, num_requests=8, num_heads=8 * group, kv_heads=8, head_size=head_size,
        block_size=block_size, table_width=8192 // block_size, itemsize=DTYPE_BYTES[dtype],
        one_query_each=one_query_each,
    )  # fmt: skip
    padded = max(16, 1 << (head_size - 1).bit_length())
    constants = {
        "H": head_size, "H_PAD": padded, "S": block_size, "GROUP": group, "BLOCK_M": launch.tile.block_m,
        "BLOCK_N": launch.block_n, "NUM_SPLITS": launch.num_splits, "WINDOW": features.get("window", 0),
        "SOFTCAP": features.get("softcap", 0.0), "IS_DIRECTED": features.get("directed", False),
        "ONE_QUERY_EACH": one_query_each, "DOT_IN_FP32": False,
    }  # fmt: skip
    out_dtype = "fp32" if launch.num_splits > 1 else dtype
    tile = launch.tile
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    compiled = compile_kernel(attention._attend, attend_types(dtype, out_dtype), constants, **options)
    assert compiled.metadata.shared <= SMS_SHARED_BYTES, f"{compiled.metadata.shared} bytes of shared memory"
    print(
        f"{dtype}, T {num_tokens}, H {head_size}, G {group}, S {block_size}, {features}:"
        f" {tile.block_m} x {launch.block_n}, {launch.num_splits} splits, shared {compiled.metadata.shared},"
        f" spilled {spilled_bytes(compiled)}, async {'cp.async' in compiled.asm['ptx']},"
        f" wgmma {'wgmma' in compiled.asm['ptx']}",
        flush=True,
    )
    if launch.num_splits > 1:
        types = {"partial_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": f"*{dtype}"}
        compile_kernel(
            attention._combine, types, {"H": head_size, "H_PAD": padded, "NUM_SPLITS": launch.num_splits}, num_warps=4
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["all"]:
        for dtype, tokens, size, block in product(DTYPE_BYTES, (8, 64, 2048), (64, 128, 256), (16, 64)):
            compile_shape(dtype, tokens, size, 4, block)
    else:
        compile_shape("bf16", 8, 128, 4, 64)
        compile_shape("bf16", 2048, 128, 4, 64, directed=True)
        compile_shape("fp16", 64, 80, 7, 16, window=100, softcap=30.0)
        compile_shape("fp32", 2048, 256, 2, 64)

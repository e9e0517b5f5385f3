"""Kernels compile for every device, within its memory, with the accesses and the order that other processors rely on.

Needs no GPU. What each takes of a device is in ``kernel_resources``; ``compile_kernels`` says how to write it anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import triton

from omniserve.ops.kernels.attention_launch import choose_launch, shared_bytes
from tests.ops.compile_cases import ALL, DEVICES, DTYPES, QUICK, cases, requests_of
from tests.ops.compile_kernels import TABLES

OLDEST, NEWEST = "3.6.0", "3.9.0"
"""Triton of the oldest and of the newest torch of pyproject.toml."""

SPILLED = {
    ("3.9.0", "attend bf16 H128 G7 S16 chunk, window, softcap, directed", "sm_100"): 56,
    ("3.9.0", "attend fp32 H128 G7 S16 prompt, window, softcap, directed", "sm_100"): 8,
    ("3.9.0", "add_lora bf16 I4096 O4096 R16 decode", "sm_90"): 8,
}
"""Bytes of stack that a thread takes where a Triton has too few registers: it costs time on that device, and nothing
else. What is not named here must not spill."""

Row = dict[str, list[int]]


def run_program(folder: Path, *options: str) -> list[str]:
    """Return the lines that the program prints."""
    env = os.environ | {"TRITON_CACHE_DIR": str(folder)}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.compile_kernels", *options],
        capture_output=True, text=True, timeout=3600, env=env, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The lines that the program prints, parsed."""
    return [json.loads(line) for line in run_program(tmp_path_factory.mktemp("triton"))]


@pytest.fixture(scope="module")
def kernels(lines: list[Any]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """(case, compute capability) -> its kernels."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for kernel in lines[:-1]:
        found.setdefault((kernel["case"], kernel["sm"]), []).append(kernel)
    return found


@cache
def table(version: str) -> dict[str, Row]:
    """Return [registers, bytes of stack, bytes of shared memory] by kernel and device."""
    rows: dict[str, Row] = json.loads((TABLES / f"triton-{version}.json").read_text())
    return rows


def check(label: str, capability: int, stack: int, shared: int) -> None:
    """Fail if a kernel spills more than is known.

    It fails, too, if one takes more shared memory than the device has or than is written for this Triton.
    """
    spilled = SPILLED.get((triton.__version__, label, f"sm_{capability}"), 0)
    assert stack <= spilled, f"{label}, sm_{capability}: {stack} bytes are spilled"
    limit = DEVICES[capability].shared_bytes
    if (TABLES / f"triton-{triton.__version__}.json").exists():
        limit = min(limit, table(triton.__version__)[label][f"sm_{capability}"][2])
    assert shared <= limit, f"{label}, sm_{capability}: {shared} bytes of {limit}"


@pytest.mark.parametrize("version", sorted({OLDEST, NEWEST, *(p.stem.split("-")[1] for p in TABLES.glob("*.json"))}))
def test_no_kernel_spills_or_exceeds_a_device_with_this_triton(version: str) -> None:
    rows = table(version)
    assert {label for label in rows if not label.startswith("combine")} == set(cases()), "write the table anew"
    for label, row in rows.items():
        assert set(row) == {f"sm_{capability}" for capability in DEVICES}, label
        for device, (registers, stack, shared) in row.items():
            limit = DEVICES[int(device.removeprefix("sm_"))].shared_bytes
            assert registers <= 255 and shared <= limit, f"{label}, {device}: {shared} bytes of {limit}"
            assert stack == SPILLED.get((version, label, device), 0), f"{label}, {device}: {stack} bytes are spilled"


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_no_kernel_takes_more_shared_memory_than_its_launch_was_chosen_for(version: str) -> None:
    for label, row in table(version).items():
        if not label.startswith("attend"):
            continue
        dtype, size, groups, block, kind = label.replace(",", "").split()[1:6]
        head_size, group, itemsize = int(size[1:]), int(groups[1:]), DTYPES[dtype].itemsize
        requests, tokens = requests_of(kind, group)
        for capability, device in DEVICES.items():
            launch = choose_launch(
                num_tokens=requests * tokens, num_requests=requests, num_heads=2 * group, kv_heads=2,
                head_size=head_size, block_size=int(block[1:]), table_width=8192 // int(block[1:]), itemsize=itemsize,
                one_query_each=tokens == 1, device=device,
            )  # fmt: skip
            padded_head = 1 << (head_size - 1).bit_length()
            bound = shared_bytes(launch.tile, launch.block_n, padded_head, itemsize, device)
            taken = row[f"sm_{capability}"][2]
            assert taken <= bound, f"{label}, sm_{capability}: {taken} bytes of {bound}"


def test_there_are_tables_for_the_oldest_and_the_newest_torch() -> None:
    required = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    assert '"torch>=2.11,<2.16"' in required, "other versions of torch: look up their triton, and write the tables"


@pytest.mark.slow
def test_every_quick_case_compiles_within_what_is_written(kernels: dict[tuple[str, int], list[dict[str, Any]]]) -> None:
    assert set(kernels) == set(QUICK)
    for (name, capability), found in kernels.items():
        for kernel in found:
            label = name.replace("attend", "combine") if kernel["kernel"] == "_combine" else name
            check(label, capability, kernel["stack"], kernel["shared"])


@pytest.mark.exhaustive
def test_every_case_compiles_within_what_is_written(tmp_path: Path) -> None:
    for line in run_program(tmp_path, "--all"):
        for label, row in json.loads("{" + line + "}").items():
            for device, (_, stack, shared) in row.items():
                check(label, int(device.removeprefix("sm_")), stack, shared)


@pytest.mark.slow
def test_attention_loads_ahead_and_multiplies_on_the_tensor_cores_that_a_device_has(
    kernels: dict[tuple[str, int], list[dict[str, Any]]],
) -> None:
    attends = {case: found[0] for case, found in kernels.items() if case[0].startswith("attend")}
    assert all(kernel["is_async"] for kernel in attends.values())
    prompts = [(sm, kernel) for (name, sm), kernel in attends.items() if "prompt" in name]
    assert {sm for sm, _ in prompts} >= {90, 100, 120}
    for sm, kernel in prompts:
        assert kernel["wgmma"] == (sm == 90) and kernel["tcgen05"] == (sm == 100), kernel["case"]
    assert any(set(ALL) <= set(name.split(", ")) for name, _ in attends)


@pytest.mark.slow
def test_nothing_is_compiled_anew_for_another_step_or_move(lines: list[Any]) -> None:
    # Fetching and concatenating differ in nothing that a kernel is compiled for; attention and add_lora are two each.
    assert lines[-1] == [1, 1, 2, 2]


@pytest.mark.slow
def test_rows_with_adapters_are_multiplied_by_one_instruction_however_many_they_are(
    kernels: dict[tuple[str, int], list[dict[str, Any]]],
) -> None:
    found = {case: launched for case, launched in kernels.items() if case[0].startswith("add_lora")}
    assert {sm for (name, sm) in found if "prompt" in name} >= {90, 100}, "they have other instructions for many rows"
    for (name, sm), launched in found.items():
        shrink, expand = launched
        for kernel in launched:
            known = ["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"] if "bf16" in name else []
            assert kernel["mma"] == known and not kernel["wgmma"] and not kernel["tcgen05"], f"{name}, sm_{sm}"
        assert shrink["is_async"], f"{name}, sm_{sm}: it does not load ahead"
        assert "st.global.v4.b32" in expand["ptx"], f"{name}, sm_{sm}: it does not write 16 bytes a thread"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["store_kv", "piggyback_concat", "residual_fetch", "gather_rows"])
def test_rows_are_moved_in_16_bytes_a_thread(name: str, kernels: dict[tuple[str, int], list[dict[str, Any]]]) -> None:
    ((kernel,),) = [found for (case, _), found in kernels.items() if case == f"{name} bf16"]
    moved = [access for access in kernel["ptx"] if access not in ("ld.global.b64", "bar.sync")]  # indices: 8 bytes
    assert set(moved) == {"ld.global.v4.b32", "st.global.v4.b32"}


@pytest.mark.slow
def test_a_copy_crosses_the_bus_in_16_bytes_a_thread(kernels: dict[tuple[str, int], list[dict[str, Any]]]) -> None:
    for suffix in ("", ", reversed"):
        # To the host K and V are written wide, V is read in halves of pairs; from it they are read wide.
        (kernel,) = kernels[f"copy_blocks bf16 to host{suffix}", 90]
        assert [access for access in kernel["ptx"] if access.startswith("st")] == ["st.global.v4.b32"] * 2
        (kernel,) = kernels[f"copy_blocks bf16 back{suffix}", 90]
        assert kernel["ptx"].count("ld.global.v4.b32") == 2 and "ld.global.v2.b32" not in kernel["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("capability", DEVICES)
def test_the_flag_is_released_to_the_system_behind_everything_by_one_thread(
    capability: int, kernels: dict[tuple[str, int], list[dict[str, Any]]]
) -> None:
    (kernel,) = kernels["piggyback_send bf16", capability]
    ptx = [access for access in kernel["ptx"] if not access.startswith("ld")]
    # q, k, v and the residual, one round of each; then all threads meet; then the flag.
    assert [access.startswith("st.global.") for access in ptx[:-2]] == [True] * 4
    assert ptx[-2:] == ["bar.sync", "st.release.sys.global.b64"]
    barrier = next(i for i, code in enumerate(kernel["sass"]) if "BAR.SYNC" in code)
    before = [code for code in kernel["sass"][:barrier] if not code.endswith(("EXIT", "BRA"))]
    assert len(before) == 4 and all("STG.E" in code and "STRONG" not in code for code in before)
    *others, fence, flag = kernel["sass"][barrier + 1 :]
    assert any(code.startswith("@") for code in (*others, flag)), "every thread stores the flag"
    assert fence == "MEMBAR.ALL.SYS" and flag.endswith("STG.E.64.STRONG.SYS")
    assert not any("ST" in code or "ATOM" in code or "RED" in code for code in others)


@pytest.mark.slow
@pytest.mark.parametrize("capability", DEVICES)
def test_a_result_is_acquired_from_the_system_and_a_skip_is_released_to_it(
    capability: int, kernels: dict[tuple[str, int], list[dict[str, Any]]]
) -> None:
    receive, gather = kernels["piggyback_receive bf16", capability]
    shared = [access for access in receive["ptx"] if ".sys." in access]
    assert shared == ["ld.acquire.sys.global.b64", "st.release.sys.global.b64"]
    *_, fence, skip = receive["sass"]
    assert fence == "MEMBAR.ALL.SYS" and skip.endswith("STG.E.64.STRONG.SYS")
    assert not any(".sys." in access for access in gather["ptx"]), "the results are read by a launch behind it"

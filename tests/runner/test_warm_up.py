"""Kernels of device attention are compiled before the first step, and not while steps run."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from omniserve.core.spec import AttentionSpec, ModelSpec
from omniserve.kv.storage import DeviceKVStorage
from omniserve.ops.attention import AttentionMetadata
from omniserve.runner.warm_up import warm_up_attention
from tests.host.helpers import make_spec

pytest.importorskip("triton")

MAX_ROWS, BLOCK = 512, 64
HEADS = [(32, 32, 128), (32, 8, 128), (28, 4, 128), (8, 1, 256)]


MAX_REQUESTS = 512


def warmed(
    spec: Any, max_rows: int, max_blocks: int, block_size: int, *, is_directed: bool, dtype: torch.dtype
) -> list[tuple[int, int, int, AttentionSpec, bool]]:
    """Return T, R and M of each launch, the kind of layer, and whether there is a direction table."""
    noted = []

    def attend(
        q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, kind: AttentionSpec
    ) -> None:
        block_table_RM, query_start_loc_R1 = metadata.block_table_RM, metadata.query_start_loc_R1
        seq_lens_R, reversed_RM, lengths = metadata.seq_lens_R, metadata.reversed_RM, metadata.host_lengths
        assert lengths is not None and not metadata.one_query_each
        assert q_TNH.shape == (query_start_loc_R1[-1], spec.num_heads, spec.head_size) and q_TNH.dtype == dtype
        assert tuple(query_start_loc_R1.diff().tolist()) == lengths.query_lens
        assert tuple(seq_lens_R.tolist()) == lengths.seq_lens
        assert {query_start_loc_R1.dtype, seq_lens_R.dtype, block_table_RM.dtype} == {torch.int32}
        assert block_table_RM.shape[1] * block_size >= max(lengths.seq_lens)
        assert reversed_RM is None or (reversed_RM.shape == block_table_RM.shape and reversed_RM.dtype == torch.bool)
        noted.append((len(q_TNH), *block_table_RM.shape, kind, reversed_RM is not None))

    cache = torch.zeros(1, 1, 1, 1, 1, dtype=dtype)
    layers = [cache[0]] * spec.num_layers
    storage = SimpleNamespace(
        k_LBKSH=cache, k_layers=dict(enumerate(layers)), v_layers=dict(enumerate(layers)), block_size=block_size
    )
    warm_up_attention(
        attend, storage, spec, max_rows=max_rows, max_requests=MAX_REQUESTS, max_blocks=max_blocks,
        is_directed=is_directed,
    )  # fmt: skip
    return noted


@pytest.mark.parametrize("max_blocks", [2, 40, 2048])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("is_hopper", [False, True])
def test_no_step_needs_a_kernel_that_was_not_compiled(
    heads: tuple[int, int, int], max_blocks: int, is_hopper: bool
) -> None:
    from omniserve.ops.kernels.attention_launch import Device, choose_launch

    hopper = Device(shared_bytes=227 << 10, multiprocessors=132, has_wide_tensor_cores=True)

    num_heads, kv_heads, head_size = heads
    spec = SimpleNamespace(
        num_heads=num_heads, head_size=head_size, num_layers=1, attention=(AttentionSpec(scale=1.0),)
    )  # fmt: skip

    def kernel(num_rows: int, num_requests: int, width: int) -> tuple[Any, ...]:
        launch = choose_launch(
            num_tokens=num_rows, num_requests=num_requests, num_heads=num_heads, kv_heads=kv_heads,
            head_size=head_size, block_size=BLOCK, table_width=width, itemsize=2, one_query_each=False,
            device=hopper if is_hopper else Device(),
        )  # fmt: skip
        return launch.tile, launch.block_n, launch.num_splits

    noted = warmed(spec, MAX_ROWS, max_blocks, BLOCK, is_directed=False, dtype=torch.bfloat16)
    compiled = {kernel(*launch[:3]) for launch in noted}

    rng = random.Random(0)
    for _ in range(2000):
        num_rows = 1 << rng.randrange(10) if rng.random() < 0.5 else rng.randint(1, MAX_ROWS)
        num_requests = rng.randint(-(-num_rows // (max_blocks * BLOCK)), min(num_rows, MAX_REQUESTS))
        narrowest = -(-num_rows // num_requests // BLOCK) or 1
        width = rng.choice([narrowest, max_blocks, rng.randint(narrowest, max_blocks)])
        assert kernel(num_rows, num_requests, width) in compiled, (num_rows, num_requests, width)


@pytest.mark.parametrize("is_directed", [False, True])
def test_each_kind_of_layer_with_and_without_a_direction_table(is_directed: bool) -> None:
    kinds = (AttentionSpec(scale=1.0), AttentionSpec(scale=1.0, window=7))
    spec = SimpleNamespace(num_heads=4, head_size=16, num_layers=4, attention=kinds * 2)
    noted = warmed(spec, 40, 5, 8, is_directed=is_directed, dtype=torch.float32)
    assert {launch[3:] for launch in noted} == {(k, d) for k in kinds for d in {False, is_directed}}
    assert max(launch[0] for launch in noted) == 40


def test_it_writes_no_kv() -> None:
    from omniserve.ops.attention.native import attend_cpu

    spec: ModelSpec = make_spec(torch.float32)
    storage = DeviceKVStorage(spec, num_blocks=5, block_size=8, dtype=torch.float32, device=torch.device("cpu"))
    storage.k_LBKSH.normal_()
    before = storage.k_LBKSH.clone()
    warm_up_attention(attend_cpu, storage, spec, max_rows=40, max_requests=9, max_blocks=6, is_directed=True)
    assert torch.equal(storage.k_LBKSH, before)

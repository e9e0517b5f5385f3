"""Single scenes on a lazy device that histories come to too seldom. For a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from unittest import mock

import torch

from omniserve.core.setup import HostTierSetup
from omniserve.core.spec import AttentionSpec, ModelSpec
from omniserve.core.work import KVMove, MoveDirection
from omniserve.host.mover import DirectMover, Mover, StagedMover
from omniserve.host.tier import HostTier
from tests.events import WORK_FAILED, kind_of
from tests.ops.host_layout import pack_blocks
from tests.streams.device import Order
from tests.streams.runs import Bench
from tests.streams.tensors import CUDA, LazyTensor

_SHAPE = (1, 4, 1, 2, 4)
"""L, B, K, S, H of a cache."""


def _caches() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(_SHAPE, device=CUDA), torch.zeros(_SHAPE, device=CUDA)


def _move(direction: MoveDirection, source: int, target: int) -> KVMove:
    return KVMove(move_id=0, request_id="a", direction=direction, src_block_ids=(source,), dst_block_ids=(target,))


def half_a_move(bench: Bench) -> None:
    """Leave a move half done: the keys are on their way when there is no memory for the values. It ends when they have
    arrived."""
    copied: list[tuple[torch.Tensor, ...]] = []

    def host_copy(copy_id: int, to_host: bool, k: torch.Tensor, v: torch.Tensor, *ids: object) -> None:
        k.fill_(7.0)
        v.fill_(7.0)
        copied.append((k, v))

    mover = StagedMover((1, 1, 2, 4), torch.float32, 4, host_copy, pin_memory=True)
    k, v = _caches()
    num_calls, write = 0, torch.Tensor.index_copy_

    def write_once(tensor: torch.Tensor, *args: object) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise torch.OutOfMemoryError("made up")
        return write(tensor, *args)

    with mock.patch.object(LazyTensor, "index_copy_", write_once):
        mover.start(_move(MoveDirection.TO_DEVICE, 0, 3), k, v)
        assert mover.advance() == [] and copied
        assert mover.takes(-2, "")
        events = mover.advance()
        while not events:
            events = mover.advance()
    assert [kind_of(event) for event in events] == [WORK_FAILED] and "made up" in events[0].message
    k[:, 3] = 1.0  # the block is free, and now another request's
    assert k[:, 3].tolist() == [[[[1.0] * 4] * 2]]
    bench.cuda.device.drain()
    assert k[:, 3].tolist() == [[[[1.0] * 4] * 2]], "a move that had failed wrote to a block that was free"


def _tier() -> HostTier:
    spec = ModelSpec(
        num_layers=1, hidden_size=4, num_heads=1, num_kv_heads=1, head_size=4, vocab_size=8, max_model_len=8,
        eos_token_ids=(), dtype_bytes=4, attention=(AttentionSpec(scale=1.0),),
    )  # fmt: skip
    setup = HostTierSetup(
        block_size=2, kv_bytes=4 * spec.kv_block_bytes(2), num_slots=1, num_threads=1, pin_memory=True
    )  # fmt: skip
    return HostTier(setup, spec=spec, dtype=torch.float32)


def _drop_caches_in_flight() -> torch.Tensor:
    """Move from a cache that nothing else refers to; return what the pool has of it."""
    tier = _tier()
    assert isinstance(tier._moves.mover, DirectMover)
    k, v = _caches()
    k[:] = 5.0
    v[:] = 6.0
    tier.start_move(_move(MoveDirection.TO_HOST, 1, 2), k, v)
    del k, v
    while not tier.poll():
        pass
    found = tier.pool_LBK2SH[:, 2].clone()
    tier.close()
    return found


def caches_in_flight(bench: Bench) -> None:
    """A cache lives until the moves from it are over."""
    want = pack_blocks(torch.full((1, 1, 2, 4), 5.0), torch.full((1, 1, 2, 4), 6.0))
    assert torch.equal(_drop_caches_in_flight(), want)
    with mock.patch("omniserve.host.moves.HostMoves.start", _start_and_forget):
        assert not torch.equal(_drop_caches_in_flight(), want), "the scene would not notice"


def _start_and_forget(moves: object, move: KVMove, k: torch.Tensor, v: torch.Tensor) -> None:
    mover: Mover = moves.mover  # type: ignore[attr-defined]
    mover.start(move, k, v)


SCENES: Mapping[str, tuple[Callable[[Bench], None], Order]] = {
    "half a move": (half_a_move, Order("eager", "late")),
    "caches in flight": (caches_in_flight, Order("eager", "late")),
}
"""Name: what happens, and when the device runs what it is given."""

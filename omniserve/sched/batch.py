"""Batch: the device side of a plan while a policy puts it together."""

from __future__ import annotations

from omniserve.kv.base import KVManager
from omniserve.plan import DeviceChunk
from omniserve.sched.state import RequestState


class Batch:
    """Collects chunks under a token budget.

    Args:
        kv: Where the blocks come from.
        max_tokens: The step's token budget.
    """

    def __init__(self, kv: KVManager, max_tokens: int) -> None:
        self._kv = kv
        self._chunks: dict[str, DeviceChunk] = {}
        self.tokens_left = max_tokens

    def __contains__(self, state: RequestState) -> bool:
        return state.request_id in self._chunks

    @property
    def chunks(self) -> tuple[DeviceChunk, ...]:
        return tuple(self._chunks.values())

    def add(self, state: RequestState, *, max_tokens: int | None = None, reserve_blocks: int = 0) -> bool:
        """Schedule the next uncomputed tokens of a request, as many as the budget (and ``max_tokens``) lets in.

        Blocks are taken for *all* known tokens at the first chunk: two half-prefilled prompts can then never wait for
        each other's memory.

        Returns:
            False, and nothing has changed, if the blocks or the budget do not suffice.
        """
        count = min(state.num_uncomputed_tokens, self.tokens_left)
        if max_tokens is not None:
            count = min(count, max_tokens)
        if count <= 0:
            return False
        blocks = self._kv.allocate(state.request_id, state.num_tokens, reserve_blocks=reserve_blocks)
        if blocks is None:
            return False
        start = state.num_computed_tokens
        self._chunks[state.request_id] = DeviceChunk(
            request_id=state.request_id,
            token_ids=tuple(state.token_ids[start : start + count]),
            start=start,
            block_ids=blocks,
            samples=start + count == state.num_tokens,
        )
        self.tokens_left -= count
        return True

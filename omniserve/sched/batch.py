"""Batch: the device side of a plan while a policy puts it together."""

from __future__ import annotations

import math

from omniserve.core.plan import Bound, DeviceChunk
from omniserve.kv.base import KVManager
from omniserve.sched.load import StepLoad
from omniserve.sched.state import RequestState


class Batch:
    """Collects chunks under a token budget and, with a latency model, a time bound.

    Args:
        kv: Where the blocks come from.
        max_tokens: The step's token budget.
        load: Is told every chunk; None: there is no latency model, and time bounds mean nothing.
    """

    def __init__(self, kv: KVManager, max_tokens: int, load: StepLoad | None = None) -> None:
        self._kv = kv
        self._chunks: dict[str, DeviceChunk] = {}
        self.load = load
        self.tokens_left = max_tokens
        self.refused_by: Bound | None = None
        """Why the last ``add`` was refused."""

    def __contains__(self, state: RequestState) -> bool:
        return state.request_id in self._chunks

    @property
    def chunks(self) -> tuple[DeviceChunk, ...]:
        return tuple(self._chunks.values())

    def samples(self, state: RequestState) -> bool:
        """Return whether a request gets a new token from this step."""
        chunk = self._chunks.get(state.request_id)
        return chunk is not None and chunk.samples

    def end_of(self, state: RequestState) -> int:
        """Return how many of a request's tokens are computed after this step."""
        chunk = self._chunks.get(state.request_id)
        return state.num_computed_tokens if chunk is None else chunk.start + len(chunk.token_ids)

    def chunk_size(self, state: RequestState, *, bound_s: float = math.inf, min_tokens: int = 0) -> int:
        """Return how many of a request's tokens the step has time and tokens for; if none, ``refused_by`` says why.

        A chunk that left an earlier step goes on as it is; if it does not fit, the request forgets it and begins anew.

        Args:
            bound_s: Longest step.
            min_tokens: So many are let in if the bound lets in none.
        """
        count = min(state.num_uncomputed_tokens, self.tokens_left)
        if count <= 0:
            self.refused_by = Bound.TOKENS
            return 0
        if (num_halted := self._resume_or_drop_halted(state, bound_s)) > 0:
            return num_halted
        if self.load is None or bound_s == math.inf:
            return count
        start = state.num_computed_tokens
        within = self.load.largest_chunk(start, count, bound_s, samples=state.num_logits)
        count = within or min(count, min_tokens)
        if count == 0:
            self.refused_by = Bound.TIME
        return count

    def _resume_or_drop_halted(self, state: RequestState, bound_s: float) -> int:
        """Return how many tokens of a chunk that left an earlier step can go on; if they do not fit, forget it: 0."""
        halted = state.halted
        if halted is None:
            return 0
        fits = halted.num_tokens <= self.tokens_left
        if fits and self.load is not None and bound_s < math.inf:
            samples = state.num_logits(halted.start, halted.num_tokens)
            fits = self.load.seconds_with(halted.start, halted.num_tokens, samples=samples) <= bound_s
        if not fits:
            state.halted = None
            return 0
        return halted.num_tokens

    def add(
        self, state: RequestState, *, bound_s: float = math.inf, min_tokens: int = 0, reserve_blocks: int = 0
    ) -> bool:
        """Schedule the next uncomputed tokens of a request, as many as budget and bound let in.

        Blocks are taken for *all* known tokens at the first chunk: two half-prefilled prompts can then never wait for
        each other's memory.

        Returns:
            False, and nothing has changed, if blocks, budget or bound do not suffice; ``refused_by`` says which.
        """
        count = self.chunk_size(state, bound_s=bound_s, min_tokens=min_tokens)
        if count == 0:
            return False
        blocks = self._kv.allocate(state.request_id, state.num_tokens, reserve_blocks=reserve_blocks)
        if blocks is None:
            self.refused_by = Bound.MEMORY
            return False
        start = state.num_computed_tokens
        self._chunks[state.request_id] = DeviceChunk(
            request_id=state.request_id,
            token_ids=tuple(state.token_ids[start : start + count]),
            start=start,
            block_ids=blocks,
            samples=start + count == state.num_tokens,
            is_reversed=self._kv.runs_from_right(state.request_id),
            from_layer=state.halted.layer if state.halted is not None else 0,
            scores=state.scores(start, count),
        )
        self.tokens_left -= count
        if self.load is not None:
            self.load.add_chunk(start, count, samples=state.num_logits(start, count))
        return True

"""Chooses the decodes of a step that carry drafts, and how many: speculative decoding, under any policy.

A decode on the device may be followed by drafts of the tokens behind its newest one. All of them pass the step as one
chunk, and the sampler tells how many were right: those are new tokens, at the price of rows instead of steps. What
comes out does not depend on the drafts.

They are added to a step that is complete otherwise, from what it leaves: tokens of the budget, time within the bound,
free blocks. Nothing gives way to them.

Drafts go where the expected tokens raise tokens a second, into blocks that no request uses
(``KVManager.allocate_lookahead``). A chunk of 1 + k rows gives 1 to k + 1 tokens: each row's token is picked as without
drafts, with the random number and the penalties of its place, and counts while the rows before it gave the drafts
(exact in fp32; in bf16 a chunk's attention rounds otherwise than a single row's). KV behind the last token that counts
is overwritten later: ``num_computed_tokens`` says what is valid, and the blocks that only wrong drafts needed go back
(``trim``) before anything else is planned. So nothing else ever sees an unverified token.

Drafts come from a ``Drafter``, and their number from how often it was right lately (``speculation.py``). There are no
drafts for models with recurrent states, for rows that may leave between layers, and behind tokens that are
still pending.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from omniserve.core.plan import MAX_DRAFTS, PENDING_TOKEN, DeviceChunk
from omniserve.kv.base import KVManager
from omniserve.sched.features.speculation import Speculation, speculation_of
from omniserve.sched.state import RequestState
from omniserve.sched.step_cost import StepCost

MAX_DRAFTS_WITHOUT_FORECAST = 4
"""Most drafts of a request in a step where no latency model tells what they cost."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """A decode of the step, and drafts that may follow it."""

    state: RequestState
    chunk: DeviceChunk
    drafts: Sequence[int]
    speculation: Speculation


def with_drafts(
    chunks: Sequence[DeviceChunk],
    states: Sequence[RequestState],
    kv: KVManager,
    *,
    cost: StepCost | None,
    bound_s: float,
    tokens_left: int,
    max_model_len: int,
) -> dict[str, DeviceChunk]:
    """Return the chunks of a step that get drafts, by request, and add them to the cost.

    Args:
        chunks: All of the step's.
        states: The request of each.
        cost: The step with them; None: nothing predicts what drafts cost.
        bound_s: Most seconds of the step; a longer one gets no drafts.
        tokens_left: Most drafts in all.
    """
    offers = []
    for chunk, state in zip(chunks, states, strict=True):
        speculation = speculation_of(state)
        if speculation is None or not _is_plain_decode(chunk, state):
            continue
        most = min(tokens_left, most_drafts(state, speculation, max_model_len, has_forecast=cost is not None))
        if drafts := speculation.draft(state.token_ids, state.num_tokens, most):
            offers.append(_Offer(state, chunk, drafts, speculation))
    offers.sort(key=lambda offer: -offer.speculation.chance)
    work = _work_of(cost, chunks)
    found: dict[str, DeviceChunk] = {}
    for offer in offers:
        count = min(len(offer.drafts), tokens_left)
        if cost is not None and count:
            count = _num_that_pay(cost, offer, count, work=work, bound_s=bound_s)
        for num_drafts in _fitting(offer, count, kv.block_size):
            block_ids = kv.allocate_lookahead(offer.state.request_id, offer.state.num_tokens + num_drafts)
            if block_ids is None:
                continue
            token_ids = (*offer.chunk.token_ids, *offer.drafts[:num_drafts])
            found[offer.chunk.request_id] = dataclasses.replace(
                offer.chunk, token_ids=token_ids, block_ids=block_ids, num_drafts=num_drafts
            )
            if cost is not None:
                cost.add_drafts(offer.chunk.start, num_drafts)
            tokens_left -= num_drafts
            work += offer.speculation.expected(num_drafts)
            break
        else:
            offer.speculation.decline(offer.state.num_tokens)
    return found


def most_drafts(state: RequestState, speculation: Speculation, max_model_len: int, *, has_forecast: bool) -> int:
    """Return the most drafts that are worth asking for."""
    # One token is certain, and there may be no draft of what would end the request by its length.
    limit = min(state.max_num_tokens, max_model_len) - state.num_tokens - 1
    if not has_forecast:
        return min(limit, speculation.num_likely, MAX_DRAFTS_WITHOUT_FORECAST)
    # Where it is known what they cost, more are considered than are likely to be right all together.
    return min(limit, 2 * speculation.num_likely, MAX_DRAFTS)


def _work_of(cost: StepCost | None, chunks: Sequence[DeviceChunk]) -> float:
    """Return the tokens that a step computes or brings; a host row passes one layer of its token."""
    work = float(sum(len(chunk.token_ids) for chunk in chunks))
    if cost is not None:
        work += cost.features.piggyback_rows / cost.shape.num_layers + cost.features.pipelined_rows
    return work


def _is_plain_decode(chunk: DeviceChunk, state: RequestState) -> bool:
    """Tell whether a chunk is a request's newest token alone, which is known, and passes all layers in the step."""
    return (
        len(chunk.token_ids) == 1
        and chunk.samples
        and state.num_output_tokens > 0
        and chunk.token_ids[0] != PENDING_TOKEN
        and chunk.from_layer == 0
        and chunk.scores is None
        and not (chunk.is_preemptible or chunk.leaves_at)
    )


def _num_that_pay(cost: StepCost, offer: _Offer, most: int, *, work: float, bound_s: float) -> int:
    """Return how many of up to ``most`` drafts bring most tokens a second within the bound; 0 if none bring more.

    ``work`` is the tokens that the step computes or brings, on average.
    """
    best, best_rate = 0, work / cost.seconds()
    count = most
    while count:
        trial = cost.copy()
        trial.add_drafts(offer.chunk.start, count)
        seconds = trial.seconds()
        rate = (work + offer.speculation.expected(count)) / seconds
        if seconds <= bound_s and rate > best_rate:
            best, best_rate = count, rate
        count //= 2
    return best


def _fitting(offer: _Offer, count: int, block_size: int) -> Iterator[int]:
    """Yield ``count`` drafts, then as many of them as the request's last block has slots for, if any."""
    in_last_block = -offer.state.num_tokens % block_size
    if count:
        yield count
    if 0 < in_last_block < count:
        yield in_last_block

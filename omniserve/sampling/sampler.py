"""Sampler: logits to tokens, each request by its own parameters and its own random stream.

All of it happens on the device: the host launches it, and waits for the tokens only in ``PendingSample.result``.

Legend: R rows of a step that sample, V vocabulary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType

import torch
from torch import Tensor

from omniserve.core.plan import SampledToken
from omniserve.core.request import SamplingParams, TokenLogprob
from omniserve.ops.streams import AsyncHostCopy, upload
from omniserve.sampling.draw import draw, is_greedy
from omniserve.sampling.grammar import GrammarFailed, GrammarState
from omniserve.sampling.prompt_scores import logprobs_of, told_logprobs

_NO_DRAFTS: Mapping[str, tuple[int, ...]] = MappingProxyType({})
_DRAW_BITS = 52
_BANS, _FORCES = -100.0, 100.0
"""Biases that are absolute, however far apart the logits are."""
# The most rows whose changed logits (by bias, penalties or a grammar) are held at a time, in float32.
_MOST_CHANGED = 32


@dataclass(slots=True)
class _RequestSampling:
    params: SamplingParams
    random: Random | None
    """Gives one number a token; None: greedy."""
    penalised: tuple[Tensor, Tensor] | None
    """Counts for penalties: how often each token is in the output ``[V]``, and which are in the prompt, bool ``[V]``.
    """
    bias: tuple[Tensor, Tensor] | None
    """Token ids, and the values to add to their logits; -inf bans one."""
    forced_V: Tensor | None
    """Tokens beside which no other comes as long as one of them may, bool ``[V]``."""
    grammar: GrammarState | None
    ends: Tensor | None
    """Token ids that end the output, int64, if they may not come at first."""
    is_plain: bool
    """Greedy, with unchanged logits and no log-probabilities: the argmax is enough."""
    changes_logits: bool
    """A bias, penalties, a grammar or a least number of tokens change the logits."""
    num_tokens: int = 0
    """Number of tokens that count."""
    numbers: deque[float] = field(default_factory=deque)
    """Numbers that were drawn and not used up."""

    def number(self, index: int) -> float:
        """Return the number, in [0, 1 - 2^-52], for the token ``index`` tokens after the next; there is a temperature.

        It stays the same until numbers are used up.
        """
        assert self.random is not None
        while len(self.numbers) <= index:
            self.numbers.append(self.random.getrandbits(_DRAW_BITS) / (1 << _DRAW_BITS))
        return self.numbers[index]

    def use_up(self, token_ids_R: Tensor) -> None:
        """Count new tokens, int64 on the device, for penalties, and use up their numbers."""
        self.num_tokens += len(token_ids_R)
        if self.random is not None:
            for _ in range(len(token_ids_R)):
                self.numbers.popleft()
        if self.penalised is not None:
            counts_V, _ = self.penalised
            counts_V.index_add_(0, token_ids_R, torch.ones(len(token_ids_R), device=counts_V.device))


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of logits, and what is known of the tokens that its request gets before its own."""

    row: int
    request: _RequestSampling
    drafts: tuple[int, ...] = ()
    """Drafts that come between the request's newest known token and the row's."""
    is_certain: bool = True
    """The row's token counts, whatever it is: it is the request's only one in the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingSample:
    """The tokens of a step, which are being copied to the host."""

    request_ids: Sequence[str]
    tokens_R: Tensor
    """int64, on the device; any token in a row that fails."""
    drafted: Mapping[str, tuple[tuple[int, ...], _RequestSampling]]
    """Drafts by request: it has a row more than drafts, and its rows follow one another."""
    grammars: Mapping[int, GrammarState]
    failed: Mapping[int, str]
    """Messages by row."""
    scored_rows: Sequence[Sequence[int]]
    """Rows that return log-probabilities, in groups with the same number of likeliest tokens."""
    copy: AsyncHostCopy
    """Tokens, the largest logit of each row (-inf where no token may come), and the three tensors of ``logprobs_of``
    for each of ``scored_rows``."""

    def result(self) -> tuple[dict[str, tuple[SampledToken, ...]], dict[str, str]]:
        """Wait for the tokens, once; return them and error messages by request.

        Of a request with drafts, a row's token counts if those before it are the drafts. A request fails if the maximum
        of its row is not finite, if its bias bans all tokens, or if no token fits its grammar. One with drafts never
        fails: it has the tokens of the rows before such a row, maybe none. What follows the end of a grammar does not
        count.
        """
        tokens_R, top_R, *told = self.copy.wait()
        token_ids, top = tokens_R.tolist(), top_R.tolist()
        logprobs: dict[int, TokenLogprob] = {}
        for number, rows in enumerate(self.scored_rows):
            entries = told_logprobs([token_ids[row] for row in rows], *told[3 * number : 3 * number + 3])
            logprobs.update(zip(rows, entries, strict=True))
        sampled = [SampledToken(token_id=token_id, logprob=logprobs.get(row)) for row, token_id in enumerate(token_ids)]
        tokens: dict[str, tuple[SampledToken, ...]] = {}
        failed: dict[str, str] = {}
        row = 0
        while row < len(sampled):
            request_id = self.request_ids[row]
            if request_id in self.drafted:
                drafts, request = self.drafted[request_id]
                own = slice(row, row + len(drafts) + 1)
                is_good = [math.isfinite(top[i]) and i not in self.failed for i in range(own.start, own.stop)]
                count = _num_that_count(token_ids[own], is_good, drafts)
                if request.grammar is not None:
                    count = request.grammar.accept_all(token_ids[row : row + count])
                tokens[request_id] = tuple(sampled[row : row + count])
                request.use_up(self.tokens_R[row : row + count])
                row = own.stop
                continue
            # max() returns nan if any logit is nan.
            if top[row] == -math.inf:
                failed[request_id] = "no token may come: logit_bias and the format that the answer has to keep ban all"
            elif not math.isfinite(top[row]):
                failed[request_id] = f"the model returned non-finite logits (maximum {top[row]})"
            else:
                try:
                    if row in self.failed:
                        raise GrammarFailed(self.failed[row])
                    if row in self.grammars:
                        self.grammars[row].accept(token_ids[row])
                except GrammarFailed as error:
                    failed[request_id] = str(error)
                else:
                    tokens[request_id] = (sampled[row],)
            row += 1
        return tokens, failed


def _num_that_count(token_ids: Sequence[int], is_good: Sequence[bool], drafts: Sequence[int]) -> int:
    """Return how many first rows of a request count: up to the first that contradicts a draft, or before a bad one."""
    count = 0
    for token_id, good, draft in zip(token_ids, is_good, (*drafts, None), strict=True):
        if not good:
            break
        count += 1
        if token_id != draft:
            break
    return count


class Sampler:
    """Holds the sampling state of each request between its steps; ``seed`` seeds the requests without a seed.

    A request's tokens depend on its logits, parameters and seed alone, not on the other requests in the batch.
    """

    def __init__(self, *, vocab_size: int, device: torch.device, seed: int, eos_token_ids: Sequence[int] = ()) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._eos_token_ids = tuple(eos_token_ids)
        self._requests: dict[str, _RequestSampling] = {}
        self._seeds = Random(seed)
        self._shifts = torch.arange(8, dtype=torch.uint8, device=device)

    def add(
        self,
        request_id: str,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        grammar: GrammarState | None = None,
    ) -> None:
        """Begin to sample for a request; ``grammar`` is the start state of the grammar in ``params``, if any."""
        random = None
        if not is_greedy(params):
            seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
            random = Random(seed & (2**64 - 1))
        penalised = bias = forced_V = None
        if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
            in_prompt_V = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            in_prompt_V.index_fill_(0, upload(torch.tensor(list(prompt_token_ids)), self._device), True)
            penalised = torch.zeros(self._vocab_size, device=self._device), in_prompt_V
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            added = torch.tensor(values, dtype=torch.float32)
            added.masked_fill_(added == _BANS, -math.inf)
            bias = upload(torch.tensor(ids), self._device), upload(added, self._device)
            if forced := [token_id for token_id, value in params.logit_bias if value == _FORCES]:
                forced_V = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
                forced_V.index_fill_(0, upload(torch.tensor(forced), self._device), True)
        ends = None
        end_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        if params.min_tokens and (known := sorted(i for i in end_ids if i < self._vocab_size)):
            ends = upload(torch.tensor(known), self._device)
        changes_logits = any(x is not None for x in (penalised, bias, grammar, ends))
        is_plain = params.logprobs is None and random is None and not changes_logits
        self._requests[request_id] = _RequestSampling(
            params, random, penalised, bias, forced_V, grammar, ends, is_plain, changes_logits
        )

    def remove(self, request_id: str) -> None:
        """Forget a request, if it is known."""
        self._requests.pop(request_id, None)

    def sample(self, logits_RV: Tensor, request_ids: Sequence[str]) -> tuple[dict[str, SampledToken], dict[str, str]]:
        """Pick a token for each row, each of another request, and wait for it; see ``launch``."""
        tokens, failed = self.launch(logits_RV, request_ids).result()
        return {request_id: token for request_id, (token,) in tokens.items()}, failed

    def launch(
        self, logits_RV: Tensor, request_ids: Sequence[str], drafts: Mapping[str, tuple[int, ...]] = _NO_DRAFTS
    ) -> PendingSample:
        """Pick a token for each row, which belongs to the request in its place; the host waits for nothing.

        A request with a grammar may be in the next launch only after a call of this one's ``result``, because the
        tokens that may come next depend on its token. So may one with ``drafts``.

        Args:
            drafts: By request: it has one row more than drafts, and each row's token is picked as if the drafts up to
                it were the request's tokens.
        """
        top_R, tokens_R = logits_RV.max(dim=-1)
        others = self._rows_of_others(request_ids, drafts)
        failed: dict[int, str] = {}
        scored: dict[int, list[int]] = {}
        told = [top_R]
        if others:
            failed = self._sample_others(logits_RV, tokens_R, top_R, others)
            for each in others:
                if each.request.params.logprobs is not None:
                    scored.setdefault(each.request.params.logprobs, []).append(each.row)
            for num_top, rows in scored.items():
                rows_R = upload(torch.tensor(rows), self._device)
                told += logprobs_of(logits_RV[rows_R], tokens_R[rows_R], num_top)
        return PendingSample(
            request_ids=request_ids,
            tokens_R=tokens_R,
            drafted={request_id: (guesses, self._requests[request_id]) for request_id, guesses in drafts.items()},
            grammars={each.row: each.request.grammar for each in others if each.request.grammar is not None},
            failed=failed,
            scored_rows=list(scored.values()),
            copy=AsyncHostCopy([tokens_R, *told]),
        )

    def _rows_of_others(self, request_ids: Sequence[str], drafts: Mapping[str, tuple[int, ...]]) -> list[_Row]:
        """Return the rows of requests for which the likeliest token is not enough."""
        rows: list[_Row] = []
        num_seen = dict.fromkeys(drafts, 0)
        for row, request_id in enumerate(request_ids):
            request = self._requests[request_id]
            if request.is_plain:
                continue
            if request_id not in drafts:
                rows.append(_Row(row, request))
                continue
            rows.append(_Row(row, request, drafts[request_id][: num_seen[request_id]], is_certain=False))
            num_seen[request_id] += 1
        return rows

    def _sample_others(
        self, logits_RV: Tensor, tokens_R: Tensor, top_R: Tensor, others: Sequence[_Row]
    ) -> dict[int, str]:
        """Replace the likeliest tokens in the rows of requests with parameters; return error messages by row.

        In ``top_R`` it replaces the largest logit by -inf where none is left.
        """
        failed: dict[int, str] = {}
        picked: list[tuple[list[int], Tensor]] = []
        unchanged = [each for each in others if each.request.random and not each.request.changes_logits]
        if unchanged:
            is_all = len(unchanged) == len(logits_RV)
            index = slice(None) if is_all else upload(torch.tensor([each.row for each in unchanged]), self._device)
            picked.append(_draw_next(logits_RV[index], unchanged))
        changed: list[_Row] = []
        changed_logits: list[Tensor] = []
        for each in others:
            if not each.request.changes_logits:
                continue
            try:
                adjusted_V = self._adjusted(logits_RV[each.row].float(), each)
            except GrammarFailed as error:
                failed[each.row] = str(error)
                continue
            if each.request.bias is not None:
                most, top = adjusted_V.max(), top_R[each.row]
                top.copy_(torch.where(most == -math.inf, most.to(top.dtype), top))
            if each.request.random is None:
                picked.append(([each.row], adjusted_V.argmax()[None]))
                continue
            changed.append(each)
            changed_logits.append(adjusted_V)
            if len(changed) == _MOST_CHANGED:
                picked.append(_draw_next(torch.stack(changed_logits), changed))
                changed, changed_logits = [], []
        if changed:
            picked.append(_draw_next(torch.stack(changed_logits), changed))
        if picked:
            rows = [row for some, _ in picked for row in some]
            tokens_R.index_copy_(0, upload(torch.tensor(rows), self._device), torch.cat([some for _, some in picked]))
        for each in others:
            if each.is_certain and each.row not in failed:
                each.request.use_up(tokens_R[each.row : each.row + 1])
        return failed

    def _adjusted(self, logits_V: Tensor, each: _Row) -> Tensor:
        """Apply the bias, the penalties (Hugging Face's order), the grammar, the least length and what is forced."""
        request, params = each.request, each.request.params
        if request.bias is not None:
            logits_V = logits_V.index_add(0, *request.bias)
        if request.penalised is not None:
            counts_V, in_prompt_V = request.penalised
            if each.drafts:
                drafts = upload(torch.tensor(each.drafts), self._device)
                counts_V = counts_V.index_add(0, drafts, torch.ones(len(each.drafts), device=self._device))
            penalty, seen_V = params.repetition_penalty, counts_V > 0
            scaled_V = torch.where(logits_V > 0, logits_V / penalty, logits_V * penalty)
            logits_V = torch.where(seen_V | in_prompt_V, scaled_V, logits_V)
            logits_V = logits_V - params.presence_penalty * seen_V - params.frequency_penalty * counts_V
        grammar = request.grammar
        if grammar is not None and each.drafts:
            # None: the grammar forbids a draft, so an earlier row contradicts it, and this row does not count.
            grammar = grammar.behind(each.drafts)
        if grammar is not None:
            bytes_ = upload(torch.frombuffer(bytearray(grammar.allowed()), dtype=torch.uint8), self._device)
            allowed_V = (bytes_[:, None] >> self._shifts & 1).view(-1)[: self._vocab_size].bool()
            logits_V = logits_V.masked_fill(~allowed_V, -math.inf)
        if request.ends is not None and request.num_tokens + len(each.drafts) < params.min_tokens:
            going_on_V = logits_V.index_fill(0, request.ends, -math.inf)
            # Where a grammar is at its end, only an end is left.
            logits_V = torch.where(going_on_V.max() > -math.inf, going_on_V, logits_V)
        if request.forced_V is not None:
            forced_V = logits_V.masked_fill(~request.forced_V, -math.inf)
            logits_V = torch.where((forced_V > -math.inf).any(), forced_V, logits_V)
        return logits_V


def _draw_next(logits_DV: Tensor, drawn: Sequence[_Row]) -> tuple[list[int], Tensor]:
    """Return the rows of requests with a temperature, and a token drawn for each, int64."""
    params, numbers = [], []
    for each in drawn:
        params.append(each.request.params)
        numbers.append(each.request.number(len(each.drafts)))
    return [each.row for each in drawn], draw(logits_DV, params, numbers)

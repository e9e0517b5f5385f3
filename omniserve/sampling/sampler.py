"""Sampler: logits to tokens, each request by its own parameters and its own random stream.

All of it happens on the device: the host launches it, and hears of the tokens when it asks (``PendingSample``).

Legend: R rows of a step that sample, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from omniserve.core.plan import SampledToken
from omniserve.core.request import SamplingParams, TokenLogprob
from omniserve.ops.device_copies import AsyncHostCopy, upload
from omniserve.sampling.draws import draw
from omniserve.sampling.grammar import GrammarFailed, GrammarState
from omniserve.sampling.prompt_scores import logprobs_of, told_logprobs

_DRAW_BITS = 52
# Logits of so many rows that bias, penalties or a grammar changed are held at a time, in float32.
_MOST_CHANGED = 32


@dataclass(slots=True)
class _RequestSampling:
    params: SamplingParams
    random: Random | None
    """One number a token; None: greedy."""
    output_counts_V: Tensor | None
    """Occurrences of each token in the output; only for requests with penalties."""
    in_prompt_V: Tensor | None
    bias: tuple[Tensor, Tensor] | None
    """Token ids and what is added to their logits."""
    grammar: GrammarState | None
    is_plain: bool
    """Greedy, logits as they are, no log-probabilities: the argmax is all it needs."""
    changes_logits: bool
    """By a bias, penalties or a grammar."""

    def next_number(self) -> float:
        """Return the next number of a request with a temperature, in [0, 1 - 2^-52]."""
        assert self.random is not None
        return self.random.getrandbits(_DRAW_BITS) / (1 << _DRAW_BITS)


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingSample:
    """The tokens of a step, on their way to the host."""

    request_ids: Sequence[str]
    tokens_R: Tensor
    """int64, on the device; of a row that fails, any token."""
    grammars: Mapping[int, GrammarState]
    failed: Mapping[int, str]
    """Messages by row."""
    scored_rows: Sequence[Sequence[int]]
    """Rows that return log-probabilities, by how many of the likeliest tokens."""
    copy: AsyncHostCopy
    """Tokens, each row's largest logit, and three tensors for each of ``scored_rows``; see ``logprobs_of``."""

    def result(self) -> tuple[dict[str, SampledToken], dict[str, str]]:
        """Wait for the tokens; to be called once.

        Returns:
            Tokens by request, and messages by request for rows that have no finite maximum or no token that fits a
            grammar.
        """
        tokens_R, top_R, *told = self.copy.wait()
        token_ids, top = tokens_R.tolist(), top_R.tolist()
        logprobs: dict[int, TokenLogprob] = {}
        for number, rows in enumerate(self.scored_rows):
            entries = told_logprobs([token_ids[row] for row in rows], *told[3 * number : 3 * number + 3])
            logprobs.update(zip(rows, entries, strict=True))
        tokens: dict[str, SampledToken] = {}
        failed: dict[str, str] = {}
        for row, request_id in enumerate(self.request_ids):
            # max() returns nan if any logit is nan.
            if not math.isfinite(top[row]):
                failed[request_id] = f"the model returned non-finite logits (maximum {top[row]})"
            elif row in self.grammars and (message := self._message(row, token_ids[row])) is not None:
                failed[request_id] = message
            else:
                tokens[request_id] = SampledToken(token_id=token_ids[row], logprob=logprobs.get(row))
        return tokens, failed

    def _message(self, row: int, token_id: int) -> str | None:
        """Return why a row with a grammar has no token, else book its token there; None: all is well."""
        if row in self.failed:
            return self.failed[row]
        try:
            self.grammars[row].accept(token_id)
        except GrammarFailed as error:
            return str(error)
        return None


class Sampler:
    """Keeps what sampling needs between a request's steps.

    A request's tokens depend on its logits, parameters and seed alone, not on what shares the batch.

    Args:
        vocab_size: V.
        device: Where logits are.
        seed: Seeds the requests that bring no seed.
    """

    def __init__(self, *, vocab_size: int, device: torch.device, seed: int) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._requests: dict[str, _RequestSampling] = {}
        self._seeds = Random(seed)
        self._one = torch.ones(1, device=device)
        self._shifts = torch.arange(8, dtype=torch.uint8, device=device)

    def add(
        self,
        request_id: str,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        grammar: GrammarState | None = None,
    ) -> None:
        """Begin to sample for a request; ``grammar`` is the beginning of that of ``params``, if it has one."""
        random = None
        if params.temperature > 0:
            seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
            random = Random(seed & (2**64 - 1))
        counts = in_prompt = None
        if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
            counts = torch.zeros(self._vocab_size, device=self._device)
            in_prompt = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            in_prompt.index_fill_(0, upload(torch.tensor(list(prompt_token_ids)), self._device), True)
        bias = None
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            bias = (
                upload(torch.tensor(ids), self._device),
                upload(torch.tensor(values, dtype=torch.float32), self._device),
            )
        changes_logits = any(x is not None for x in (counts, bias, grammar))
        is_plain = params.logprobs is None and random is None and not changes_logits
        self._requests[request_id] = _RequestSampling(
            params, random, counts, in_prompt, bias, grammar, is_plain, changes_logits
        )

    def remove(self, request_id: str) -> None:
        """Forget a request; an unknown one is no error."""
        self._requests.pop(request_id, None)

    def sample(self, logits_RV: Tensor, request_ids: Sequence[str]) -> tuple[dict[str, SampledToken], dict[str, str]]:
        """Pick a token for each row, and wait for it; see ``launch``."""
        return self.launch(logits_RV, request_ids).result()

    def launch(self, logits_RV: Tensor, request_ids: Sequence[str]) -> PendingSample:
        """Pick a token for each row; the host waits for nothing.

        A request with a grammar may be in the next launch only after the result of this one was asked for: what may
        come next depends on its token.

        Args:
            logits_RV: Model dtype, any device.
            request_ids: The request of each row.
        """
        top_R, tokens_R = logits_RV.max(dim=-1)
        requests = self._requests
        others = [(row, requests[name]) for row, name in enumerate(request_ids) if not requests[name].is_plain]
        told = [top_R]
        failed: dict[int, str] = {}
        scored: dict[int, list[int]] = {}
        if others:
            failed = self._sample_others(logits_RV, tokens_R, others)
            for row, request in others:
                if request.params.logprobs is not None:
                    scored.setdefault(request.params.logprobs, []).append(row)
            for num_top, rows in scored.items():
                rows_R = upload(torch.tensor(rows), self._device)
                told += logprobs_of(logits_RV[rows_R], tokens_R[rows_R], num_top)
        return PendingSample(
            request_ids=request_ids,
            tokens_R=tokens_R,
            grammars={row: request.grammar for row, request in others if request.grammar is not None},
            failed=failed,
            scored_rows=list(scored.values()),
            copy=AsyncHostCopy([tokens_R, *told]),
        )

    def _sample_others(
        self, logits_RV: Tensor, tokens_R: Tensor, others: Sequence[tuple[int, _RequestSampling]]
    ) -> dict[int, str]:
        """Replace the likeliest tokens by what rows with parameters pick; return messages by row that cannot."""
        failed: dict[int, str] = {}
        picked: list[tuple[list[int], Tensor]] = []
        as_they_are = [(row, request) for row, request in others if request.random and not request.changes_logits]
        if as_they_are:
            picked.append(_draw(self._rows_of(logits_RV, as_they_are), as_they_are))
        changed: list[tuple[int, _RequestSampling]] = []
        changed_logits: list[Tensor] = []
        for row, request in others:
            if not request.changes_logits:
                continue
            try:
                adjusted_V = self._adjusted(logits_RV[row].float(), request)
            except GrammarFailed as error:
                failed[row] = str(error)
                continue
            if request.random is None:
                picked.append(([row], adjusted_V.argmax()[None]))
                continue
            changed.append((row, request))
            changed_logits.append(adjusted_V)
            if len(changed) == _MOST_CHANGED:
                picked.append(_draw(torch.stack(changed_logits), changed))
                changed, changed_logits = [], []
        if changed:
            picked.append(_draw(torch.stack(changed_logits), changed))
        if picked:
            rows = [row for some, _ in picked for row in some]
            tokens_R.index_copy_(0, upload(torch.tensor(rows), self._device), torch.cat([some for _, some in picked]))
        for row, request in others:
            if request.output_counts_V is not None:
                request.output_counts_V.index_add_(0, tokens_R[row : row + 1], self._one)
        return failed

    def _rows_of(self, logits_RV: Tensor, requests: Sequence[tuple[int, _RequestSampling]]) -> Tensor:
        if len(requests) == len(logits_RV):
            return logits_RV
        return logits_RV[upload(torch.tensor([row for row, _ in requests]), self._device)]

    def _adjusted(self, logits_V: Tensor, request: _RequestSampling) -> Tensor:
        """Apply bias, penalties and grammar, in this order."""
        return self._constrain(_penalise(_biased(logits_V, request), request), request.grammar)

    def _constrain(self, logits_V: Tensor, grammar: GrammarState | None) -> Tensor:
        """Leave only the tokens that may come next."""
        if grammar is None:
            return logits_V
        bytes_ = upload(torch.frombuffer(bytearray(grammar.allowed()), dtype=torch.uint8), self._device)
        allowed_V = (bytes_[:, None] >> self._shifts & 1).view(-1)[: self._vocab_size].bool()
        return logits_V.masked_fill(~allowed_V, -math.inf)


def _biased(logits_V: Tensor, request: _RequestSampling) -> Tensor:
    """Add the bias, which comes before penalties (Hugging Face's order)."""
    if request.bias is None:
        return logits_V
    ids, values = request.bias
    return logits_V.index_add(0, ids, values)


def _penalise(logits_V: Tensor, request: _RequestSampling) -> Tensor:
    counts_V, in_prompt_V, params = request.output_counts_V, request.in_prompt_V, request.params
    if counts_V is None or in_prompt_V is None:
        return logits_V
    seen_V = counts_V > 0
    scaled_V = torch.where(logits_V > 0, logits_V / params.repetition_penalty, logits_V * params.repetition_penalty)
    penalised_V = torch.where(seen_V | in_prompt_V, scaled_V, logits_V)
    return penalised_V - params.presence_penalty * seen_V - params.frequency_penalty * counts_V


def _draw(logits_DV: Tensor, drawn: Sequence[tuple[int, _RequestSampling]]) -> tuple[list[int], Tensor]:
    """Return the rows of requests with a temperature, and a token for each, int64."""
    params, numbers = [request.params for _, request in drawn], [request.next_number() for _, request in drawn]
    return [row for row, _ in drawn], draw(logits_DV, params, numbers)

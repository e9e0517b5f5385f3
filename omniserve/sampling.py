"""Sampler: logits to tokens, each request by its own parameters and its own random stream.

Legend: R rows of a step that sample, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from omniserve.grammar import GrammarFailed, GrammarState
from omniserve.plan import SampledToken
from omniserve.prompt_scores import token_logprobs
from omniserve.request import SamplingParams

# Below it quotients overflow float32, and all probabilities are nan; at it, sampling is greedy but for ties.
_MIN_TEMPERATURE = 1e-6


@dataclass(slots=True)
class _RequestSampling:
    params: SamplingParams
    generator: torch.Generator | None
    output_counts_V: Tensor | None
    """Occurrences of each token in the output; only for requests with penalties."""
    in_prompt_V: Tensor | None
    bias: tuple[Tensor, Tensor] | None
    """Token ids and what is added to their logits."""
    grammar: GrammarState | None
    is_plain: bool
    """Greedy, logits as they are, no log-probabilities: the argmax is all it needs."""


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
        self._seeds = torch.Generator().manual_seed(seed)
        self._shifts = torch.arange(8, dtype=torch.uint8, device=device)

    def add(
        self,
        request_id: str,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        grammar: GrammarState | None = None,
    ) -> None:
        """Begin to sample for a request; ``grammar`` is the beginning of that of ``params``, if it has one."""
        generator = None
        if params.temperature > 0:
            seed = params.seed
            if seed is None:
                seed = int(torch.randint(2**62, (), generator=self._seeds))
            generator = torch.Generator(self._device).manual_seed(seed & (2**64 - 1))
        counts = in_prompt = None
        if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
            counts = torch.zeros(self._vocab_size, device=self._device)
            in_prompt = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            in_prompt[torch.tensor(list(prompt_token_ids), device=self._device)] = True
        bias = None
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            bias = (
                torch.tensor(ids, device=self._device),
                torch.tensor(values, dtype=torch.float32, device=self._device),
            )
        is_plain = params.logprobs is None and all(x is None for x in (generator, counts, bias, grammar))
        self._requests[request_id] = _RequestSampling(params, generator, counts, in_prompt, bias, grammar, is_plain)

    def remove(self, request_id: str) -> None:
        """Forget a request; an unknown one is no error."""
        self._requests.pop(request_id, None)

    def sample(self, logits_RV: Tensor, request_ids: Sequence[str]) -> tuple[dict[str, SampledToken], dict[str, str]]:
        """Pick a token for each row.

        Args:
            logits_RV: Model dtype, any device.
            request_ids: The request of each row.

        Returns:
            Tokens by request, and messages by request for rows that have no finite maximum or no token that fits a
            grammar.
        """
        top_R, greedy_R = logits_RV.max(dim=-1)
        top, greedy = top_R.tolist(), greedy_R.tolist()
        tokens: dict[str, SampledToken] = {}
        failed: dict[str, str] = {}
        for row, request_id in enumerate(request_ids):
            # max() returns nan if any logit is nan.
            if not math.isfinite(top[row]):
                failed[request_id] = f"the model returned non-finite logits (maximum {top[row]})"
                continue
            request = self._requests[request_id]
            if request.is_plain:
                tokens[request_id] = SampledToken(token_id=greedy[row])
                continue
            try:
                tokens[request_id] = self._sample_row(logits_RV[row].float(), greedy[row], request)
            except GrammarFailed as error:
                failed[request_id] = str(error)
        return tokens, failed

    def _sample_row(self, logits_V: Tensor, greedy: int, request: _RequestSampling) -> SampledToken:
        params = request.params
        adjusted_V = self._constrain(_penalise(_biased(logits_V, request), request), request.grammar)
        if request.generator is not None:
            token_id = _draw(_filtered_probs(adjusted_V, params), request.generator)
        else:
            token_id = greedy if adjusted_V is logits_V else int(adjusted_V.argmax())
        if request.output_counts_V is not None:
            request.output_counts_V[token_id] += 1
        if request.grammar is not None:
            request.grammar.accept(token_id)
        if params.logprobs is None:
            return SampledToken(token_id=token_id)
        [logprob] = token_logprobs(logits_V[None], [token_id], params.logprobs)
        return SampledToken(token_id=token_id, logprob=logprob)

    def _constrain(self, logits_V: Tensor, grammar: GrammarState | None) -> Tensor:
        """Leave only the tokens that may come next."""
        if grammar is None:
            return logits_V
        bytes_ = torch.frombuffer(bytearray(grammar.allowed()), dtype=torch.uint8).to(self._device)
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


def _filtered_probs(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, then top-k, top-p and min-p, each on what the one before left (Hugging Face's order)."""
    logits_V = logits_V / max(params.temperature, _MIN_TEMPERATURE)
    if 0 < params.top_k < logits_V.numel():
        kth = logits_V.topk(params.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < kth, -math.inf)
    probs_V = logits_V.softmax(dim=-1)
    if params.top_p < 1.0:
        sorted_V, order_V = probs_V.sort(descending=True)
        # A token stays if those before it do not reach top_p yet, so the likeliest always stays.
        beyond_V = sorted_V.cumsum(dim=-1) - sorted_V >= params.top_p
        beyond_V[0] = False  # also where float32 has top_p as 0
        probs_V = probs_V.index_fill(0, order_V[beyond_V], 0.0)
    if params.min_p > 0.0:
        probs_V = probs_V.masked_fill(probs_V < params.min_p * probs_V.max(), 0.0)
    return probs_V


def _draw(probs_V: Tensor, generator: torch.Generator) -> int:
    """Draw from unnormalised probabilities: the argmax of p / Exp(1) (an exponential race; no host sync inside)."""
    race_V = torch.empty_like(probs_V).exponential_(generator=generator)
    return int((probs_V / race_V).argmax())

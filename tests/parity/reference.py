"""Hugging Face's continuations of prompts, with which those of the engine are compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.ops.host_layout import quantize_rows
from tests.parity.models import VOCAB_SIZE
from tests.references import identity, kept

# fp32 runs that differ in batch and chunking only agree to about 1e-6 on logits of size 5. Where the two likeliest
# tokens are closer than this, either is right, so such a prompt says nothing.
NEAR_TIE = 1e-4
# A delta rule or a scan in chunks rounds otherwise than one token at a time, up to some 1e-4 after a few layers of
# random weights. A model whose own decode contradicts its prefill is given no more than this.
_NOISES, _LARGEST_TOLERANCE = 10, 4e-3


class RoundedCache(DynamicCache):
    """Hugging Face's cache, in which each token's K and V are rounded as int8 KV is before anything attends them."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(_rounded(key_states), _rounded(value_states), *args, **kwargs)


def _rounded(rows: Tensor) -> Tensor:
    codes, scales = quantize_rows(rows)
    return (codes * scales[..., None]).to(rows.dtype)


class _Continuation(NamedTuple):
    """Hugging Face's continuation of a prompt."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    gap: float
    """The smallest distance between a step's two largest logits."""
    noise: float
    """The largest difference between the logits of its decode and of its prefill of the same tokens."""
    prompt_logprobs: torch.Tensor
    hidden: torch.Tensor
    """Its last hidden states, ``[length, columns]``."""


_DIVISORS: dict[str, Callable[[Any], float]] = {"minicpm3": lambda config: config.logits_scaling}
"""Model type -> what the last hidden states are divided by for the head, where they are."""


class Reference:
    """Hugging Face's greedy continuations, made before the model is patched, the longest that any test asks for."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        prompts: Sequence[tuple[int, ...]] | None = None,
        num_prompts: int = 12,
        max_tokens: int = 24,
        seed: int = 0,
        first_position: int = 0,
        num_shared: int = 0,
        near_tie: float = NEAR_TIE,
        int8_kv: bool = False,
    ) -> None:
        """Make them; ``first_position`` is the model's own, of which ``generate`` knows nothing if it is not 0.

        Args:
            prompts: The first ``num_prompts`` of these without a near tie are taken; None: random ones are made up.
            num_shared: Random prompts with more tokens than that begin with the same ones.
            near_tie: Logits that are closer are equal, where a model rounds its rows to few bits.
            int8_kv: K and V are rounded to int8. Where a value is between two codes, the last bit of fp32 chooses, so
                 that all runs have the largest tolerance.
        """
        tried = prompts if prompts is not None else _random_prompts(10 * num_prompts, seed, num_shared)
        self.max_tokens = max_tokens

        def make() -> dict[str, Any]:
            return _made(model, tried, num_prompts, max_tokens, first_position, near_tie, int8_kv)

        which = identity(model)
        numbers = (num_prompts, max_tokens, first_position, near_tie, int8_kv)
        about = (which, tuple(tried), *numbers, Path(__file__).read_text())
        found = make() if which is None else kept(about, make)
        self.prompts: list[tuple[int, ...]] = found["prompts"]
        self.tokens: list[tuple[int, ...]] = found["tokens"]
        self.prompt_logprobs: list[torch.Tensor] = found["prompt_logprobs"]
        """Log-probabilities of each prompt's rows, ``[length, vocabulary]``."""
        self.hidden: list[torch.Tensor] = found["hidden"]
        """Last hidden states of each prompt's rows, ``[length, columns]``."""
        self.tolerance: float = found["tolerance"]
        """Largest difference of logits: more than usual where the model's own decode and prefill differ by more."""
        self.loras: list[str | None] = [None] * len(self.prompts)
        """The adapter by which each prompt is continued; None: by the model alone."""
        self.folders: dict[str, Path] = {}
        """The folders of the adapters, by name."""

    def extend(self, other: Reference, lora: str, folder: Path) -> None:
        """Add another reference's continuations, which an adapter of the model has made."""
        self.prompts, self.tokens = self.prompts + other.prompts, self.tokens + other.tokens
        self.prompt_logprobs = self.prompt_logprobs + other.prompt_logprobs
        self.hidden = self.hidden + other.hidden
        self.tolerance = max(self.tolerance, other.tolerance)
        self.loras = self.loras + [lora] * len(other.prompts)
        self.folders[lora] = folder


def _made(
    model: PreTrainedModel,
    tried: Sequence[tuple[int, ...]],
    num_prompts: int,
    max_tokens: int,
    first_position: int,
    near_tie: float,
    int8_kv: bool,
) -> dict[str, Any]:
    """Compute the fields of a reference."""
    made: list[_Continuation] = []
    good: list[_Continuation] = []
    tolerance = max(near_tie, _LARGEST_TOLERANCE if int8_kv else 0.0)
    while len(good) < num_prompts and len(made) < len(tried):
        more = tried[len(made) : len(made) + num_prompts - len(good)]
        made += _continuations(model, more, max_tokens, first_position, int8_kv)
        tolerance = max(tolerance, min(_NOISES * max(each.noise for each in made), _LARGEST_TOLERANCE))
        good = [each for each in made if each.gap >= tolerance]
    if len(good) == num_prompts:
        fields = {"prompts": "prompt", "tokens": "tokens", "prompt_logprobs": "prompt_logprobs", "hidden": "hidden"}
        found = {name: [getattr(each, field) for each in good] for name, field in fields.items()}
        return {**found, "tolerance": tolerance}
    raise AssertionError(f"only {len(good)} of {len(tried)} prompts have no near tie")


def _continuations(
    model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], max_tokens: int, first_position: int, int8_kv: bool
) -> list[_Continuation]:
    """Continue prompts, in their order; those of one length are one batch, which needs no padding."""
    lengths = {len(prompt) for prompt in prompts}
    batches = [[prompt for prompt in prompts if len(prompt) == length] for length in lengths]
    found: list[_Continuation] = []
    for batch in batches:
        found += _generate(model, batch, max_tokens, first_position, int8_kv)
    found.sort(key=lambda each: prompts.index(each.prompt))
    return found


def _generate(
    model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], max_tokens: int, first_position: int, int8_kv: bool
) -> list[_Continuation]:
    """Continue prompts of one length."""

    def cached() -> dict[str, Any]:
        return {"past_key_values": RoundedCache(config=model.config), "use_cache": True} if int8_kv else {}

    ids_BT = torch.tensor(prompts, device=model.device)
    length = ids_BT.shape[1]
    numbered = {}
    if first_position:
        numbered["position_ids"] = (torch.arange(length, device=model.device) + first_position).expand_as(ids_BT)
    out = model.generate(
        ids_BT,
        **numbered,
        attention_mask=torch.ones_like(ids_BT),
        max_new_tokens=max_tokens,
        do_sample=False,
        **{"use_cache": True, **cached()},
        return_dict_in_generate=True,
        output_logits=True,
    )
    decoded_BTV = torch.stack(out.logits, dim=1).float()
    best_BT2 = decoded_BTV.topk(2).values
    hidden: list[Tensor] = []
    with torch.inference_mode():
        # Not output_hidden_states, which changes modules for good.
        hook = model.get_output_embeddings().register_forward_pre_hook(lambda head, args: hidden.append(args[0]))
        prompt_logits_BTV = model(ids_BT, **cached()).logits
        hook.remove()
        prefilled_BTV = model(out.sequences[:, :-1], **cached()).logits[:, length - 1 :].float()
    divisor = _DIVISORS.get(model.config.model_type, lambda config: 1.0)(model.config)
    return [
        _Continuation(
            prompt=prompt,
            tokens=tuple(out.sequences[row, length:].tolist()),
            gap=float((best_BT2[row, :, 0] - best_BT2[row, :, 1]).min()),
            noise=float((decoded_BTV[row] - prefilled_BTV[row]).abs().max()),
            prompt_logprobs=prompt_logits_BTV[row].float().log_softmax(-1).cpu(),
            hidden=(hidden[0][row].float() * divisor).cpu(),
        )
        for row, prompt in enumerate(prompts)
    ]


def _random_prompts(count: int, seed: int, num_shared: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    shared = tuple(random.Random(-1 - seed).randrange(1, VOCAB_SIZE) for _ in range(num_shared))
    prompts = []
    for _ in range(count):
        prompt = tuple(rng.randrange(1, VOCAB_SIZE) for _ in range(rng.choice([1, 3, 8, 17, 40])))
        prompts.append((*shared, *prompt[num_shared:]) if len(prompt) > num_shared else prompt)
    return prompts

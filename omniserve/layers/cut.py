"""The attention function that a model calls while one of its halves runs, and what its masks let through.

It is registered with Hugging Face's attention interface. ``calling`` puts a function in its place for as long as a half
runs; ``described_masks`` has the masks of a run describe themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface

_NAME = "omniserve_halves"
"""Of the attention function, in Hugging Face's registry; a model's config names it while a half runs."""
_FAR = 1 << 24
"""A position behind every window."""

AttentionFunction = Callable[..., Tensor]
"""(module, query, key, value, mask, keywords) -> attention rows ``[T, 1, N, H]``; q, k, v are ``[T, heads, 1, H]``."""


class _Running:
    """What the functions that are registered below do."""

    attend: AttentionFunction | None = None
    """The attention function of the half that runs."""
    describes_masks = False
    """The making of a mask describes it; a half needs none."""


_running = _Running()


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **keywords: Any) -> Any:
    assert _running.attend is not None
    return _running.attend(module, query, key, value, mask, keywords), None


def _mask(*args: Any, mask_function: Callable[..., Any], device: Any, **keywords: Any) -> Tensor:
    """Stand in for the making of an attention mask: the result tells which tokens the mask function lets through."""
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
    if _running.describes_masks:
        with _ConstantTensors():
            mask.omniserve_window = window_of(mask_function)  # type: ignore[attr-defined]
    return mask


class _ConstantTensors(TorchFunctionMode):
    """Has mask functions find the same everywhere, out of bounds too, in a tensor of the batch that is constant.

    That a batch of text tells no blocks of images apart says so for every position.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__getitem__ and isinstance(args[1], tuple) and len(args[1]) == args[0].dim():
            values = args[0].flatten()
            if len(values) and bool((values == values[0]).all()):
                return values[0]
        return function(*args, **(kwargs or {}))


def window_of(mask_function: Callable[..., Any]) -> int | None:
    """Return the sliding window of a mask function, 0 without one; None if it is no causal mask of one of these."""
    zero = torch.tensor(0)

    def sees(query: int, key: int) -> bool:
        return bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))

    def width(query: int) -> int | None:
        """Return how many positions up to its own a query sees; None unless they are the nearest."""
        if not sees(query, query) or sees(query, query + 1):
            return None
        if sees(query, 0):
            return query + 1
        hidden, seen = 0, query
        while seen - hidden > 1:
            middle = (hidden + seen) // 2
            hidden, seen = (hidden, middle) if sees(query, middle) else (middle, seen)
        return query + 1 - seen

    queries = (_FAR, _FAR + 1, _FAR + 4099)
    try:
        widths = [width(query) for query in queries]
    except (IndexError, RuntimeError):  # it looks into tensors of the batch: packed sequences, blocks of images
        return None
    if widths == [query + 1 for query in queries]:
        return 0
    return widths[0] if len(set(widths)) == 1 else None


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, _mask)


@contextmanager
def calling(attend: AttentionFunction, configs: Sequence[Any]) -> Iterator[None]:
    """Have the model with these configs call an attention function."""
    if torch.compiler.is_compiling():  # within another ``calling``: a graph cannot change a config
        _running.attend = attend
        yield
        _running.attend = None
        return
    names = [config._attn_implementation_internal for config in configs]
    before, _running.attend = _running.attend, attend
    for config in configs:
        config._attn_implementation_internal = _NAME
    try:
        yield
    finally:
        for config, name in zip(configs, names, strict=True):
            config._attn_implementation_internal = name
        _running.attend = before


@contextmanager
def described_masks() -> Iterator[None]:
    """Have a model make, in the place of each mask, a tensor whose ``omniserve_window`` says what the mask does."""
    _running.describes_masks = True
    try:
        yield
    finally:
        _running.describes_masks = False

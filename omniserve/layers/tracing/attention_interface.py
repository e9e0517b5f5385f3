"""The attention function that a model calls while one of its halves runs, and what its masks let through.

It is registered with Hugging Face's attention interface. ``attention_replaced`` puts a function in its place for as
long as a half runs, and one in the place of modules with recurrent state that stand beside an attention
(``attention_free.Mixer``); ``described_masks`` has the masks of a run describe themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface

_NAME = "omniserve_halves"
"""The attention function's name in Hugging Face's registry; a model's config has it while a half runs."""
_FAR = 1 << 24
"""A position behind every window."""

AttentionFunction = Callable[..., Tensor]
"""(module, query, key, value, mask, keywords) -> attention rows ``[T, 1, N, H]``; q, k, v are ``[T, heads, 1, H]``."""

MixerFunction = Callable[[Any, Any, Any], Tensor]
"""(module, its arguments, those with a name) -> its output."""


class StopForward(Exception):
    """Ends a layer or a model where everything that is wanted has been computed."""


class _Running:
    """The state of the registered functions below: what they call while a half or a model runs."""

    attend: AttentionFunction | None = None
    """The attention function of the half that runs."""
    mix: MixerFunction | None = None
    """The function that runs in the place of the half's mixers."""
    describes_masks = False
    """The making of a mask describes it; a half needs none."""


_running = _Running()


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **keywords: Any) -> Any:
    assert _running.attend is not None
    absorb = getattr(module, "absorb_query", None)  # of a module with latents as its KV (``latent.LatentAttention``)
    if absorb is None:
        return _running.attend(module, query, key, value, mask, keywords), None
    rows = _running.attend(module, absorb(query), key, value, mask, keywords)
    return module.expand_rows(rows), None  # type: ignore[operator]


def attended(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    """Return what the attention function makes of heads ``[sequences, heads, T, H]``, as ``[sequences, T, N * H]``."""
    return _attend(module, query, key, value, **keywords)[0].flatten(2)


def no_attention(*args: Any) -> NoReturn:
    """Stand for the attention function where the model must not attend."""
    raise RuntimeError("the model attends outside of its decoder layers")


class Mixed:
    """The forward of a mixer while a half runs."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        assert _running.mix is not None
        return _running.mix(self, args, kwargs)


def _mask(*args: Any, mask_function: Callable[..., Any], device: Any, batch_size: int = 1, **keywords: Any) -> Tensor:
    """Stand in for the making of an attention mask: the result tells which tokens the mask function lets through."""
    mask = torch.zeros(batch_size, 1, 1, 1, dtype=torch.bool, device=device)
    if _running.describes_masks:
        with _ConstantTensors():
            mask.omniserve_mask = mask_of(mask_function)  # type: ignore[attr-defined]
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


class Mask(NamedTuple):
    """The keys that a causal mask lets a query see, in the terms of ``AttentionSpec``; 0: no limit of this kind."""

    window: int = 0
    chunk: int = 0


def mask_of(mask_function: Callable[..., Any]) -> Mask | None:
    """Return what a mask function lets through; None if it is no causal mask of one of these kinds."""
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

    def last_with(key: int) -> int:
        """Return the last query that sees a key, up to 2 * _FAR."""
        seen, hidden = key, 2 * _FAR + 1
        while hidden - seen > 1:
            middle = (hidden + seen) // 2
            seen, hidden = (middle, hidden) if sees(middle, key) else (seen, middle)
        return seen

    queries = (_FAR, _FAR + 1, _FAR + 4099)
    try:
        widths = [width(query) for query in queries]
        if widths == [query + 1 for query in queries]:
            return Mask()
        if widths[0] is None:
            return None
        if len(set(widths)) == 1:
            return Mask(window=widths[0])
        first = _FAR + 1 - widths[0]
        chunk = last_with(first) + 1 - first
        borders = (0, chunk - 1, chunk, chunk + 1, 3 * chunk - 1, 2 * _FAR + 7)
        is_chunked = all(width(query) == query % chunk + 1 for query in (*queries, *borders))
    except (IndexError, RuntimeError):  # it looks into tensors of the batch: packed sequences, blocks of images
        return None
    return Mask(chunk=chunk) if is_chunked else None


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, _mask)


@contextmanager
def attention_replaced(
    attend: AttentionFunction,
    configs: Sequence[Any],
    overridden: Sequence[tuple[nn.Module, type]],
    mix: MixerFunction | None = None,
) -> Iterator[None]:
    """Have the model with these configs call an attention function; modules with an override change their class."""
    if torch.compiler.is_compiling():  # within another ``attention_replaced``: a graph cannot change a config
        _running.attend, _running.mix = attend, mix
        try:
            yield
        finally:
            _running.attend = _running.mix = None
        return
    names = [config._attn_implementation_internal for config in configs]
    before = _running.attend, _running.mix
    _running.attend, _running.mix = attend, mix
    classes = [type(module) for module, _ in overridden]
    for config in configs:
        config._attn_implementation_internal = _NAME
    for module, stand_in in overridden:
        module.__class__ = stand_in
    try:
        yield
    finally:
        for (module, _), own in zip(overridden, classes, strict=True):
            module.__class__ = own
        for config, name in zip(configs, names, strict=True):
            config._attn_implementation_internal = name
        _running.attend, _running.mix = before


@contextmanager
def described_masks() -> Iterator[None]:
    """Have a model make, in the place of each mask, a tensor whose ``omniserve_mask`` says what the mask does."""
    _running.describes_masks = True
    try:
        yield
    finally:
        _running.describes_masks = False

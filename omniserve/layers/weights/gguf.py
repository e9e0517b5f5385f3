"""GGUF files, llama.cpp's format: the codes of a file's tensors, for the weights that transformers made of them.

transformers reads such a file and widens it; it renames the tensors and moves rows (of Llama's q and k). The codes of a
weight are found by its values: those that a tensor of the file has when it is widened, row for row, in some order.
What has been changed since, and what was made of several tensors or of other types, has none and stays dense.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from omniserve.layers.weights.quantized import QuantForm, QuantizedWeight, Scales, dense_of, remember


class _Type(NamedTuple):
    """A type of GGUF: how many inputs and bytes a block has, and how blocks ``[O, blocks, bytes]`` are read."""

    inputs: int
    bytes: int
    read: Callable[[Tensor], QuantizedWeight]


def _half(blocks: Tensor, first: int) -> Tensor:
    return blocks[..., first : first + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(quants: Tensor) -> Tensor:
    """The lower nibbles of some bytes, and behind them the upper: ``[..., n]`` to ``[..., 2 n]``."""
    return torch.cat([quants & 15, quants >> 4], dim=-1)


def _bits(words: Tensor) -> Tensor:
    """``[..., 4]`` bytes as their 32 bits, the lowest first."""
    return (words[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _rows(values: Tensor) -> Tensor:
    return values.reshape(values.shape[0], -1)


def _q4_0(blocks: Tensor) -> QuantizedWeight:
    return QuantizedWeight(QuantForm(4, Scales.F16, 32), _rows(_nibbles(blocks[..., 2:])), (_half(blocks, 0),))


def _q4_1(blocks: Tensor) -> QuantizedWeight:
    scales = (_half(blocks, 0), _half(blocks, 2))
    return QuantizedWeight(QuantForm(4, Scales.AFFINE16, 32), _rows(_nibbles(blocks[..., 4:])), scales)


def _q5_0(blocks: Tensor) -> QuantizedWeight:
    codes = _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return QuantizedWeight(QuantForm(5, Scales.F16, 32), _rows(codes), (_half(blocks, 0),))


def _q5_1(blocks: Tensor) -> QuantizedWeight:
    codes = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return QuantizedWeight(QuantForm(5, Scales.AFFINE16, 32), _rows(codes), (_half(blocks, 0), _half(blocks, 2)))


def _q8_0(blocks: Tensor) -> QuantizedWeight:
    return QuantizedWeight(QuantForm(8, Scales.F16, 32), _rows(blocks[..., 2:] ^ 0x80), (_half(blocks, 0),))


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and eight minima, 6 bits each, of the 12 bytes of a block of Q4_K or Q5_K."""
    low, middle, high = packed.split(4, dim=-1)
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], dim=-1)
    minima = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], dim=-1)
    return _rows(scales), _rows(minima)


def _q4_k(blocks: Tensor) -> QuantizedWeight:
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))
    scales = (_half(blocks, 0), _half(blocks, 2), *_k_scales(blocks[..., 4:16]))
    return QuantizedWeight(QuantForm(4, Scales.K, 32), _rows(codes), scales)


def _q5_k(blocks: Tensor) -> QuantizedWeight:
    lower = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2).unflatten(-1, (8, 32))
    upper = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    scales = (_half(blocks, 0), _half(blocks, 2), *_k_scales(blocks[..., 4:16]))
    return QuantizedWeight(QuantForm(5, Scales.K, 32), _rows(lower | upper << 4), scales)


def _q6_k(blocks: Tensor) -> QuantizedWeight:
    lower = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))  # of each half 128 inputs
    upper = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> (torch.arange(4, dtype=torch.uint8) * 2)[:, None] & 3
    scales = (_half(blocks, 208), _rows(blocks[..., 192:208].contiguous()).view(torch.int8))
    return QuantizedWeight(QuantForm(6, Scales.K_SIGNED, 16), _rows(lower | upper.flatten(-2) << 4), scales)


TYPES = {
    "Q4_0": _Type(32, 18, _q4_0),
    "Q4_1": _Type(32, 20, _q4_1),
    "Q5_0": _Type(32, 22, _q5_0),
    "Q5_1": _Type(32, 24, _q5_1),
    "Q8_0": _Type(32, 34, _q8_0),
    "Q4_K": _Type(256, 144, _q4_k),
    "Q5_K": _Type(256, 176, _q5_k),
    "Q6_K": _Type(256, 210, _q6_k),
}
"""Types of GGUF that are served as they are, by their names there."""


def weight_of_blocks(kind: str, raw: Tensor) -> QuantizedWeight:
    """Return the codes of a tensor of a file: ``raw`` is uint8, ``[O, bytes of a row]``."""
    of = TYPES[kind]
    return of.read(raw.view(raw.shape[0], -1, of.bytes))


class _OfFile:
    """The codes of a weight, read from the file when they are asked for."""

    def __init__(self, tensor: Any, order: Tensor | None) -> None:
        self._tensor, self._order = tensor, order

    def __call__(self) -> QuantizedWeight:
        codes = _weight_of(self._tensor)
        return codes if self._order is None else codes.rows(self._order)


def _weight_of(tensor: Any) -> QuantizedWeight:
    return weight_of_blocks(tensor.tensor_type.name, torch.from_numpy(numpy.array(tensor.data)))


class GGUFCodes(NamedTuple):
    """What ``remember_file`` found."""

    num_weights: int
    """Weights that have codes."""
    dense: dict[str, int]
    """How many tensors of a file are dense in the model, by type."""


def remember_file(model: nn.Module, path: Path) -> GGUFCodes:
    """Note for each weight of a model that was loaded from a file which codes it has there.

    Raises:
        ImportError: The package ``gguf`` is not installed.
    """
    import gguf  # type: ignore[import-not-found, import-untyped, unused-ignore]

    weights = [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.Embedding) and isinstance(module.weight, nn.Parameter)
    ]
    by_print: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    orders: dict[int, Tensor] = {}
    for weight in {id(weight): weight for weight in weights}.values():
        prints = _prints(weight.detach())
        orders[id(weight)] = torch.argsort(prints, stable=True)
        by_print.setdefault(_key(weight, prints), []).append(weight)
    found, dense = set[int](), dict[str, int]()
    for tensor in gguf.GGUFReader(path).tensors:
        kind = tensor.tensor_type.name
        if len(tensor.shape) != 2:
            continue
        matches: list[nn.Parameter] = []
        if kind in TYPES:
            read = _weight_of(tensor)
            for dtype in {weight.dtype for weight in weights}:
                values = dense_of(read).to(dtype)
                prints = _prints(values)
                for weight in by_print.get(_key(values, prints), []):
                    order = torch.empty_like(orders[id(weight)])
                    order[orders[id(weight)]] = torch.argsort(prints, stable=True)
                    if torch.equal(values[order], weight):
                        same = torch.equal(order, torch.arange(len(order)))
                        remember(weight, read.form, _OfFile(tensor, None if same else order))
                        matches.append(weight)
        found.update(map(id, matches))
        if not matches:
            dense[kind] = dense.get(kind, 0) + 1
    return GGUFCodes(len(found), dense)


def _prints(values: Tensor) -> Tensor:
    """A number for each row that rows of other values hardly share: ``[O]``, float64."""
    mixed = torch.rand(values.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    # Not a matrix product, in which a row's sum could depend on the rows beside it.
    return torch.cat([(rows.double() * mixed).sum(1) for rows in values.split(1024)])


def _key(values: Tensor, prints: Tensor) -> tuple[Any, ...]:
    return (*values.shape, values.dtype, float(prints.sort().values[:: max(1, len(prints) // 7)].sum()))

"""UnreadTensor: a tensor of a checkpoint whose values are still in the file, and of which any part can be read.

transformers builds a model from such tensors by its own code: it renames, converts, stacks experts and ties weights as
in any other load. ``sharding.shard`` then cuts them by its own code, too. Both only say which elements of which file
go where; when all is cut, these are read and no others (``checkpoint_files``). So a rank's weights are those of the
whole model, cut, bit for bit.

What moves elements or casts them stays unread: slices, concatenations, transpositions. Any other operator gets the
whole values at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from omniserve.layers.weights.checkpoint_files import NotInParts, Region, Values

_aten = torch.ops.aten
_CPU = torch.device("cpu")


class _Held(Values):
    """A tensor in memory, among unread ones."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.to("meta"))
        self._tensor = tensor

    def fill(self, out: Tensor, region: Region) -> None:
        out.copy_(self._tensor[tuple(slice(*each) for each in region)])


class _Moved(Values):
    """The elements of one other tensor, in other places or without some."""

    def __init__(self, form: Tensor, of: Values, place: Callable[[Tensor, Region], tuple[Tensor, Region]]) -> None:
        super().__init__(form)
        self.has_cast = of.has_cast
        self._of, self._place = of, place

    def fill(self, out: Tensor, region: Region) -> None:
        self._of.fill(*self._place(out, region))


class _Joined(Values):
    """Tensors one behind the other in a dimension."""

    def __init__(self, form: Tensor, parts: Sequence[Values], dim: int) -> None:
        super().__init__(form)
        # Parts of several dtypes become one dtype, which is a cast.
        self.has_cast = any(part.has_cast or part.form.dtype is not form.dtype for part in parts)
        self._parts, self._dim = parts, dim

    def fill(self, out: Tensor, region: Region) -> None:
        (begin, end), start = region[self._dim], 0
        for part in self._parts:
            stop = start + part.form.shape[self._dim]
            first, last = max(begin, start), min(end, stop)
            if first < last:
                of_part = (*region[: self._dim], (first - start, last - start), *region[self._dim + 1 :])
                _fill_cast(part, out.narrow(self._dim, first - begin, last - first), of_part)
            start = stop


class _Cast(Values):
    """A tensor in another dtype."""

    has_cast = True

    def __init__(self, form: Tensor, of: Values) -> None:
        super().__init__(form)
        self._of = of

    def fill(self, out: Tensor, region: Region) -> None:
        _fill_cast(self._of, out, region)


class _Reshaped(Values):
    """A tensor with the same elements in other dimensions: it is read whole, whatever is wanted of it."""

    def __init__(self, form: Tensor, of: Values) -> None:
        super().__init__(form)
        self.has_cast = True  # the values are made before they are copied
        self._of = of

    def fill(self, out: Tensor, region: Region) -> None:
        values = self._of.whole().reshape(self.form.shape)
        out.copy_(values[tuple(slice(*each) for each in region)])


def _fill_cast(values: Values, out: Tensor, region: Region) -> None:
    """Fill a tensor that may have another dtype; values that were cast before are not cast in one go."""
    if not values.has_cast or out.dtype is values.form.dtype:
        values.fill(out, region)
        return
    before = torch.empty(out.shape, dtype=values.form.dtype)
    values.fill(before, region)
    out.copy_(before)


class UnreadTensor(Tensor):
    """A tensor without values as yet; on the CPU, as it says."""

    source: Values

    @staticmethod
    def __new__(cls, values: Values) -> UnreadTensor:
        form = values.form
        made = Tensor._make_wrapper_subclass(cls, form.shape, strides=form.stride(), dtype=form.dtype, device=_CPU)
        made.source = values
        return made

    def read(self) -> Tensor:
        """Return the values: in memory of their own, or a view of the file if it has them as they are."""
        return self.source.whole()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UnreadTensor({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        move = _MOVES.get(func)
        if move is not None and (moved := move(func, *args, **kwargs)) is not None:
            return moved
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.is_write and any(isinstance(each, cls) for each in pytree.tree_leaves(given)):
                raise NotInParts(f"the model changes weights in place while they are loaded ({func})")
        return func(*pytree.tree_map(_read, args), **pytree.tree_map(_read, kwargs))


def _read(value: Any) -> Any:
    return value.read() if isinstance(value, UnreadTensor) else value


def _values(tensor: Tensor) -> Values:
    return tensor.source if isinstance(tensor, UnreadTensor) else _Held(tensor)


# -- operators of which the result is unread -------------------------------------------------------------------------


def _same(func: Any, tensor: UnreadTensor, **_: Any) -> UnreadTensor:
    return UnreadTensor(tensor.source)


def _clone(func: Any, tensor: UnreadTensor, *, memory_format: Any = None) -> UnreadTensor:
    form = func(tensor.source.form, memory_format=memory_format)
    return UnreadTensor(_Moved(form, tensor.source, lambda out, region: (out, region)))


def _to_copy(func: Any, tensor: UnreadTensor, **kwargs: Any) -> UnreadTensor | None:
    if torch.device(kwargs.pop("device", None) or "cpu").type != "cpu" or kwargs.pop("layout", None) is not None:
        return None
    kwargs.pop("pin_memory", None)
    form = func(tensor.source.form, **kwargs)
    if form.dtype is tensor.dtype:
        return UnreadTensor(_Moved(form, tensor.source, lambda out, region: (out, region)))
    return UnreadTensor(_Cast(form, tensor.source))


def _slice(
    func: Any, tensor: UnreadTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> UnreadTensor | None:
    if step != 1:
        return None
    dim, first = dim % tensor.ndim, slice(start, end).indices(tensor.shape[dim])[0]

    def place(out: Tensor, region: Region) -> tuple[Tensor, Region]:
        begin, stop = region[dim]
        return out, (*region[:dim], (first + begin, first + stop), *region[dim + 1 :])

    return UnreadTensor(_Moved(func(tensor.source.form, dim, start, end, step), tensor.source, place))


def _select(func: Any, tensor: UnreadTensor, dim: int, index: int) -> UnreadTensor:
    dim, index = dim % tensor.ndim, index % tensor.shape[dim]

    def place(out: Tensor, region: Region) -> tuple[Tensor, Region]:
        return out.unsqueeze(dim), (*region[:dim], (index, index + 1), *region[dim:])

    return UnreadTensor(_Moved(func(tensor.source.form, dim, index), tensor.source, place))


def _split(func: Any, tensor: UnreadTensor, sizes: int | Sequence[int], dim: int = 0) -> list[UnreadTensor]:
    length = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    cut = (
        _slice(_aten.slice.Tensor, tensor, dim, start, start + size) for start, size in zip(starts, sizes, strict=True)
    )
    return [each for each in cut if each is not None]


def _unbind(func: Any, tensor: UnreadTensor, dim: int = 0) -> list[UnreadTensor]:
    return [_select(_aten.select.int, tensor, dim, index) for index in range(tensor.shape[dim])]


def _permute(func: Any, tensor: UnreadTensor, dims: Sequence[int]) -> UnreadTensor:
    order = [dim % tensor.ndim for dim in dims]
    back = [order.index(dim) for dim in range(tensor.ndim)]

    def place(out: Tensor, region: Region) -> tuple[Tensor, Region]:
        return out.permute(back), tuple(region[dim] for dim in back)

    return UnreadTensor(_Moved(tensor.source.form.permute(order), tensor.source, place))


def _transpose(func: Any, tensor: UnreadTensor, first: int, second: int) -> UnreadTensor:
    order = list(range(tensor.ndim))
    order[first], order[second] = order[second], order[first]
    return _permute(func, tensor, order)


def _t(func: Any, tensor: UnreadTensor) -> UnreadTensor:
    return _transpose(func, tensor, 0, 1) if tensor.ndim == 2 else UnreadTensor(tensor.source)


def _unsqueeze(func: Any, tensor: UnreadTensor, dim: int) -> UnreadTensor:
    dim %= tensor.ndim + 1

    def place(out: Tensor, region: Region) -> tuple[Tensor, Region]:
        return out.squeeze(dim), (*region[:dim], *region[dim + 1 :])

    return UnreadTensor(_Moved(func(tensor.source.form, dim), tensor.source, place))


def _squeeze(func: Any, tensor: UnreadTensor, dim: int) -> UnreadTensor:
    return _select(_aten.select.int, tensor, dim, 0) if tensor.shape[dim] == 1 else UnreadTensor(tensor.source)


def _cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> UnreadTensor:
    parts = [_values(each) for each in tensors]
    form = func([part.form for part in parts], dim)
    parts = [part for part in parts if part.form.ndim == form.ndim]  # an empty tensor of any shape may be among them
    return UnreadTensor(_Joined(form, parts, dim % form.ndim))


def _stack(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> UnreadTensor:
    dim %= tensors[0].ndim + 1
    parts = [
        _unsqueeze(_aten.unsqueeze.default, each, dim).source
        if isinstance(each, UnreadTensor)
        else _Held(each.unsqueeze(dim))
        for each in tensors
    ]
    form = func([_values(each).form for each in tensors], dim)
    return UnreadTensor(_Joined(form, parts, dim))


def _reshape(func: Any, tensor: UnreadTensor, shape: Sequence[int]) -> UnreadTensor:
    form = func(tensor.source.form, shape)
    same = form.shape == tensor.shape
    return UnreadTensor(tensor.source if same else _Reshaped(form, tensor.source))


_MOVES: dict[Any, Callable[..., Any]] = {
    _aten.alias.default: _same,
    _aten.detach.default: _same,
    _aten.clone.default: _clone,
    _aten._to_copy.default: _to_copy,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.unbind.int: _unbind,
    _aten.permute.default: _permute,
    _aten.transpose.int: _transpose,
    _aten.t.default: _t,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.squeeze.dim: _squeeze,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.view.default: _reshape,
    _aten._unsafe_view.default: _reshape,
}
"""What each operator makes of unread tensors; None from a function: it needs the values."""

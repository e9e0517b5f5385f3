"""Groups: linears that read the same input are held together, so that one product serves all of them.

The subclasses of ``GroupLinear`` hold the weights: ``packed.py`` for the CPU, ``merged.py`` for a GPU. Each member asks
for the product of the whole group, and the compiler computes it once (``compiled.py``).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeGuard

import torch
from torch import Tensor, nn


def any_kind(module: nn.Module) -> None:
    """Members of a group need nothing in common."""


class HeldForm(NamedTuple):
    """A form in which the weights of linears are held."""

    name: str
    """The participle for the log."""
    suitable: Callable[[nn.Module, Iterable[nn.Module]], list[nn.Linear]]
    """Returns the candidates of a model for which the form is better."""
    hold: Callable[..., bool | None]
    """Brings a group, as ``groups_of`` returns it, into the form; returns False if it left it as it was."""
    release: Callable[..., None]
    """Undoes it for the same linears: same class, same Parameter objects, same bits."""
    takes_single: bool = True
    """The form is better for a linear without a group, too."""
    alike: Callable[[nn.Module], Any] = any_kind
    """Returns what the members of a group must have in common."""


class _LastProduct:
    """A group's product of the input that its members were last called with, as long as that input lives."""

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Tensor], int, Tensor] | None = None

    def of(self, input: Tensor, product_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the product, computed once for all members that are given this input."""
        if torch.is_grad_enabled() or input.is_inference():  # inference tensors do not count how often they change
            return product_of(input)
        last = self._last
        if last is not None and last[0]() is input and last[1] == input._version:
            return last[2]
        product = product_of(input)
        self._last = (weakref.ref(input, self._forget), input._version, product)
        return product

    def _forget(self, input: weakref.ref[Tensor]) -> None:
        if self._last is not None and self._last[0] is input:
            self._last = None


class GroupLinear(nn.Linear):
    """A member of a group.

    ``join_group`` changes the class of a linear in place, as torch's parametrizations and ``fully_shard`` do. The
    object and its names stay, so that ``split_group`` can undo it.
    """

    group_weight: Tensor
    """Stands for the weights of all members, and is the same object for all."""
    group_bias: Tensor | None
    """The biases of all members; the bias of each is a view."""
    group_start: int
    """The member's first row in the group."""
    group_rows: int
    """Rows of the group."""
    group_last: _LastProduct
    """The product that was computed last; one object for all members."""

    def group_product(self, input: Tensor) -> Tensor:
        """Return the products of all members, one after the other in the last dimension."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "bias"):
            self._refuse(f"be given another {name}")
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse("be copied")

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        self._refuse("change its device or dtype")

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(f"a prepacked linear cannot {what}; call omniserve.unpatch(model) first")


class _ForwardOnly(torch.autograd.Function):
    """A product without a gradient: an error is better than a result that lacks its gradient silently."""

    @staticmethod
    def forward(ctx: Any, product: Callable[..., Tensor], *arguments: Any) -> Tensor:
        return product(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError("prepacked linears have no backward; omniserve.unpatch(model), or patch with prepack=False")


class HeldLinear(GroupLinear):
    """A member whose weight is not dense any more, alone or in a group.

    The Parameter keeps its shape and dtype but holds NaN without storage, so that a use of it is noticed; ``weight``
    and ``state_dict()`` return the dense values. The members compute their product together, in ``generate()`` as in a
    compiled half.
    """

    def held_product(self, input: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """Return the operator that computes the products of all members, and its arguments after the input."""
        raise NotImplementedError

    def dense_group(self) -> Tensor:
        """Return a dense copy of the weights of all members, bit for bit the originals."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        if self.group_rows == self.out_features:
            return self.group_product(input)
        is_compiling = torch.compiler.is_compiling()
        product = self.group_product(input) if is_compiling else self.group_last.of(input, self.group_product)
        return product.narrow(-1, self.group_start, self.out_features).contiguous()

    def group_product(self, input: Tensor) -> Tensor:
        product, arguments = self.held_product(input)
        if torch.is_grad_enabled():
            return _ForwardOnly.apply(product, input, *arguments)
        return product(input, *arguments)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A dense copy of the weight, bit for bit the original."""
        # The copy must not be an inference tensor, because it may become a Parameter's data again.
        with torch.inference_mode(False), torch.no_grad():
            dense = self.dense_group()
            if self.group_rows == self.out_features:
                return dense
            # A view would keep the other members' rows alive.
            return dense.narrow(0, self.group_start, self.out_features).clone()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("load a state dict")

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            # Savers refuse tensors that share their storage.
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach().clone()


def hide(weight: Tensor) -> None:
    """Replace a Parameter's values by NaN of the same shape and dtype without storage."""
    weight.data = torch.full((), float("nan"), dtype=weight.dtype).expand(weight.shape)


def join_group(linears: Sequence[nn.Linear], kind: type[GroupLinear], group_weight: Tensor) -> None:
    """Make linears the members of one group, in this order. The caller changes their weights."""
    biases = [linear.bias.data for linear in linears if linear.bias is not None]
    group_bias = torch.cat(biases) if biases else None
    rows, start = sum(linear.out_features for linear in linears), 0
    last = _LastProduct()
    for linear in linears:
        linear.__dict__.update(
            group_weight=group_weight, group_bias=group_bias, group_start=start, group_rows=rows, group_last=last
        )
        if group_bias is not None:
            linear.bias.data = group_bias.narrow(0, start, linear.out_features)
        start += linear.out_features
        linear.__class__ = kind


def split_group(
    linears: Sequence[nn.Linear],
    kind: type[GroupLinear],
    dense_weight: Callable[[], Tensor],
    *,
    own: type[nn.Linear] = nn.Linear,
) -> None:
    """Undo ``join_group``: each linear gets back its rows of the group's dense weight, its bias and its ``own`` class.

    Raises:
        ValueError: The linears are not all the members of one group of this kind, in order.
    """
    if not (isinstance(linears[0], kind) and is_group(linears)):
        raise ValueError("give all the linears of one group, in the order in which it was made")
    with torch.inference_mode(False), torch.no_grad():
        weight = dense_weight()
        for linear, rows in zip(linears, weight.split([linear.out_features for linear in linears]), strict=True):
            for name in GroupLinear.__annotations__:
                delattr(linear, name)
            linear.__class__ = own
            # Each Parameter owns its storage again.
            linear.weight.data = rows.clone() if len(linears) > 1 else weight
            if linear.bias is not None:
                linear.bias.data = linear.bias.data.clone()


def is_group(linears: Sequence[Any]) -> bool:
    """Tell whether these are all the members of one group, in order."""
    first, rows = linears[0], 0
    for linear in linears:
        if not isinstance(linear, GroupLinear) or linear.group_weight is not first.group_weight:
            return False
        if linear.group_start != rows:
            return False
        rows += linear.out_features
    return rows == first.group_rows


def groups_of(
    linears: Sequence[nn.Linear], groups: Iterable[Sequence[nn.Module]], alike: Callable[[nn.Module], Any] = any_kind
) -> list[tuple[nn.Linear, ...]]:
    """Sort linears into groups: those of ``groups`` whose members are all there and alike, and the others singly.

    ``groups`` are disjoint sets of modules that have the same input; one whose members differ in ``alike`` is several.
    """
    groups = [
        [each for each in group if alike(each) == kind] for group in groups for kind in dict.fromkeys(map(alike, group))
    ]
    left = {id(linear): linear for linear in linears}
    sorted_groups: list[tuple[nn.Linear, ...]] = []
    for group in groups:
        members = [left[id(module)] for module in group if id(module) in left]
        if (
            len(members) == len(group) > 1
            and len({(member.in_features, member.bias is None) for member in members}) == 1
            and not any(is_watched(member) for member in members)
        ):
            sorted_groups.append(tuple(members))
            for member in members:
                del left[id(member)]
    return sorted_groups + [(linear,) for linear in left.values()]


def plain_linears(
    model: nn.Module,
    candidates: Iterable[nn.Module],
    device_types: Iterable[str],
    dtype: torch.dtype | None = None,
    *,
    kind: type[nn.Linear] = nn.Linear,
) -> list[nn.Linear]:
    """Return the candidates that are plain linears of a class on such a device, whose weight no other module reads."""
    uses = Counter(parameter.data_ptr() for _, parameter in model.named_parameters(remove_duplicate=False))
    return [
        module
        for module in candidates
        if is_plain(module, kind)
        and module.weight.device.type in device_types
        and dtype in (None, module.weight.dtype)
        and uses[module.weight.data_ptr()] == 1
    ]


def is_plain(module: nn.Module, kind: type[nn.Linear] = nn.Linear) -> TypeGuard[nn.Linear]:
    """Tell whether a module is torch's own: no subclass (quantised, adapters), no forward of its own.

    ``kind`` is another class that it is to be.
    """
    return (
        type(module) is kind
        and "forward" not in module.__dict__
        and type(module._parameters.get("weight")) is nn.Parameter
        and module.weight.is_contiguous()
    )


def is_watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in module.__dict__

"""Linears that read the same input, held together: one product for all of them.

How their weights are held is for the subclasses of ``GroupLinear`` to say: ``packed.py`` and ``narrow.py`` for the CPU,
``merged.py`` for a GPU. ``project`` is what the halves call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeGuard, cast

import torch
from torch import Tensor, nn


class GroupLinear(nn.Linear):
    """A member of a group.

    ``join`` changes the class of a linear in place, as torch's parametrizations and ``fully_shard`` do: the object and
    its names stay, so that ``part`` can undo it.

    Attributes:
        group_weight: What stands for the weights of all, the same object for all members.
        group_bias: Their biases, of which each member's is a view.
        group_start: The member's first row in the group.
        group_rows: Rows of the group.
    """

    group_weight: Tensor
    group_bias: Tensor | None
    group_start: int
    group_rows: int

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
    """A product without a gradient: saying so beats returning none."""

    @staticmethod
    def forward(ctx: Any, product: Callable[..., Tensor], *arguments: Any) -> Tensor:
        return product(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError("prepacked linears have no backward; omniserve.unpatch(model), or patch with prepack=False")


class HeldLinear(GroupLinear):
    """A member whose weight is held in another form, alone or in a group.

    The Parameter keeps shape and dtype but holds NaN without storage behind it, so that reading it cannot go unnoticed;
    ``weight`` and ``state_dict()`` give the dense values. Calling a member of a group computes the whole group and
    throws the rest away; the halves call ``project`` instead.
    """

    def held_product(self) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """Return the operator that computes the products of all members, and its arguments after the input."""
        raise NotImplementedError

    def dense_group(self) -> Tensor:
        """Return a dense copy of the weights of all members, bit for bit the originals."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        product = self.group_product(input)
        if self.group_rows == self.out_features:
            return product
        return product.narrow(-1, self.group_start, self.out_features).contiguous()

    def group_product(self, input: Tensor) -> Tensor:
        product, arguments = self.held_product()
        if torch.is_grad_enabled():
            return _ForwardOnly.apply(product, input, *arguments)
        return product(input, *arguments)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A dense copy of the weight, bit for bit the original."""
        # Never an inference tensor: the copy may become a Parameter's data again.
        with torch.inference_mode(False), torch.no_grad():
            dense = self.dense_group()
            if self.group_rows == self.out_features:
                return dense
            # A clone: a view would keep the other members' rows alive.
            return dense.narrow(0, self.group_start, self.out_features).clone()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("load a state dict")

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            # A clone: savers refuse tensors that share their storage.
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach().clone()


def hide(weight: Tensor) -> None:
    """Release a Parameter's values: NaN of the same shape and dtype, without storage behind it."""
    weight.data = torch.full((), float("nan"), dtype=weight.dtype).expand(weight.shape)


def join(linears: Sequence[nn.Linear], kind: type[GroupLinear], group_weight: Tensor) -> None:
    """Make linears the members of one group, in this order; their weights are the caller's business."""
    biases = [linear.bias.data for linear in linears if linear.bias is not None]
    group_bias = torch.cat(biases) if biases else None
    rows, start = sum(linear.out_features for linear in linears), 0
    for linear in linears:
        linear.__dict__.update(group_weight=group_weight, group_bias=group_bias, group_start=start, group_rows=rows)
        if group_bias is not None:
            linear.bias.data = group_bias.narrow(0, start, linear.out_features)
        start += linear.out_features
        linear.__class__ = kind


def part(linears: Sequence[nn.Linear], weight: Tensor) -> None:
    """Undo ``join``: give each its rows of a dense weight, and what it had before.

    Raises:
        ValueError: They are not all the members of one group, in order.
    """
    if not is_group(linears):
        raise ValueError("give the linears of one group, all of them and in the order in which it was made")
    for linear, rows in zip(linears, weight.split([linear.out_features for linear in linears]), strict=True):
        for name in GroupLinear.__annotations__:
            delattr(linear, name)
        linear.__class__ = nn.Linear
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


def fused(*linears: nn.Module) -> bool:
    """Tell whether ``project`` computes these in one call: one group, and no hook waits for the call of a member."""
    return is_group(linears) and not any(_is_watched(linear) for linear in linears)


def project(x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
    """Return ``linear(x)`` for each; views of one product where the linears are a group."""
    if not fused(*linears):
        return tuple(linear(x) for linear in linears)
    members = cast(tuple[GroupLinear, ...], linears)
    return members[0].group_product(x).split([member.out_features for member in members], dim=-1)


def groups_of(linears: Sequence[nn.Linear], groups: Iterable[Sequence[nn.Module]]) -> list[tuple[nn.Linear, ...]]:
    """Sort linears into groups: those of ``groups`` whose members are all there and alike, and the others singly.

    Args:
        linears: That can be held together, or alone.
        groups: Disjoint sets of modules that are given the same input.
    """
    left = {id(linear): linear for linear in linears}
    sorted_groups: list[tuple[nn.Linear, ...]] = []
    for group in groups:
        members = [left[id(module)] for module in group if id(module) in left]
        if (
            len(members) == len(group) > 1
            and len({(member.in_features, member.bias is None) for member in members}) == 1
            and not any(_is_watched(member) for member in members)
        ):
            sorted_groups.append(tuple(members))
            for member in members:
                del left[id(member)]
    return sorted_groups + [(linear,) for linear in left.values()]


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Tell whether a module is torch's own: no subclass (quantised, adapters), no forward of its own."""
    return (
        type(module) is nn.Linear
        and "forward" not in module.__dict__
        and type(module._parameters.get("weight")) is nn.Parameter
        and module.weight.is_contiguous()
    )


def _is_watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in module.__dict__

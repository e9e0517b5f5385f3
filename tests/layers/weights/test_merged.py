"""Merged linears: one product for a group, each weight a view of one tensor, and everything back as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from omniserve.layers.weights.groups import is_group
from omniserve.layers.weights.merged import MergedLinear, merge, mergeable, unmerge


def _group(*, bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return tuple(  # type: ignore[return-value]
        nn.Linear(40, rows, bias=bias, dtype=dtype).requires_grad_(False) for rows in (33, 17, 5)
    )


@pytest.mark.parametrize("rows", [(1,), (7,), (2, 3)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_group_product_equals_the_linears(rows: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    linears = _group(bias=bias, dtype=dtype)
    x = torch.randn(*rows, 40, dtype=dtype)
    expected = [linear(x) for linear in linears]
    merge(*linears)
    assert is_group(linears)
    tolerance = {"atol": 1e-5, "rtol": 0} if dtype is torch.float32 else {"atol": 1e-3, "rtol": 2**-7}
    together = linears[0].group_product(x).split([linear.out_features for linear in linears], dim=-1)
    for product, linear, want in zip(together, linears, expected, strict=True):
        torch.testing.assert_close(product, want, **tolerance)
        torch.testing.assert_close(linear(x), want, **tolerance)


def test_there_is_one_copy_of_the_weights_and_what_is_written_is_used() -> None:
    linears = _group()
    merge(*linears)
    weight = linears[0].group_weight
    assert isinstance(weight, torch.Tensor) and weight.shape == (55, 40)
    for linear in linears:
        assert linear.weight.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        assert linear.weight.is_contiguous() and linear.group_weight is weight
    x = torch.randn(3, 40)
    before = linears[0].group_product(x).split([33, 17, 5], dim=-1)
    linears[1].load_state_dict({"weight": 2 * linears[1].weight, "bias": 2 * linears[1].bias})
    after = linears[0].group_product(x).split([33, 17, 5], dim=-1)
    assert torch.equal(after[0], before[0]) and torch.equal(after[2], before[2])
    torch.testing.assert_close(after[1], 2 * before[1])


@pytest.mark.parametrize("bias", [False, True])
def test_unmerge_restores_objects_and_bits(bias: bool) -> None:
    linears = _group(bias=bias)
    linears[1].weight.data[0, :3] = torch.tensor([float("inf"), -0.0, 1e-40])
    parameters = [dict(linear.named_parameters()) for linear in linears]
    keys = [set(linear.__dict__) for linear in linears]
    before = [{name: value.clone() for name, value in each.items()} for each in parameters]
    with torch.inference_mode():
        merge(*linears)
        assert all(type(linear) is MergedLinear for linear in linears)
        unmerge(*linears)
    for linear, own, names, expected in zip(linears, parameters, keys, before, strict=True):
        assert type(linear) is nn.Linear and set(linear.__dict__) == names
        for name, value in linear.named_parameters():
            assert value is own[name] and not value.is_inference()
            assert torch.equal(value.view(torch.int32), expected[name].view(torch.int32))
            assert value.untyped_storage().nbytes() == value.nbytes, "each owns its storage again"


def test_unmerge_wants_the_whole_group_in_order() -> None:
    q, k, v = _group()
    merge(q, k, v)
    for wrong in ((q, k), (k, q, v), (q,)):
        with pytest.raises(ValueError, match="in the order"):
            unmerge(*wrong)
    unmerge(q, k, v)


@pytest.mark.parametrize(
    "change",
    [
        lambda linear: linear.half(),
        lambda linear: copy.deepcopy(linear),
        lambda linear: setattr(linear, "weight", nn.Parameter(torch.zeros(33, 40))),
        lambda linear: setattr(linear, "bias", None),
    ],
)
def test_changes_that_would_miss_the_groups_weight_are_refused(change: object) -> None:
    linears = _group()
    merge(*linears)
    assert callable(change)
    with pytest.raises(RuntimeError, match="unpatch"):
        change(linears[0])


def test_a_watched_member_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    linears = _group()
    merge(*linears)
    seen = []
    with linears[1].register_forward_hook(lambda module, inputs, output: seen.append(module)):
        for linear in linears:
            linear(torch.zeros(1, 40))
    assert seen == [linears[1]]


def test_only_plain_unshared_linears_of_a_gpu_are_mergeable(monkeypatch: pytest.MonkeyPatch) -> None:
    class Quantised(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "plain": nn.Linear(8, 8),
            "subclass": Quantised(8, 8),
            "tied": nn.Linear(8, 16, bias=False),
            "embedding": nn.Embedding(16, 8),
            "strided": nn.Linear(8, 8),
            "own_forward": nn.Linear(8, 8),
        }
    )
    model["tied"].weight = model["embedding"].weight
    model["strided"].weight.data = model["strided"].weight.data.t()
    model["own_forward"].forward = model["own_forward"].forward
    assert mergeable(model, model.modules()) == []
    monkeypatch.setattr("omniserve.layers.weights.merged._DEVICES", {"cpu"})
    monkeypatch.setattr("omniserve.layers.weights.packed.HAS_VECTOR_KERNEL", False)
    assert mergeable(model, model.modules()) == [model["plain"]]

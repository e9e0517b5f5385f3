"""Narrow linears: fp32 products from bf16 weights that have every bit, and refusals instead of surprises."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from omniserve.layers import narrow as narrow_module
from omniserve.layers.compiled import compile_halves, structure
from omniserve.layers.groups import is_group
from omniserve.layers.narrow import NarrowLinear, few_rows, narrow, narrowable, widen
from omniserve.layers.patching import patch, unpatch
from tests.ops.tolerances import LINEAR
from tests.parity.models import tiny_model

pytestmark = pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="this CPU has no vector kernel for few rows")

MANY = few_rows(40) + 1
ROWS = [(0,), (1,), (7,), (2, 3), (MANY - 1,), (MANY,), (2, MANY)]


@pytest.fixture(autouse=True)
def a_cpu_without_bf16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_module, "has_products", lambda dtype: dtype is not torch.bfloat16)


def _linear(in_features: int = 40, out_features: int = 24, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(in_features, out_features, bias=bias, dtype=torch.bfloat16).float().requires_grad_(False)


def _group(*, bias: bool = True) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    linears = tuple(_linear(out_features=rows, bias=bias) for rows in (33, 17, 5))
    for sign, linear in zip((1, -1, 2), linears, strict=True):
        linear.weight.data.mul_(sign)
    return linears  # type: ignore[return-value]


def _exact(linear: nn.Linear, x: Tensor) -> Tensor:
    product = x.double() @ linear.weight.double().T
    return product if linear.bias is None else product + linear.bias.double()


def _is_close(got: Tensor, exact: Tensor) -> None:
    assert got.dtype is torch.float32
    rtol, atol = LINEAR[torch.float32]
    torch.testing.assert_close(got.double(), exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_as_exact_as_with_the_fp32_weight(rows: tuple[int, ...], bias: bool) -> None:
    linear = _linear(bias=bias)
    x = torch.randn(*rows, 40)
    exact = _exact(linear, x)
    narrow(linear)
    _is_close(linear(x), exact)


@pytest.mark.parametrize("rows", [3, MANY])
def test_rows_need_not_be_contiguous(rows: int) -> None:
    linear = _linear()
    x = torch.randn(40, rows).T
    exact = _exact(linear, x)
    narrow(linear)
    _is_close(linear(x), exact)


def test_a_weight_larger_than_the_scratch_is_widened_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = _linear(out_features=103)
    x = torch.randn(MANY, 40)
    exact = _exact(linear, x)
    narrow(linear)
    for piece_rows in (7, 103, 1000):
        monkeypatch.setattr(narrow_module, "_PIECE_BYTES", piece_rows * 40 * 4)
        _is_close(linear(x), exact)
    monkeypatch.setattr(narrow_module, "_PIECE_BYTES", 1)  # less than a row
    _is_close(linear(x), exact)


def test_products_alternate_between_inference_mode_and_none() -> None:
    linear = _linear()
    narrow(linear)
    x = torch.randn(MANY, 40)
    with torch.inference_mode():
        inside = linear(x)
    with torch.no_grad():
        outside = linear(x)
    assert torch.equal(inside, outside)


@pytest.mark.parametrize("bias", [False, True])
def test_op_is_registered_soundly(bias: bool) -> None:
    linear = _linear(bias=bias)
    narrow(linear)
    for rows in (5, MANY):
        arguments = (torch.randn(rows, 40), linear.group_weight, linear.group_bias)
        torch.library.opcheck(torch.ops.omniserve.narrow_linear.default, arguments)


def test_the_weight_takes_two_bytes_a_value_and_no_more() -> None:
    linear = _linear(512, 512)
    parameter, before = linear.weight, weakref.ref(linear.weight.untyped_storage())
    narrow(linear)
    gc.collect()
    assert before() is None or before() is not parameter.untyped_storage()
    assert isinstance(linear, NarrowLinear) and linear.group_weight.dtype is torch.bfloat16
    assert parameter.untyped_storage().nbytes() == parameter.itemsize
    assert parameter.shape == (512, 512) and bool(parameter.isnan().all())


@pytest.mark.parametrize("bias", [False, True])
def test_a_group_keeps_and_restores_the_bits_of_every_member(bias: bool) -> None:
    linears = _group(bias=bias)
    odd = torch.tensor([0x7F810000, -0x80000000, 0x00010000, 0x7F800000], dtype=torch.int32)  # a NaN, -0, 9e-41, inf
    linears[1].weight.data[0, :4] = odd.view(torch.float32)
    parameters = [dict(linear.named_parameters()) for linear in linears]
    keys = [set(linear.__dict__) for linear in linears]
    before = [{key: value.clone() for key, value in each.items()} for each in parameters]

    def assert_unchanged(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        assert tensors.keys() == expected.keys()
        for key, value in tensors.items():
            assert value.dtype is torch.float32
            assert torch.equal(value.view(torch.int32), expected[key].view(torch.int32))
            assert value.untyped_storage().nbytes() == value.nbytes  # a slice of the group would not be its own

    with torch.inference_mode():
        narrow(*linears)
    for linear, expected in zip(linears, before, strict=True):
        assert_unchanged(linear.state_dict(), expected)
        assert torch.equal(linear.weight.view(torch.int32), expected["weight"].view(torch.int32))
    with torch.inference_mode():
        widen(*linears)
    for linear, own, names, expected in zip(linears, parameters, keys, before, strict=True):
        assert type(linear) is nn.Linear and set(linear.__dict__) == names
        assert all(parameter is own[name] for name, parameter in linear.named_parameters())
        assert_unchanged(own, expected)
        assert not any(parameter.is_inference() for parameter in own.values())


def test_a_group_shares_one_weight() -> None:
    linears = _group()
    x = torch.randn(3, 40)
    exact = [_exact(linear, x) for linear in linears]
    narrow(*linears)
    assert is_group(linears) and len({linear.group_weight.data_ptr() for linear in linears}) == 1
    for linear, expected in zip(linears, exact, strict=True):
        _is_close(linear(x), expected)


def test_a_group_is_widened_only_as_a_whole_and_in_order() -> None:
    q, k, v = _group()
    narrow(q, k, v)
    for wrong in [(q,), (q, k), (k, v), (q, v, k)]:
        with pytest.raises(ValueError, match="in the order"):
            widen(*wrong)
    widen(q, k, v)


def test_a_weight_that_bf16_would_round_is_left_alone() -> None:
    linear = _linear()
    linear.weight.data[3, 5] = 1 + 2**-8  # nine bits
    before = linear.weight.clone()
    assert narrowable(linear, [linear]) == []
    with pytest.raises(ValueError, match="round"):
        narrow(linear)
    assert type(linear) is nn.Linear and torch.equal(linear.weight, before)


def test_only_plain_unshared_exact_fp32_linears_are_narrowable(monkeypatch: pytest.MonkeyPatch) -> None:
    class Quantised(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "plain": _linear(),
            "bf16": _linear().bfloat16(),
            "fp32 values": nn.Linear(8, 8),
            "subclass": Quantised(8, 8, dtype=torch.bfloat16).float(),
            "tied": _linear(8, 16, bias=False),
            "embedding": nn.Embedding(16, 8),
        }
    )
    model["tied"].weight = model["embedding"].weight
    with torch.no_grad():
        model["embedding"].weight.fill_(1)
    assert narrowable(model, model.modules()) == [model["plain"]]
    monkeypatch.setattr(narrow_module, "has_products", lambda dtype: True)
    assert narrowable(model, model.modules()) == []


def test_gradients_are_refused_and_not_lost() -> None:
    linear = _linear()
    narrow(linear)
    x = torch.randn(2, 40, requires_grad=True)
    with pytest.raises(RuntimeError, match="no backward"):
        linear(x).sum().backward()


@pytest.mark.parametrize(
    "change",
    [
        lambda linear: linear.bfloat16(),
        lambda linear: copy.deepcopy(linear),
        lambda linear: linear.load_state_dict(linear.state_dict()),
        lambda linear: setattr(linear, "weight", nn.Parameter(torch.zeros(24, 40))),
        lambda linear: linear._parameters["weight"].mul_(2),
    ],
)
def test_changes_that_would_miss_the_narrow_weight_are_refused(change: object) -> None:
    linear = _linear()
    narrow(linear)
    assert callable(change)
    with pytest.raises(RuntimeError, match=r"unpatch|single memory location"):
        change(linear)


def test_one_graph_takes_any_number_of_rows_and_another_linear_of_the_same_shape() -> None:
    first, second = nn.ModuleList(_group()), nn.ModuleList(_group())
    for linear in second:
        linear.weight.data.neg_()
    narrow(*first)
    narrow(*second)
    assert structure(first) == structure(second)

    def half(layer: nn.ModuleList, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear(x) for linear in layer)

    with torch.inference_mode():
        halves = compile_halves(half, [(first,), (second,)], "products")
        for layer, compiled in zip((first, second), halves, strict=True):
            for rows in (1, 5, MANY):
                x = torch.randn(rows, 40)
                for result, linear in zip(compiled(x), layer, strict=True):
                    assert torch.equal(result, linear(x))


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_patch_narrows_a_bf16_checkpoint_in_fp32_and_unpatch_restores_its_bits(family: str) -> None:
    model = tiny_model(family, torch.bfloat16).float()
    before = {name: (value, value.detach().clone()) for name, value in model.named_parameters()}
    ids = torch.arange(1, 9)[None]
    with torch.inference_mode():
        expected = model(ids).logits
    patch(model, compile=False)
    linears = [
        module for layer in model.omniserve.family.layers for module in layer.modules() if type(module) is nn.Linear
    ]
    assert not linears, "a linear of a layer was left as it is"
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name][1]) if name in before else True
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)  # fp32 sums in another order
    unpatch(model)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter.view(torch.int32), before[name][1].view(torch.int32))
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, expected)

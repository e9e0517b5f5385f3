"""Prepacked linears: the op, the values, one copy of the weight, and refusals instead of surprises."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

from omniserve.layers import packed
from omniserve.layers.compiled import ShareProducts, compile_halves, structure
from omniserve.layers.groups import groups_of, is_group
from omniserve.layers.packed import PackedLinear, pack, packable, unpack
from omniserve.layers.patching import patch
from tests.parity.models import tiny_model
from tests.quick import slow_except

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bf16 on this CPU"
)


def _linear(in_features: int = 40, out_features: int = 24, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(in_features, out_features, bias=bias, dtype=torch.bfloat16).requires_grad_(False)


@pytest.mark.parametrize("rows", [(1,), (7,), (2, 3), (64,)])
@pytest.mark.parametrize("bias", [False, True])
def test_product_equals_the_dense_linear(rows: tuple[int, ...], bias: bool) -> None:
    linear = _linear(bias=bias)
    x = torch.randn(*rows, 40, dtype=torch.bfloat16)
    expected = linear(x)
    pack(linear)
    # Both accumulate 40 products in fp32; only their order may differ, so the results are at most one bf16 step apart.
    torch.testing.assert_close(linear(x), expected, atol=1e-3, rtol=2**-7)


@pytest.mark.parametrize("bias", [False, True])
def test_op_is_registered_soundly(bias: bool) -> None:
    linear = _linear(bias=bias)
    pack(linear)
    x = torch.randn(5, 40, dtype=torch.bfloat16)
    torch.library.opcheck(
        torch.ops.omniserve.packed_linear.default, (x, linear.group_weight, linear.bias, linear.out_features)
    )


def test_only_one_copy_of_the_weight_exists() -> None:
    linear = _linear(512, 512)
    parameter = linear.weight
    pack(linear)
    assert isinstance(linear, PackedLinear)
    assert parameter.untyped_storage().nbytes() == parameter.itemsize
    assert parameter.shape == (512, 512) and bool(parameter.isnan().all())


def test_unpack_restores_the_object_and_the_bits() -> None:
    linear = _linear(33, 17)
    parameter, keys = linear.weight, set(linear.__dict__)
    with torch.no_grad():
        parameter[0, :3] = torch.tensor([float("inf"), -0.0, 1e-40])
    before = parameter.clone()
    table_size = len(packed._TABLE)
    with torch.inference_mode():  # the engine's mode must not turn the Parameter into an inference tensor
        pack(linear)
        unpack(linear)
    assert type(linear) is nn.Linear and linear.weight is parameter and set(linear.__dict__) == keys
    assert torch.equal(parameter.view(torch.int16), before.view(torch.int16))
    assert parameter.is_contiguous() and not parameter.is_inference()
    assert len(packed._TABLE) == table_size


def test_a_dropped_module_takes_its_packed_weight_along() -> None:
    linear = _linear()
    pack(linear)
    handle = int(linear.group_weight)
    assert handle in packed._TABLE
    del linear
    gc.collect()
    assert handle not in packed._TABLE


def test_only_plain_unshared_bf16_linears_are_packable() -> None:
    class Quantised(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "plain": _linear(),
            "fp32": nn.Linear(8, 8),
            "subclass": Quantised(8, 8, dtype=torch.bfloat16),
            "tied": nn.Linear(8, 16, bias=False, dtype=torch.bfloat16),
            "embedding": nn.Embedding(16, 8, dtype=torch.bfloat16),
        }
    )
    model["tied"].weight = model["embedding"].weight
    assert packable(model, model.modules()) == [model["plain"]]


def test_gradients_are_refused_and_not_lost() -> None:
    linear = _linear()
    pack(linear)
    x = torch.randn(2, 40, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RuntimeError, match="no backward"):
        linear(x).sum().backward()


@pytest.mark.parametrize(
    "change",
    [
        lambda linear: linear.float(),
        lambda linear: copy.deepcopy(linear),
        lambda linear: linear.load_state_dict(linear.state_dict()),
        lambda linear: setattr(linear, "weight", nn.Parameter(torch.zeros(24, 40))),
    ],
)
def test_changes_that_would_miss_the_packed_weight_are_refused(change: object) -> None:
    linear = _linear()
    pack(linear)
    assert callable(change)
    with pytest.raises(RuntimeError, match="unpatch"):
        change(linear)


def test_compiled_graph_takes_another_linear_of_the_same_shape() -> None:
    first, second = _linear(), _linear()
    with torch.no_grad():
        second.weight.neg_()
    for linear in (first, second):
        pack(linear)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(linear: nn.Module, x: Tensor) -> Tensor:
        return linear(x)

    x = torch.randn(3, 40, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(run(first, x), first(x))
        assert torch.equal(run(second, x), second(x))


def _group(*, bias: bool = True) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    """Three linears of one input, of different heights that are no multiples of oneDNN's blocks."""
    linears = tuple(_linear(out_features=rows, bias=bias) for rows in (33, 17, 5))
    for sign, linear in zip((1, -1, 2), linears, strict=True):
        linear.weight.data.mul_(sign)
    return linears  # type: ignore[return-value]


@pytest.mark.parametrize("rows", [(1,), (7,), (2, 3)])
@pytest.mark.parametrize("bias", [False, True])
def test_group_product_equals_the_dense_linears(rows: tuple[int, ...], bias: bool) -> None:
    linears = _group(bias=bias)
    x = torch.randn(*rows, 40, dtype=torch.bfloat16)
    expected = [linear(x) for linear in linears]
    pack(*linears)
    assert is_group(linears)
    for linear, dense in zip(linears, expected, strict=True):
        product = linear(x)
        torch.testing.assert_close(product, dense, atol=1e-3, rtol=2**-7)  # as above
        assert product.is_contiguous()


def test_a_group_is_one_copy_of_the_weights() -> None:
    linears = _group()
    parameters, table_size = [linear.weight for linear in linears], len(packed._TABLE)
    pack(*linears)
    assert len(packed._TABLE) == table_size + 1
    assert all(parameter.untyped_storage().nbytes() == parameter.itemsize for parameter in parameters)


def test_members_share_the_product_of_an_input_while_it_lives_and_is_not_changed() -> None:
    linears = _group()
    pack(*linears)
    x = torch.randn(3, 40, dtype=torch.bfloat16)
    products: list[int] = []
    original = PackedLinear.group_product
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(PackedLinear, "group_product", lambda self, x: products.append(1) or original(self, x))
        together = [linear(x) for linear in linears]
        assert len(products) == 1
        for linear, product in zip(linears, together, strict=True):
            again = linear(x.clone())
            assert torch.equal(product, again) and linear.group_last._last is None
        assert torch.equal(linears[0](x), together[0])
        x.mul_(2)
        assert torch.equal(linears[1](x), linears[1](x.clone())), "a changed input has another product"
    assert linears[0](x.requires_grad_()).requires_grad, "nothing is kept where gradients are wanted"


@pytest.mark.parametrize("bias", [False, True])
def test_a_group_keeps_and_restores_the_bits_of_every_member(bias: bool) -> None:
    linears = _group(bias=bias)
    linears[1].weight.data[0, :3] = torch.tensor([float("inf"), -0.0, 1e-40])
    parameters = [dict(linear.named_parameters()) for linear in linears]
    keys = [set(linear.__dict__) for linear in linears]
    before = [{key: value.clone() for key, value in each.items()} for each in parameters]
    table_size = len(packed._TABLE)

    def assert_unchanged(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        assert tensors.keys() == expected.keys()
        for key, value in tensors.items():
            assert torch.equal(value.view(torch.int16), expected[key].view(torch.int16))
            assert value.untyped_storage().nbytes() == value.nbytes  # a slice of the group would not be its own

    with torch.inference_mode():
        pack(*linears)
    for linear, expected in zip(linears, before, strict=True):
        assert_unchanged(linear.state_dict(), expected)
        assert torch.equal(linear.weight.view(torch.int16), expected["weight"].view(torch.int16))
    with torch.inference_mode():
        unpack(*linears)
    for linear, own, names, expected in zip(linears, parameters, keys, before, strict=True):
        assert type(linear) is nn.Linear and set(linear.__dict__) == names
        assert all(parameter is own[name] for name, parameter in linear.named_parameters())
        assert_unchanged(own, expected)
        assert not any(parameter.is_inference() for parameter in own.values())
    assert len(packed._TABLE) == table_size


def test_a_group_is_unpacked_only_as_a_whole_and_in_order() -> None:
    q, k, v = _group()
    pack(q, k, v)
    for wrong in [(q,), (q, k), (k, v), (q, v, k)]:
        assert not is_group(wrong)
        with pytest.raises(ValueError, match="in the order"):
            unpack(*wrong)
    unpack(q, k, v)


def test_a_hooked_member_is_called() -> None:
    linears = _group()
    pack(*linears)
    x = torch.randn(3, 40, dtype=torch.bfloat16)
    expected = [linear(x) for linear in linears]
    with linears[1].register_forward_hook(lambda module, inputs, output: output + 1):
        results = [linear(x) for linear in linears]
    assert torch.equal(results[1], expected[1] + 1) and torch.equal(results[2], expected[2])
    linears[2].forward = lambda x: torch.zeros(1)  # type: ignore[method-assign]
    assert torch.equal(linears[2](x), torch.zeros(1))


def test_a_group_lives_as_long_as_any_member() -> None:
    members = list(_group())
    pack(*members)
    handle = int(members[0].group_weight)
    del members[:2]
    gc.collect()
    x = torch.randn(2, 40, dtype=torch.bfloat16)
    assert members[0](x).shape == (2, 5)
    members.clear()
    gc.collect()
    assert handle not in packed._TABLE


def test_only_whole_groups_of_one_kind_are_formed() -> None:
    q, k, v = _group()
    bare, narrow, hooked = _linear(bias=False), _linear(8), _linear()
    hooked.register_forward_hook(lambda module, inputs, output: None)
    everything = [q, k, v, bare, narrow, hooked]
    assert groups_of(everything, [(q, k, v)])[0] == (q, k, v)
    singles = [(linear,) for linear in everything]
    for group in [(q, bare), (q, narrow), (q, hooked), (q, nn.ReLU())]:
        assert groups_of(everything, [group]) == singles


def test_layers_whose_linears_are_grouped_differently_get_graphs_of_their_own() -> None:
    grouped, other, singles = (nn.ModuleList(_group()) for _ in range(3))
    pack(*grouped)
    pack(*other)
    for linear in singles:
        pack(linear)
    assert structure(grouped) == structure(other) != structure(singles)
    x = torch.randn(3, 40, dtype=torch.bfloat16)
    other[0].bias.data.add_(1)  # the group's bias is the members'

    def half(layer: nn.ModuleList, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear(x) for linear in layer)

    layers = [grouped, other, singles]
    with torch.inference_mode():
        for layer, compiled in zip(
            layers, compile_halves(half, [(layer,) for layer in layers], "products"), strict=True
        ):
            for result, linear in zip(compiled(x), layer, strict=True):
                assert torch.equal(result, linear(x))


@pytest.mark.parametrize("name", slow_except(("llama",), ("llama", "gemma2", "opt", "phi3", "gpt_neox")))
def test_a_layer_has_four_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[int] = []
    original = ShareProducts.__call__

    def counting(share: ShareProducts, graph: torch.fx.Graph) -> None:
        original(share, graph)
        products.append(sum(node.target is torch.ops.omniserve.packed_linear.default for node in graph.nodes))

    monkeypatch.setattr(ShareProducts, "__call__", counting)
    with fresh_cache():
        patch(tiny_model(name, torch.bfloat16)).omniserve.warm_up()
    assert products == [1, 3]

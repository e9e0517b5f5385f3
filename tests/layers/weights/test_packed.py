"""Prepacked linears: the op, the values, one copy of the weight, and refusals instead of surprises."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from omniserve.layers import compile_cache
from omniserve.layers.compiled import ShareProducts, compile_halves, structure
from omniserve.layers.patching import patch, unpatch
from omniserve.layers.weights.groups import groups_of, is_group
from omniserve.layers.weights.packed import (
    PackedEmbedding,
    PackedLinear,
    holds_bfloat16,
    pack,
    pack_tied,
    packable,
    tied_embedding,
    unpack,
)
from tests.ops.tolerances import LINEAR
from tests.parity.models import tiny_model
from tests.quick import slow_except

# Asked of torch and not of the module under test: if that one forgets its kernel, these tests must fail.
pytestmark = pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="this CPU has no vector kernel")

FORMS = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "fp32 of bf16": (torch.bfloat16, torch.float32),
}
"""name: (dtype in which the weights are drawn, the linear's)."""


def _linear(in_features: int = 40, out_features: int = 24, *, bias: bool = True, form: str = "bf16") -> nn.Linear:
    torch.manual_seed(0)
    drawn, dtype = FORMS[form]
    return nn.Linear(in_features, out_features, bias=bias, dtype=drawn).to(dtype).requires_grad_(False)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


@pytest.mark.parametrize("rows", [(0,), (1,), (7,), (2, 3), (64,)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_product_equals_the_dense_linear(rows: tuple[int, ...], bias: bool, form: str) -> None:
    linear = _linear(bias=bias, form=form)
    x = torch.randn(*rows, 40).to(linear.weight.dtype)
    exact = x.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    pack(linear)
    product = linear(x)
    assert product.dtype is x.dtype
    rtol, atol = LINEAR[x.dtype]
    torch.testing.assert_close(product.double(), exact, rtol=rtol, atol=atol)


def test_rows_need_not_be_contiguous() -> None:
    linear = _linear()
    x = torch.randn(40, 3, dtype=torch.bfloat16).T
    pack(linear)
    assert torch.equal(linear(x), linear(x.contiguous()))


@pytest.mark.parametrize("form", FORMS)
def test_only_weights_with_values_of_bf16_take_two_bytes(form: str) -> None:
    linear = _linear(512, 512, form=form)
    pack(linear)
    assert linear.group_weight.itemsize == (4 if form == "fp32" else 2)
    other = _linear(form="fp32 of bf16")
    other.weight.data[3, 5] = 1 + 2**-8  # nine bits
    pack(other)
    assert other.group_weight.dtype is torch.float32


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
    with torch.inference_mode():  # the engine's mode must not turn the Parameter into an inference tensor
        pack(linear)
        unpack(linear)
    assert type(linear) is nn.Linear and linear.weight is parameter and set(linear.__dict__) == keys
    assert torch.equal(parameter.view(torch.int16), before.view(torch.int16))
    assert parameter.is_contiguous() and not parameter.is_inference()


def test_a_dropped_module_takes_its_packed_weight_along() -> None:
    linear = _linear()
    pack(linear)
    weight = weakref.ref(linear.group_weight)
    del linear
    assert weight() is None


def test_only_plain_unshared_linears_are_packable() -> None:
    class Quantised(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "plain": _linear(),
            "fp32": nn.Linear(8, 8),
            "float64": nn.Linear(8, 8, dtype=torch.float64),
            "subclass": Quantised(8, 8, dtype=torch.bfloat16),
            "tied": nn.Linear(8, 16, bias=False, dtype=torch.bfloat16),
            "embedding": nn.Embedding(16, 8, dtype=torch.bfloat16),
        }
    )
    model["tied"].weight = model["embedding"].weight
    assert packable(model, model.modules()) == [model["plain"], model["fp32"]]


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


def _group(*, bias: bool = True, form: str = "bf16") -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    """Three linears of one input, of different heights that are no multiples of a panel's."""
    linears = tuple(_linear(out_features=rows, bias=bias, form=form) for rows in (33, 17, 5))
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
    parameters = [linear.weight for linear in linears]
    pack(*linears)
    assert len({linear.group_weight.data_ptr() for linear in linears}) == 1
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
@pytest.mark.parametrize("form", FORMS)
def test_a_group_keeps_and_restores_the_bits_of_every_member(bias: bool, form: str) -> None:
    linears = _group(bias=bias, form=form)
    odd = torch.tensor([0x7F810000, -0x80000000, 0x00010000, 0x7F800000], dtype=torch.int32)  # a NaN, -0, 9e-41, inf
    if form == "fp16":
        odd = torch.tensor([0x7E017C01, -0x80000000, 0x00010000], dtype=torch.int32)
    values = odd.view(torch.float32)
    if form == "bf16":
        values = odd.view(torch.bfloat16)
    elif form == "fp16":
        values = odd.view(torch.float16)
    _bits(linears[1].weight.data)[0, : len(values)] = _bits(values)
    parameters = [dict(linear.named_parameters()) for linear in linears]
    keys = [set(linear.__dict__) for linear in linears]
    before = [{key: value.clone() for key, value in each.items()} for each in parameters]

    def assert_unchanged(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        assert tensors.keys() == expected.keys()
        for key, value in tensors.items():
            assert value.dtype is expected[key].dtype and torch.equal(_bits(value), _bits(expected[key]))
            assert value.untyped_storage().nbytes() == value.nbytes  # a slice of the group would not be its own

    with torch.inference_mode():
        pack(*linears)
    for linear, expected in zip(linears, before, strict=True):
        assert_unchanged(linear.state_dict(), expected)
        assert torch.equal(_bits(linear.weight), _bits(expected["weight"]))
    with torch.inference_mode():
        unpack(*linears)
    for linear, own, names, expected in zip(linears, parameters, keys, before, strict=True):
        assert type(linear) is nn.Linear and set(linear.__dict__) == names
        assert all(parameter is own[name] for name, parameter in linear.named_parameters())
        assert_unchanged(own, expected)
        assert not any(parameter.is_inference() for parameter in own.values())


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
    weight = weakref.ref(members[0].group_weight)
    del members[:2]
    x = torch.randn(2, 40, dtype=torch.bfloat16)
    assert members[0](x).shape == (2, 5)
    members.clear()
    assert weight() is None


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
def test_a_layer_has_four_products(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[int] = []
    original = ShareProducts.__call__

    def counting(share: ShareProducts, graph: torch.fx.Graph) -> None:
        original(share, graph)
        products.append(sum(node.target is torch.ops.omniserve.packed_linear.default for node in graph.nodes))

    monkeypatch.setattr(ShareProducts, "__call__", counting)
    monkeypatch.setattr(compile_cache, "_folder", lambda: tmp_path)
    # No graph is taken from a cache, but its kernels may be: a compiler takes seconds for each.
    settings = (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    )
    with settings[0], settings[1]:
        patch(tiny_model(name, torch.bfloat16)).omniserve.warm_up()
    assert products == [1, 3]


def test_one_graph_takes_any_number_of_rows_and_another_group_of_the_same_shape() -> None:
    first, second = nn.ModuleList(_group(form="fp32 of bf16")), nn.ModuleList(_group(form="fp32 of bf16"))
    for linear in second:
        linear.weight.data.neg_()
    pack(*first)
    pack(*second)
    assert structure(first) == structure(second)

    def half(layer: nn.ModuleList, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear(x) for linear in layer)

    with torch.inference_mode():
        halves = compile_halves(half, [(first,), (second,)], "products")
        for layer, compiled in zip((first, second), halves, strict=True):
            for rows in (1, 5, 300):
                x = torch.randn(rows, 40)
                for result, linear in zip(compiled(x), layer, strict=True):
                    assert torch.equal(result, linear(x))


class _Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * torch.tensor(3.0).to(self.weight.dtype)


class _OwnLookup(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return self.weight[input]


def _tied(kind: type[nn.Embedding] = nn.Embedding, form: str = "bf16") -> nn.ModuleDict:
    head = _linear(40, 70, bias=False, form=form)
    embedding = kind(70, 40, dtype=head.weight.dtype)
    embedding.weight = head.weight
    return nn.ModuleDict({"embedding": embedding, "head": head})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [nn.Embedding, _Scaled])
def test_a_tied_embedding_looks_up_rows_of_the_packed_head(kind: type[nn.Embedding], form: str) -> None:
    model = _tied(kind, form)
    head, embedding = model["head"], model["embedding"]
    weight, before = head.weight, head.weight.clone()
    ids = torch.randint(70, (3, 5))
    expected = embedding(ids)
    assert tied_embedding(model, head, embedding) is embedding
    assert pack_tied(head, embedding)
    assert isinstance(embedding, (PackedEmbedding, kind)) and isinstance(head, PackedLinear)
    assert torch.equal(embedding(ids), expected)
    assert weight.untyped_storage().nbytes() == weight.itemsize, "a dense copy is left"
    for name in ("embedding", "head"):
        assert torch.equal(model[name].state_dict()["weight"], before)
    for change in (lambda: embedding.float(), lambda: copy.deepcopy(embedding), lambda: embedding.load_state_dict({})):
        with pytest.raises(RuntimeError, match="unpatch"):
            change()
    unpack(head, embedding=embedding)
    assert type(embedding) is kind and "group_weight" not in embedding.__dict__
    assert embedding.weight is head.weight is weight and torch.equal(_bits(weight), _bits(before))


def test_an_embedding_with_a_lookup_of_its_own_stays_dense() -> None:
    model = _tied(_OwnLookup)
    head, embedding, before = model["head"], model["embedding"], model["head"].weight.clone()
    assert not pack_tied(head, embedding)
    assert type(embedding) is _OwnLookup and type(head) is nn.Linear and torch.equal(head.weight, before)


def test_an_embedding_is_packed_only_with_a_head_that_alone_shares_its_weight() -> None:
    model = _tied()
    head, embedding = model["head"], model["embedding"]
    assert tied_embedding(model, head, nn.Embedding(70, 40)) is None
    model["third"] = nn.Linear(40, 70, bias=False)
    model["third"].weight = head.weight
    assert tied_embedding(model, head, embedding) is None
    del model["third"]
    with embedding.register_forward_hook(lambda module, inputs, output: output + 1):
        assert tied_embedding(model, head, embedding) is None
    embedding.max_norm = 1.0
    assert tied_embedding(model, head, embedding) is None


@pytest.mark.parametrize("name", slow_except(("llama",), ("llama", "gemma2")))
def test_patch_packs_a_tied_head_and_unpatch_restores_it(name: str) -> None:
    model = tiny_model(name, torch.bfloat16, tie_word_embeddings=True)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    kind, weight, before = type(embedding), embedding.weight, embedding.weight.detach().clone()
    ids = torch.arange(1, 9)[None]
    with torch.inference_mode():
        expected = embedding(ids)
        patch(model, compile=False)
        assert isinstance(head, PackedLinear) and isinstance(embedding, PackedEmbedding)
        assert torch.equal(embedding(ids), expected)
    unpatch(model)
    assert type(embedding) is kind and type(head) is nn.Linear
    assert embedding.weight is head.weight is weight and torch.equal(weight, before)


def test_a_parametrised_linear_is_no_plain_one() -> None:
    model = nn.ModuleList([weight_norm(_linear(form="fp32 of bf16"))])
    assert packable(model, model.modules()) == [] and not holds_bfloat16(model)


def test_fp32_linears_that_are_held_in_bf16_are_known_before_and_after() -> None:
    for form, expected in (("fp32", False), ("fp32 of bf16", True), ("bf16", False)):
        linear = nn.ModuleList([_linear(form=form)])
        assert holds_bfloat16(linear) is expected
        pack(*linear)
        assert holds_bfloat16(linear) is expected

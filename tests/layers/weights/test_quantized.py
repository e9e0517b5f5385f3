"""Linears and embeddings held as codes: values, bytes, what stays dense, refusals, and the way back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from omniserve.layers.patching import patch, unpatch
from omniserve.layers.weights.groups import groups_of, is_group
from omniserve.layers.weights.packed import PackedEmbedding, PackedLinear, pack, tied_embedding
from omniserve.layers.weights.quantized import dense_of, remember, remembered, still_quantized
from omniserve.layers.weights.quantized_modules import (
    QuantizedEmbedding,
    QuantizedLinear,
    hold,
    hold_embedding,
    hold_tied,
    kind_of,
    quantizable,
    release,
    release_embedding,
)
from tests.parity.formats import CODES, give_codes, of_codes, random_codes
from tests.parity.models import tiny_model
from tests.quick import slow_except

has_vectors = pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="this CPU has no vector kernel")

# A code, and the scales of its group: two bytes for each 32, eight bytes for each 24. Of K in memory: two scales for a
# block of 256, two bytes for each 32; or a scale, and a byte for each 16.
BITS_OF_A_WEIGHT = {
    "Q4_0": 4.5, "Q4_1": 5, "Q5_0": 5.5, "Q5_1": 6, "Q8_0": 8.5, "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625,
    "4 bits": 6, "4 bits affine": 4 + 64 / 24, "8 bits": 8 + 32 / 1024, "8 bits affine": 8.5,
}  # fmt: skip


def _linear(
    form: str = "Q4_0", num_in: int = 512, num_out: int = 45, *, bias: bool = True, dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> nn.Linear:  # fmt: skip
    torch.manual_seed(seed)
    linear = nn.Linear(num_in, num_out, bias=bias, dtype=dtype).requires_grad_(False)
    give_codes(linear, CODES[form], seed=seed)
    return linear


def _packed(linear: nn.Linear) -> nn.Linear:
    dense = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, dtype=linear.weight.dtype)
    dense.load_state_dict(linear.state_dict())
    pack(dense.requires_grad_(False))
    return dense


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


class _Before:
    """What modules were before they were held; ``assert_restored`` compares them."""

    def __init__(self, *modules: nn.Module) -> None:
        self._modules = modules
        self._own = [(type(module), set(module.__dict__), dict(module.named_parameters())) for module in modules]
        self._values = [{name: p.detach().clone() for name, p in module.named_parameters()} for module in modules]

    def assert_saved(self) -> None:
        """Assert that ``state_dict`` gives the values of before, each with a storage of its own."""
        for module, values in zip(self._modules, self._values, strict=True):
            state = module.state_dict()
            assert state.keys() == values.keys()
            for name, value in state.items():
                assert value.dtype is values[name].dtype and torch.equal(_bits(value), _bits(values[name]))
                assert value.untyped_storage().nbytes() == value.nbytes

    def assert_restored(self) -> None:
        for module, (kind, names, parameters), values in zip(self._modules, self._own, self._values, strict=True):
            assert type(module) is kind and set(module.__dict__) == names
            for name, parameter in module.named_parameters():
                assert parameter is parameters[name] and not parameter.is_inference()
                assert torch.equal(_bits(parameter.detach()), _bits(values[name]))
                assert parameter.is_contiguous() and parameter.untyped_storage().nbytes() == parameter.nbytes


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", CODES)
def test_fp32_product_has_the_bits_of_the_dense_weight(form: str, bias: bool) -> None:
    linear = _linear(form, bias=bias)
    dense = _packed(linear)
    assert hold(linear) and isinstance(linear, QuantizedLinear)
    for shape in ((0,), (1,), (2, 3), (40,)):
        x = torch.randn(*shape, 512)
        assert torch.equal(linear(x), dense(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", CODES)
def test_release_restores_the_object_and_the_bits(form: str, dtype: torch.dtype) -> None:
    linear = _linear(form, 513 if form == "8 bits" else 512, 33, dtype=dtype)
    before = _Before(linear)
    with torch.inference_mode():  # the engine's mode must not turn the Parameter into an inference tensor
        assert hold(linear)
    before.assert_saved()
    with torch.inference_mode():
        release(linear)
    before.assert_restored()
    assert kind_of(linear) == (CODES[form], None)
    assert hold(linear), "it can be held again"


@pytest.mark.parametrize("form", ["4 bits", "8 bits affine"])
def test_codes_in_another_order_of_inputs_multiply_the_columns_in_that_order(form: str) -> None:
    orders = [torch.randperm(512, generator=torch.Generator().manual_seed(seed)).int() for seed in (0, 0, 1)]
    trio = nn.ModuleList([_linear(num_out=33 + row, bias=True) for row in range(3)])
    for linear, order in zip(trio, orders, strict=True):
        give_codes(linear, CODES[form], seed=linear.out_features, order=order)
    whole, before = [_packed(linear) for linear in trio], _Before(*trio)
    ordered = [copy.deepcopy(linear) for linear in trio]
    for linear, order in zip(ordered, orders, strict=True):
        linear.weight.data = linear.weight.detach()[:, order.long()]
    products = [_packed(linear) for linear in ordered]
    made = groups_of(quantizable(trio, trio.modules()), [list(trio)], kind_of)
    assert sorted(map(len, made)) == [1, 2]
    with torch.inference_mode():
        assert all([hold(*group) for group in made])
    for linear, other, product, order in zip(trio, whole, products, orders, strict=True):
        for shape in ((0,), (1,), (2, 3), (40,)):
            x = torch.randn(*shape, 512)
            assert torch.equal(linear(x), product(x[..., order.long()]))
            torch.testing.assert_close(linear(x), other(x), rtol=1e-5, atol=1e-5)
    before.assert_saved()
    for group in made:
        release(*group)
    before.assert_restored()


def test_an_embedding_does_not_look_its_rows_up_in_codes_of_another_order() -> None:
    tied = _tied()
    give_codes(tied.head, CODES["4 bits"], order=torch.arange(512).flip(0).int())
    assert not hold_tied(tied.head, tied.embedding) and type(tied.head) is nn.Linear


@pytest.mark.parametrize("form", CODES)
def test_only_the_codes_are_held(form: str) -> None:
    linear = _linear(form, 3072, 64)
    parameter = linear._parameters["weight"]
    assert parameter is not None
    hold(linear)
    assert linear.group_weight.nbytes * 8 == BITS_OF_A_WEIGHT[form] * 64 * 3072
    assert parameter.untyped_storage().nbytes() == parameter.itemsize
    assert parameter.shape == (64, 3072) and bool(parameter.isnan().all())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["Q4_K", "Q6_K", "Q5_1", "4 bits"])
def test_a_group_of_one_form_is_one_weight(form: str, bias: bool) -> None:
    linears = [_linear(form, num_out=rows, bias=bias, seed=rows) for rows in (33, 17, 5)]
    dense, before = [_packed(linear) for linear in linears], _Before(*linears)
    with torch.inference_mode():
        assert hold(*linears)
    assert is_group(linears) and len({linear.group_weight.data_ptr() for linear in linears}) == 1
    x = torch.randn(3, 512)
    for linear, other in zip(linears, dense, strict=True):
        assert torch.equal(linear(x), other(x)) and linear(x).is_contiguous()
        assert torch.equal(linear(x[:1]), other(x[:1]))
    before.assert_saved()
    for wrong in (linears[:1], linears[1:], linears[::-1]):
        with pytest.raises(ValueError, match="in the order"):
            release(*wrong)
    with torch.inference_mode():
        release(*linears)
    before.assert_restored()


@pytest.mark.parametrize(
    ("forms", "groups"),
    [
        (("Q4_K", "Q4_K", "Q6_K"), [(0, 1), (2,)]),
        (("Q4_K", "Q6_K", "Q4_K"), [(0, 2), (1,)]),
        (("Q4_K", "Q5_K", "Q6_K"), [(0,), (1,), (2,)]),
    ],
)  # fmt: skip
def test_projections_of_one_input_are_grouped_by_their_forms(
    forms: tuple[str, ...], groups: list[tuple[int, ...]]
) -> None:
    trio = nn.ModuleList([_linear(form, num_out=32 + row, seed=row) for row, form in enumerate(forms)])
    dense, before = [_packed(linear) for linear in trio], _Before(*trio)
    made = groups_of(quantizable(trio, trio.modules()), [list(trio)], kind_of)
    assert sorted(made, key=lambda group: list(trio).index(group[0])) == [
        tuple(trio[index] for index in group) for group in groups
    ]
    assert all([hold(*group) for group in made])
    x = torch.randn(3, 512)
    for linear, other in zip(trio, dense, strict=True):
        assert torch.equal(linear(x), other(x))
    before.assert_saved()
    for group in made:
        release(*group)
    before.assert_restored()


def test_a_dense_member_keeps_none_of_the_others_from_their_group() -> None:
    trio = nn.ModuleList([_linear(num_out=32 + row, seed=row) for row in range(3)])
    del trio[1].weight.omniserve_quantized
    made = groups_of(quantizable(trio, trio.modules()), [list(trio)], kind_of)
    assert made == [(trio[0], trio[2])]


def test_only_plain_unshared_linears_with_codes_are_quantizable() -> None:
    class Own(nn.Linear):
        pass

    own, plain, dense = Own(512, 45), _linear(), nn.Linear(512, 45)
    give_codes(own, CODES["Q4_0"])
    tied = _tied()
    model = nn.ModuleDict({"own": own, "plain": plain, "dense": dense, "tied": tied})
    assert quantizable(model, model.modules()) == [plain]


@pytest.mark.parametrize("changed", [0, 1])
def test_a_weight_that_was_changed_since_stays_dense(changed: int) -> None:
    pair = [_linear(num_out=33), _linear(num_out=17, seed=1)]
    with torch.no_grad():
        pair[changed].weight[-1, -1] += 1
    before = _Before(*pair)
    assert not hold(*pair)
    before.assert_restored()
    assert still_quantized(pair[changed].weight) is None and still_quantized(pair[1 - changed].weight) is not None
    assert hold(pair[1 - changed])


def test_codes_of_another_dtype_are_compared_in_the_weights_own() -> None:
    linear = _linear(dtype=torch.bfloat16)
    codes = still_quantized(linear.weight)
    assert codes is not None and not torch.equal(dense_of(codes), linear.weight.float())


def test_a_loaded_state_dict_counts_as_a_change() -> None:
    linear, other = _linear(), _linear(seed=1)
    linear.load_state_dict(other.state_dict())
    assert remembered(linear.weight) is not None and not hold(linear)


@pytest.mark.parametrize(
    "change",
    [
        lambda linear: linear.float(),
        lambda linear: linear.to("meta"),
        lambda linear: copy.deepcopy(linear),
        lambda linear: linear.load_state_dict(linear.state_dict()),
        lambda linear: setattr(linear, "weight", nn.Parameter(torch.zeros(45, 512))),
        lambda linear: setattr(linear, "bias", None),
    ],
)
def test_changes_that_would_miss_the_codes_are_refused(change: Any) -> None:
    linear = _linear(dtype=torch.bfloat16)
    before = _Before(linear)
    hold(linear)
    with pytest.raises(RuntimeError, match="unpatch"):
        change(linear)
    before.assert_saved()


def test_gradients_are_refused_and_not_lost() -> None:
    linear = _linear()
    hold(linear)
    x = torch.randn(2, 512, requires_grad=True)
    with pytest.raises(RuntimeError, match="no backward"):
        linear(x).sum().backward()


class _Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * torch.tensor(3.0).to(self.weight.dtype)


class _OwnLookup(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return self.weight[input]


KINDS = [nn.Embedding, _Scaled]


def _tied(
    kind: type[nn.Embedding] = nn.Embedding, form: str = "Q6_K", dtype: torch.dtype = torch.float32
) -> nn.ModuleDict:
    head = _linear(form, num_out=70, bias=False, dtype=dtype)
    embedding = kind(70, 512, dtype=dtype)
    embedding.weight = head.weight
    return nn.ModuleDict({"embedding": embedding, "head": head})


def _assert_refuses(embedding: nn.Embedding) -> None:
    for change in (lambda: embedding.double(), lambda: copy.deepcopy(embedding), lambda: embedding.load_state_dict({})):
        with pytest.raises(RuntimeError, match="unpatch"):
            change()


@has_vectors
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["Q6_K", "Q4_1"])
def test_a_tied_embedding_looks_up_rows_of_the_codes_of_the_head(
    form: str, kind: type[nn.Embedding], dtype: torch.dtype
) -> None:
    model = _tied(kind, form, dtype)
    head, embedding = model["head"], model["embedding"]
    before, dense, weight = _Before(head, embedding), _packed(head), head.weight
    ids = torch.randint(70, (3, 5))
    expected = embedding(ids)
    assert tied_embedding(model, head, embedding) is embedding
    assert hold_tied(head, embedding)
    assert isinstance(embedding, (QuantizedEmbedding, kind)) and isinstance(head, QuantizedLinear)
    assert torch.equal(embedding(ids), expected) and torch.equal(embedding(ids.T), expected.transpose(0, 1))
    assert embedding.group_weight is head.group_weight
    x = torch.randn(40, 512, dtype=dtype)
    if dtype is torch.float32:
        assert torch.equal(head(x), dense(x))
    assert weight.untyped_storage().nbytes() == weight.itemsize, "a dense copy is left"
    before.assert_saved()
    _assert_refuses(embedding)
    release(head, embedding=embedding)
    before.assert_restored()
    assert embedding.weight is head.weight is weight


@has_vectors
def test_a_tied_pair_that_cannot_be_held_stays_as_it_is() -> None:
    for kind, changes in ((_OwnLookup, False), (nn.Embedding, True), (_Scaled, True)):
        model = _tied(kind)
        if changes:
            model["head"].weight.data[3] += 1
        before = _Before(*model.values())
        assert not hold_tied(model["head"], model["embedding"])
        before.assert_restored()
    model = _tied()
    del model["head"].weight.omniserve_quantized
    assert not hold_tied(model["head"], model["embedding"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", CODES)
def test_an_embedding_alone_is_held(form: str, kind: type[nn.Embedding], dtype: torch.dtype) -> None:
    embedding = kind(70, 96, dtype=dtype).requires_grad_(False)
    give_codes(embedding, CODES[form])
    before, weight = _Before(embedding), embedding.weight
    ids = torch.randint(70, (3, 5))
    expected = embedding(ids)
    with torch.inference_mode():
        assert hold_embedding(embedding, embedding)
    assert isinstance(embedding, QuantizedEmbedding) and isinstance(embedding, kind)
    assert torch.equal(embedding(ids), expected) and torch.equal(embedding(ids.T), expected.transpose(0, 1))
    assert embedding(ids[:, :0]).shape == (3, 0, 96)
    assert weight.untyped_storage().nbytes() == weight.itemsize and bool(weight.isnan().all())
    before.assert_saved()
    _assert_refuses(embedding)
    with torch.inference_mode():
        release_embedding(embedding)
    before.assert_restored()


def test_an_embedding_that_does_more_than_look_up_stays_dense() -> None:
    def embedding(kind: type[nn.Embedding] = nn.Embedding, **options: Any) -> nn.Embedding:
        made = kind(70, 96, **options)
        give_codes(made, CODES["Q8_0"])
        return made

    hooked, changed = embedding(), embedding()
    hooked.register_forward_hook(lambda module, inputs, output: output + 1)
    with torch.no_grad():
        changed.weight[0, 0] += 1
    for each in (hooked, changed, embedding(_OwnLookup), embedding(max_norm=1.0), nn.Embedding(70, 96)):
        before = _Before(each)
        assert not hold_embedding(each, each)
        before.assert_restored()
    assert not hold_embedding(nn.Linear(8, 8), nn.Linear(8, 8)), "a model may have another module as its embedding"


@has_vectors
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", slow_except(("llama", "gemma2"), ("llama", "gemma2", "opt", "qwen3_moe", "gpt_neox")))
def test_patch_holds_codes_and_unpatch_restores_every_bit(name: str, tied: bool) -> None:
    model = of_codes(tiny_model(name, tie_word_embeddings=tied))
    modules = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)]
    before, ids = _Before(*modules), torch.arange(1, 20)[None]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.inference_mode():
        expected = model(ids).logits
        patch(model, compile=False)
        assert not any(isinstance(module, PackedLinear) for module in modules)
        assert sum(isinstance(module, QuantizedLinear) for module in modules) > 10
        assert isinstance(model.get_input_embeddings(), QuantizedEmbedding)
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=0)  # sums in another order
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        unpatch(model)
        assert torch.equal(model(ids).logits, expected)
    before.assert_restored()


@has_vectors
def test_patch_packs_what_was_changed_since() -> None:
    model = of_codes(tiny_model("llama", tie_word_embeddings=True))
    layer = model.model.layers[1]
    with torch.no_grad():
        for weight in (layer.mlp.down_proj.weight, layer.self_attn.o_proj.weight, model.lm_head.weight):
            weight[0] *= 2
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    before = _Before(*linears, model.model.embed_tokens)
    patch(model, compile=False)
    packed = [linear for linear in linears if isinstance(linear, PackedLinear)]
    assert packed == [layer.self_attn.o_proj, layer.mlp.down_proj, model.lm_head]
    assert all(isinstance(linear, QuantizedLinear) for linear in linears if linear not in packed)
    assert type(model.model.embed_tokens) is PackedEmbedding
    before.assert_saved()
    unpatch(model)
    before.assert_restored()


@has_vectors
def test_a_group_with_a_changed_member_is_packed_as_one() -> None:
    model = tiny_model("llama")
    layer = model.model.layers[0]
    for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
        give_codes(linear, CODES["Q4_0"])
    with torch.no_grad():
        layer.mlp.up_proj.weight[3, 4] += 1
    patch(model, compile=False)
    pair = (layer.mlp.gate_proj, layer.mlp.up_proj)
    assert is_group(pair) and all(isinstance(linear, PackedLinear) for linear in pair)


def test_prepack_false_leaves_codes_alone() -> None:
    model = of_codes(tiny_model("llama"))
    patch(model, compile=False, prepack=False)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear


def test_rows_may_be_in_another_order() -> None:
    for form in CODES.values():
        codes = random_codes(form, 40, 520)
        order = torch.randperm(40)
        assert torch.equal(dense_of(codes.rows(order)), dense_of(codes)[order])
        linear = nn.Linear(520, 40, bias=False)
        linear.weight.data = dense_of(codes)[order]
        remember(linear.weight, form, lambda codes=codes, order=order: codes.rows(order))
        assert hold(linear) and torch.equal(linear.weight, dense_of(codes)[order])

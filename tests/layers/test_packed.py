"""Prepacked linears: the op, the values, one copy of the weight, and refusals instead of surprises."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

from omniserve.layers import packed
from omniserve.layers.packed import PackedLinear, pack, packable, unpack

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
        torch.ops.omniserve.packed_linear.default, (x, linear.packed_handle, linear.bias, linear.out_features)
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
    handle = int(linear.packed_handle)
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

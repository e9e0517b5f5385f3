"""The head: skinny_linear where it applies, the module itself everywhere else, the same values."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn

from omniserve.layers.head import MAX_SKINNY_ROWS, head_product
from omniserve.layers.patching import patch
from tests.parity.models import tiny_model

# Asked of torch and not of the module under test: if that one forgets its kernel, these tests must fail.
pytestmark = pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="this CPU has no vector kernel for the head")


def _head(dtype: torch.dtype = torch.bfloat16, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(40, 150, bias=bias, dtype=dtype)


def _calls_of_the_module(linear: nn.Module, num_rows: int) -> int:
    """Project rows, check the values, and return how often the module was called for them."""
    dtype = next(linear.parameters()).dtype
    hidden_RD = torch.randn(num_rows, 40).to(dtype)
    expected = linear(hidden_RD)
    with mock.patch.object(nn.Linear, "forward", autospec=True, side_effect=nn.Linear.forward) as forward:
        got = head_product(linear, hidden_RD)
    # Sums of 40 products in fp32 in another order: in half precision at most one step of 8 bits apart.
    torch.testing.assert_close(got, expected, rtol=1e-5 if dtype is torch.float32 else 2**-7, atol=1e-5)
    return forward.call_count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 16, MAX_SKINNY_ROWS])
@torch.inference_mode()
def test_few_rows_of_a_plain_head_do_not_call_the_module(num_rows: int, dtype: torch.dtype) -> None:
    assert _calls_of_the_module(_head(dtype), num_rows) == 0


def _hooked() -> nn.Linear:
    linear = _head()
    linear.register_forward_hook(lambda module, args, output: output + 1)
    return linear


def _replaced_forward() -> nn.Linear:
    linear = _head()
    linear.forward = lambda x: nn.Linear.forward(linear, x) * 2  # type: ignore[method-assign]
    return linear


def _subclass() -> nn.Linear:
    class Quantised(nn.Linear):
        pass

    linear = _head()
    linear.__class__ = Quantised
    return linear


def _transposed() -> nn.Linear:
    linear = _head()
    linear.weight = nn.Parameter(linear.weight.detach().T.contiguous().T)
    return linear


@pytest.mark.parametrize(
    "make",
    [_hooked, _replaced_forward, _subclass, _transposed, lambda: _head(bias=True), lambda: _head(torch.float16)],
    ids=["hook", "own forward", "subclass", "transposed weight", "bias", "float16"],
)
@torch.inference_mode()
def test_any_other_head_is_called(make: Callable[[], nn.Linear]) -> None:
    assert _calls_of_the_module(make(), 3) == 1


@torch.inference_mode()
def test_many_rows_call_the_module() -> None:
    assert _calls_of_the_module(_head(), MAX_SKINNY_ROWS + 1) == 1


def test_gradients_flow() -> None:
    linear = _head()
    head_product(linear, torch.ones(2, 40, dtype=torch.bfloat16)).sum().backward()
    assert linear.weight.grad is not None


@torch.inference_mode()
def test_a_tied_head_uses_the_embeddings_own_weight() -> None:
    model = tiny_model("llama", torch.bfloat16, tie_word_embeddings=True)
    patched = patch(model, compile=False).omniserve
    hidden_RD = torch.randn(3, model.config.hidden_size).bfloat16()
    with mock.patch.object(nn.Linear, "forward", side_effect=AssertionError("the head was called as a module")):
        before = patched.logits(hidden_RD)
        model.get_input_embeddings().weight.mul_(2)
        after = patched.logits(hidden_RD)
    torch.testing.assert_close(after, before * 2, rtol=0, atol=0)

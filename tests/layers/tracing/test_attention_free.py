"""Layers without attention, and modules with state beside one: what they keep, how rows pass, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1DecoderLayer, FalconH1Mixer

from omniserve.core.errors import UnsupportedModelError
from omniserve.layers.tracing import family_of
from omniserve.layers.tracing.attention_free import AttentionFreeLayer, modules_beside
from omniserve.layers.tracing.layer_states import RowGroup, StateCache, StatePool
from tests.parity.zoo import tiny


class _Sum(nn.Module):
    """Adds up the rows of a sequence; ``keeps`` says what of that it puts into the cache."""

    def __init__(self, keeps: str = "sum") -> None:
        super().__init__()
        self.keeps = keeps

    def forward(self, hidden: Tensor, scale: Tensor, cache: Any = None) -> Tensor:
        before = 0.0
        if cache is not None and (state := cache.get_recurrent_state(7)) is not None:
            before = state[:, None]
        sums = before + hidden.cumsum(1)
        if self.keeps == "sum":
            cache.update_recurrent_state(sums[:, -1], 7)
        elif self.keeps == "last row":
            cache.update_recurrent_state(hidden[:, -1], 7)
        elif self.keeps == "all rows":
            cache.update_recurrent_state(hidden.flatten(1), 7)
        elif self.keeps == "scaled":
            cache.update_recurrent_state(sums[:, -1], 7)
            return sums * scale.mean()
        elif self.keeps == "double":
            return sums.double()
        return sums


def prepared(keeps: str = "sum") -> AttentionFreeLayer:
    layer = AttentionFreeLayer(_Sum(keeps), "layer 3", behind=None)
    with torch.inference_mode():
        layer.prepare(((torch.ones(3, 1),), {"cache": None}), torch.randn(2, 7, 4))
    return layer


@pytest.mark.parametrize(
    ("keeps", "reason"),
    [
        ("nothing", "layer 3 neither attends nor has state in the model's cache, but mixes its tokens"),
        ("last row", "layer 3 computes something else if its tokens come in chunks"),
        ("all rows", "layer 3 has states whose shape depends on how many tokens there are"),
        ("double", "layer 3 returns torch.float64; a row has torch.float32"),
        ("scaled", "layer 3 is given more than its input and a cache, and uses it"),
    ],
)
def test_a_layer_that_cannot_go_on_from_its_states_is_refused(keeps: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        prepared(keeps)


def test_groups_advance_their_slots_and_no_others() -> None:
    layer = prepared()
    layer.number = 0
    pool = StatePool([layer.forms], num_slots=5, device=torch.device("cpu"))
    state = pool.layers[0]["recurrent", 0]
    state.copy_(torch.arange(20.0).view(5, 4))
    state[2] = torch.nan  # a fresh chunk begins there
    before = state.clone()
    hidden = torch.randn(7, 4)
    groups = [
        RowGroup(torch.tensor([[1, 2, 3]]), torch.tensor([2]), is_fresh=True),
        RowGroup(torch.tensor([[0], [5]]), torch.tensor([4, 1]), is_fresh=False),
    ]
    output = layer.run(hidden, groups, pool)
    assert torch.allclose(output[1:4], hidden[1:4].cumsum(0))
    assert torch.allclose(output[[0, 5]], before[[4, 1]] + hidden[[0, 5]])
    assert torch.equal(output[[4, 6]], hidden[[4, 6]])
    assert torch.equal(state[[0, 3]], before[[0, 3]])
    assert torch.allclose(state[[2, 4, 1]], output[[3, 0, 5]])


@pytest.mark.parametrize("kernel_size", [2, 4])
@pytest.mark.parametrize("lengths", [(1, 1, 1), (5, 2), (2, 3, 1)])
def test_conv_states_are_those_of_hugging_face(kernel_size: int, lengths: tuple[int, ...]) -> None:
    theirs, ours = DynamicCache(config=tiny("lfm2").config), StateCache()
    for length in lengths:
        columns = torch.randn(2, 3, length)
        want = theirs.update_conv_state(columns, 0, conv_kernel_size=kernel_size)
        got = ours.update_conv_state(columns, 0, conv_kernel_size=kernel_size)
        assert torch.equal(want[..., -length:], got[..., -length:])
        assert torch.equal(theirs.get_conv_state(0), ours.get_conv_state(0))
        ours = StateCache(ours.states)


def test_layers_are_sorted_by_what_they_do() -> None:
    family = family_of(tiny("nemotron_h"))
    assert family.spec().num_layers == 2
    kinds = [[bool(layer.forms) for layer in layers] for layers in family.between]
    assert kinds == [[True, False], [True, False], [False]], "mamba, mlp; mamba, moe; mlp"
    assert family.spec().state_bytes == sum(
        form.num_bytes for layers in family.between for layer in layers for form in layer.forms.values()
    )


def test_a_module_with_state_beside_the_attention_is_found() -> None:
    family = family_of(tiny("falcon_h1"))
    assert [len(each) for each in family.mixers] == [1, 1, 1]
    assert [len(each) for each in family.between] == [1, 1, 1, 0]
    assert family.spec().hidden_size == 2 * 64, "rows carry the module's output"
    layer = family.layers[0].layer
    every = set(layer.modules())
    assert list(modules_beside(layer, layer.self_attn, every)) == [layer.mamba]
    assert list(modules_beside(layer, layer.self_attn.q_proj, every)) == [layer.mamba], (
        "self_attn is around, not beside"
    )
    assert not list(modules_beside(layer, layer.self_attn, {layer.self_attn})), "the other has not run"


def test_a_module_with_state_that_returns_more_than_a_tensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = FalconH1Mixer.forward

    def pair(mixer: Any, hidden_states: Tensor, cache: Any = None, **kwargs: Any) -> Any:
        return own(mixer, hidden_states, cache=cache, **kwargs), None

    def first_of(layer: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
        mixed, _ = layer.mamba(hidden_states, cache=kwargs["cache"])
        return (mixed + layer.self_attn(hidden_states, **kwargs)[0],)

    monkeypatch.setattr(FalconH1Mixer, "forward", pair)
    monkeypatch.setattr(FalconH1DecoderLayer, "forward", first_of)
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.mamba has state and returns more than one tensor"):
        family_of(tiny("falcon_h1"))


def test_a_module_with_state_behind_the_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("falcon_h1")

    def behind(layer: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
        attended, _ = layer.self_attn(hidden_states, **kwargs)
        return (layer.mamba(attended, cache=kwargs["cache"]),)

    monkeypatch.setattr(FalconH1DecoderLayer, "forward", behind)
    with pytest.raises(
        UnsupportedModelError, match=r"layers\.0\.mamba has state and runs behind its layer's attention"
    ):
        family_of(model)


def test_chunks_of_a_layer_that_drops_its_state_go_token_by_token() -> None:
    by_token = [layer._by_token for layers in family_of(tiny("jamba")).between for layer in layers]
    assert by_token == [True] * 4

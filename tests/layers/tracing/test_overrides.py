"""Overrides of attention modules: each computes what the module does, and one that does not is refused."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.xglm.modeling_xglm import XGLMAttention

from omniserve.core.errors import UnsupportedModelError
from omniserve.layers.patched_model import PatchedModel
from omniserve.layers.patching import patch, unpatch
from omniserve.layers.tracing import TracedFamily, family_of
from omniserve.layers.tracing.model_config import USUAL_LENGTH
from omniserve.layers.tracing.overrides import _OVERRIDES, _attend_plainly, overrides
from tests.parity.zoo import tiny
from tests.quick import slow_except

TYPES = (
    "big_bird", "bloom", "falcon", "gpt_neo", "gpt_neox_japanese", "megatron-bert", "mpt", "mvp", "openai-gpt",
    "rembert", "roformer", "trocr", "xglm",
)  # fmt: skip
POSITIONS_ALONE = ("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart", "whisper")
"""Models that take no positions, but call the attention interface."""

_FALCON: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256,
}  # fmt: skip


def logits_of(family: TracedFamily, token_ids: list[int], *, compile: bool = False, fused: bool = False) -> Tensor:
    """Return the logits of one sequence by the halves and plain attention, ``[T, vocabulary]``."""
    halves = PatchedModel(family, compile=compile)
    positions_T = torch.arange(len(token_ids))

    def attend(layer: int, hidden_TD: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        spec = halves.spec.attention[layer]
        keywords = {"scaling": spec.scale, "window": spec.window, "alibi_slopes": spec.alibi_slopes}
        heads = (rows.transpose(0, 1)[None] for rows in (q_TNH, k_TKH, v_TKH))
        return _attend_plainly(None, *heads, None, keywords)[0].flatten(1).contiguous()

    with torch.inference_mode():
        hidden_TD = halves.embed(torch.tensor(token_ids), positions_T)
        rotary = repeat(halves.rotary(positions_T) or (None, None))
        return halves.logits(
            halves.run_layers(range(halves.num_layers), hidden_TD, rotary, attend, fused=fused)
        )  # fmt: skip


def random_ids(num_tokens: int) -> list[int]:
    return torch.randint(1, 160, (num_tokens,), generator=torch.Generator().manual_seed(1)).tolist()


def assert_halves_are_exact(model: PreTrainedModel, *, num_tokens: int = 24, **how: bool) -> None:
    ids = random_ids(num_tokens)
    with torch.inference_mode():
        want = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(family_of(model), ids, **how), want, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("model_type", slow_except(("bloom", "gpt_neo", "roformer", "bart"), TYPES + POSITIONS_ALONE))
def test_halves_compute_what_the_model_does(model_type: str) -> None:
    assert_halves_are_exact(tiny(model_type))


@pytest.mark.parametrize(
    ("new_decoder_architecture", "multi_query", "parallel_attn"),
    [(True, False, True), (False, True, True), (False, True, False), (False, False, True), (False, False, False)],
)
def test_each_kind_of_falcon(new_decoder_architecture: bool, multi_query: bool, parallel_attn: bool) -> None:
    config = AutoConfig.for_model(
        "falcon", **_FALCON, new_decoder_architecture=new_decoder_architecture, multi_query=multi_query,
        parallel_attn=parallel_attn, num_kv_heads=2 if new_decoder_architecture else None, bias=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    nn.init.normal_(model.transformer.word_embeddings.weight)
    for layer in model.transformer.h:
        nn.init.normal_(layer.self_attention.query_key_value.weight, std=0.3)
    assert_halves_are_exact(model)
    heads = 2 if new_decoder_architecture else 1 if multi_query else 4
    assert family_of(model).spec().num_kv_heads == heads, "a KV head is stored once, not for each of its query heads"


@pytest.mark.parametrize(("num_heads", "num_positions"), [(8, 256), (4, 512), (16, 256)])
def test_falcon_with_alibi_is_exact_or_refused(num_heads: int, num_positions: int) -> None:
    fields = {"alibi": True, "num_attention_heads": num_heads, "max_position_embeddings": num_positions}
    config = AutoConfig.for_model("falcon", **_FALCON | {"hidden_size": 16 * num_heads} | fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for layer in model.transformer.h:
        nn.init.normal_(layer.self_attention.query_key_value.weight, std=0.3)
    if (num_heads, num_positions) == (8, 256):
        assert_halves_are_exact(model)
        assert [slope * 4 for slope in family_of(model).spec().attention[0].alibi_slopes or ()] == [
            2.0**-i for i in range(1, 9)
        ]
    else:
        with pytest.raises(UnsupportedModelError, match="rounds the ALiBi biases"):
            family_of(model)


def test_falcon_whose_eager_attention_counts_alibi_twice_is_refused() -> None:
    config = AutoConfig.for_model("falcon", **_FALCON, alibi=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with pytest.raises(
        UnsupportedModelError, match=r"with attn_implementation='eager' its module .* computes something"
    ):
        family_of(model)


@pytest.mark.parametrize(("num_heads", "model_type"), [(6, "bloom"), (6, "mpt")])
def test_slopes_of_heads_that_are_no_power_of_two(num_heads: int, model_type: str) -> None:
    name = "n_heads" if model_type == "mpt" else "n_head"
    config = AutoConfig.for_model(
        model_type, vocab_size=160, num_hidden_layers=2, hidden_size=48, **{name: num_heads}
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    assert_halves_are_exact(model)


def test_a_model_that_names_no_number_of_positions_has_a_usual_one() -> None:
    assert family_of(tiny("bloom")).spec().max_model_len == USUAL_LENGTH
    assert family_of(tiny("mpt")).spec().max_model_len == 512
    assert family_of(tiny("whisper")).spec().max_model_len == 448


@pytest.mark.parametrize("model_type", [pytest.param(each, marks=pytest.mark.slow) for each in TYPES])
def test_compiled_halves_are_exact(model_type: str) -> None:
    assert_halves_are_exact(tiny(model_type), compile=True, fused=True)


def test_local_layers_have_their_window() -> None:
    spec = family_of(tiny("gpt_neo")).spec()
    assert [each.window for each in spec.attention] == [0, 9, 0]


def test_linears_of_one_input_are_found() -> None:
    model = tiny("xglm")
    family, attention = family_of(model), model.model.layers[1].self_attn
    assert family.linear_groups(family.layers[1]) == [(attention.q_proj, attention.k_proj, attention.v_proj)]


def test_a_patched_model_keeps_its_classes() -> None:
    model, ids = tiny("xglm"), torch.tensor([random_ids(5)])
    with torch.inference_mode():
        before = model.generate(ids, max_new_tokens=4, do_sample=False)
        kinds = [type(module) for module in model.modules()]
        patch(model, compile=False, prepack=False)
        assert [type(module) for module in model.modules()] == kinds
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), before)
    unpatch(model)
    assert [type(module) for module in model.modules()] == kinds


def test_a_module_that_a_release_of_transformers_changed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = XGLMAttention.forward

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(self, hidden_states * 1.1, *args, **kwargs)

    monkeypatch.setattr(XGLMAttention, "forward", forward)
    with pytest.raises(UnsupportedModelError, match=r"module model\.layers\.0\.self_attn, a XGLMAttention, computes"):
        family_of(tiny("xglm"))


def test_a_module_of_that_name_from_elsewhere_has_an_override_of_its_own_or_none() -> None:
    model = tiny("xglm")
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("XGLMAttention", (XGLMAttention,), {"__module__": "modeling_mine"})
    with pytest.raises(UnsupportedModelError, match="attention interface, where layers are cut, and has no override"):
        family_of(model)
    try:
        overrides("modeling_mine.XGLMAttention")(_OVERRIDES["xglm.XGLMAttention"])
        assert_halves_are_exact(model)
    finally:
        del _OVERRIDES["modeling_mine.XGLMAttention"]


def test_positions_that_a_model_counts_from_its_tokens_are_refused() -> None:
    config = AutoConfig.for_model(
        "trocr", vocab_size=160, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48,
        use_learned_position_embeddings=False,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="mixes the rows of tokens before its layers"):
        family_of(AutoModelForCausalLM.from_config(config).eval())

"""TracedFamily: models whose halves are their own code; what is recorded of them, and what is refused by name."""

from __future__ import annotations

from itertools import repeat
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import create_causal_mask

from omniserve.core.errors import UnsupportedModelError
from omniserve.layers.compiled import ShareProducts, structure
from omniserve.layers.patched_model import PatchedModel
from omniserve.layers.patching import patch, unpatch
from omniserve.layers.tracing.attention_interface import (
    Mask,
    attention_replaced,
    described_masks,
    mask_of,
    no_attention,
)
from omniserve.layers.tracing.traced import TracedFamily
from omniserve.layers.weights.groups import HeldLinear
from omniserve.layers.weights.packed import PackedEmbedding
from tests.parity.models import MODELS, prepackable_model, tiny_model
from tests.quick import slow_except

_SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}


def build(model_type: str, **fields: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **_SMALL | fields)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("xlm", {"emb_dim": 32, "n_heads": 4, "n_layers": 2, "n_words": 64}, "attention interface"),
        ("bert", {"intermediate_size": 48}, "mask that is neither causal, a sliding window nor chunks"),
        (
            "zaya",
            {"num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
            "hands other layers what layer 0 computes beside its output",
        ),
        ("doge", {"intermediate_size": 48}, "'attention_mask', which no kernel"),
        ("diffllama", {"intermediate_size": 48}, r"attends 2 times in model\.layers\.0"),
        (
            "recurrent_gemma", {"intermediate_size": 48, "block_types": ["recurrent", "attention"], "lru_width": 32},
            r"model\.layers\.0 does not run with its states alone",
        ),
    ],
)  # fmt: skip
def test_what_has_no_kernel_here_is_refused_by_name(model_type: str, fields: dict[str, Any], reason: str) -> None:
    model = build(model_type, **fields)
    before = [(name, sorted(module.__dict__)) for name, module in model.named_modules()]
    attention = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=reason):
        patch(model)
    assert [(name, sorted(module.__dict__)) for name, module in model.named_modules()] == before
    assert model.config._attn_implementation == attention


class _Mixes(nn.Module):
    """A feed-forward that looks at the rows beside."""

    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, dims=1)


def test_a_layer_that_mixes_rows_is_refused() -> None:
    model = build("olmo2", intermediate_size=48)
    model.model.layers[1].mlp = _Mixes().eval()
    with pytest.raises(UnsupportedModelError, match="mixes the rows of layer 1"):
        patch(model)


def test_what_happens_to_rows_between_layers_is_refused() -> None:
    model = build("olmo2", intermediate_size=48)
    model.model.layers[1].register_forward_pre_hook(lambda layer, args: (args[0] + 1,))
    with pytest.raises(UnsupportedModelError, match="changes the rows between layers 0 and 1"):
        patch(model)


def test_an_argument_that_depends_on_the_layers_before_is_refused() -> None:
    model = build("olmo2", intermediate_size=48)
    model.model.layers[1].register_forward_pre_hook(
        lambda layer, args, kwargs: (args, {**kwargs, "before": 2 * args[0]}), with_kwargs=True
    )
    with pytest.raises(UnsupportedModelError, match="gives layer 1 a tensor that depends on the layers before it"):
        patch(model)


def test_a_layer_whose_number_changes_what_it_computes_has_its_own_graph() -> None:
    model = build(
        "smollm3", intermediate_size=48, num_key_value_heads=2, num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0]
    )
    family = TracedFamily(model)
    kinds = [structure(layer) for layer in family.layers]
    assert kinds[0] == kinds[1] == kinds[2] != kinds[3]


@pytest.mark.parametrize(
    ("function", "mask"),
    [
        (lambda b, h, q, k: k <= q, Mask()),
        (lambda b, h, q, k: (k <= q) & (k > q - 5), Mask(window=5)),
        (lambda b, h, q, k: (k <= q) & (k > q - 4096), Mask(window=4096)),
        (lambda b, h, q, k: k <= q + 1, None),
        (lambda b, h, q, k: (k <= q) & (k // 8 == q // 8), Mask(chunk=8)),
        (lambda b, h, q, k: (k <= q) & (k // 5001 == q // 5001), Mask(chunk=5001)),
        (lambda b, h, q, k: (k <= q) & ((k - 3) // 8 == (q - 3) // 8), None),  # three tokens of padding
        (lambda b, h, q, k: (k <= q) & (k // 8 == q // 8) & (k > q - 5), None),
        (lambda b, h, q, k: torch.zeros(3)[q], None),
    ],
)
def test_what_a_mask_lets_through_is_found_by_asking_it(function: Any, mask: Mask | None) -> None:
    assert mask_of(function) == mask


@pytest.mark.parametrize(("blocks", "kind"), [([-1, -1, -1], Mask()), ([-1, 0, 0], None)])
def test_a_batch_without_images_has_a_causal_mask(blocks: list[int], kind: Mask | None) -> None:
    block_B = torch.tensor([blocks])

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) | ((block_B[b, q] == block_B[b, k]) & (block_B[b, q] >= 0))

    config = build("olmo2", intermediate_size=48).config
    with attention_replaced(no_attention, [config], []), described_masks():
        mask: Any = create_causal_mask(config, torch.zeros(1, 3, 8), None, None, or_mask_function=sees)
    assert mask.omniserve_mask == kind


@pytest.mark.parametrize("name", MODELS)
def test_layers_know_their_windows(name: str) -> None:
    model = tiny_model(name)
    windows = [spec.window for spec in patch(model, compile=False).omniserve.spec.attention]
    usual = "sliding_attention" if getattr(model.config, "sliding_window", None) else "full_attention"
    types = getattr(model.config, "layer_types", None) or [usual] * len(windows)
    width = getattr(model.config, "sliding_window", None) or 0
    assert windows == [width if each == "sliding_attention" else 0 for each in types]


def test_layers_know_their_sinks_and_their_chunks() -> None:
    model = tiny_model("gpt_oss")
    specs = patch(model, compile=False).omniserve.spec.attention
    assert [spec.sinks for spec in specs] == [tuple(layer.self_attn.sinks.tolist()) for layer in model.model.layers]
    assert [spec.chunk for spec in patch(tiny_model("llama4"), compile=False).omniserve.spec.attention] == [7, 0, 7]


def test_a_sink_that_is_no_number_is_refused() -> None:
    model = tiny_model("gpt_oss")
    model.model.layers[1].self_attn.sinks.data[2] = torch.nan
    with pytest.raises(UnsupportedModelError, match=r"gives the attention of layer 1 's_aux' .*nan"):
        patch(model)


def test_slopes_of_alibi_may_come_as_a_tensor_or_a_tuple() -> None:
    family = TracedFamily(tiny_model("smollm3"))
    query = torch.zeros(3, 2, 1, 8)
    for slopes in ((0.5, 0.25), torch.tensor([[0.5], [0.25]])):
        assert family._arguments.spec_of(0, query, None, {"alibi_slopes": slopes}).alibi_slopes == (0.5, 0.25)
    with pytest.raises(UnsupportedModelError, match=r"'alibi_slopes' .* expected a number for each of the 2 heads"):
        family._arguments.spec_of(0, query, None, {"alibi_slopes": (0.5,)})


def test_llama_4_that_scales_its_first_queries_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="scales queries of layer 1 from position 2 on"):
        patch(tiny_model("llama4", floor_scale=3))


def _compiled_halves_are_the_eager_ones(model: PreTrainedModel) -> None:
    family = TracedFamily(model)
    halves = [PatchedModel(family, compile=compile) for compile in (False, True)]
    with torch.inference_mode():
        for rows in (1, 2, 9):
            positions = torch.arange(rows)
            results = []
            for patched in halves:
                hidden = patched.embed(positions + 3, positions)
                rotary = repeat(patched.rotary(positions) or (None, None))
                for fused in (False, True):
                    results.append(
                        patched.run_layers(
                            range(patched.num_layers), hidden, rotary, lambda _, __, q, *___: q.flatten(1).contiguous(),
                            fused=fused,
                        )
                    )  # fmt: skip
            for result in results[1:]:
                torch.testing.assert_close(result, results[0], atol=1e-4, rtol=1e-4)
    if not family._rows.carries:  # torch's wrapper adds to the outputs of a half that hands columns on
        compiled = halves[1]
        assert all(
            half.is_direct for half in [*compiled._pre.values(), *compiled._post.values(), *compiled._post_pre.values()]
        )


@pytest.mark.parametrize("name", slow_except(("cohere2",), MODELS))
def test_compiled_halves_are_the_eager_ones(name: str) -> None:
    _compiled_halves_are_the_eager_ones(tiny_model(name))


def test_models_of_one_type_and_other_sizes_are_compiled_in_one_process() -> None:
    for fields in ({"num_attention_heads": 4}, {"num_attention_heads": 2}):
        _compiled_halves_are_the_eager_ones(build("olmo2", intermediate_size=48, **fields))


def test_of_layers_that_differ_in_their_weights_alone_two_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("olmo2", intermediate_size=48, num_hidden_layers=5)
    mlps, calls = [layer.mlp for layer in model.model.layers], [0] * 5
    forward = type(mlps[0]).forward

    def counting(mlp: nn.Module, x: Tensor) -> Tensor:
        calls[mlps.index(mlp)] += 1
        return forward(mlp, x)

    monkeypatch.setattr(type(mlps[0]), "forward", counting)
    with mock.patch.object(model.lm_head, "forward", wraps=model.lm_head.forward) as head:
        TracedFamily(model)
    assert calls[1:4] == [2, 2, 2], "once to find the layers, once to record them"
    assert calls[0] == calls[4] > 2
    assert head.call_count < 6, "what layers are given is recorded without the head"


def test_linears_of_one_input_are_found() -> None:
    model = build("olmo2", intermediate_size=48)
    family = TracedFamily(model)
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    assert family.linear_groups(family.layers[1]) == [
        (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj),
    ]  # fmt: skip


@pytest.mark.slow
def test_the_product_of_a_group_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniserve.layers.weights.merged._DEVICES", {"cpu"})  # as on a GPU
    monkeypatch.setattr("omniserve.layers.weights.packed.HAS_VECTOR_KERNEL", False)
    products: list[int] = []

    def counting(share: ShareProducts, graph: torch.fx.Graph) -> None:
        original(share, graph)
        products.append(
            sum(node.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) for node in graph.nodes)
        )

    original = ShareProducts.__call__
    monkeypatch.setattr(ShareProducts, "__call__", counting)
    model = build("olmo2", intermediate_size=48)
    with fresh_cache():
        patched = patch(model, prepack=True).omniserve
        patched.warm_up()
    assert products == [1, 3], "q, k and v; o, gate and up, down"


@pytest.mark.slow
def test_compiled_halves_are_found_in_the_cache_until_an_operator_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second model's graphs have other names than the first's, as they would in another process."""
    outputs, found = [], []
    monkeypatch.setattr("omniserve.layers.compile_cache.CompileCache.find", lambda *_: None)
    with fresh_cache(), torch.inference_mode():
        for digest in ("one", "one", "other"):
            monkeypatch.setattr("omniserve.layers.compiled.source_digest", lambda digest=digest: digest)
            counters.clear()
            model = tiny_model("gemma3")
            patched = patch(model).omniserve
            hidden_TD = patched.embed(torch.arange(3, 9), torch.arange(6))
            rotary = patched.rotary(torch.arange(6)) or (None, None)
            for _ in range(2):  # the second call goes to the graph itself
                outputs.append(patched.pre_attention(0, hidden_TD, *rotary)[0])
            found.append(dict(counters["aot_autograd"]))
    assert [each.get("autograd_cache_hit", 0) for each in found] == [0, 1, 0]
    assert [each.get("autograd_cache_miss", 0) for each in found] == [1, 0, 1]
    assert all(torch.equal(outputs[0], output) for output in outputs)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("prepack", [False, True], ids=["dense", "packed"])
def test_a_tied_head_is_packed_with_its_embedding(tied: bool, prepack: bool) -> None:
    model = prepackable_model("smollm3", tie_word_embeddings=tied)
    ids_T, hidden_TD = torch.arange(3, 9), torch.randn(6, 48).to(model.dtype)
    with torch.inference_mode():
        embedded_TD, logits_TV = model.model.embed_tokens(ids_T), model.lm_head(model.model.norm(hidden_TD))
        patched = patch(model, compile=False, prepack=prepack).omniserve
        assert isinstance(model.lm_head, HeldLinear) == prepack
        assert isinstance(model.model.embed_tokens, PackedEmbedding) == (prepack and tied)
        assert torch.equal(patched.embed(ids_T, ids_T), embedded_TD)
        # Sums of 48 products in fp32 in another order: at most a step of bf16 apart.
        torch.testing.assert_close(patched.logits(hidden_TD), logits_TV, rtol=2**-7, atol=1e-2)
    unpatch(model)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_generate_runs_the_models_own_layers() -> None:
    model = tiny_model("gemma3")
    forwards = [layer.forward for layer in model.model.layers]
    patch(model, compile=False)
    assert [layer.forward for layer in model.model.layers] == forwards
    unpatch(model)
    assert "omniserve" not in model.__dict__

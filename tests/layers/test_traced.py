"""TracedFamily: models whose halves are their own code; what is recorded of them, and what is refused by name."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import create_causal_mask

from omniserve.core.errors import UnsupportedModelError
from omniserve.layers import LAYER_FAMILIES, family_of
from omniserve.layers.compiled import _ShareProducts, structure
from omniserve.layers.cut import calling, described_masks, window_of
from omniserve.layers.patching import PatchedModel, patch, unpatch
from omniserve.layers.shell import no_attention
from omniserve.layers.traced import TracedFamily
from tests.parity.models import MODELS, tiny_model
from tests.quick import slow_except

TRACED = [name for name, (model_type, _) in MODELS.items() if model_type not in LAYER_FAMILIES.names()]
_SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}


def build(model_type: str, **fields: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **_SMALL | fields)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("bloom", {}, "takes no position_ids"),
        ("bert", {"intermediate_size": 48}, "mask that is neither causal nor a sliding window"),
        (
            "zaya",
            {"num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
            "hands other layers what layer 0 computes beside its output",
        ),
        ("xglm", {"d_model": 32, "attention_heads": 4, "num_layers": 2, "ffn_dim": 48}, "another attention function"),
        ("gpt_oss", {"num_local_experts": 4, "intermediate_size": 32, "head_dim": 8}, "'s_aux', which no kernel"),
        ("diffllama", {"intermediate_size": 48}, r"attends 2 times in model\.layers\.0"),
        (
            "qwen3_next",
            {"intermediate_size": 48, "num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 4,
             "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16,
             "layer_types": ["linear_attention", "full_attention"]},
            r"attends 0 times in model\.layers\.0",
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
    model.model.layers[1].mlp = _Mixes()
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
    family = family_of(model)
    kinds = [structure(layer) for layer in family.layers]
    assert kinds[0] == kinds[1] == kinds[2] != kinds[3]


@pytest.mark.parametrize(
    ("function", "window"),
    [
        (lambda b, h, q, k: k <= q, 0),
        (lambda b, h, q, k: (k <= q) & (k > q - 5), 5),
        (lambda b, h, q, k: (k <= q) & (k > q - 4096), 4096),
        (lambda b, h, q, k: k <= q + 1, None),
        (lambda b, h, q, k: (k <= q) & (k // 8 == q // 8), None),
        (lambda b, h, q, k: torch.zeros(3)[q], None),
    ],
)
def test_windows_are_found_by_asking_the_mask(function: Any, window: int | None) -> None:
    assert window_of(function) == window


@pytest.mark.parametrize(("blocks", "window"), [([-1, -1, -1], 0), ([-1, 0, 0], None)])
def test_a_batch_without_images_has_a_causal_mask(blocks: list[int], window: int | None) -> None:
    block_B = torch.tensor([blocks])

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) | ((block_B[b, q] == block_B[b, k]) & (block_B[b, q] >= 0))

    config = build("olmo2", intermediate_size=48).config
    with calling(no_attention, [config]), described_masks():
        mask: Any = create_causal_mask(config, torch.zeros(1, 3, 8), None, None, or_mask_function=sees)
    assert mask.omniserve_window == window


@pytest.mark.parametrize("name", TRACED)
def test_layers_know_their_windows(name: str) -> None:
    model = tiny_model(name)
    windows = [spec.window for spec in patch(model, compile=False).omniserve.spec.attention]
    types = getattr(model.config, "layer_types", None) or ["full_attention"] * len(windows)
    assert windows == [9 if each == "sliding_attention" else 0 for each in types]


@pytest.mark.parametrize("name", slow_except(("cohere2",), TRACED))
def test_compiled_halves_are_the_eager_ones(name: str) -> None:
    model = tiny_model(name)
    family = family_of(model)
    assert isinstance(family, TracedFamily)
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


def test_linears_of_one_input_are_found() -> None:
    model = build("olmo2", intermediate_size=48)
    family = family_of(model)
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    assert family.linear_groups(family.layers[1]) == [
        (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj),
    ]  # fmt: skip


@pytest.mark.slow
def test_the_product_of_a_group_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniserve.layers.merged._DEVICES", {"cpu"})  # as on a GPU
    products: list[int] = []

    def counting(share: _ShareProducts, graph: torch.fx.Graph) -> None:
        original(share, graph)
        products.append(
            sum(node.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) for node in graph.nodes)
        )

    original = _ShareProducts.__call__
    monkeypatch.setattr(_ShareProducts, "__call__", counting)
    model = build("olmo2", intermediate_size=48)
    with fresh_cache():
        patched = patch(model, prepack=True).omniserve
        patched.warm_up()
    assert products == [1, 3], "q, k and v; o, gate and up, down"


def test_generate_runs_the_models_own_layers() -> None:
    model = tiny_model("gemma3")
    forwards = [layer.forward for layer in model.model.layers]
    patch(model, compile=False)
    assert [layer.forward for layer in model.model.layers] == forwards
    unpatch(model)
    assert "omniserve" not in model.__dict__

"""Models with multi-head latent attention whose KV are the latents: exact tokens over any history, and refusals."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from omniserve import Engine, EngineConfig, ExecutionConfig, Request, SamplingParams, patch, unpatch
from omniserve.core.config import DiskKVConfig, LoRAConfig, ParallelConfig
from omniserve.core.errors import UnsupportedModelError
from omniserve.layers.kv_fingerprint import kv_fingerprint
from omniserve.layers.patching import patched_model
from omniserve.layers.weights.latents import KEY_WEIGHT
from omniserve.layers.weights.quantizing import quantize_weights
from tests.host.helpers import shorten_pauses
from tests.pairwise import pairwise
from tests.parity.engine_histories import Reference, run_histories, run_history
from tests.parity.models import tiny_model
from tests.parity.test_network import hosts_behind_proxies, small_pools
from tests.parity.zoo import tiny
from tests.quick import slow_except
from tests.rotation import rotating
from tests.sched import preemptible

# With rotated parts that are interleaved or not, scaled latents, an indexer.
TYPES = (
    "axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "minicpm3", "sarvam_mla", "youtu",
)  # fmt: skip
BOTH = (False, True)
GIB = 1 << 30


@functools.cache
def model_and_reference(model_type: str) -> tuple[PreTrainedModel, Reference]:
    model = tiny(model_type)
    reference = Reference(model, num_shared=19)
    return patch(model, compile=False, latent_kv=True), reference


def config_of(model: PreTrainedModel, **settings: Any) -> EngineConfig:
    block_bytes = model.omniserve.spec.kv_block_bytes(8)
    return EngineConfig(
        device_kv_bytes=12 * block_bytes, host_kv_bytes=60 * block_bytes, block_size=8, max_model_len=80,
        execution=ExecutionConfig(compile=False, attention="latent"), **settings,
    )  # fmt: skip


@pytest.mark.parametrize("model_type", slow_except(("deepseek_v2", "minicpm3"), TYPES))
def test_rows_on_both_tiers_equal_hugging_face(model_type: str) -> None:
    model, reference = model_and_reference(model_type)
    assert model.omniserve.spec.num_kv_heads == 1, "a latent is stored once, not for each head"
    rows = ({"faults": False, "async_steps": True}, {"faults": True, "async_steps": False, "kv": "tiered"})
    run_histories(
        model, reference, range(2), reach=("host_tokens", "piggyback_rows", "swaps_out"), rows=rows,
        has_profile=False, host_kv_bytes=1 << 20, max_host_requests=16, attention="latent",
    )  # fmt: skip


@pytest.mark.parametrize("model_type", rotating(["kimi_linear", "bailing_hybrid"], 1))
def test_layers_with_states_beside_them(model_type: str) -> None:
    """Latents are so small beside states that the device has room for all."""
    model, reference = model_and_reference(model_type)
    assert model.omniserve.spec.state_bytes > 0
    run_histories(model, reference, range(1), reach=("finished",), attention="latent", kv="tiered")


def _rows() -> list[Any]:
    """Return histories in which each two options meet, of which a quarter is run by default."""
    rows = pairwise(
        kv=("tiered", "incremental", "bidirectional", "paged"), scheduler=("omniserve", "conserve", "llumnix", "neo"),
        async_steps=BOTH, drafts=BOTH, prefix_cache=(None, False), step_graphs=("on", "off"),
    )  # fmt: skip
    for row in rows:
        if row["kv"] == "bidirectional":
            row["prefix_cache"] = None
    marks = [() if number % 4 == 0 else pytest.mark.slow for number in range(len(rows))]
    return [pytest.param(row, id=str(number), marks=marks[number]) for number, row in enumerate(rows)]


@pytest.mark.parametrize("row", _rows())
def test_policies_and_kv_managers(row: dict[str, Any]) -> None:
    model, reference = model_and_reference("deepseek_v2")
    assert run_history(model, reference, 100, faults=True, attention="latent", **row).finished > 0


@pytest.mark.parametrize(
    ("seed", "reach", "settings"),
    [
        pytest.param(100, ("preemptions", "resumed_tokens"), {"kv": "incremental"}, id="checkpoints"),
        pytest.param(500, ("halted", "preemptions"), {"scheduler": preemptible.NAME}, id="safepoints"),
        pytest.param(200, ("cached_tokens",), {"kv": "tiered", "prefix_cache": True}, id="prefixes"),
    ],
)
def test_checkpoints_safepoints_and_the_prefix_cache(seed: int, reach: tuple[str, ...], settings: Any) -> None:
    model, reference = model_and_reference("deepseek_v2")
    if settings.get("kv") == "incremental":
        settings = {**settings, "device_kv_bytes": 9 * model.omniserve.spec.kv_block_bytes(8), "host_kv_bytes": 1 << 20}
    run_histories(model, reference, range(seed, seed + 1), reach=reach, attention="latent", **settings)


def test_a_restart_finds_latents_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniserve.sched.prefixes_on_host.LEAST_RESTORED_TOKENS", 8)
    model, reference = model_and_reference("deepseek_v2")
    index = max(range(len(reference.prompts)), key=lambda each: len(reference.prompts[each]))
    prompt, tokens = reference.prompts[index], reference.tokens[index]
    found = []
    for _ in range(2):
        with Engine(model, config_of(model, disk_kv=DiskKVConfig(gib=0.01, dir=str(tmp_path), keep=True))) as engine:
            sampling = SamplingParams(max_tokens=8, ignore_eos=True)
            (done,) = engine.generate([Request(prompt_token_ids=prompt, sampling=sampling)])
            assert tuple(done.token_ids) == tokens[:8]
            found.append(done.num_cached_tokens)
    assert found == [0, (len(prompt) - 1) // 8 * 8]


@pytest.mark.slow
def test_prefixes_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniserve.sched.prefixes_on_host.LEAST_RESTORED_TOKENS", 8)
    model, reference = model_and_reference("deepseek_v2")
    spec = model.omniserve.spec
    disk_gib = 100 * (spec.host_block_bytes(8) + 4096) / GIB
    run_histories(
        model, reference, range(1020, 1022), reach=("disk_tokens", "host_tokens"), kv="tiered", prefix_cache=True,
        device_kv_bytes=9 * spec.kv_block_bytes(8), host_kv_bytes=20 * spec.host_block_bytes(8), max_host_requests=16,
        disk_kv=DiskKVConfig(gib=disk_gib, dir=str(tmp_path), keep=True), attention="latent",
    )  # fmt: skip


def test_hosts_on_the_network(secret_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pauses(monkeypatch)
    model, reference = model_and_reference("deepseek_v2")
    with hosts_behind_proxies(model, 1, secret_file) as (hosts, _):
        run_histories(
            model, reference, range(1200, 1202), reach=("network_tasks", "network_moves"), hosts=hosts, kv="tiered",
            attention="latent", **small_pools(model) | {"host_kv_bytes": 6 * model.omniserve.spec.host_block_bytes(8)},
        )  # fmt: skip


def test_compiled_halves_and_replayed_steps_equal_hugging_face() -> None:
    model = tiny_model("deepseek_v3", seed=1)
    reference = Reference(model, num_prompts=6, max_tokens=12)
    patch(model, compile=True, latent_kv=True)
    run_histories(
        model, reference, range(400, 401), reach=("host_tokens",), has_profile=False, compile=True, attention="latent",
        async_steps=False, step_graphs="auto",
    )  # fmt: skip


@pytest.mark.parametrize("prepack", [False, "auto"])
def test_unpatch_takes_the_packed_weights_away(prepack: Any) -> None:
    model = tiny("deepseek_v2")
    ids = torch.arange(1, 9)[None]
    before = [sorted(module.__dict__) for module in model.modules()]
    with torch.inference_mode():
        want = model(ids).logits
        patch(model, compile=False, prepack=prepack, latent_kv=True)
        packed = [module for module in model.modules() if KEY_WEIGHT in module.__dict__]
        assert len(packed) == (0 if prepack is False else model.config.num_hidden_layers)
        torch.testing.assert_close(model(ids).logits, want, atol=1e-4, rtol=1e-4)
        unpatch(model)
        assert torch.equal(model(ids).logits, want)
    assert [sorted(module.__dict__) for module in model.modules()] == before


def test_a_quantised_model_keeps_latents_of_its_codes() -> None:
    model = tiny("deepseek_v2")
    quantize_weights(model, "int8")
    reference = Reference(model, num_prompts=5, max_tokens=8)
    patch(model, compile=False, latent_kv=True)
    run_histories(model, reference, range(10, 11), reach=("finished",), attention="latent")


def test_an_int8_host_pool_holds_latents() -> None:
    model, reference = model_and_reference("deepseek_v2")
    config = config_of(model, host_kv_dtype="int8")
    requests = [
        Request(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=12, ignore_eos=True), service_class="BE")
        for prompt in reference.prompts
    ]
    with Engine(model, config) as engine:
        completions = engine.generate(requests)
        assert engine.stats().scheduler.host_output_tokens > 0
    pairs = [
        (got, want)
        for completion, tokens in zip(completions, reference.tokens, strict=True)
        for got, want in zip(completion.token_ids[:4], tokens, strict=False)
    ]
    assert sum(got == want for got, want in pairs) > 0.7 * len(pairs)


def test_bf16_errors_are_of_the_size_of_hugging_faces_own() -> None:
    """Absorbed, a query is rounded behind U^T, and the result before W; K and V are never rounded."""
    model = tiny_model("deepseek_v3", dtype=torch.bfloat16)
    exact = tiny_model("deepseek_v3")
    exact.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    ids = torch.randint(1, 160, (4, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want, own = exact(ids).logits, model(ids).logits.float()
    patch(model, compile=False, latent_kv=True)
    requests = [
        Request(prompt_token_ids=row.tolist(), sampling=SamplingParams(max_tokens=1, prompt_logprobs=0)) for row in ids
    ]
    with Engine(model, config_of(model)) as engine:
        completions = engine.generate(requests)
    ours = torch.tensor([[entry.logprob for entry in each.prompt_logprobs] for each in completions])

    def of_tokens(logits: torch.Tensor) -> torch.Tensor:
        return logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]

    own_error = (of_tokens(own) - of_tokens(want)).abs().mean()
    assert (ours - of_tokens(want)).abs().mean() <= 2 * own_error + 1e-3


def test_kv_on_disk_is_not_that_of_other_kv() -> None:
    model, _ = model_and_reference("deepseek_v2")
    config = config_of(model)
    other = EngineConfig(block_size=config.block_size)
    assert kv_fingerprint(model, config) != kv_fingerprint(model, other)


def test_models_and_settings_that_cannot_have_latents_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"has no multi-head latent attention.*leave out latent_kv"):
        patch(tiny_model("llama"), compile=False, latent_kv=True)
    model = tiny("deepseek_v2")
    model.model.layers[0].self_attn.kv_b_proj.forward = lambda x: x
    with pytest.raises(UnsupportedModelError, match=r"kv_b_proj is a Linear; latents need its dense weight"):
        patch(model, compile=False, latent_kv=True)
    model, _ = model_and_reference("deepseek_v2")
    with pytest.raises(ValueError, match=r"patched with latent_kv=True, and attention='latent' goes with"):
        patched_model(model, compile=False)
    with pytest.raises(ValueError, match="latent_kv=True; call"):
        patch(model, compile=False)
    for settings in ({"parallel": ParallelConfig(tensor_parallel_size=2)}, {"lora": LoRAConfig(max_loras=1)}):
        with pytest.raises(ValueError, match="attention='latent' is for a model on one rank, without adapters"):
            EngineConfig(execution=ExecutionConfig(attention="latent"), **settings)  # type: ignore[arg-type]


def test_latents_longer_than_the_kernels_take_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="has latents of 584 elements; the kernels take up to 576"):
        patch(tiny_model("deepseek_v3", kv_lora_rank=576), compile=False, latent_kv=True)

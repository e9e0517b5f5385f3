"""The product: exact tokens for every family and any history; each mechanism of a step on a real model.

What policies do with requests is proved on a made-up device (``tests/sched``). Here each policy that uses the host tier
runs in some histories, and each way of a row through a step in as many as it takes until all that it is about has
happened. Options are combined pairwise (``tests.pairwise``).
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from omniserve import Engine, EngineConfig, ExecutionConfig, Request, SamplingParams, patch
from omniserve.kv import KV_MANAGERS
from omniserve.sched import SCHEDULERS
from tests.pairwise import pairwise
from tests.parity.engine_histories import Reference, Tally, run_histories, run_history
from tests.parity.models import MODELS, tiny_model
from tests.quick import slow_except
from tests.rotation import chosen_of, rotating
from tests.sched import hybrid, preemptible

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Policies that move, park, checkpoint or attend on the host; the others order the requests on the device.
_HOST_TIER_USERS = ("omniserve", "neo", "apex", "conserve", "bros", "llumnix", "neo-paper", preemptible.NAME)
BOTH = (False, True)
UNLIKE_LLAMA = ("gemma2", "opt", "gpt_neox", "qwen3_moe")
# What happens to host attention: nothing, it is late and fails at times, its threads die, too.
HOST_FAULTS: tuple[dict[str, bool], ...] = ({}, {"faults": True}, {"faults": True, "deaths": True})


@functools.cache
def model_and_reference(family: str, device: str) -> tuple[PreTrainedModel, Reference]:
    model = tiny_model(family).to(device)
    reference = Reference(model)
    return patch(model, compile=False), reference


def flat(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows in which the settings of ``host`` stand among the others."""
    return [{**row.pop("host"), **row} for row in rows]


def crowded(model: PreTrainedModel, **settings: Any) -> dict[str, Any]:
    """Return settings with which many requests move to the host tier, and sizes of pools that let them."""
    sizes = {"device_kv_bytes": 9 * model.omniserve.spec.kv_block_bytes(8), "host_kv_bytes": 1 << 20}
    return {**sizes, "max_host_requests": 16, **settings}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", slow_except(("llama", *chosen_of(UNLIKE_LLAMA, 1)), MODELS))
def test_rows_on_the_host_tier(family: str, device: str) -> None:
    """Host attention may be late, out of order or fail, and tokens on the host tier may be pending."""
    model, reference = model_and_reference(family, device)
    rows = ({"faults": False, "async_steps": True}, {"faults": True, "async_steps": False, "kv": "tiered"})
    run_histories(
        model, reference, range(2), reach=("host_tokens", "piggyback_rows", "swaps_out", "failures"), rows=rows,
        has_profile=False, host_kv_bytes=1 << 20, max_host_requests=16,
    )  # fmt: skip


def _joins() -> list[dict[str, Any]]:
    rows = pairwise(scheduler=("omniserve", "apex", "llumnix"), overlaps=BOTH, host=HOST_FAULTS, graphs=("on", "off"))
    for row in rows:
        row["async_steps"], row["step_graphs"] = row.pop("overlaps"), row.pop("graphs")
    return flat(rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_results_that_join_late_or_miss_their_layer(graphs: str, device: str) -> None:
    """The host looks for them as the step runs, or, with a mailbox, the device; then steps may be graphs."""
    model, reference = model_and_reference("llama", device)
    reach = ("late_joins", "missed_joins", "failures", *(["constant_decodes"] if graphs == "on" else []))
    kv = ("tiered", "bidirectional") if graphs == "on" else ("tiered",)
    run_histories(
        model, reference, range(300, 301), reach=reach, rows=[row for row in _joins() if row["step_graphs"] == graphs],
        kv=lambda seed: kv[seed % len(kv)], max_num_batched_tokens=lambda seed: (16, 64)[seed % 2],
        **crowded(model, max_piggyback_seats=8),
    )  # fmt: skip


def _policies() -> list[Any]:
    """Return histories in which each policy runs, and each two of the other options meet."""
    rows = flat(pairwise(kv=KV_MANAGERS.names(), host=HOST_FAULTS, async_steps=BOTH, step_graphs=("on", "off")))
    names = [_HOST_TIER_USERS[number % len(_HOST_TIER_USERS)] for number in range(len(rows))]
    return [pytest.param(*case, id=f"{case[0]}-{number}") for number, case in enumerate(zip(names, rows, strict=True))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("scheduler", "row"), _policies())
def test_policies_over_random_histories(scheduler: str, row: dict[str, Any], device: str) -> None:
    """The fuzzer goes on where this ends."""
    model, reference = model_and_reference("llama", device)
    assert run_history(model, reference, 100, scheduler=scheduler, **row).finished > 0


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheduler", [*SCHEDULERS.names(), preemptible.NAME])
def test_every_scheduler_with_every_kv_manager(scheduler: str, device: str) -> None:
    model, reference = model_and_reference("llama", device)
    tally = Tally()
    for seed, (kv, overlaps) in enumerate(((kv, overlaps) for kv in KV_MANAGERS.names() for overlaps in BOTH), 700):
        run_history(
            model, reference, seed, scheduler=scheduler, kv=kv, async_steps=overlaps, faults=overlaps,
            deaths=seed % 3 == 0, tally=tally,
        )  # fmt: skip
    assert tally.finished > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheduler", rotating(["llumnix", "conserve", "bros"], 1))
def test_faults_of_moves_and_checkpoints(scheduler: str, device: str) -> None:
    model, reference = model_and_reference("llama", device)
    run_histories(
        model, reference, range(500, 501), reach=("swaps_out",), scheduler=scheduler, faults=True,
        deaths=lambda seed: seed % 2 == 0, kv="tiered", checkpoint_kv=True, **crowded(model),
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", slow_except(("llama", *chosen_of(("gemma2", "gpt_neox"), 1)), MODELS))
def test_drafts(family: str, device: str) -> None:
    """Of requests on the device and on the host tier."""
    model, reference = model_and_reference(family, device)
    rows = [{"kv": "tiered", "async_steps": False}]
    reach: tuple[str, ...] = ("accepted_drafts", "rejected_drafts", "host_tokens")
    if family == "llama":
        rows = flat(pairwise(host=HOST_FAULTS, kv=("tiered", "bidirectional"), async_steps=BOTH))
        rows[-1]["scheduler"] = "llumnix"
        reach += ("host_drafts",)
    run_histories(
        model, reference, range(860, 861), reach=reach, rows=rows, drafts=True, max_num_batched_tokens=64,
        step_graphs=lambda seed: ("on", "on", "off")[seed % 3],
        **crowded(model, max_piggyback_seats=lambda seed: (4, 8, 16, 2)[seed % 4]),
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheduler", slow_except(("omniserve",), ["omniserve", "apex", "llumnix", "neo"]))
@pytest.mark.parametrize("overlaps", rotating([False, True], 1))
def test_drafts_that_go_by_the_mailbox_change_no_token(scheduler: str, overlaps: bool, device: str) -> None:
    """A token's drafts join with it or not at all, also where a later step is planned before that is known."""
    model, reference = model_and_reference("llama", device)
    reach = ("accepted_drafts", "rejected_drafts", "host_tokens")
    if scheduler != "neo":
        reach += ("host_drafts", "late_drafts")
    if scheduler == "omniserve":
        reach += ("missed_drafts",)
    run_histories(
        model, reference, range(860, 862), reach=reach,
        scheduler=scheduler, drafts=True, step_graphs="on", async_steps=overlaps, faults=lambda seed: seed % 2 == 0,
        deaths=lambda seed: seed % 4 == 0, kv=lambda seed: ("tiered", "bidirectional")[seed % 2],
        device_kv_bytes=9 * model.omniserve.spec.kv_block_bytes(8), host_kv_bytes=1 << 20, max_host_requests=16,
        max_piggyback_seats=lambda seed: (4, 8, 16)[seed % 3], max_num_batched_tokens=64,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheduler", slow_except(("conserve",), SCHEDULERS.names()))
def test_drafts_with_every_scheduler(scheduler: str, device: str) -> None:
    model, reference = model_and_reference("llama", device)
    managers = KV_MANAGERS.names()
    run_histories(
        model, reference, range(800, 801), reach=("accepted_drafts", "rejected_drafts", "preemptions"),
        scheduler=scheduler, drafts=True, kv=lambda seed: managers[seed % len(managers)],
        async_steps=lambda seed: seed % 3 == 0, faults=lambda seed: seed % 2 == 0,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_preempted_requests_resume_from_their_checkpoints(device: str) -> None:
    model, reference = model_and_reference("llama", device)
    run_histories(
        model, reference, range(100, 101), reach=("preemptions", "resumed_tokens"), kv="incremental", **crowded(model)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("attention", slow_except(("auto",), ["auto", "sdpa"]))
@pytest.mark.parametrize("scheduler", slow_except(("omniserve",), ["bros", "omniserve", "sarathi"]))
def test_blocks_of_two_requests(scheduler: str, attention: str, device: str) -> None:
    model, reference = model_and_reference("llama", device)
    run_histories(
        model, reference, range(601, 603),
        reach=("shared_blocks", "relocated_blocks", "overwritten_tokens", "checkpoints", "resumed_tokens"),
        scheduler=scheduler, kv="bidirectional", attention="sdpa" if device == "cuda" else attention,
        faults=lambda seed: seed % 2 == 0, most_requests=32, max_num_seqs=32, max_num_batched_tokens=64,
        checkpoint_kv=True, swap_in_delay_s=0.0, min_residence_s=0.0, **crowded(model),
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", slow_except(("llama",), ["llama", "gemma2", "opt"]))
def test_rows_that_leave_a_step_between_layers(family: str, device: str) -> None:
    model, reference = model_and_reference(family, device)
    run_histories(model, reference, range(500, 502), reach=("halted", "preemptions"), scheduler=preemptible.NAME)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("defer_tokens", slow_except(("always",), ["off", "late", "always"]))
@pytest.mark.parametrize("family", slow_except(("llama",), ["llama", "gemma2", "opt"]))
def test_rows_that_are_deferred_for_a_higher_class(family: str, defer_tokens: str, device: str) -> None:
    model, reference = model_and_reference(family, device)
    run_histories(
        model, reference, range(520, 522),
        reach=("halted", "preemptions", "host_tokens", *(["planned"] if defer_tokens != "off" else [])),
        scheduler=preemptible.DEFERRING, has_profile=True, classes=preemptible.CLASSES, defer_classes=True,
        defer_tokens=defer_tokens, most_token_steps=2, most_requests=32, max_num_seqs=32, max_num_batched_tokens=64,
        host_kv_bytes=1 << 20, max_host_requests=16, faults=lambda seed: seed % 3 == 0,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", slow_except(("llama",), ["llama", "gemma2", "opt", "gpt_neox"]))
def test_host_rows_in_the_first_sub_batch(family: str, device: str) -> None:
    model, reference = model_and_reference(family, device)
    run_histories(
        model, reference, range(540, 542), reach=("hybrid_rows", "preemptions", "failures"), scheduler=hybrid.NAME,
        has_profile=False, host_kv_bytes=1 << 20, max_host_requests=16, faults=lambda seed: seed % 2 == 1,
        deaths=lambda seed: seed % 4 == 3, kv="tiered",
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", slow_except(("gemma2",), ["gemma2", "opt"]))
def test_a_second_sub_batch_with_late_and_failing_host_attention(family: str, device: str) -> None:
    model, reference = model_and_reference(family, device)
    run_histories(
        model, reference, range(200, 202), reach=("host_tokens", "failures"), scheduler="neo", faults=True,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", rotating(["llama", "gemma2", "opt", "gpt_neox"], 1))
def test_ls_requests_that_decode_on_the_host_tier(family: str, device: str) -> None:
    """None is lost when host attention fails, or the host tier as a whole."""
    model, reference = model_and_reference(family, device)
    rows = flat(
        pairwise(host=HOST_FAULTS, kv=("tiered", "incremental", "bidirectional"), async_steps=BOTH, drafts=BOTH)
    )
    run_histories(
        model, reference, range(560, 561), reach=("ls_host_tokens", "hybrid_rows", "preemptions", "failures"),
        scheduler="neo-paper", rows=rows, host_kv_bytes=1 << 20, max_host_requests=16,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_halves_in_the_engine_equal_hugging_face(device: str) -> None:
    model = tiny_model("llama", seed=1).to(device)
    reference = Reference(model, num_prompts=6, max_tokens=12)
    patch(model, compile=True)
    run_histories(model, reference, range(400, 401), reach=("host_tokens",), has_profile=False, compile=True)


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_log_probabilities_are_close(device: str) -> None:
    """bf16 flips argmaxes that are nearly tied, so tokens are not compared: what each path thinks of them is."""
    model = tiny_model("llama", dtype=torch.bfloat16).to(device)
    reference = Reference(model, num_prompts=6, max_tokens=16)
    exact = tiny_model("llama").to(device)  # the same weights, before they were rounded
    exact.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    patch(model, compile=False)
    spec = model.omniserve.spec
    config = EngineConfig(
        device_kv_bytes=spec.kv_block_bytes(8) * 12,
        host_kv_bytes=spec.kv_block_bytes(8) * 60,
        block_size=8,
        max_model_len=80,
        execution=ExecutionConfig(compile=False),
    )
    requests = [
        Request(
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=16, ignore_eos=True, logprobs=0),
            service_class="BE",
        )
        for prompt in reference.prompts
    ]
    with Engine(model, config) as engine:
        completions = engine.generate(requests)
        assert engine.stats().scheduler.host_output_tokens > 0
    errors, own_errors = [], []
    for prompt, completion, tokens in zip(reference.prompts, completions, reference.tokens, strict=True):
        ours = torch.tensor([entry.logprob for entry in completion.logprobs])
        errors.append((ours - _logprobs(exact, prompt, completion.token_ids)).abs())
        own_errors.append((_logprobs(model, prompt, tokens) - _logprobs(exact, prompt, tokens)).abs())
    # Our rounding error against fp32 must be of the size of Hugging Face's own bf16 error on this model.
    assert torch.cat(errors).mean() <= 2 * torch.cat(own_errors).mean() + 1e-3


def _logprobs(model: PreTrainedModel, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits[0].float()
    rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()

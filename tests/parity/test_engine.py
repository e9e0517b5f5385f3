"""The product: exact tokens for every family and any history."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import PreTrainedModel

from omniserve import patch
from omniserve.kv import KV_MANAGERS
from omniserve.sched import SCHEDULERS
from tests.parity.engine_histories import Reference, Tally, run_histories, run_history
from tests.parity.models import MODELS, tiny_model
from tests.quick import slow_except
from tests.sched import hybrid, preemptible

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Policies that move, park, checkpoint or attend on the host; the others order the requests on the device.
_HOST_TIER_USERS = ("omniserve", "neo", "apex", "conserve", "bros", "llumnix", preemptible.NAME)


@functools.cache
def model_and_reference(family: str, device: str) -> tuple[PreTrainedModel, Reference]:
    model = tiny_model(family).to(device)
    reference = Reference(model)
    return patch(model, compile=False), reference


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", slow_except(("llama", "gemma2", "opt", "gpt_neox", "qwen3_moe"), MODELS))
def test_piggybacked_tokens_equal_hugging_face(family: str, device: str) -> None:
    model, reference = model_and_reference(family, device)
    run_histories(
        model, reference, range(3), reach=("host_tokens", "swaps_out"), has_profile=False, host_kv_bytes=1 << 20,
        max_host_requests=16,
    )  # fmt: skip


@pytest.mark.parametrize("scheduler", ["omniserve", "apex", "llumnix"])
@pytest.mark.parametrize("faults", [False, True])
def test_results_that_join_late_or_miss_their_layer_change_no_token(scheduler: str, faults: bool) -> None:
    model, reference = model_and_reference("llama", "cpu")
    run_histories(
        model, reference, range(300, 302), reach=("late_joins", "missed_joins"), scheduler=scheduler, kv="tiered",
        faults=faults, device_kv_bytes=9 * model.omniserve.spec.kv_block_bytes(8), host_kv_bytes=1 << 20,
        max_host_requests=16,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheduler", ["omniserve", "apex", "llumnix"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_results_that_the_device_looks_for_change_no_token(scheduler: str, overlaps: bool, device: str) -> None:
    """Steps are of constant shape or not; with ``overlaps`` the next step is planned before the results are known."""
    model, reference = model_and_reference("llama", device)
    run_histories(
        model, reference, range(320, 323), reach=("late_joins", "missed_joins", "constant_decodes"),
        scheduler=scheduler, step_graphs="on", async_steps=overlaps, faults=lambda seed: seed % 2 == 0,
        deaths=lambda seed: seed % 3 == 0, kv=lambda seed: ("tiered", "bidirectional")[seed % 2],
        device_kv_bytes=9 * model.omniserve.spec.kv_block_bytes(8), host_kv_bytes=1 << 20, max_host_requests=16,
        max_num_batched_tokens=lambda seed: (16, 64)[seed % 2], max_piggyback_seats=8,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheduler", slow_except(_HOST_TIER_USERS, SCHEDULERS.names()))
def test_every_scheduler_with_every_kv_manager_over_random_histories(scheduler: str, device: str) -> None:
    """The fuzzer goes on where this ends."""
    model, reference = model_and_reference("llama", device)
    tally = Tally()
    for seed, kv in enumerate(KV_MANAGERS.names(), 100):
        run_history(model, reference, seed, scheduler=scheduler, kv=kv, tally=tally)
    assert tally.finished > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheduler", slow_except(_HOST_TIER_USERS, [*SCHEDULERS.names(), preemptible.NAME]))
def test_steps_that_overlap_change_no_token(scheduler: str, device: str) -> None:
    model, reference = model_and_reference("llama", device)
    tally, managers = Tally(), KV_MANAGERS.names()
    first = len(scheduler)  # so that each manager meets several policies
    for seed in range(2):
        run_history(
            model, reference, 700 + seed, scheduler=scheduler, kv=managers[(first + seed) % len(managers)],
            async_steps=True, faults=True, deaths=seed == 1, tally=tally,
        )  # fmt: skip
    assert tally.finished > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheduler", slow_except(("omniserve", "conserve"), SCHEDULERS.names()))
def test_drafts_change_no_token(scheduler: str, device: str) -> None:
    model, reference = model_and_reference("llama", device)
    managers = KV_MANAGERS.names()
    tally = run_histories(
        model, reference, range(800, 804), reach=("accepted_drafts", "rejected_drafts", "preemptions"),
        scheduler=scheduler, drafts=True, kv=lambda seed: managers[seed % len(managers)],
        async_steps=lambda seed: seed % 3 == 0, faults=lambda seed: seed % 2 == 0,
    )  # fmt: skip
    assert tally.finished > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", slow_except(("gemma2", "gpt_neox"), MODELS))
def test_drafts_change_no_token_of_any_family(family: str, device: str) -> None:
    model, reference = model_and_reference(family, device)
    run_histories(
        model, reference, range(820, 822), reach=("accepted_drafts", "rejected_drafts"), drafts=True,
        step_graphs=lambda seed: ("on", "off")[seed % 2],
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheduler", slow_except(("omniserve",), ["omniserve", "apex", "llumnix", "neo"]))
@pytest.mark.parametrize("overlaps", [False, True])
def test_drafts_that_go_by_the_mailbox_change_no_token(scheduler: str, overlaps: bool, device: str) -> None:
    """A token's drafts join with it or not at all, also where a later step is planned before that is known."""
    model, reference = model_and_reference("llama", device)
    reach = ("accepted_drafts", "rejected_drafts", "host_tokens")
    if scheduler != "neo":
        reach += ("host_drafts", "late_drafts")
    if scheduler == "omniserve":
        reach += ("missed_drafts",)
    run_histories(
        model, reference, range(860, 864), reach=reach,
        scheduler=scheduler, drafts=True, step_graphs="on", async_steps=overlaps, faults=lambda seed: seed % 2 == 0,
        deaths=lambda seed: seed % 4 == 0, kv=lambda seed: ("tiered", "bidirectional")[seed % 2],
        device_kv_bytes=9 * model.omniserve.spec.kv_block_bytes(8), host_kv_bytes=1 << 20, max_host_requests=16,
        max_piggyback_seats=lambda seed: (4, 8, 16)[seed % 3], max_num_batched_tokens=64,
    )  # fmt: skip


@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize(
    ("family", "scheduler"),
    slow_except(
        (("llama", "omniserve"), ("gemma2", "llumnix")),
        [("llama", "omniserve"), ("gemma2", "llumnix"), ("llama", "apex"), ("opt", "omniserve"), ("llama", "neo")],
    ),
)
def test_drafts_on_the_host_tier_change_no_token(family: str, scheduler: str, faults: bool) -> None:
    model, reference = model_and_reference(family, "cpu")
    managers = [name for name in KV_MANAGERS.names() if name != "paged"]
    reach = ("accepted_drafts", "rejected_drafts", "host_tokens")
    run_histories(
        model, reference, range(840, 844), reach=reach if scheduler == "neo" else (*reach, "host_drafts"),
        scheduler=scheduler, drafts=True, kv=lambda seed: managers[seed % len(managers)], faults=faults,
        deaths=lambda seed: faults and seed % 2 == 0, async_steps=lambda seed: seed % 4 == 0,
        device_kv_bytes=9 * model.omniserve.spec.kv_block_bytes(8), host_kv_bytes=1 << 20, max_host_requests=16,
        max_piggyback_seats=lambda seed: (2, 4, 8, 16)[seed % 4], max_num_batched_tokens=64,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "opt"])
def test_tokens_on_the_host_tier_may_be_pending(family: str, device: str) -> None:
    model, reference = model_and_reference(family, device)
    run_histories(
        model, reference, range(720, 722), reach=("host_tokens", "swaps_out"), async_steps=True, kv="tiered",
        has_profile=False, host_kv_bytes=1 << 20, max_host_requests=16,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_preempted_requests_resume_from_their_checkpoints(device: str) -> None:
    model, reference = model_and_reference("llama", device)
    run_histories(model, reference, range(100, 108), reach=("preemptions", "resumed_tokens"), kv="incremental")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("attention", slow_except(("auto",), ["auto", "sdpa"]))
@pytest.mark.parametrize("scheduler", slow_except(("omniserve",), ["bros", "omniserve", "sarathi"]))
def test_blocks_of_two_requests_change_no_token(scheduler: str, attention: str, device: str) -> None:
    model, reference = model_and_reference("llama", device)
    run_histories(
        model, reference, range(600, 604),
        reach=("shared_blocks", "relocated_blocks", "overwritten_tokens", "checkpoints", "resumed_tokens"),
        scheduler=scheduler, kv="bidirectional", attention="sdpa" if device == "cuda" else attention,
        faults=lambda seed: seed % 2 == 0,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "scheduler"),
    slow_except(
        (("llama", "omniserve"), ("gemma2", "neo")),
        [("llama", "omniserve"), ("gemma2", "omniserve"), ("opt", "omniserve"), ("gemma2", "neo"), ("opt", "apex")],
    ),
)
def test_late_shuffled_and_failing_host_attention_changes_no_token(family: str, scheduler: str, device: str) -> None:
    model, reference = model_and_reference(family, device)
    run_histories(
        model, reference, range(200, 208), reach=("host_tokens", "failures"), scheduler=scheduler, faults=True
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheduler", ["llumnix", "conserve", "bros"])
def test_faults_change_no_token_of_other_users_of_the_host_tier(scheduler: str, device: str) -> None:
    model, reference = model_and_reference("llama", device)
    run_histories(
        model, reference, range(500, 504), reach=("swaps_out",), scheduler=scheduler, faults=True,
        deaths=lambda seed: seed % 2 == 0, kv="tiered", checkpoint_kv=True,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheduler", slow_except(("omniserve",), ["omniserve", "neo", "apex"]))
def test_dying_host_threads_change_no_token(scheduler: str, device: str) -> None:
    model, reference = model_and_reference("llama", device)
    run_histories(
        model, reference, range(300, 310), reach=("failures", "host_tokens"), scheduler=scheduler, faults=True,
        deaths=True,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", slow_except(("llama",), ["llama", "gemma2", "opt"]))
def test_rows_that_leave_a_step_between_layers_change_no_token(family: str, device: str) -> None:
    model, reference = model_and_reference(family, device)
    run_histories(model, reference, range(500, 510), reach=("halted", "preemptions"), scheduler=preemptible.NAME)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", slow_except(("llama",), ["llama", "gemma2", "opt"]))
def test_rows_that_are_deferred_for_a_higher_class_change_no_token(family: str, device: str) -> None:
    model, reference = model_and_reference(family, device)
    run_histories(
        model, reference, range(520, 530), reach=("halted", "preemptions", "host_tokens"),
        scheduler=preemptible.DEFERRING, has_profile=True, classes=preemptible.CLASSES, defer_classes=True,
        host_kv_bytes=1 << 20, max_host_requests=16, faults=lambda seed: seed % 3 == 0,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", slow_except(("llama",), ["llama", "gemma2", "opt", "gpt_neox"]))
@pytest.mark.parametrize("faults", [False, True])
def test_host_rows_in_the_first_sub_batch_change_no_token(family: str, faults: bool, device: str) -> None:
    model, reference = model_and_reference(family, device)
    run_histories(
        model, reference, range(540, 543), reach=("hybrid_rows", "preemptions", *(["failures"] if faults else [])),
        scheduler=hybrid.NAME, has_profile=False, host_kv_bytes=1 << 20, max_host_requests=16, faults=faults,
        deaths=lambda seed: faults and seed % 3 == 0, kv="tiered",
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_halves_in_the_engine_equal_hugging_face(device: str) -> None:
    model = tiny_model("llama", seed=1).to(device)
    reference = Reference(model, num_prompts=6, max_tokens=12)
    patch(model, compile=True)
    run_histories(model, reference, range(400, 404), reach=("host_tokens",), has_profile=False, compile=True)


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_log_probabilities_are_close(device: str) -> None:
    """bf16 flips argmaxes that are nearly tied, so tokens are not compared: what each path thinks of them is."""
    from omniserve import Engine, EngineConfig, ExecutionConfig, Request, SamplingParams

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

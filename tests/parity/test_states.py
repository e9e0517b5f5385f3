"""Models in which layers have recurrent state instead of KV, or beside it: exact tokens over any history."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import PreTrainedModel

from omniserve import patch, unpatch
from omniserve.kv import KV_MANAGERS
from omniserve.layers.weights.packed import PackedLinear
from omniserve.sched import SCHEDULERS
from tests.parity.engine_histories import Reference, Tally, run_histories, run_history
from tests.parity.zoo import tiny
from tests.quick import slow_except
from tests.rotation import chosen_of, rotating
from tests.sched import hybrid, preemptible

# Gated delta rule behind and before attention; Mamba-2 and layers that only have an MLP; Mamba, whose chunks go token
# by token; short convolutions, with attention first; Mamba-2 beside the attention of each layer.
STRUCTURES = ("qwen3_next", "nemotron_h", "jamba", "lfm2_moe", "falcon_h1")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@functools.cache
def model_and_reference(model_type: str, device: str) -> tuple[PreTrainedModel, Reference]:
    model = tiny(model_type).to(device)
    reference = Reference(model)
    return patch(model, compile=False), reference


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", slow_except(("nemotron_h", "falcon_h1"), STRUCTURES))
def test_piggybacked_tokens_equal_hugging_face(model_type: str, device: str) -> None:
    model, reference = model_and_reference(model_type, device)
    run_histories(
        model, reference, range(1), reach=("host_tokens", "swaps_out"), has_profile=False, kv="tiered",
    )  # fmt: skip


@pytest.mark.parametrize("model_type", slow_except(("nemotron_h",), STRUCTURES))
def test_states_of_rows_that_miss_their_layer_stand_still(model_type: str) -> None:
    model, reference = model_and_reference(model_type, "cpu")
    run_histories(
        model, reference, range(300, 301), reach=("late_joins", "missed_joins"), scheduler="omniserve", kv="tiered",
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "scheduler", slow_except(("omniserve", *chosen_of(("neo", "conserve"), 1)), SCHEDULERS.names())
)
def test_schedulers_and_kv_managers(scheduler: str, device: str) -> None:
    """Each policy has two managers, and each two neighbours one of them in common."""
    model, reference = model_and_reference("nemotron_h", device)
    tally, managers = Tally(), KV_MANAGERS.names()
    first = SCHEDULERS.names().index(scheduler)
    for number in (first, first + 1):
        run_history(
            model, reference, 100 + number, scheduler=scheduler, kv=managers[number % len(managers)], tally=tally
        )
    assert tally.finished > 0 and tally.resumed_tokens == 0, "states do not stand where kept tokens end"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", slow_except(("nemotron_h",), STRUCTURES))
@pytest.mark.parametrize("scheduler", slow_except(("omniserve",), ["omniserve", "neo", "neo-paper", "apex"]))
def test_failing_host_attention_and_steps_that_overlap(scheduler: str, model_type: str, device: str) -> None:
    model, reference = model_and_reference(model_type, device)
    run_histories(
        model, reference, range(202, 204), reach=("host_tokens", "failures"), scheduler=scheduler, faults=True,
        async_steps=lambda seed: seed % 2 == 0, deaths=lambda seed: seed % 4 == 3,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_rows_do_not_leave_a_step_between_layers(device: str) -> None:
    """A chunk that begins anew after it left would find the states of some layers ahead of it."""
    model, reference = model_and_reference("nemotron_h", device)
    tally = run_histories(model, reference, range(500, 502), reach=("preemptions",), scheduler=preemptible.NAME)
    assert tally.halted == 0


def test_rows_cannot_be_deferred() -> None:
    model, reference = model_and_reference(STRUCTURES[0], "cpu")
    for option in ({"defer_classes": True}, {"defer_tokens": "late"}):
        with pytest.raises(ValueError, match=f"{next(iter(option))} is not for models with recurrent states"):
            run_history(model, reference, 0, **option)


@pytest.mark.parametrize("model_type", rotating(STRUCTURES, 1))
def test_host_rows_in_the_first_sub_batch_change_no_token(model_type: str) -> None:
    model, reference = model_and_reference(model_type, "cpu")
    run_histories(
        model, reference, range(541, 542), reach=("hybrid_rows",), scheduler=hybrid.NAME, has_profile=False,
        host_kv_bytes=1 << 20, faults=lambda seed: seed % 2 == 1,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "falcon_h1"])
def test_halves_beside_layers_with_state_can_be_compiled(model_type: str, device: str) -> None:
    model = tiny(model_type).to(device)
    reference = Reference(model, num_prompts=6, max_tokens=12)
    patch(model, compile=True)
    run_histories(model, reference, range(400, 401), reach=("host_tokens",), has_profile=False, compile=True)


@pytest.mark.parametrize("model_type", slow_except(("jamba",), ("jamba", "lfm2_moe", "nemotron_h", "falcon_h1")))
def test_linears_of_layers_with_state_are_prepacked(model_type: str) -> None:
    """fp32 weights whose values bf16 has; Jamba uses the weight of one of its linears without a call."""
    model = tiny(model_type)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    reference = Reference(model, num_prompts=6, max_tokens=12)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    patch(model, compile=False, prepack=True)
    layer = model.get_submodule("model.layers.0")
    assert any(isinstance(module, PackedLinear) for module in layer.modules())
    run_histories(model, reference, range(1), reach=("finished",))
    unpatch(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name

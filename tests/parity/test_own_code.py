"""Models that transformers does not know are served by their own code, if they call its attention interface."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from omniserve import UnsupportedModelError, patch, unpatch
from tests.parity.engine_histories import Reference, Tally, run_histories, run_history
from tests.parity.own_code import tern, write


def load(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    assert type(model).__module__.startswith("transformers_modules.")
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have transformers keep its copies of the code in a folder of this test."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_an_architecture_of_today_needs_no_line_of_ours() -> None:
    model = tern()
    reference = Reference(model, num_prompts=4, max_tokens=16)
    patch(model, compile=False)
    assert [each.window for each in model.omniserve.spec.attention] == [9, 0, 9, 0]
    run_histories(
        model, reference, range(1), reach=("host_tokens", "piggyback_rows", "preemptions"),
        faults=lambda seed: seed % 2 == 1,
    )  # fmt: skip
    unpatch(model)


@pytest.mark.slow
def test_an_architecture_of_today_is_compiled() -> None:
    model = tern()
    reference = Reference(model, num_prompts=4, max_tokens=10)
    patch(model)
    assert len({half._half for half in model.omniserve._pre.values()}) == 2
    tally = Tally()
    for seed in range(2):
        run_history(model, reference, seed, tally=tally, compile=True)
    assert tally.finished > 5


def test_code_beside_a_config_is_served(tmp_path: Path) -> None:
    write(tmp_path / "model")
    model = load(tmp_path / "model")
    reference = Reference(model, num_prompts=4, max_tokens=10)
    patch(model, compile=False)
    assert run_history(model, reference, 0).finished > 0


def test_code_without_the_attention_interface_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "model", uses_interface=False)
    with pytest.raises(UnsupportedModelError, match="TernForCausalLM does not use Hugging Face's attention interface"):
        patch(load(tmp_path / "model"))

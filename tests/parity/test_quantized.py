"""Models of codes are served exactly in fp32: their tokens are those of the widened model's own generate()."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from omniserve import patch, unpatch
from omniserve.layers.weights.gguf import remember_file
from omniserve.layers.weights.int8_modules import Int8Linear, RoundedLinear
from omniserve.layers.weights.quantized_modules import QuantizedEmbedding, QuantizedLinear
from tests.gguf_files import write_llama
from tests.parity.engine_histories import Reference, run_histories
from tests.parity.formats import in_int8, of_codes
from tests.parity.models import tiny_model
from tests.quick import slow_except

pytestmark = pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="this CPU has no vector kernel")

REACH = ("host_tokens", "piggyback_rows", "preemptions", "swaps_out", "aborted")
FAMILIES = ("llama", "gemma2", "opt", "gpt_neox", "qwen3_moe", "smollm3")


def _is_served_exactly(model: PreTrainedModel, *, compile: bool = False, num_histories: int = 2) -> None:
    reference = Reference(model, num_prompts=6, max_tokens=24)
    ids = torch.tensor([reference.prompts[0]])
    with torch.inference_mode():
        expected = model(ids).logits
    patch(model, compile=compile)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert all(isinstance(linear, QuantizedLinear) for linear in linears), "nothing dense is left"
    assert isinstance(model.get_input_embeddings(), QuantizedEmbedding)
    rows = ({"faults": False, "async_steps": True}, {"faults": True, "async_steps": False})[:num_histories]
    tally = run_histories(
        model, reference, range(num_histories), reach=REACH, rows=rows, has_profile=False, kv="tiered",
        host_kv_bytes=1 << 20, max_host_requests=16, compile=compile,
    )  # fmt: skip
    assert tally.finished > 5
    unpatch(model)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)  # other threads


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", slow_except(("llama",), FAMILIES))
def test_codes_of_every_form_on_both_tiers(family: str, tied: bool) -> None:
    """Groups are of one form, of two, and of members with a form each; gemma2 scales its embedding."""
    _is_served_exactly(of_codes(tiny_model(family, tie_word_embeddings=tied)))


@pytest.mark.parametrize("compile", slow_except((False,), (False, True)))
def test_codes_in_another_order_of_inputs_on_both_tiers(compile: bool) -> None:
    model = of_codes(tiny_model("llama"), in_order=False)
    _is_served_exactly(model, compile=compile, num_histories=1 if compile else 2)


@pytest.mark.parametrize("compile", slow_except((False,), (False, True)))
@pytest.mark.parametrize("is_tied", slow_except((True,), (False, True)))
def test_a_gguf_file_on_both_tiers(is_tied: bool, compile: bool, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", is_tied=is_tied)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    model.config.__dict__.pop("quantization_config", None)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    assert remember_file(model, path).dense == {}
    _is_served_exactly(model, compile=compile, num_histories=1 if compile else 2)


# A difference of 1e-7 in a row now and then rounds a value to the next code: by 1/127 of the row's largest one. What
# that changes of logits of up to 10 is below this; where they are closer, another token is right, too.
INT8_NEAR_TIE = 0.3


@pytest.mark.parametrize(
    ("family", "is_static", "compile"),
    slow_except(
        [("llama", False, False)],
        [("llama", False, False), ("llama", True, False), ("llama", False, True), ("qwen3_moe", False, False)],
    ),
)  # fmt: skip
def test_rows_in_int8_on_both_tiers(family: str, is_static: bool, compile: bool) -> None:
    model = in_int8(tiny_model(family), is_static=is_static)
    reference = Reference(model, num_prompts=6, max_tokens=6, near_tie=INT8_NEAR_TIE)
    patch(model, compile=compile)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert all(isinstance(linear, Int8Linear) for linear in linears), "nothing dense is left"
    rows = ({"faults": False, "async_steps": True}, {"faults": True, "async_steps": False})[: 1 if compile else 2]
    tally = run_histories(
        model, reference, range(len(rows)), reach=REACH, rows=rows, has_profile=False, kv="tiered",
        host_kv_bytes=1 << 20, max_host_requests=16, compile=compile,
    )  # fmt: skip
    assert tally.finished > 5
    unpatch(model)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert all(type(linear) is RoundedLinear for linear in linears)


@pytest.mark.slow
def test_compiled_halves_of_codes() -> None:
    _is_served_exactly(of_codes(tiny_model("llama")), compile=True, num_histories=1)

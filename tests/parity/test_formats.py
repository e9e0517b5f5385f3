"""Models as users load and change them are served exactly: their tokens are those of their own generate()."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from omniserve import Engine, Request, SamplingParams, patch, unpatch
from tests.engine_settings import flat_config
from tests.parity.engine_histories import Reference, Tally, run_histories, run_history
from tests.parity.formats import FORMS, MULTIMODAL, OpaqueHead, multimodal, quantised
from tests.parity.models import tiny_model
from tests.quick import slow_except

FAMILIES = ("llama", "smollm3")  # one kind of layer, two kinds
CASES = [(form, family) for form in FORMS for family in FAMILIES]
# What is in the layers' own modules is traced as they are, so a graph may be wrong where the layers' code is right.
COMPILED = ("lora", "lora scalings", "int8", "packed ints", "hooks", "weight norm", "gradient checkpointing")


def is_served_exactly(model: Any, *, compile: bool = False, num_histories: int = 2) -> None:
    reference = Reference(model, num_prompts=4, max_tokens=10)
    patch(model, compile=compile)
    tally = Tally()
    for seed in range(num_histories):
        run_history(model, reference, seed, tally=tally, faults=seed % 2 == 1, compile=compile)
    assert tally.finished > 5
    unpatch(model)
    with torch.inference_mode():
        ids = torch.tensor([reference.prompts[0]])
        logprobs_TV = model(input_ids=ids).logits[0].log_softmax(-1)
    torch.testing.assert_close(logprobs_TV, reference.prompt_logprobs[0], rtol=1e-5, atol=1e-5)  # other threads


@pytest.mark.parametrize(
    ("form", "family"),
    slow_except([("lora", "smollm3"), ("int8", "llama"), ("packed ints", "smollm3"), ("hooks", "llama")], CASES),
)
def test_tokens_are_those_of_generate(form: str, family: str) -> None:
    is_served_exactly(FORMS[form](tiny_model(family)))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", COMPILED)
def test_compiled_halves_call_the_modules_own_forward(form: str, family: str) -> None:
    is_served_exactly(FORMS[form](tiny_model(family)), compile=True, num_histories=1)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["lora", "int8"])
def test_requests_move_between_the_tiers(form: str, family: str) -> None:
    model = FORMS[form](tiny_model(family))
    reference = Reference(model, num_prompts=6, max_tokens=24)
    patch(model, compile=False)
    run_histories(model, reference, range(4), reach=("host_tokens", "piggyback_rows", "preemptions", "swaps_in"))


@pytest.mark.parametrize("family", slow_except(("smollm3",), FAMILIES))
def test_a_tied_and_quantised_head_leaves_the_embedding_as_it_is(family: str) -> None:
    model = tiny_model(family, tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight
    quantised(model, "Int8WeightOnlyConfig")
    assert model.get_input_embeddings().weight is embedding is not model.lm_head.weight
    is_served_exactly(model)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_resized_embeddings_may_be_tied(family: str, tied: bool) -> None:
    is_served_exactly(FORMS["resized"](tiny_model(family, tie_word_embeddings=tied)))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantiser_of_transformers_is_served(family: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    tiny_model(family).save_pretrained(tmp_path)
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map="cpu")
    model.generation_config.pad_token_id = 0
    is_served_exactly(model)


@pytest.mark.parametrize("model_type", slow_except(("qwen2_vl",), MULTIMODAL))
def test_a_model_of_texts_and_images_serves_texts(model_type: str) -> None:
    is_served_exactly(multimodal(model_type))


def test_a_head_need_not_be_a_linear() -> None:
    model = tiny_model("smollm3")
    model.lm_head = OpaqueHead(model.lm_head)
    is_served_exactly(model)


# Activations that are rounded to few bits amplify differences of 1e-7 to a step of their rounding: 2^-11 in fp16, 1/127
# of a row's largest value in int8. Over three layers with logits of up to 10 that is some 0.01 and 0.1.
FP16_LOGPROB_TOLERANCE = 0.05
INT8_LOGPROB_TOLERANCE = 0.5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["float16", "int8 activations"])
def test_rounded_activations_are_served_closely(form: str, family: str) -> None:
    model = tiny_model(family, torch.float16 if form == "float16" else torch.float32)
    if form != "float16":
        quantised(model, "Int8DynamicActivationInt8WeightConfig", is_headless=True)
    prompt = torch.randint(1, 160, (40,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        logprobs_TV = model(prompt[None]).logits[0].float().log_softmax(-1)
    patch(model, compile=False)
    config = flat_config(
        {"device_kv_bytes": 1 << 20, "host_kv_bytes": 0, "max_num_batched_tokens": 16, "compile": False}
    )
    with Engine(model, config) as engine:
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
        (output,) = engine.generate([Request(prompt_token_ids=prompt.tolist(), sampling=sampling)])
    got = torch.tensor([entry.logprob for entry in output.prompt_logprobs])
    want = logprobs_TV[:-1].gather(1, prompt[1:, None])[:, 0]
    worst = float((got - want).abs().max())
    assert worst < (FP16_LOGPROB_TOLERANCE if form == "float16" else INT8_LOGPROB_TOLERANCE)
    assert worst < 0.1 * float(want.std())

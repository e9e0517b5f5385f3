"""The model that is shipped, and the script that made it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import omniserve

FOLDER = Path(omniserve.__file__).parent / "builtin_model"
SCRIPT = Path(__file__).parents[2] / "examples" / "train_builtin_model.py"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


def test_it_is_small_enough_to_ship() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 10_000_000


@pytest.mark.parametrize(
    "text", ["def f(x):\n    return x + 1", "naïve café, Москва, 数学, 🎉", "  leading\t\ttabs \n\n"]
)
def test_its_tokenizer_loses_nothing(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_its_words_are_those_of_the_documentation(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    real = "Return a list of the names of all modules. If the argument is not a string, raise a TypeError."
    mixed = " ".join(reversed(real.split()))

    def loss(text: str) -> float:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            return model(input_ids=ids, labels=ids).loss.item()

    # A untrained model gives ln(4096) = 8.3 to both; the text below is of a kind that it was trained on.
    assert loss(real) < 4.0
    assert loss(real) < loss(mixed) - 1.0


def test_its_chat_answers_end(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(prompt["input_ids"], attention_mask=prompt["attention_mask"], max_new_tokens=64)
    answer = output[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.convert_ids_to_tokens(answer[-1].item()) == "<|end|>"
    assert "Python" in tokenizer.decode(answer, skip_special_tokens=True)


@pytest.mark.slow
def test_training_script_writes_a_model_that_loads(tmp_path: Path) -> None:
    arguments = ["--output", str(tmp_path), "--steps", "1", "--vocab-size", "400", "--max-texts", "200"]
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "training.json").read_text())
    assert facts["steps"] == 1 and facts["seed"] == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(tokenizer) == trained.config.vocab_size == 400
    assert trained.dtype == torch.bfloat16
    assert trained.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|end|>"])

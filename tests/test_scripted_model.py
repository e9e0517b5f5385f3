"""The scripted model says its scripts, to transformers as to the server."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.scripted_model import OTHERWISE, write_scripted_model

SCRIPTS = {
    "plain": "A list is mutable, a tuple is not.",
    "call": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "again": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "json": '{"city": "Rome", "tags": ["a", "a", "a"]}',
    "end": "a tuple is not.",
    "repeated": "ha " * 40,
    "pieces": ["A list", " is a", " mutable sequence."],
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripted")
    write_scripted_model(folder, SCRIPTS)
    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("key", [*SCRIPTS, None])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_key_is_followed_by_its_text(loaded, key, temperature):
    tokenizer, model = loaded
    chat = [
        {"role": "user", "content": "§plain§ is an earlier one" if key else "no key"},
        {"role": "assistant", "content": "said"},
        {"role": "user", "content": f'{{"result": "§{key}§ and more"}}' if key else "hello"},
    ]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    with torch.inference_mode():
        output = model.generate(**ids, max_new_tokens=200, **sampling)
    text = tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=False)
    assert text == ("".join(SCRIPTS[key]) if key else OTHERWISE) + "<|end|>"


def test_a_text_that_cannot_be_scripted_is_refused(tmp_path):
    for scripts in ({"a": ""}, {"a": "Köln"}, {"a": "same", "b": "same"}, {"a": ["x", "x"]}):
        with pytest.raises(ValueError, match="scripted text"):
            write_scripted_model(tmp_path, scripts)

"""Patch a Hugging Face model, see that it still generates the same tokens, and restore it."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import omniserve

MODEL = Path(omniserve.__file__).parent / "builtin_model"
PROMPT = "The with statement"


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    # In float32 equal means equal; in bfloat16 about one greedy choice in 200 is a tie that rounding decides.
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)

    before = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    omniserve.patch(model, compile=False)
    patched = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    omniserve.unpatch(model)
    after = model.generate(**inputs, max_new_tokens=48, do_sample=False)

    print(tokenizer.decode(patched[0]))
    print("patched generates the same tokens:", torch.equal(before, patched))
    print("unpatched generates the same tokens:", torch.equal(before, after))


if __name__ == "__main__":
    main()

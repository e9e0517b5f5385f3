"""LoRA adapters by name: requests of the model alone, of one and of several adapters."""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.common.cases import Trials
from benchmarks.common.engine_run import request
from benchmarks.common.models import random_llama
from benchmarks.features import FEATURES
from omniserve import Engine, EngineConfig, ExecutionConfig
from omniserve.core.config import LoRAConfig

_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(model: Any, folder: Path, rank: int, seed: int) -> None:
    """Write a random adapter of all linears of a model's layers, as PEFT would, in bf16."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return (0.02 * torch.randn(shape, generator=generator)).to(torch.bfloat16)

    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _LINEARS:
            tensors[f"base_model.model.{name}.lora_A.weight"] = random(rank, module.in_features)
            tensors[f"base_model.model.{name}.lora_B.weight"] = random(module.out_features, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


@FEATURES.case(
    hidden=(2048, "size of a row; the other sizes are those of TinyLlama, in proportion"), layers=22, rank=16,
    prompt=32, output=64, num_requests=[1, 8, 32], repeats=5, no_compile=False,
    tiny={"hidden": 64, "layers": 2, "prompt": 8, "output": 8, "num_requests": [4], "repeats": 1, "no_compile": True},
)  # fmt: skip
def loras(args: argparse.Namespace) -> Trials:
    """LoRA adapters: decoded tokens a second of requests that run at once, each with an adapter.

    The arms, in one engine with eight slots: ``none``, requests of the model alone; ``one``, all requests have one
    adapter; ``eight``, they take turns among eight. Adapters are of all linears, the model has random bf16 weights.
    Times are from the last first token to the last token.
    """
    shape = {
        "hidden_size": args.hidden, "intermediate_size": args.hidden * 11 // 4, "num_hidden_layers": args.layers,
        "num_attention_heads": max(1, args.hidden // 64), "num_key_value_heads": max(1, args.hidden // 512),
        "vocab_size": 32000, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    config = EngineConfig(
        device_kv_bytes=512 << 20, host_kv_bytes=0, max_num_seqs=64, scheduler="sarathi",
        execution=ExecutionConfig(compile=not args.no_compile, prefix_cache=False),
        lora=LoRAConfig(max_loras=8, max_lora_rank=args.rank),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = random_llama(**shape)
        names = [f"adapter{number}" for number in range(8)]
        for seed, name in enumerate(names):
            save_adapter(model, Path(folder) / name, args.rank, seed)
        with Engine(model, config) as engine:
            for name in names:
                engine.load_lora(name, Path(folder) / name)
            count = 0

            def rate(at_once: int, adapters: list[str]) -> dict[str, float]:
                nonlocal count
                asked = []
                for number in range(at_once):
                    count += 1
                    lora = adapters[number % len(adapters)] if adapters else None
                    asked.append(request(f"ls{count}", args.prompt, args.output, lora=lora))
                for each in asked:
                    engine.add(each)
                first: set[str] = set()
                num_tokens, began_s = 0, 0.0
                while engine.has_unfinished:
                    for output in engine.step():
                        first.add(output.request_id)
                        num_tokens += len(output.new_token_ids) if began_s else 0
                    if not began_s and len(first) == at_once:
                        began_s = time.perf_counter()
                    if engine.last_plan_was_empty:
                        engine.wait(0.001)
                return {"tokens_per_s": num_tokens / (time.perf_counter() - began_s)}

            for at_once in args.num_requests:
                yield f"{at_once} at once", {
                    "none": functools.partial(rate, at_once, []),
                    "one": functools.partial(rate, at_once, names[:1]),
                    "eight": functools.partial(rate, at_once, names),
                }  # fmt: skip

"""The latents of multi-head latent attention as KV, beside the K and V of each head that are made from them."""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common.cases import Trials
from benchmarks.common.engine_run import request
from benchmarks.features import FEATURES
from omniserve import Engine, EngineConfig, ExecutionConfig

_DEEPSEEK_V2_LITE: dict[str, Any] = {
    "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "intermediate_size": 10944,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "vocab_size": 4096, "max_position_embeddings": 8192,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def _model(layers: int, rank: int) -> Any:
    """Return a random bf16 model; all its MLPs are dense, of the size that a token's experts have together."""
    torch.manual_seed(0)
    shape = {**_DEEPSEEK_V2_LITE, "kv_lora_rank": rank, "num_hidden_layers": layers, "first_k_dense_replace": layers}
    config = AutoConfig.for_model("deepseek_v2", **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.pad_token_id = 0
    return model


@FEATURES.case(
    layers=(2, "of DeepSeek-V2-Lite's 27"), rank=512, output=32, num_requests=[8], contexts=[256, 1024], repeats=3,
    no_compile=False,
    tiny={
        "layers": 1, "rank": 32, "output": 4, "num_requests": [2], "contexts": [16], "repeats": 1, "no_compile": True,
    },
)  # fmt: skip
def latents(args: argparse.Namespace) -> Trials:
    """Latents as KV: decoded tokens a second, prompt tokens a second, and tokens that 1 GiB of either pool holds.

    The arms: ``heads``, K and V of each head, and ``latents`` (``attention="latent"``), of two engines with the same
    random weights in DeepSeek-V2-Lite's shape. Prompts are as long as the context, come one after the other and share
    nothing; decode is timed from the last first token to the last token.
    """
    engines: dict[str, Engine] = {}
    count = 0

    def serve(arm: str, at_once: int, context: int) -> dict[str, float]:
        nonlocal count
        engine, began_s, prompt_s = engines[arm], 0.0, 0.0
        first: set[str] = set()
        num_tokens, count = 0, count + at_once
        asked_s = time.perf_counter()
        for number in range(at_once):
            engine.add(request(f"ls{count - number}", context, args.output))
        while engine.has_unfinished:
            for output in engine.step():
                first.add(output.request_id)
                num_tokens += len(output.new_token_ids) if began_s else 0
            if not began_s and len(first) == at_once:
                began_s = time.perf_counter()
                prompt_s = began_s - asked_s
        spec, block_size = engine.spec, engine.config.block_size
        return {
            "tokens_per_s": num_tokens / (time.perf_counter() - began_s),
            "prompt_tokens_per_s": at_once * context / prompt_s,
            "device_tokens_a_gib": 2**30 / spec.kv_block_bytes(block_size) * block_size,
            "host_tokens_a_gib": 2**30 / spec.host_block_bytes(block_size) * block_size,
        }

    try:
        for arm, attention in (("heads", "auto"), ("latents", "latent")):
            execution = ExecutionConfig(attention=attention, compile=not args.no_compile, prefix_cache=False)
            config = EngineConfig(
                device_kv_bytes=1 << 30, host_kv_bytes=0, max_num_seqs=64, scheduler="sarathi", execution=execution
            )
            engines[arm] = Engine(_model(args.layers, args.rank), config)
        for at_once in args.num_requests:
            for context in args.contexts:
                arms = {arm: functools.partial(serve, arm, at_once, context) for arm in engines}
                yield f"{at_once} x {context}", arms
    finally:
        for engine in engines.values():
            engine.close()

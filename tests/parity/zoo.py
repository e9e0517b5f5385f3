"""All causal language models of transformers, tiny and random, against their own ``generate()``.

    python -m tests.parity.zoo [MODEL_TYPE ...]      --write also writes docs/models.md

Each type gets random histories on the real engine: mixed, chunked, preempted, offloaded and piggybacked requests, whose
fp32 greedy tokens must be those of ``generate()``. A type that is refused is listed with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from omniserve import UnsupportedModelError, patch
from tests.parity.engine_histories import Reference, Tally, run_history
from tests.parity.models import VOCAB_SIZE

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

# Fields of configs by their names, for every type that has them.
_SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_local_experts", "num_experts", "n_routed_experts"), 2),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"), 512),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "first_k_dense_replace"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim"), 16),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "sliding_window": 9,
    "vocab_size": VOCAB_SIZE,
}
_MLA = {"num_key_value_heads": 4, "v_head_dim": 16, "qk_nope_head_dim": 16, "head_dim": 8, "q_lora_rank": 16}
# Prompts have several chunks; every second layer has none, and scales queries from an early position on.
_LLAMA4 = {"attention_chunk_size": 7, "no_rope_layer_interval": 2, "floor_scale": 5}
# What a type needs beside these sizes. None leaves a field as it is by default.
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "axk1": _MLA, "axk2": _MLA, "deepseek_v2": _MLA | {"topk_method": "greedy", "num_experts_per_tok": 2},
    "deepseek_v3": _MLA,
    "deepseek_v32": _MLA | {"index_topk": 512}, "glm4_moe_lite": _MLA, "glm_moe_dsa": _MLA, "longcat_flash": _MLA,
    "minicpm3": _MLA, "mistral4": _MLA, "youtu": _MLA, "kimi_linear": _MLA,
    "bert": {"is_decoder": True},
    "bert-generation": {"is_decoder": True},
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "biogpt": {"scale_embedding": True},
    "camembert": {"is_decoder": True},
    "codegen": {"rotary_dim": 8},
    "data2vec-text": {"is_decoder": True},
    "dots1": {"n_shared_experts": 1},
    "electra": {"is_decoder": True},
    "ernie": {"is_decoder": True},
    "falcon": {"head_dim": None, "alibi": False, "new_decoder_architecture": True},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]], "window_size": 9},
    "gptj": {"rotary_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "hunyuan_v1_moe": {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "moe_topk": 1},
    "llama4": _LLAMA4, "llama4_text": _LLAMA4,
    "megatron-bert": {"is_decoder": True},
    "moshi": {"sliding_window": 512},  # with a shorter one its generate() contradicts its own forward
    "ministral": {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "nemotron": {
        "head_dim": 16, "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "rembert": {"is_decoder": True},
    "roberta": {"is_decoder": True},
    "roberta-prelayernorm": {"is_decoder": True},
    "roc_bert": {"is_decoder": True},
    "roformer": {"is_decoder": True},
    "xlm-roberta": {"is_decoder": True},
    "xlm-roberta-xl": {"is_decoder": True},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
}  # fmt: skip


_MOST_PARAMETERS = 20_000_000


class Outcome(NamedTuple):
    """What became of a type."""

    model_type: str
    result: str
    """``exact``, ``refused``, ``wrong``, or ``no model`` where none could be made."""
    detail: str


def tiny(model_type: str) -> PreTrainedModel:
    """Build a small random model of a type whose greedy outputs are varied."""
    usual = AutoConfig.for_model(model_type).get_text_config()
    known = set(inspect.signature(type(usual).__init__).parameters) | set(vars(usual)) | set(usual.attribute_map)
    fields = {name: value for name, value in _SIZES.items() if name in known and getattr(usual, name, None) is not None}
    fields |= _FIELDS.get(model_type, {})
    fields = {name: value for name, value in fields.items() if value is not None}
    config = type(usual)(**fields)
    if getattr(config, "_experts_implementation", None) == "eager":
        config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(config)
    if (num_parameters := sum(parameter.numel() for parameter in shell.parameters())) > _MOST_PARAMETERS:
        raise ValueError(
            f"{num_parameters / 1e6:.0f} million parameters: the type has sizes that the table does not know"
        )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.2 * noise)
            elif "embed" in name or "wte" in name:
                parameter.copy_(0.1 * noise if config.tie_word_embeddings else noise)
            else:
                parameter.copy_(noise * 1.6 * parameter.shape[-1] ** -0.5)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None  # BART's generate() ends with it whatever the model says
    return model.eval()


def try_type(model_type: str, num_histories: int) -> Outcome:
    """Run histories of a type."""
    try:
        model = tiny(model_type)
    except Exception as error:  # whatever its config or its module refuses; reported, not swallowed
        return Outcome(model_type, "no model", f"{type(error).__name__}: {_one_line(error)}")
    try:
        model(torch.arange(1, 6)[None], use_cache=False)
        reference = Reference(model, num_prompts=5, max_tokens=12)
    except Exception as error:
        return Outcome(model_type, "no model", f"its own code fails: {type(error).__name__}: {_one_line(error)}")
    try:
        patch(model, compile=False)
    except UnsupportedModelError as error:
        return Outcome(model_type, "refused", _one_line(error).removeprefix(type(model).__name__).lstrip(": "))
    except Exception as error:
        return Outcome(model_type, "wrong", f"patch: {type(error).__name__}: {_one_line(error)}")
    tally = Tally()
    try:
        for seed in range(num_histories):
            run_history(model, reference, seed, faults=seed % 2 == 1, tally=tally)
    except Exception as error:  # AssertionError: other tokens; anything else is as wrong
        return Outcome(model_type, "wrong", f"{type(error).__name__}: {_one_line(error)}")
    return Outcome(model_type, "exact", f"{tally.finished} requests, {tally.host_tokens} tokens on the host tier")


def page(outcomes: list[Outcome]) -> str:
    """Return the page that lists them."""
    exact = [each for each in outcomes if each.result == "exact"]
    refused = [each for each in outcomes if each.result == "refused"]
    untried = [each for each in outcomes if each.result not in ("exact", "refused")]
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"
    lines = [
        "# Models", "",
        f"Written by `python -m tests.parity.zoo --write`, with {versions}: each causal language model of",
        "transformers, tiny and random, in fp32. *Exact*: over random histories of mixed, chunked, preempted,",
        "offloaded and piggybacked requests its tokens were those of its own `generate()`.", "",
        f"## Exact ({len(exact)})", "",
        ", ".join(f"`{each.model_type}`" for each in exact), "",
        f"## Refused, by name ({len(refused)})", "",
        "| type | reason |", "|---|---|", *(f"| `{each.model_type}` | {each.detail} |" for each in refused), "",
        f"## Not tried ({len(untried)})", "",
        "No tiny model of these was made, or what was found is not exact.", "",
        "| type | why |", "|---|---|",
        *(f"| `{each.model_type}` | {each.result}: {each.detail} |" for each in untried), "",
    ]  # fmt: skip
    return "\n".join(lines)


def _one_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return " ".join(lines)[:200].replace("|", "/")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def main(write: Callable[[str], object] = PAGE.write_text) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="MODEL_TYPE", help="all, if none is named")
    parser.add_argument("--histories", type=int, default=3, help="of each type")
    parser.add_argument("--write", action="store_true", help="write docs/models.md")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the layers are tiny; the cores are for the host tier
    outcomes, started_s = [], time.monotonic()
    with _quiet(), tqdm(args.types or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), unit="type") as progress:
        for model_type in progress:
            outcome = try_type(model_type, args.histories)
            outcomes.append(outcome)
            progress.write(f"{outcome.result:8} {outcome.model_type}: {outcome.detail}")
    counts = {result: sum(each.result == result for each in outcomes) for result in ("exact", "refused", "wrong")}
    print(f"{counts}, of {len(outcomes)} types in {time.monotonic() - started_s:.0f} s")
    if args.write:
        write(page(outcomes))
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())

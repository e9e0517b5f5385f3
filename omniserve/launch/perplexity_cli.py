"""What quantising costs: the perplexity of a text, with weights as loaded and quantised, and KV as it is and in int8.

    python -m omniserve.perplexity --model PATH_OR_HUB_ID --text FILE [--quantize int8 int4] [--kv-dtype auto int8]

The text is cut into windows; a token's probability is that behind all tokens before it in its window (but the first
half of a window, which has little before it, is not counted). Transformers' own forward computes it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_AS_LOADED = "as loaded"


def perplexity(model: PreTrainedModel, ids: Sequence[int], window: int, kv_dtype: str = "auto") -> float:
    """Return the perplexity of the tokens in the second half of each window, with half a window before them.

    With ``kv_dtype`` ``int8`` K and V are rounded before they are attended (``launch/int8_cache.py``).

    Raises:
        ValueError: The text is shorter than a window.
    """
    import torch
    from tqdm import tqdm

    from omniserve.launch.int8_cache import Int8Cache

    if len(ids) < window:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than a window of {window}; give a longer one")
    total, count, half = 0.0, 0, window // 2
    with torch.inference_mode():
        for first in tqdm(range(0, len(ids) - window + 1, half), unit="window", disable=None, leave=False):
            tokens = torch.tensor([ids[first : first + window]])
            cached: dict[str, Any] = {"use_cache": False}
            if kv_dtype == "int8":
                cached = {"use_cache": True, "past_key_values": Int8Cache(config=model.config)}
            logits = model(input_ids=tokens, **cached).logits[0, half - 1 : -1].float()
            total += float(torch.nn.functional.cross_entropy(logits, tokens[0, half:], reduction="sum"))
            count += window - half
    return math.exp(total / count)


def main(arguments: Sequence[str] | None = None) -> int:
    from omniserve.core.arguments import ArgumentParser
    from omniserve.core.config import EngineConfig
    from omniserve.core.spec import KV_DTYPES
    from omniserve.launch.flags import model_from
    from omniserve.launch.loading import EngineLoader
    from omniserve.launch.models import DTYPES, QUANTIZE, is_of_codes

    parser = ArgumentParser(
        "python -m omniserve.perplexity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", metavar="PATH_OR_HUB_ID", help="default: the built-in one")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="the text, in UTF-8")
    parser.add_argument("--gguf-file", metavar="NAME", help="the GGUF file of the model's folder or repository")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of the model's repository")
    parser.add_argument(
        "--quantize", nargs="*", choices=QUANTIZE, help="default: all, of a model that is not quantised"
    )
    parser.add_argument("--kv-dtype", nargs="+", choices=KV_DTYPES, default=KV_DTYPES, help="default: all")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text, from its beginning")
    parser.add_argument("--window", type=int, default=512)
    args = parser.parse_args(arguments)
    if args.window < 2:
        parser.error("--window must be 2 or more")
    rows = []
    try:
        model_name = model_from(args)
        is_quantized = is_of_codes(model_name)
        if is_quantized and args.quantize:
            parser.error(f"--quantize: {model_name} is quantised already; leave it out")
        ways = (() if is_quantized else QUANTIZE) if args.quantize is None else args.quantize
        text = args.text.read_text(encoding="utf-8")
        for how in (None, *ways):
            loader = EngineLoader(model=model_name, dtype=args.dtype, device="cpu", config=EngineConfig(), quantize=how)
            model = loader.load_model(lambda what: print(what, file=sys.stderr, flush=True))
            # Not verbose: it would warn that the text, which is cut into windows, is longer than the context.
            ids = loader.load_tokenizer()(text, verbose=False)["input_ids"][: args.tokens]
            found = [perplexity(model, ids, args.window, kv_dtype) for kv_dtype in args.kv_dtype]
            size = _weight_bytes(model)  # it patches the model
            rows += [(how or _AS_LOADED, each, value, size) for each, value in zip(args.kv_dtype, found, strict=True)]
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))
    print(f"{'weights':<12}{'KV':<6}{'perplexity':>12}{'MB':>10}")
    for name, kv_dtype, value, size in rows:
        print(f"{name:<12}{kv_dtype:<6}{value:>12.3f}{size / 1e6:>10,.1f}")
    return 0


def _weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the weights of a model as they are held once it is patched."""
    from omniserve.layers.patching import patch
    from omniserve.layers.weights.loaded_model import held_tensors

    patch(model, compile=False)
    held = {id(each): each.nbytes for module in model.modules() for each in held_tensors(module).values()}
    return sum(held.values()) + sum(weight.untyped_storage().nbytes() for weight in model.parameters())

"""Rows that leave a step between two layers, as ``benchmarks.safepoints`` measures it, with a known model's shape."""

from __future__ import annotations

from argparse import Namespace

from benchmarks.gpu.engines import LLAMA_8B, config_of, kv_token_bytes, patched_model, reclaim_memory
from benchmarks.gpu.script import NotHere, Script
from benchmarks.safepoints import measure_overhead, measure_stream


def safepoints(script: Script) -> None:
    """Time a BE decode step with and without looks for requests, and how soon rows are gone when one has come."""
    model = patched_model(LLAMA_8B, script)
    args = Namespace(
        rate=1.0, seconds=20.0, steps=60, be=64, be_prompt=4096, be_output=2, ls_prompt=64, ls_output=4, ttft=0.2,
        tpot=0.1, profile_s=12.0,
    )  # fmt: skip
    if script.dry:
        vars(args).update(rate=20.0, seconds=1.0, steps=5, be=4, be_prompt=64, ls_prompt=8, profile_s=1.0)
    config = config_of(
        model, scheduler="conserve", host_kv_bytes=0, max_model_len=2 * args.be_prompt,
        max_num_batched_tokens=2 * args.be_prompt, device_kv_bytes=20 * args.be_prompt * kv_token_bytes(model),
    )  # fmt: skip
    reclaim_memory(script.device)
    with script.case(f"step of {args.be} BE rows that looks for requests") as case:
        found = measure_overhead(model, config, args)
        note = f"limit: the same without looks; a look takes {1e6 * found['look_s']:.2g} us"
        case.figure(1e3 * found["with_s"], "ms", limit=1e3 * found["without_s"], at_most=1.005, note=note)
    with script.case("from an LS request's arrival to the end of the BE step that it comes in") as case:
        stream = measure_stream(model, config, args, "kept", seed=0)
        if not stream["delays_s"]:
            raise NotHere("no LS request came in a step of BE work alone")
        whole_ms, layers = 1e3 * stream["alone_step_p50_s"], model.omniserve.num_layers
        note = f"limit: a layer; a step of BE work alone takes {whole_ms:.4g} ms"
        case.figure(1e3 * stream["delay_p50_s"], "ms", limit=whole_ms / layers, note=note, **stream)

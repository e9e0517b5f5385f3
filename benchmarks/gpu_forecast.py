"""Forecast: what steps on an H100 and an H200 read, write and launch, and how long they take at least, without a GPU.

python -m benchmarks.gpu_forecast

The layers' kernels are those that the compiler makes for an H200 (``forecast/kernels.py``), with the bytes of their
inputs and outputs; attention and the operators that move rows go by formula (``forecast/steps.py``). Two times:

* floor: weights and KV read once at the data sheet's bandwidth, or the step's arithmetic at its peak, whichever takes
  longer. Nothing can be faster.
* expected: each kernel at the share of these peaks that kernels reached on A100s
  (``omniserve.simulate.analytic.Efficiency``), one after the other with a gap behind each. This is a prediction; the
  step's planning and its copies are not in it.

So the first real run is compared with what was said before it. Nothing here was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser, table_of
from benchmarks.forecast.kernels import Work, expected_s, pretend_to_have_a_gpu
from benchmarks.forecast.steps import Chunk, Decode, StepCounter
from benchmarks.gpu.engines import LLAMA_8B, QWEN_32B, TINY, Shape
from omniserve.simulate.analytic import Efficiency
from omniserve.simulate.hardware import find_devices

DEVICES = ("H100-80GB", "H200-141GB")
KERNEL_GAP_S = 1.0e-6
"""Seconds from the end of a kernel to the start of the next in a CUDA graph; assumed."""
GRAPH_LAUNCH_S = 10e-6
"""Seconds to launch a captured step: the host's one call, until the first kernel runs; assumed."""
PIECE_LAUNCH_S = 6e-6
"""Seconds to launch a captured piece between two attentions; assumed. The device is busy meanwhile with the piece
before."""
EAGER_LAUNCH_S = 6e-6
"""Seconds to launch a kernel from Python; assumed."""

DECODES = [Decode(batch=batch, context=context) for batch in (1, 8, 64) for context in (1024, 8192)]
SEATED = [Decode(batch=8, context=1024, seats=seats) for seats in (16, 64)]
CHUNKS = [Chunk(num_tokens=512, context=context) for context in (0, 7680)]
STEPS: list[Decode | Chunk] = [*DECODES, *SEATED, *CHUNKS]
_RESERVE = 0.94
"""Share of the device's memory that weights and KV may take."""


def times(works: Sequence[Work], device_name: str, *, least_bytes: float, is_whole: bool) -> dict[str, float]:
    """Return a step's seconds on a device; ``least_bytes`` are the weights and KV that it reads.

    The layers are one graph, or launched piece by piece (not ``is_whole``).
    """
    _, device = find_devices(device_name)
    expected = sum(expected_s(work, device, Efficiency(), KERNEL_GAP_S) for work in works) + GRAPH_LAUNCH_S
    if not is_whole:
        pieces = sum(work.kind == "prefill" for work in works) + 1
        launches = sum(work.name in ("attend", "zeros", "unpad", "keep_attention") for work in works)
        expected = max(expected, pieces * PIECE_LAUNCH_S + launches * EAGER_LAUNCH_S)
    flops = sum(work.flops for work in works)
    return {"floor_s": max(least_bytes / device.bytes_per_s, flops / device.flops), "expected_s": expected}


def line(counter: StepCounter, step: Decode | Chunk) -> dict[str, Any]:
    """Return what a step does, and how long that takes."""
    is_whole = isinstance(step, Decode)
    works = counter.decode(step) if isinstance(step, Decode) else counter.prefill(step)
    tokens = step.batch * step.context if isinstance(step, Decode) else step.context + step.num_tokens
    needed = counter.parameter_bytes + counter.kv_bytes(tokens)
    least_bytes = needed - counter.embedding_bytes
    return {
        "step": {"kind": "decode" if is_whole else "chunk", **asdict(step)},
        "bytes": sum(work.num_bytes for work in works),
        "bytes_by_kind": {
            kind: sum(work.num_bytes for work in works if work.kind == kind)
            for kind in sorted({work.kind for work in works})
        },
        "bus_bytes": sum(work.bus_bytes for work in works),
        "flops": sum(work.flops for work in works),
        "kernels": len(works),
        "memory_bytes": needed,
        "devices": {
            name: times(works, name, least_bytes=least_bytes, is_whole=is_whole)
            for name in DEVICES
            if needed <= _RESERVE * find_devices(name)[1].memory_bytes
        },
    }


def forecast(shape: Shape) -> dict[str, Any]:
    """Return all that is said of one model."""
    counter = StepCounter(shape.model_type, shape.fields, [step.num_tokens for step in STEPS])
    return {
        "parameter_bytes": counter.parameter_bytes,
        "kv_bytes_per_token": counter.kv_bytes(1),
        "steps": [line(counter, step) for step in STEPS],
    }


def forecast_table(results: dict[str, Any]) -> str:
    """Return the steps' forecasts as Markdown."""
    lines = []
    for model, result in results.items():
        for each in result["steps"]:
            line = {
                "model": model, "step": label(each["step"]), "GB": f"{each['bytes'] / 1e9:.2f}",
                "TFLOP": f"{each['flops'] / 1e12:.3f}", "kernels": f"{each['kernels']}",
            }  # fmt: skip
            for name in DEVICES:
                times_s = each["devices"].get(name)
                cell = (
                    f"{1e3 * times_s['floor_s']:.2f} / {1e3 * times_s['expected_s']:.2f}" if times_s else "does not fit"
                )
                line[f"{name}: floor / expected, ms"] = cell
            lines.append(line)
    return table_of(lines)


def label(step: dict[str, Any]) -> str:
    """Return a step's name."""
    if step["kind"] == "chunk":
        return f"chunk of {step['num_tokens']} behind {step['context']}"
    seats = f", {step['seats']} seats" if step["seats"] else ""
    return f"{step['batch']} decodes at {step['context']}{seats}"


def main() -> None:
    parser = argument_parser(__doc__, "gpu_forecast", tiny=(False, "a model of two layers, to try the program"))
    args = parser.parse_args()
    pretend_to_have_a_gpu()
    shapes = [TINY] if args.tiny else [LLAMA_8B, QWEN_32B]
    results = {shape.name: forecast(shape) for shape in shapes}
    assumed = {
        "efficiency": asdict(Efficiency()), "kernel_gap_s": KERNEL_GAP_S, "graph_launch_s": GRAPH_LAUNCH_S,
        "piece_launch_s": PIECE_LAUNCH_S, "eager_launch_s": EAGER_LAUNCH_S,
    }  # fmt: skip
    config = {
        "models": {shape.name: shape.fields for shape in shapes},
        "devices": {name: asdict(find_devices(name)[1]) for name in DEVICES},
        "assumed": assumed,
    }
    write_record(args.record, name="gpu_forecast", config=config, seed=0, results=results)
    print(forecast_table(results))


if __name__ == "__main__":
    main()

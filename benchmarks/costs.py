"""The costs of parts of a step and of a shared machine: sampling, linears and quantised ones, scheduling, neighbours.

python -m benchmarks.costs --list
python -m benchmarks.costs linears scheduling --record benchmarks/results/costs.json
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

import omniserve.runner.layer_loop
from benchmarks.common.bandwidth import Arena, allowed_cpus
from benchmarks.common.cases import Benchmark, Trials
from benchmarks.common.client import LS_TIER, LoadRequest, drive, poisson_stream, warm_server
from benchmarks.common.dry_scheduler import DryScheduler, smollm_profile
from benchmarks.common.engine_run import request
from benchmarks.common.machine_speed import SpeedMeter, available_products
from benchmarks.common.models import MODELS, SMOLLM_135M, random_llama, saved_smollm
from benchmarks.common.summary import summarize
from benchmarks.common.timing import OtherLoad, median_ratio, seconds
from omniserve import SLO, Engine, EngineConfig, ExecutionConfig, Request, SamplingParams
from omniserve.host.cores import available_cores
from omniserve.layers.weights.int8_modules import form_of_inputs, pack_int8
from omniserve.layers.weights.packed import PackedLinear, pack
from omniserve.layers.weights.quantized import QuantForm, QuantizedWeight, Scales, pack_quantized, packed_shape
from omniserve.sampling.sampler import Sampler

COSTS = Benchmark("costs")

# -- sampling ------------------------------------------------------------------------------------------------------

FILTERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.6},
    "top_p 0.9": {"temperature": 0.6, "top_p": 0.9},
    "top_k 50": {"temperature": 0.6, "top_k": 50},
    "min_p 0.05": {"temperature": 0.6, "min_p": 0.05},
}


@COSTS.case(
    vocabulary=([49152, 128256], "SmolLM's, Llama 3's"), rows=[1, 8, 32], repeats=9,
    tiny={"vocabulary": [100], "rows": [1, 2], "repeats": 2},
)  # fmt: skip
def sampling(args: argparse.Namespace) -> Trials:
    """What sampling takes a step: greedy, temperature alone and with each filter, by vocabulary and by rows.

    Milliseconds from logits to tokens on this machine's CPU; bf16 logits, normal with a standard deviation of 3.
    """
    generator = torch.Generator().manual_seed(0)
    for vocab_size, rows in itertools.product(args.vocabulary, args.rows):
        logits_RV = (3 * torch.randn(rows, vocab_size, generator=generator)).bfloat16()
        names, arms = [str(row) for row in range(rows)], {}
        for label, settings in FILTERS.items():
            sampler = Sampler(vocab_size=vocab_size, device=torch.device("cpu"), seed=0)
            for row, name in enumerate(names):
                sampler.add(name, SamplingParams(**settings, seed=row), [1])
            arms[label] = functools.partial(ms_of, functools.partial(sampler.sample, logits_RV, names))
        yield f"{vocab_size} tokens, {rows} rows", arms


def ms_of(call: Callable[[], object], calls: int = 1) -> dict[str, float]:
    """Return the mean milliseconds of some calls."""
    return {"ms": 1e3 * seconds(lambda: [call() for _ in range(calls)]) / calls}


# -- linears -------------------------------------------------------------------------------------------------------

OURS, ONEDNN, TORCH = "packed here", "oneDNN packed", "torch"
_SAMPLE_S = 0.02
Product = Callable[[torch.Tensor, torch.Tensor], object]


@COSTS.case(
    shapes=["576x960", "576x3072", "1536x576", "2048x5632"], dtypes=["bfloat16"], rows=[1, 4, 8, 16, 32, 128, 512],
    repeats=9, cold_mib=(1024, "of weights of each contender"),
    # What libgomp and malloc read at start: as in the Makefile, and huge pages for oneDNN's weights.
    environment={"GOMP_SPINCOUNT": "10000", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    tiny={"shapes": ["64x96"], "dtypes": ["bfloat16", "float32"], "rows": [1, 2], "repeats": 1, "cold_mib": 1},
)  # fmt: skip
def linears(args: argparse.Namespace) -> Trials:
    """Dense products on the CPU device tier: packed weights here, oneDNN's packed ones and torch's own, by the floor.

    A shape is inputs x outputs. A sample is the mean of some calls, each with a weight that no cache holds any more, in
    huge pages for all. ``floor_us`` is the larger of reading the weight at the speed at which all threads read memory,
    and of its arithmetic at the rate of the fastest matrix product that torch has here, in any dtype; both are measured
    again for each number of rows, and ``over_floor`` is how many times it each contender takes. ``pairs`` is the median
    of the ratios of neighbouring samples, ours by oneDNN's: below 1, packed here is faster. Give the machine nothing
    else to do; OMNISERVE_ISA forces an instruction set on the kernels here, not on the others.
    """
    meter = SpeedMeter(allowed_cpus())
    with torch.inference_mode():
        for shape, name in itertools.product(args.shapes, args.dtypes):
            (num_in, num_out), dtype = map(int, shape.split("x")), getattr(torch, name)
            weights, values = weights_of(num_in, num_out, dtype, args.cold_mib << 20), num_in * num_out
            products = products_of(num_out)
            for rows in args.rows:
                speed, load, x = meter.sample(), OtherLoad(), torch.randn(rows, num_in).to(dtype)
                arms = {}
                for contender, copies in weights.items():
                    call = functools.partial(_next_product, products[contender], x, itertools.cycle(copies))
                    call()
                    arms[contender] = functools.partial(ms_of, call, max(1, round(_SAMPLE_S / seconds(call))))
                result = yield f"{shape} {name}, {rows} rows", arms
                floor_s = max(values * dtype.itemsize / speed.bytes_per_s, 2 * values * rows / speed.flop_per_s)
                over_floor = {arm: each["ms"] / 1e3 / floor_s for arm, each in result["medians"].items()}
                result |= {"floor_us": 1e6 * floor_s, "over_floor": over_floor, "speed": speed}
                result["others_busy_cores"] = load.cores()
                if ONEDNN in weights:
                    times = [[sample["ms"] for sample in result["raw"][arm]] for arm in (OURS, ONEDNN)]
                    result["pairs"] = median_ratio(*times)


BF16, W8A8 = "bf16", "W8A8"
FORMS = {
    "Q8_0": QuantForm(8, Scales.F16, 32), "int8": QuantForm(8, Scales.F32, 2048),
    "Q6_K": QuantForm(6, Scales.K_SIGNED, 16), "Q5_K": QuantForm(5, Scales.K, 32),
    "Q5_0": QuantForm(5, Scales.F16, 32), "Q4_K": QuantForm(4, Scales.K, 32),
    "int4": QuantForm(4, Scales.AFFINE32, 64), "Q4_0": QuantForm(4, Scales.F16, 32),
}  # fmt: skip
"""Forms of codes, by the names of GGUF and of ``--quantize``."""


@COSTS.case(
    shape="2048x5632", dtype="bfloat16", rows=[1, 4, 8, 32, 128, 512], repeats=9,
    cold_mib=(512, "of the dense weights; codes have as many copies"),
    environment={"GOMP_SPINCOUNT": "10000"}, tiny={"shape": "256x64", "rows": [1, 2], "repeats": 1, "cold_mib": 1},
)  # fmt: skip
def quantized_linears(args: argparse.Namespace) -> Trials:
    """Products with weights of 4 to 8 bits on the CPU device tier, and with rows in int8, beside the dense one in bf16.

    A shape is inputs x outputs. A sample is the mean of some calls, each with a weight that no cache holds any more; in
    brackets times that of bf16, below 1 is faster. Give the machine nothing else to do; OMNISERVE_ISA forces an
    instruction set.
    """
    (num_in, num_out), dtype = map(int, args.shape.split("x")), getattr(torch, args.dtype)
    dense = (torch.randn(num_out, num_in) / num_in**0.5).to(dtype)
    linear = nn.Linear(num_in, num_out, bias=False, dtype=dtype)
    linear.weight.data = dense
    pack(linear)
    count = -(-(args.cold_mib << 20) // dense.nbytes)
    copies = {BF16: itertools.cycle(_copies(cast(PackedLinear, linear).group_weight, count))}
    products: dict[str, Product] = {BF16: lambda x, weight: torch.ops.omniserve.packed_linear(x, weight, None, num_out)}
    for name, form in FORMS.items():
        if num_in % form.block and form.scales is not Scales.F32:
            continue
        form = form._replace(group=num_in) if form.scales is Scales.F32 else form
        packed = torch.empty(packed_shape(form, num_out, num_in), dtype=torch.uint8)
        pack_quantized(random_codes(form, num_out, num_in), packed)
        copies[name] = itertools.cycle(_copies(packed, count))
        products[name] = functools.partial(_quantized_product, form, num_out)
    in_int8 = pack_int8(random_codes(form_of_inputs(num_in), num_out, num_in))
    copies[W8A8] = itertools.cycle(_copies(in_int8, count))
    products[W8A8] = lambda x, weight: torch.ops.omniserve.int8_linear(x, weight, None, num_out)
    with torch.inference_mode():
        for rows in args.rows:
            x, load, arms = torch.randn(rows, num_in).to(dtype), OtherLoad(), {}
            for name, weights in copies.items():
                call = functools.partial(_next_product, products[name], x, weights)
                call()
                arms[name] = functools.partial(ms_of, call, max(1, round(_SAMPLE_S / seconds(call))))
            result = yield f"{args.shape}, {rows} rows", arms
            result["others_busy_cores"] = load.cores()


def _quantized_product(form: QuantForm, num_out: int, x: torch.Tensor, weight: torch.Tensor) -> object:
    return torch.ops.omniserve.quantized_linear(x, weight, None, num_out, *form.arguments)


def random_codes(form: QuantForm, num_out: int, num_in: int) -> QuantizedWeight:
    """Return a weight of random codes and scales."""
    codes = torch.randint(2**form.bits, (num_out, num_in), dtype=torch.uint8)
    blocks, groups = num_in // form.block, num_in // form.group
    scale, halves = torch.rand(num_out, groups) / 100, torch.rand(2, num_out, blocks).half() / 1000
    small = torch.randint(64, (2, num_out, groups), dtype=torch.uint8)
    scales: dict[Scales, tuple[torch.Tensor, ...]] = {
        Scales.F16: (scale.half(),), Scales.F32: (scale,), Scales.AFFINE32: (scale, -8 * scale),
        Scales.K: (halves[0], halves[1], small[0], small[1]), Scales.K_SIGNED: (halves[0], small[0].view(torch.int8)),
    }  # fmt: skip
    return QuantizedWeight(form, codes, scales[form.scales])


def weights_of(num_in: int, num_out: int, dtype: torch.dtype, cold_bytes: int) -> dict[str, list[torch.Tensor]]:
    """Return, by contender, copies of one random weight that together are larger than ``cold_bytes``."""
    dense = torch.randn(num_out, num_in).to(dtype) / num_in**0.5
    linear = nn.Linear(num_in, num_out, bias=False, dtype=dtype)
    linear.weight.data = dense
    pack(linear)
    count = -(-cold_bytes // dense.nbytes)
    weights = {OURS: _copies(cast(PackedLinear, linear).group_weight, count), TORCH: _copies(dense, count)}
    if dtype == torch.float32 or "bf16 packed" in available_products():
        weights[ONEDNN] = [torch.ops.mkldnn._reorder_linear_weight(dense, None) for _ in range(count)]
    return weights


def _copies(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    size = -(-tensor.nbytes // 4096) * 4096
    memory = Arena(size * count).bytes
    parts = [memory[size * i : size * i + tensor.nbytes].view(tensor.dtype).view(tensor.shape) for i in range(count)]
    for part in parts:
        part.copy_(tensor)
    return parts


def products_of(num_out: int) -> dict[str, Product]:
    """Return each contender's product of rows and a weight of its own."""
    return {
        OURS: lambda x, weight: torch.ops.omniserve.packed_linear(x, weight, None, num_out),
        ONEDNN: lambda x, weight: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""),
        TORCH: functional.linear,
    }


def _next_product(product: Product, x: torch.Tensor, weights: Iterator[torch.Tensor]) -> object:
    return product(x, next(weights))


# -- a step outside of its kernels ---------------------------------------------------------------------------------

_WARM_UP_STEPS = 20
_NARROW = SMOLLM_135M | {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip


@COSTS.case(requests=[1, 8, 64], steps=200, uncounted=0, tiny={"requests": [1], "steps": 3})
def step_overhead(args: argparse.Namespace) -> Trials:
    """A step's time outside of kernels: scheduling, tensors of the plan, layers' calls, sampling; microseconds.

    The model has SmolLM-135M's depth and almost no width, so what is left of a step is overhead.
    """
    for num_requests in args.requests:
        yield str(num_requests), {"step": functools.partial(parts_of_a_step, num_requests, args.steps)}


def timed(owner: Any, name: str, samples: list[float]) -> None:
    """Replace a method or function by one that also records its time."""
    inner: Callable[..., Any] = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            samples.append(time.perf_counter() - began_s)

    setattr(owner, name, wrapper)


def parts_of_a_step(num_requests: int, num_steps: int) -> dict[str, float]:
    """Return the median microseconds of each part of a decode step with ``num_requests`` requests."""
    config = EngineConfig(device_kv_bytes=256 << 20, host_kv_bytes=0, max_num_seqs=num_requests)
    samples: dict[str, list[float]] = defaultdict(list)
    with Engine(random_llama(**_NARROW), config) as engine:
        for i in range(num_requests):
            engine.add(request(f"ls{i}", 16, num_steps + 20))
        for _ in range(10):  # prefill, compilation
            engine.step()
        original = omniserve.runner.layer_loop.make_step_inputs
        try:
            timed(engine.scheduler, "schedule", samples["schedule"])
            timed(engine.scheduler, "update", samples["update"])
            timed(omniserve.runner.layer_loop, "make_step_inputs", samples["step inputs"])
            timed(engine.runner, "_run_layers", samples["layers"])
            timed(engine.runner._sampler, "launch", samples["sample"])
            timed(engine.runner, "collect", samples["collect"])
            timed(engine, "step", samples["step"])
            for _ in range(num_steps):
                engine.step()
        finally:
            omniserve.runner.layer_loop.make_step_inputs = original
    parts = {part: 1e6 * statistics.median(times) for part, times in samples.items()}
    return parts | {"rest": parts["step"] - sum(us for part, us in parts.items() if part != "step")}


@COSTS.case(requests=[1, 8, 32], steps=15, repeats=9, tiny={"requests": [1], "steps": 2, "repeats": 2})
def replayed_steps(args: argparse.Namespace) -> Trials:
    """Decode steps whose layers are called from C++, beside the same steps from Python: milliseconds of a step.

    A model with random bf16 weights in SmolLM-135M's shape.
    """
    with contextlib.ExitStack() as engines:
        for num_requests in args.requests:
            num_steps = _WARM_UP_STEPS + (args.repeats + 1) * args.steps
            arms = {}
            for arm, execution in (
                ("from Python", ExecutionConfig(step_graphs="off")),
                ("replayed", ExecutionConfig()),
            ):
                config = EngineConfig(device_kv_bytes=256 << 20, host_kv_bytes=0, execution=execution)
                engine = engines.enter_context(Engine(random_llama(**SMOLLM_135M), config))
                for i in range(num_requests):
                    engine.add(request(f"ls{i}", 32, num_steps + 1))
                for _ in range(_WARM_UP_STEPS):  # prefill, compilation
                    engine.step()
                arms[arm] = functools.partial(ms_of, engine.step, args.steps)
            yield f"{num_requests} requests", arms
            engines.close()


# -- scheduling ----------------------------------------------------------------------------------------------------

_MAX_RUNNING = 200
_ALL_COME, _COUNTED = 300, 400
"""The step at which all requests come that are not there yet, and the first one that counts."""


@COSTS.case(
    requests=[10, 100, 1000], steps=100, seed=0, policies=["omniserve", "conserve", "bros", "sarathi", "fcfs"],
    uncounted=0, tiny={"requests": [4], "steps": 2, "policies": ["omniserve", "fcfs"]},
)  # fmt: skip
def scheduling(args: argparse.Namespace) -> Trials:
    """What scheduling costs: seconds of `schedule()` and `update()` as a share of the step that they plan.

    The real policies with the latency model of a measured profile (SmolLM-135M's shape; cached, or made now), driven
    without a device: the clock moves by 10 ms a step, and shares are of the step as the model predicts it. Up to 200
    requests run, half of them LS; the others wait.
    """
    profile = smollm_profile()

    def run(policy: str, num_requests: int) -> dict[str, float]:
        scheduler = DryScheduler(
            policy, profile, max_model_len=2048, max_num_batched_tokens=512, max_num_seqs=_MAX_RUNNING,
            kv={"num_device_blocks": 20_000, "num_host_blocks": 20_000, "block_size": 64},
        )  # fmt: skip
        rng, sampling = random.Random(args.seed), SamplingParams(max_tokens=1500, ignore_eos=True)
        waiting = [
            Request(
                prompt_token_ids=[1] * rng.randint(20, 400), sampling=sampling,
                service_class="LS" if i % 2 == 0 and i < _MAX_RUNNING else "BE",
            )
            for i in range(num_requests)
        ]  # fmt: skip
        steps = []
        for step in range(args.steps + _COUNTED):  # one at a time at first, all others when these run
            count = 1 if step < min(num_requests, _MAX_RUNNING) else num_requests if step == _ALL_COME else 0
            for _ in range(min(count, len(waiting))):
                scheduler.add(f"r{len(waiting)}", waiting.pop(0), SLO(ttft_s=600.0, tpot_s=0.5))
            plan, *times_s = scheduler.step()
            if step >= _COUNTED:
                steps.append((*times_s, len(plan.chunks)))
        schedule_s, update_s, step_s, rows = map(statistics.median, zip(*steps, strict=True))
        return {
            "schedule_s": schedule_s, "update_s": update_s, "add_s": statistics.median(scheduler.adds_s),
            "step_s": step_s, "share": (schedule_s + update_s) / step_s, "schedule_share": schedule_s / step_s,
            "requests_in_step": rows,
        }  # fmt: skip

    for count in args.requests:
        yield str(count), {policy: functools.partial(run, policy, count) for policy in args.policies}


# -- a server alone ------------------------------------------------------------------------------------------------

_ONE_TOKEN = LoadRequest(send_at_s=0.0, prompt=[1, 2, 3], max_tokens=1, service_tier=LS_TIER)


@COSTS.case(
    rate=1.0, seconds=60.0, prompt=128, output=32, repeats=3, seed=0, uncounted=0,
    tiny={"rate": 4.0, "seconds": 2.0, "prompt": 8, "output": 2, "repeats": 1},
)  # fmt: skip
def ls_alone(args: argparse.Namespace) -> Trials:
    """Latency of a light LS stream over HTTP: TTFT and TPOT of the server, and the time from start to first token.

    A random-weight bf16 model in SmolLM-135M's shape; Poisson arrivals.
    """
    model, seeds = saved_smollm(), itertools.count(args.seed)

    def run() -> dict[str, Any]:
        requests = poisson_stream(
            random.Random(next(seeds)), rate=args.rate, seconds=args.seconds, prompt=args.prompt, output=args.output,
            tier=LS_TIER, vocab_size=SMOLLM_135M["vocab_size"],
        )  # fmt: skip
        began_s = time.monotonic()
        with warm_server("ls_alone", ["--model", str(model)], [_ONE_TOKEN]) as server:
            start_s = time.monotonic() - began_s
            records, end_s = drive(server, requests, cutoff_s=args.seconds + 30, may_be_cut_off=True)
        return {"start_to_first_token_s": start_s, **vars(summarize(records, end_s)), "requests": records}

    yield "server", {"alone": run}


# -- neighbours ----------------------------------------------------------------------------------------------------

_PERIOD_S = 0.01


@COSTS.case(
    shares=[0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0], requests=[8, 64], steps=15, repeats=5, uncounted=0,
    models=list(MODELS), tiny={"shares": [0.0, 0.5], "requests": [2], "steps": 2, "repeats": 1, "models": ["built-in"]},
)  # fmt: skip
def shared_cores(args: argparse.Namespace) -> Trials:
    """What a neighbour costs: decode steps with all cores and with one less, beside a process with a share of one.

    The neighbour works for its share of every 10 ms. ``ms`` is the median of the runs' means, since what a neighbour
    costs comes in single long steps. Nothing else must run on the machine, which needs more than one core.
    """
    cores = available_cores()
    if cores < 2:
        raise ValueError("there is one core only: none can be left to a neighbour")
    with neighbour() as share:
        for name, requests in itertools.product(args.models, args.requests):
            with decoding(MODELS[name](), requests, cores, args) as engine:
                for share.value in args.shares:
                    time.sleep(2 * _PERIOD_S)
                    arms = {
                        arm: functools.partial(decode_ms, engine, threads, args.steps)
                        for arm, threads in (("one less", cores - 1), ("all", cores))
                    }
                    yield f"{name}, {requests} requests, neighbour {share.value:g}", arms


@contextlib.contextmanager
def neighbour() -> Iterator[Any]:
    """Run a process that works for a share of each period; yield the share, which may be set."""
    context = multiprocessing.get_context("spawn")
    share = context.Value("d", 0.0, lock=False)
    process = context.Process(target=work_for_a_share, args=(share,), daemon=True)
    process.start()
    try:
        yield share
    finally:
        process.kill()


def work_for_a_share(share: Any) -> None:
    """Work for a share of each period, until killed."""
    while True:
        ends_s = time.perf_counter() + _PERIOD_S
        while time.perf_counter() < ends_s - _PERIOD_S * (1 - share.value):
            pass
        time.sleep(max(0.0, ends_s - time.perf_counter()))


@contextlib.contextmanager
def decoding(model: Any, requests: int, cores: int, args: argparse.Namespace) -> Iterator[Engine]:
    """Give an engine whose requests decode until all has been measured."""
    num_steps = _WARM_UP_STEPS + len(args.shares) * args.repeats * 2 * (args.steps + 1)
    # Threads that are asked for are not given to others.
    config = EngineConfig(
        device_kv_bytes=512 << 20, host_kv_bytes=0, device_threads=cores, max_num_seqs=requests, scheduler="fcfs"
    )
    with Engine(model, config) as engine:
        for i in range(requests):
            engine.add(request(f"ls{i}", 32, num_steps + 1))
        for _ in range(_WARM_UP_STEPS):  # prefill, compilation
            engine.step()
        yield engine


def decode_ms(engine: Engine, threads: int, steps: int) -> dict[str, float]:
    """Return the mean milliseconds of some steps with a number of threads; a first one does not count."""
    torch.set_num_threads(threads)
    engine.step()
    return ms_of(engine.step, steps)


if __name__ == "__main__":
    sys.exit(COSTS.main())

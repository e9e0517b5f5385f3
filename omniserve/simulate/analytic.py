"""AnalyticDevice: seconds of a step from a model's sizes and a device's data sheet.

Rooflines with efficiencies that were fitted to timings measured on A100-80GB GPUs. Other devices use the same shares of
their own peaks, which is an extrapolation: their figures are estimates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omniserve.core.config import EngineConfig, ParallelConfig
from omniserve.engine.capacity import largest_part
from omniserve.latency import BatchFeatures, Predictor
from omniserve.latency.features import AlphaBeta
from omniserve.latency.omniserve import pipeline_wait_s
from omniserve.sched import late_joins
from omniserve.simulate.hardware import DeviceSpec, HostSpec
from omniserve.simulate.host_tier import Copies, HostNode
from omniserve.simulate.machine import Machine, PrefillNode, host_speed_of
from omniserve.simulate.models import ModelDims

_BYTES = 2  # of an element
_LOCAL_CORES_KEPT = 2  # of the device's host: the engine and the server run there
HOST_SHARE = 0.7
"""Share of its peak bandwidth at which a host's attention reads K and V: with the device's own share, the 7.6 times of
omniserve's Table 1 (ten requests of 1,000 tokens)."""
_DRAFT_SHARE = 0.2
"""Time of a key that a draft sees, as a share of a token's key, for each query head that shares the KV head, at most
all of it: measured in bf16, heads of 128, with AVX2 (``host_rows`` of benchmarks.features); 0.6 of that with AMX, half
with heads of 64."""
_THREAD_TASK_S = 15e-6  # of a host's thread for a task, besides those of its bytes
_HOST_LATENCY_S = 100e-6  # from a step's end to a thread and back
_NETWORK_LATENCY_S = 100e-6  # the same for a remote host, besides
_HAND_OVER_S = 200e-6
"""Seconds to hand a step from one stage to the next, besides its rows' bytes: the plan told, a send and a receive. Not
fitted: less than the 0.3 to 0.6 ms on two cores (``pipeline_parallel`` of benchmarks.machines)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """The shares of a device's peaks that kernels reach.

    Fitted to the A100 timings of Vidur (microsoft/vidur, commit 7d47513363ec, data/profiling, MIT licence): linear
    layers of five models at TP 1 to 8 and 1 to 4096 rows (mean error of a layer 4 %, 90th percentile 9 %), attention of
    Llama-2-70B at TP 2 (decode 11 %, prefill 12 %), CPU overheads (13 %); all-reduces (2 to 14 %) are in ``hardware``.

    Not fitted, but compared: whole steps of Llama-2-70B on two A100s (Splitwise, MIT licence) are met within 13 %
    (decode) and 15 % (prefill), prefills of Yi-34B on two (Sarathi-Serve, Apache-2.0) within 14 % from 512 tokens on.
    On four and eight devices, and in Sarathi-Serve's decodes, those systems' own launches bound a step (43 ms and
    more), which are not in here: they take 1.3 to 3.6 times as long.
    """

    gemm_s: float = 5.0e-6
    """Seconds of any matrix product, besides those that follow from its size."""
    gemm_bytes: float = 0.80
    """Share of the memory bandwidth at which it reads weights."""
    gemm_flops: float = 0.74
    """Share of the arithmetic peak."""
    gemm_corner: float = 1.46
    """The p of the p-norm that joins the bounds by memory and by compute."""
    elementwise_s: float = 19.6e-6
    """Seconds of a layer's norms, rotary embedding, activation and residual addition together."""
    elementwise_bytes: float = 0.55
    """Share of the bandwidth at which they go through their rows."""
    decode_s: float = 15.3e-6
    """Seconds of decode attention in a layer, besides those of its bytes."""
    decode_bytes: float = 0.76
    """Share of the bandwidth at which it reads K and V."""
    prefill_s: float = 6.0e-6
    """Seconds of prefill attention in a layer, besides those of its products."""
    prefill_flops: float = 0.39
    """Share of the arithmetic peak that it reaches, counting only what the causal mask lets through."""
    prefill_row_bytes: float = 0.069
    """Share of the bandwidth at which it goes through its rows, besides."""
    step_s: float = 1.4e-3
    """Seconds of a step for scheduling, inputs and sampling."""
    request_s: float = 42e-6
    """Seconds of a step for each of its requests."""
    piggyback_layer_s: float = 15e-6
    """Seconds of concatenation, residuals and the input queue, per layer that a row joins or enters at; not fitted:
    within omniserve 5.4's 75 us at 400 requests."""


class AnalyticDevice(Predictor):
    """Predicts steps of one model on one or more equal devices.

    Heads and MLP columns are split among the devices of a stage (tensor parallel). With several stages (pipeline
    parallel) a step is one that passes all of them alone. A second sub-batch waits for the hosts' attention.

    Raises:
        ValueError: The model's heads or layers cannot be split so.
    """

    term_names = (
        "dense",
        "prefill attention",
        "decode attention",
        "tensor parallel",
        "piggyback",
        "pipelined rows",
        "waiting for the host",
        "pipeline parallel",
        "head",
        "step overhead",
        "request overhead",
    )
    layer_terms = slice(0, 7)
    attention_terms = (1, 2)

    def __init__(
        self,
        model: ModelDims,
        device: DeviceSpec,
        count: int = 1,
        *,
        num_stages: int = 1,
        hosts: Sequence[HostNode] = (),
    ) -> None:
        if model.num_heads % count:
            raise ValueError(f"{model.name} has {model.num_heads} heads, which {count} devices cannot share evenly")
        if not 1 <= num_stages <= model.num_layers:
            raise ValueError(f"{model.name} has {model.num_layers} layers, of which {num_stages} stages cannot be made")
        self.num_layers = model.num_layers
        self._device = device
        self._host = host_speed_of(hosts)
        self._efficiency = eff = Efficiency()
        heads, kv_heads = model.num_heads // count, max(1, model.num_kv_heads // count)
        width, hidden, size = heads * model.head_size, model.hidden_size, model.head_size
        # (columns, rows) of each projection's weight on one device.
        self._products = (
            ((heads + 2 * kv_heads) * size, hidden),
            (hidden, width),
            (model.up_size // count, hidden),
            (hidden, model.intermediate_size // count),
        )
        # Bytes that elementwise kernels read and write a row: two norms, two additions, rotary, activation.
        self._row_bytes = _BYTES * (
            7 * hidden + (model.up_size + model.intermediate_size) / count + 2 * (heads + kv_heads) * size
        )
        self._head_product = (model.vocab_size // count, hidden)
        self._key_decode_s = _BYTES * 2 * kv_heads * size / (eff.decode_bytes * device.bytes_per_s)
        self._key_prefill_s = 4 * width / (eff.prefill_flops * device.flops)
        row_bytes = _BYTES * 2 * (width + kv_heads * size)
        self._row_prefill_s = row_bytes / (eff.prefill_row_bytes * device.bytes_per_s)
        self._reduce = AlphaBeta()
        if count > 1:
            alpha_s, speed = device.link_alpha_s[count], device.link_bytes_per_s[count]
            self._reduce = AlphaBeta(alpha_s, hidden * _BYTES * 2 * (count - 1) / count / speed)
        between = num_stages - 1
        self._hand_overs = AlphaBeta(between * _HAND_OVER_S, between * hidden * _BYTES / device.pcie_bytes_per_s)
        sent = model.num_heads + (model.num_heads + 2 * model.num_kv_heads)  # an attention row up; q, k and v down
        self._piggyback_row_s = sent * size * _BYTES / device.pcie_bytes_per_s
        self._dense_cache: dict[int, float] = {}

    def terms(self, features: BatchFeatures) -> tuple[float, ...]:
        f, eff, layers = features, self._efficiency, self.num_layers
        rows = f.rows
        prefill = decode = piggyback = 0.0
        if f.prefill_tokens:
            prefill = layers * (
                eff.prefill_s + self._key_prefill_s * f.prefill_load + self._row_prefill_s * f.prefill_tokens
            )
        if f.decode_requests:
            decode = layers * (eff.decode_s + self._key_decode_s * f.decode_load)
        if f.piggyback_rows:
            piggyback = eff.piggyback_layer_s * f.piggyback_layers + self._piggyback_row_s * f.piggyback_rows
        dense, reducing = f.dense_layers * self.dense_layer_s(rows), f.dense_layers * 2 * self._reduce(rows)
        second = waiting = 0.0
        if f.pipelined_rows:
            n, behind = f.pipelined_rows, f.second_rows
            second_s = self.dense_layer_s(behind) + 2 * self._reduce(behind) if behind else 0.0
            second = f.pipelined_layers * (second_s + eff.piggyback_layer_s + self._piggyback_row_s * n)
            waiting = f.pipelined_layers * pipeline_wait_s(
                f,
                self._host,
                dense_s=(dense + reducing + piggyback) / layers,
                attention_s=(prefill + decode) / layers,
                second_s=second_s,
            )
        return (
            dense,
            prefill,
            decode,
            reducing,
            piggyback,
            second,
            waiting,
            self._hand_overs(rows),
            self._product_s(f.sampled_rows, *self._head_product) if f.sampled_rows else 0.0,
            eff.step_s,
            eff.request_s * (f.prefill_requests + f.decode_requests + f.pipelined_rows + f.piggyback_rows / layers),
        )

    def dense_layer_s(self, rows: int) -> float:
        """Return the seconds of a layer's projections and elementwise work for ``rows`` rows."""
        if not rows:
            return 0.0
        if (seconds := self._dense_cache.get(rows)) is None:
            eff = self._efficiency
            seconds = eff.elementwise_s + rows * self._row_bytes / (eff.elementwise_bytes * self._device.bytes_per_s)
            seconds += sum(self._product_s(rows, *product) for product in self._products)
            self._dense_cache[rows] = seconds
        return seconds

    def _product_s(self, m: int, n: int, k: int) -> float:
        """Return the seconds of ``[m, k] @ [k, n]``."""
        eff = self._efficiency
        reading = _BYTES * (n * k + m * (n + k)) / (eff.gemm_bytes * self._device.bytes_per_s)
        computing = 2 * m * n * k / (eff.gemm_flops * self._device.flops)
        p = eff.gemm_corner
        return eff.gemm_s + float((reading**p + computing**p) ** (1 / p))


def analytic_machine(
    model: ModelDims,
    device: DeviceSpec,
    count: int = 1,
    *,
    num_stages: int = 1,
    hosts: tuple[HostSpec, ...] = (),
    host_share: float = HOST_SHARE,
    late_layers: int | None = None,
    num_prefill_engines: int = 0,
) -> Machine:
    """Return a machine of data sheets.

    Args:
        model: Sizes.
        device: The GPU.
        count: How many in a stage, tensor parallel.
        num_stages: Pipeline parallel; each stage has ``count`` devices.
        hosts: Hosts that attend for best-effort requests: the device's own first, then remote ones. None: no host tier.
        host_share: See HOST_SHARE.
        late_layers: As in ``Machine``; None: as the engine has them on a GPU. In the paper's steps it is all layers.
        num_prefill_engines: More machines with the same devices and a host like the first one, over its network. They
            compute prompts.

    Raises:
        ValueError: The model does not fit the devices.
    """
    total = count * num_stages
    free_bytes = 0.9 * total * device.memory_bytes - model.weight_bytes
    if free_bytes <= 0:
        raise ValueError(
            f"{model.name} needs {model.weight_bytes / 1e9:.0f} GB for its weights, and {total} {device.name} have "
            f"{total * device.memory_bytes / 1e9:.0f} GB: take more devices or larger ones"
        )
    if num_prefill_engines and not hosts:
        raise ValueError("prefill engines hand KV over in host memory: give hosts, too")
    link = AlphaBeta(50e-6, 1 / (total * device.pcie_bytes_per_s))
    nodes = tuple(_node(model, host, host_share, link, is_local=number == 0) for number, host in enumerate(hosts))
    of_engine = late_joins.late_layers(
        model.spec.num_layers, device_looks=True, has_between=model.spec.state_bytes > 0, has_stages=num_stages > 1
    )
    predictor = AnalyticDevice(model, device, count, num_stages=num_stages, hosts=nodes)
    prefill_engines: tuple[PrefillNode, ...] = ()
    if num_prefill_engines:
        alike = analytic_machine(model, device, count, num_stages=num_stages, hosts=hosts[:1], host_share=host_share)
        network = AlphaBeta(_NETWORK_LATENCY_S, 1 / hosts[0].network_bytes_per_s)
        prefill_engines = (PrefillNode(machine=alike, link=network),) * num_prefill_engines
    stages = f"{num_stages} stages of " if num_stages > 1 else ""
    peers = f", {num_prefill_engines} prefill engines" if num_prefill_engines else ""
    return Machine(
        name=f"{stages}{count}x{device.name}" + (f" and {len(hosts)} x {hosts[0].name}" if hosts else "") + peers,
        spec=model.spec,
        device=predictor,
        forecast=predictor,
        hosts=nodes,
        copies=Copies(to_host=link, to_device=link),
        late_layers=of_engine if late_layers is None else late_layers,
        device_kv_bytes=int(free_bytes / num_stages),
        host_kv_bytes=int(sum(0.8 * host.memory_bytes for host in hosts) / num_stages),
        num_stages=num_stages,
        prefill_engines=prefill_engines,
    )


def _node(model: ModelDims, host: HostSpec, share: float, link: AlphaBeta, *, is_local: bool) -> HostNode:
    threads, latency_s, slower = host.cores, _HOST_LATENCY_S, 0.0
    if is_local:
        threads = max(1, host.cores - _LOCAL_CORES_KEPT)
    else:
        task_bytes = 2 * (model.num_heads + model.num_kv_heads) * model.head_size * _BYTES
        latency_s += _NETWORK_LATENCY_S + task_bytes / host.network_bytes_per_s
        slower = max(0.0, 1 / host.network_bytes_per_s - link.beta_s)
    key_s = 2 * model.num_kv_heads * model.head_size * _BYTES / (share * host.bytes_per_s)
    return HostNode(
        num_threads=threads,
        key_s=key_s,
        draft_key_s=min(1.0, _DRAFT_SHARE * model.num_heads / model.num_kv_heads) * key_s,
        task_s=_THREAD_TASK_S / threads,
        latency_s=latency_s,
        move_byte_s=slower,
        memory=host.memory_bytes,
    )


def engine_config_for(machine: Machine, **settings: Any) -> EngineConfig:
    """Return engine settings with the machine's own KV pools, other settings as given.

    If they do not say how many requests the host tier may have, its memory alone limits them: each has a block at
    least. With recurrent states, of which each takes device memory, EngineConfig's own number stays.

    Raises:
        ValueError: A setting is out of range, or the machine does not say its pools and they are not given.
    """
    pools = {"device_kv_bytes": machine.device_kv_bytes, "host_kv_bytes": machine.host_kv_bytes}
    values: dict[str, Any] = {name: size for name, size in pools.items() if size is not None} | settings
    values.setdefault("parallel", ParallelConfig(pipeline_parallel_size=machine.num_stages))
    if "device_kv_bytes" not in values:
        raise ValueError(f"{machine.name} does not say how much KV it holds: give device_kv_bytes")
    config = EngineConfig(**values)
    if "max_host_requests" in values or machine.spec.state_bytes:
        return config
    spec = largest_part(config, machine.spec)
    num_blocks = config.host_kv_bytes // spec.host_block_bytes(config.block_size, config.host_pool_dtype)
    return dataclasses.replace(config, max_host_requests=max(1, num_blocks))

"""EngineConfig: every setting of an engine. Plain data, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from omniserve.core.lora import MOST_LORAS
from omniserve.core.request import SLO, ClassSpec, ServiceClass
from omniserve.core.spec import KV_DTYPES

GIB = 1 << 30
MOST_HOSTS = 127
"""CPU hosts on the network that an engine can have (``kMostHosts`` in ``ops/csrc/host_tier.h``)."""
CPU_HOST_SECRET_VARIABLE: Final = "OMNISERVE_CPU_HOST_SECRET"
"""Environment variable with the secret of CPU hosts, where no file has it."""
PREFILL_SECRET_VARIABLE: Final = "OMNISERVE_PREFILL_SECRET"
"""Environment variable with the secret of prefill engines, where no file has it."""


DEFAULT_CLASSES = (
    ClassSpec(name=ServiceClass.LS, kind=ServiceClass.LS, slo=SLO(ttft_s=1.0, tpot_s=0.1)),
    ClassSpec(name=ServiceClass.BE, kind=ServiceClass.BE),
)


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """Settings of the device tier: how it gets its model, runs a step, and keeps KV.

    Raises:
        ValueError: A setting is out of its range; the message says which and what to give instead.
    """

    attention: str = "auto"
    """Device attention, a name in DEVICE_ATTENTION; ``auto`` takes the best that this device has. ``latent``, on a CPU:
    a model with multi-head latent attention (DeepSeek's MLA) keeps the latents as its KV, one head of
    ``kv_lora_rank + qk_rope_head_dim`` values for all query heads."""
    compile: bool = True
    """torch.compile the dense halves; False runs the same code eagerly."""
    async_steps: bool | None = None
    """Schedule and launch each step while the one before it runs, so that the device does not wait for the host between
    them; outputs come a step later. None: with a GPU. Without one a step runs as it is launched: True is for tests."""
    step_graphs: Literal["auto", "on", "off"] = "auto"
    """Run steps in a small set of constant shapes, captured at the start: a decode step is then one launch, its
    piggyback rows included. ``auto``: as CUDA graphs on a GPU; on the CPU the layers of a decode step of up to 32
    requests are called from C++ instead of Python. ``on``: in constant shapes on the CPU, too, where that is of use for
    tests only; ``off``: neither."""
    step_graphs_limit_s: float = 60.0
    """Most seconds that capturing steps may take at the start, with compiling kernels; steps that are not captured run
    kernel by kernel. Some hundred steps take a few seconds, and kernels that are compiled for the first time most of
    a minute."""
    step_graphs_gib: float = 2.0
    """Most GiB of device memory that captured steps may take, beside the KV pool and the weights."""
    prefix_cache: bool | None = None
    """Full KV blocks without a request keep their KV on the device until the memory is needed, and a request with the
    same first tokens begins behind them; so does a preempted one. With kv ``paged``, ``tiered`` and ``incremental``,
    and not for models with recurrent states. None: with the first two, where it is possible."""
    ls_prefix_share: float = 0.25
    """Share of the device's blocks, in [0, 1), in which the prefix cache keeps what LS requests have had there last,
    before all else, as long as LS requests find something there. BE requests that come to the device leave it these
    blocks, under policies that reserve memory for LS."""
    session_share: float = 0.75
    """Share of the device's blocks, in [0, 1), in which the prefix cache keeps what the newest requests of sessions
    begin with (``Request.session``), longer than prefixes outside of sessions. Prefixes of LS requests are kept before
    these, as ``ls_prefix_share`` says."""
    session_ttl_s: float = 600.0
    """Seconds after which a session ends that no request has used: then its blocks are the first to be overwritten, as
    those of its older branches are at any time."""
    host_prefixes: bool = True
    """Copy blocks of the prefix cache to the host tier before the device overwrites them, into host blocks that no
    request uses, and copy them back for a request with the same first tokens. Not with ``host_kv_dtype`` ``int8``
    alone, which would round them; with ``kv_dtype`` ``int8`` they are rounded already."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model or its tokenizer, when it is loaded by its name; it can do anything."""
    kv_dtype: Literal["auto", "int8"] = "auto"
    """``auto``: KV is in the model's dtype. ``int8``, on the CPU: in half the bytes or less (a scale per token and KV
    head included), so that about twice the tokens fit into ``device_kv_bytes``, and attention reads half as much. Its
    outputs are not exact: K and V of each token are rounded, by up to 0.4 % of their row's largest value, before the
    first query attends them, so that they do not depend on how a prompt is cut into chunks. The host tier then has int8
    as well, and rounds nothing again. With attention ``cpu``."""
    numa: Literal["auto", "off"] = "auto"
    """``auto``: ranks on the CPU of one machine are spread over its NUMA nodes, if that is possible evenly: each has
    cores and memory of one. ``off``: each has an equal share of the cores, whatever their nodes."""

    def __post_init__(self) -> None:
        for name in ("step_graphs_limit_s", "step_graphs_gib"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a number >= 0, got {value}")
        if not 0 <= self.ls_prefix_share < 1:
            raise ValueError(f"ls_prefix_share must be a share in [0, 1), got {self.ls_prefix_share}")
        if not 0 <= self.session_share < 1:
            raise ValueError(f"session_share must be a share in [0, 1), got {self.session_share}")
        if not (math.isfinite(self.session_ttl_s) and self.session_ttl_s > 0):
            raise ValueError(f"session_ttl_s must be a number > 0, got {self.session_ttl_s}")
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype must be one of {', '.join(KV_DTYPES)}, got {self.kv_dtype!r}")
        if self.step_graphs not in ("auto", "on", "off"):
            raise ValueError(f"step_graphs must be auto, on or off, got {self.step_graphs!r}")
        if self.numa not in ("auto", "off"):
            raise ValueError(f"numa must be auto or off, got {self.numa!r}")

    @property
    def latent_kv(self) -> bool:
        """The model's KV are latents."""
        return self.attention == "latent"


@dataclass(frozen=True, kw_only=True)
class DiskKVConfig:
    """The disk tier: a file with KV of prefixes, below the host tier.

    Raises:
        ValueError: A setting is out of its range.
    """

    gib: float = 0.0
    """Most GiB of the file; 0: there is no disk tier. It needs a host tier, whose memory it is read into."""
    dir: str | None = None
    """Folder of the file; None: ``omniserve/kv`` in XDG_CACHE_HOME or ``~/.cache``. Only its owner can read the file,
    which tells what requests said."""
    keep: bool = False
    """Leave the file there, for the next engine with the same weights, dtype and block size. Prefixes that were found
    once, and those of LS requests, are then written at once. Otherwise the file is gone when the process ends, however
    it does."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.gib) and self.gib >= 0):
            raise ValueError(f"disk_kv.gib must be a number >= 0, got {self.gib}")
        if not self.gib and (self.keep or self.dir is not None):
            raise ValueError("disk_kv.dir and disk_kv.keep are of a disk tier: give disk_kv.gib, too")


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """LoRA adapters that requests can name.

    Raises:
        ValueError: A setting is out of its range.
    """

    max_loras: int = 0
    """Most LoRA adapters in memory at a time. Others that are known are read from disk when a request names them, in
    the place of the one that has not been used for the longest time. 0: as many as are named at the start, or 8 where
    others may be loaded."""
    max_lora_rank: int = 16
    """Highest rank of a LoRA adapter, rounded up to a multiple of 8, and at least that of the adapters named at the
    start: each takes the memory of this rank."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_loras <= MOST_LORAS:
            raise ValueError(f"max_loras must be from 0 to {MOST_LORAS}, got {self.max_loras}")
        if not 1 <= self.max_lora_rank <= 1024:
            raise ValueError(f"max_lora_rank must be from 1 to 1024, got {self.max_lora_rank}")

    @property
    def sizes(self) -> tuple[int, int]:
        """Slots and highest rank."""
        return self.max_loras, self.max_lora_rank


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Settings of the processes that serve one model: their number, and where they come from.

    Raises:
        ValueError: A setting is out of its range.
    """

    tensor_parallel_size: int = 1
    """Ranks that serve the model together, each with a part of every layer and of its KV heads. Sizes of KV pools,
    threads and rows are those of each rank."""
    pipeline_parallel_size: int = 1
    """Stages, one behind the other, each with a range of the layers and their KV. So many steps are under way, each in
    another stage. A stage has ``tensor_parallel_size`` ranks. Sizes of KV pools are those of each rank."""
    rank_listen: str | None = None
    """Address HOST:PORT at which ranks on other machines join, by ``python -m omniserve.rank --join HOST:PORT``, with
    their collectives on the same network. None: all ranks are processes of this machine, started with the engine; a GPU
    each, or a share of the cores."""
    rank_secret_file: str | None = None
    """File with a secret of at least 16 characters, which ranks that join must know, too."""
    rank_timeout_s: float = 20.0
    """Seconds without an answer after which a rank is taken for dead, and the engine is started again."""

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1:
            raise ValueError(f"tensor_parallel_size must be >= 1, got {self.tensor_parallel_size}")
        if self.pipeline_parallel_size < 1:
            raise ValueError(f"pipeline_parallel_size must be >= 1, got {self.pipeline_parallel_size}")
        if not (math.isfinite(self.rank_timeout_s) and self.rank_timeout_s > 0):
            raise ValueError(f"rank_timeout_s must be a number > 0, got {self.rank_timeout_s}")
        if self.rank_listen is not None and self.rank_secret_file is None:
            raise ValueError("rank_listen needs rank_secret_file: ranks that join must know a secret")

    @property
    def num_ranks(self) -> int:
        """The number of ranks that serve the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, kw_only=True)
class HostsConfig:
    """CPU hosts on the network: machines that run ``python -m omniserve.host``.

    Raises:
        ValueError: A setting is out of its range.
    """

    cpu_hosts: tuple[str, ...] = ()
    """HOST:PORT of each. Best-effort requests go there when the host tier of this machine is full, with the KV manager
    ``tiered`` or ``incremental``. Rows and KV go over the network neither encrypted nor signed."""
    cpu_host_secret_file: str | None = None
    """File with a secret of at least 16 characters, which the hosts must know, too."""
    cpu_host_timeout_s: float = 5.0
    """Seconds of silence after which a host is lost: what is there is recomputed, until it comes back."""

    def __post_init__(self) -> None:
        if self.cpu_hosts and self.cpu_host_secret_file is None:
            raise ValueError("cpu_hosts needs cpu_host_secret_file: they must know a secret")
        if len(set(self.cpu_hosts)) < len(self.cpu_hosts):
            raise ValueError(f"cpu_hosts names a host twice: {', '.join(self.cpu_hosts)}")
        if len(self.cpu_hosts) > MOST_HOSTS:
            raise ValueError(f"cpu_hosts names {len(self.cpu_hosts)} hosts, {MOST_HOSTS} are possible")
        if not (math.isfinite(self.cpu_host_timeout_s) and self.cpu_host_timeout_s > 0):
            raise ValueError(f"cpu_host_timeout_s must be a number > 0, got {self.cpu_host_timeout_s}")


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """Prefill engines: processes with the same model that compute prompts (``python -m omniserve.prefill``).

    Raises:
        ValueError: A setting is out of its range.
    """

    prefill_engines: tuple[str, ...] = ()
    """HOST:PORT of each. The KV of prompts that they compute comes into this machine's host memory, and from there to
    the device. It goes over the network neither encrypted nor signed."""
    prefill_secret_file: str | None = None
    """File with a secret of at least 16 characters, which the prefill engines must know, too."""
    prefill_placement: str = "in-time"
    """Prompts that go to prefill engines, a name in PLACEMENTS or ``package.module:Class``. Latency-sensitive ones:
    ``in-time``, if their first token is predicted within its objective there, or sooner than here; ``sooner``: only in
    the latter case. Best-effort ones while an engine has little to do. ``always``: all that the host has room for, of
    best-effort ones a few a step. ``disaggregated``: all; none is computed here as long as an engine can be asked."""
    prefill_timeout_s: float = 10.0
    """Seconds of silence after which a prefill engine is lost: its prompts are computed here."""
    is_prefill_engine: bool = False
    """This engine is a prefill engine: it computes prompts for others. Set by ``python -m omniserve.prefill``."""

    def __post_init__(self) -> None:
        if self.prefill_engines and self.prefill_secret_file is None:
            raise ValueError("prefill_engines needs prefill_secret_file: they must know a secret")
        if len(set(self.prefill_engines)) < len(self.prefill_engines):
            raise ValueError(f"prefill_engines names one twice: {', '.join(self.prefill_engines)}")
        if not (math.isfinite(self.prefill_timeout_s) and self.prefill_timeout_s > 0):
            raise ValueError(f"prefill_timeout_s must be a number > 0, got {self.prefill_timeout_s}")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine.

    Raises:
        ValueError: A setting is out of its range; the message says which and what to give instead.
    """

    scheduler: str = "omniserve"
    """Scheduling policy, a name in SCHEDULERS or ``package.module:Class``."""
    scheduler_options: Mapping[str, bool | int | float | str | None] = field(default_factory=dict)
    """Options of that policy by name, such as ``{"be_order": "prefill"}``; see ``omniserve.sched.options``."""
    kv: str = "tiered"
    """KV manager, a name in KV_MANAGERS or ``package.module:Class``. ``paged``: device only; ``tiered``: device and
    host; ``incremental``: the same, and preempted requests resume from checkpoints; ``bidirectional``: likewise, and LS
    requests share blocks with BE ones."""
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    """Settings of the device tier."""

    device_kv_bytes: int = 1 * GIB
    """Memory for the device tier's KV pool; without a GPU it is taken from main memory, all of it, at the start. If the
    model has layers with recurrent state, up to half of it is for the states of the requests that may run;
    ``max_num_seqs`` and ``max_host_requests`` are lowered to what that holds."""
    host_kv_bytes: int = 1 * GIB
    """Memory for the host tier's KV pool; 0 switches the host tier off. With a GPU it is page-locked."""
    host_kv_dtype: str = "auto"
    """``auto``: the host pool is in the dtype of the device's (``execution.kv_dtype``), and its outputs are the device
    tier's. ``int8``: half the bytes or less (a scale per token and KV head included), so that about twice the tokens
    fit. Its outputs are not exact, unless the device has int8 as well: K and V are rounded, by up to 0.4 % of their
    row's largest value, as they come to the host tier, and stay so if they go back."""
    disk_kv: DiskKVConfig = field(default_factory=DiskKVConfig)
    """KV of prefixes on disk."""
    block_size: int = 64
    """Tokens per KV block, on both tiers; a power of two."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; None takes the model's."""

    max_num_batched_tokens: int = 512
    """Most device rows in a step (the token budget of chunked prefill)."""
    max_num_seqs: int = 256
    """Most requests that hold device KV at a time (BE requests do not count against LS ones)."""
    max_host_requests: int = 256
    """Slots of the host tier: most requests that decode there at a time."""
    max_piggyback_seats: int = 32
    """Largest P: most piggyback rows a layer."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Several processes for one model."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """Adapters that requests can name."""
    hosts: HostsConfig = field(default_factory=HostsConfig)
    """Further machines for the host tier."""
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    """Further machines that compute prompts."""

    trace_steps: str | None = None
    """File that gets one JSON line a step, for ``python -m omniserve.explain``."""

    device_threads: int | None = None
    """CPU threads of the device tier while the host tier is idle; None: all cores, or as many as a CPU quota of
    this container allows, less those that other processes use (no effect on a GPU's kernels)."""
    host_threads: int | None = None
    """Host tier threads; None: half of these cores without a GPU, all but two with one."""
    host_cores: tuple[int, ...] | None = None
    """Cores that host threads are pinned to; None: not pinned."""

    classes: tuple[ClassSpec, ...] = DEFAULT_CLASSES
    """Classes of requests, highest priority first; latency-sensitive ones come before best-effort ones."""
    seed: int = 0
    """Seeds the sampling of requests that have no seed of their own."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {self.block_size}")
        if self.host_kv_dtype not in KV_DTYPES:
            raise ValueError(f"host_kv_dtype must be one of {', '.join(KV_DTYPES)}, got {self.host_kv_dtype!r}")
        for name, low in (
            ("device_kv_bytes", 1),
            ("host_kv_bytes", 0),
            ("max_num_batched_tokens", 1),
            ("max_num_seqs", 1),
            ("max_host_requests", 1),
            ("max_piggyback_seats", 1),
        ):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be >= {low}, got {getattr(self, name)}")
        for name in ("device_threads", "host_threads", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1 or None, got {value}")
        if self.hosts.cpu_hosts and not self.host_kv_bytes:
            raise ValueError(
                "cpu_hosts are used when this machine's host tier is full: give host_kv_bytes, if only a little"
            )
        if self.disk_kv.gib and not self.host_kv_bytes:
            raise ValueError("the disk tier is read into host memory: give host_kv_bytes, or set disk_kv.gib to 0")
        if self.disk_kv.gib and not self.keeps_host_prefixes:
            raise ValueError(
                "the disk tier keeps what the host tier has of prefixes: set host_prefixes to True and host_kv_dtype "
                "to auto, or disk_kv.gib to 0"
            )
        if self.prefill.prefill_engines and not self.host_kv_bytes:
            raise ValueError("the KV of prefill_engines comes into host memory: give host_kv_bytes")
        if self.lora.max_loras and self.prefill.is_prefill_engine:
            raise ValueError(
                "no adapters can be named on a prefill engine: leave --lora-modules, --lora-dir and --max-loras away, "
                "or merge the adapter into the model"
            )
        if self.lora.max_loras and self.parallel.num_ranks > 1 and not self.host_kv_bytes:
            raise ValueError(
                "the host tiers of ranks tell when adapters are loaded: give host_kv_bytes (--host-kv-gib), if only a "
                "little, or leave --lora-modules, --lora-dir and --max-loras away"
            )
        if self.execution.latent_kv and self.execution.kv_dtype != "auto":
            raise ValueError(
                "attention='latent' keeps latents in the model's dtype on the device: set kv_dtype to 'auto'"
            )
        if self.execution.latent_kv and (self.parallel.num_ranks > 1 or self.lora.max_loras):
            raise ValueError(
                "attention='latent' is for a model on one rank, without adapters that requests can name: set attention "
                "to 'auto', or leave those out"
            )
        if self.parallel.num_ranks > 1:
            sizes = "tensor_parallel_size and pipeline_parallel_size"
            if self.disk_kv.gib:
                raise ValueError(f"disk_kv is for a model on one rank: leave out disk_kv.gib, or {sizes}")
            if self.host_cores is not None:
                raise ValueError(f"host_cores names cores of one process: leave it out, or {sizes}")
        check_classes(self.classes)

    @property
    def host_pool_dtype(self) -> str:
        """The dtype of the host pool, one of KV_DTYPES."""
        return self.execution.kv_dtype if self.host_kv_dtype == "auto" else self.host_kv_dtype

    @property
    def keeps_host_prefixes(self) -> bool:
        """True: the host tier keeps prefixes, as copying KV there and back rounds nothing."""
        return self.execution.host_prefixes and self.host_pool_dtype == self.execution.kv_dtype

    def class_named(self, name: str) -> ClassSpec:
        """Return a class.

        Raises:
            ValueError: There is none of that name.
        """
        for spec in self.classes:
            if spec.name == name:
                return spec
        raise ValueError(f"there is no class {name!r}; this engine has {', '.join(c.name for c in self.classes)}")


def check_classes(classes: tuple[ClassSpec, ...]) -> None:
    """Raise ValueError unless the names differ, both kinds are there, and LS kinds come first."""
    names, kinds = [spec.name for spec in classes], [spec.kind for spec in classes]
    if len(set(names)) < len(names):
        raise ValueError(f"classes must have different names, got {', '.join(names)}")
    if set(kinds) != set(ServiceClass):
        raise ValueError(f"classes needs one of kind LS and one of kind BE at least, got {[str(k) for k in kinds]}")
    if kinds != sorted(kinds, reverse=True):  # "LS" > "BE"
        raise ValueError(f"classes of kind LS must come before those of kind BE, got {', '.join(names)}")

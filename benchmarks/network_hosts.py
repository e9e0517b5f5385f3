"""A CPU host on the network beside a host tier of the engine's own: latency of rows, time of steps, BE tokens a second.

    python -m benchmarks.network_hosts --record benchmarks/results/network_hosts.json

``local`` is a host tier in the engine's process; the others are ``python -m omniserve.host`` in a process of its own,
with as many threads: ``loopback`` connects to it directly, the rest through a link that is as slow as a network.

*rows*: q, k and v of so many requests go to the host, one task each, and their results come back, in milliseconds from
the first to the last. The context is short, so that this is mostly the link. *steps*: LS requests decode beside BE
requests whose attention is on the host; engines take turns. ``LS`` is the median step, ``p99`` its 99th percentile.

Engine, hosts and slow links share this machine's cores: on loopback the host's threads for the network take the time
of the engine's, which they do not on two machines.

Paper: omniserve 4 (distributed CPU attention), 5.3.
"""

from __future__ import annotations

import functools
import itertools
import secrets
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.engine_run import SteadyRun
from benchmarks.common.host_tasks import seconds_of_tasks
from benchmarks.common.models import MODELS, token_bytes
from benchmarks.common.network import cpu_host, paced_cpu_host, slow_link
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser, table, table_of
from benchmarks.common.timing import OtherLoad, in_turn, median_ratio
from omniserve import Engine, EngineConfig, HostsConfig
from omniserve.core.setup import HostTierSetup
from omniserve.core.spec import AttentionSpec, ModelSpec
from omniserve.core.work import HOST_BLOCKS
from omniserve.host.cores import available_cores
from omniserve.host.tier import HostTier
from omniserve.ops.isa import instruction_set_in_use
from omniserve.remote.network_hosts import NetworkHosts

BLOCK_SIZE = 16
LINKS = {
    "loopback": None, "10 Gb/s": (0.0, 10e9), "1 Gb/s": (0.0, 1e9), "0.2 ms, 10 Gb/s": (0.2e-3, 10e9),
    "0.2 ms, 1 Gb/s": (0.2e-3, 1e9),
}  # fmt: skip
"""Delay of one way in seconds, and bits a second. Without a delay the kernel paces the connections; with one, a program
in between delays what it forwards."""


class Rows:
    """A host tier with requests of a few tokens, on this machine or on a host.

    Args:
        shape: Query heads / KV heads / head size, of bf16.
        requests: Tasks at once.
        context: Tokens of a request.
        hosts: Settings of one host; None: this machine's tier.
    """

    def __init__(self, shape: str, requests: int, context: int, hosts: HostsConfig | None) -> None:
        num_heads, kv_heads, head_size = (int(part) for part in shape.split("/"))
        self._layers, layers = itertools.cycle(range(2)), (AttentionSpec(scale=head_size**-0.5),) * 2
        spec = ModelSpec(
            num_layers=len(layers), hidden_size=num_heads * head_size, num_heads=num_heads, num_kv_heads=kv_heads,
            head_size=head_size, vocab_size=1, max_model_len=context, eos_token_ids=(), dtype_bytes=2,
            attention=layers,
        )  # fmt: skip
        blocks_each = -(-context // BLOCK_SIZE)
        setup = HostTierSetup(
            block_size=BLOCK_SIZE, num_slots=requests, num_threads=1,
            kv_bytes=requests * blocks_each * spec.host_block_bytes(BLOCK_SIZE, "auto"),
        )  # fmt: skip
        self._tier = HostTier(setup, spec=spec, dtype=torch.bfloat16)
        self._hosts: NetworkHosts | None = None
        first = 0
        if hosts is not None:
            self._hosts = NetworkHosts(hosts, self._tier)
            while not self._hosts.poll([]):
                time.sleep(0.01)
            first = HOST_BLOCKS
        blocks = torch.arange(requests * blocks_each).view(requests, blocks_each)
        self._blocks = [[first + block for block in row] for row in blocks.tolist()]
        self._last = context - 1
        self._q, self._k = (torch.randn(requests, heads, head_size).bfloat16() for heads in (num_heads, kv_heads))
        for position in range(context):  # fills the blocks, which hold nothing yet
            for layer in range(len(layers)):
                self._seconds(layer, position)

    def seconds(self) -> float:
        """Send a row of each request, and return when all results are back."""
        return self._seconds(next(self._layers), self._last)

    def _seconds(self, layer: int, position: int) -> float:
        for slot, blocks in enumerate(self._blocks):
            self._tier.begin_token(slot, 0, position, blocks[: position // BLOCK_SIZE + 1])
        slots = torch.arange(len(self._blocks))
        return seconds_of_tasks(self._tier, len(slots), layer, slots, self._q, self._k, self._k)

    def close(self) -> None:
        if self._hosts is not None:
            self._hosts.close()
        self._tier.close()


class Places:
    """The hosts, one a link: started once, used by one engine after the other."""

    def __init__(self, stack: ExitStack, threads: int, kv_gib: float) -> None:
        secret = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "secret"
        secret.write_text(secrets.token_hex(32))
        self.configs: dict[str, HostsConfig | None] = {"local": None}
        for name, link in LINKS.items():
            delay_s, bits_per_s = link or (0.0, 0.0)
            if bits_per_s and not delay_s:
                host = paced_cpu_host(secret, threads=threads, kv_gib=kv_gib, bits_per_s=bits_per_s)
            else:
                host = cpu_host(secret, threads=threads, kv_gib=kv_gib)
            address = stack.enter_context(host)
            if delay_s:
                address = stack.enter_context(slow_link(address, delay_s=delay_s, bits_per_s=bits_per_s))
            self.configs[name] = HostsConfig(
                cpu_hosts=("{}:{}".format(*address),), cpu_host_secret_file=str(secret)
            )  # fmt: skip


def measure_rows(places: Places, shape: str, args: Any) -> dict[str, Any]:
    """Return the seconds of each sample by link; the links take turns."""
    rows = {name: Rows(shape, args.rows, args.context, hosts) for name, hosts in places.configs.items()}
    try:
        return in_turn({name: tier.seconds for name, tier in rows.items()}, args.row_samples, warm_up=5)
    finally:
        for tier in rows.values():
            tier.close()


def measure_steps(places: Places, name: str, args: Any) -> dict[str, list[dict[str, float]]]:
    """Return the windows of each link's engine; the engines take turns."""
    model = MODELS[name]()
    with ExitStack() as stack:
        runs = {}
        for place, hosts in places.configs.items():
            kv_bytes = 1 << 30 if hosts is None else BLOCK_SIZE * token_bytes(model)
            config = EngineConfig(
                device_kv_bytes=args.device_tokens * token_bytes(model), host_kv_bytes=kv_bytes, host_threads=1,
                device_threads=max(1, available_cores() - 1), block_size=BLOCK_SIZE, hosts=hosts or HostsConfig(),
                scheduler_options={"swap_in_delay_s": 1e9},
            )  # fmt: skip
            engine = stack.enter_context(Engine(model, config))
            runs[place] = SteadyRun(engine, num_ls=args.ls, num_be=args.be, prompt=args.be_prompt)
        return in_turn(
            {place: functools.partial(run.window, args.window_s) for place, run in runs.items()}, args.repeats
        )


def step_rows(windows: dict[str, list[dict[str, float]]]) -> list[dict[str, str]]:
    """Return a line for each link: medians, and the medians of the ratios to ``local``."""
    local = windows["local"]
    lines = []
    for place, runs in windows.items():
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        ratio = {
            key: median_ratio([run[key] for run in runs], [run[key] for run in local])
            for key in ("step_p50_s", "host_tokens_per_s", "be_tokens_per_s")
        }  # fmt: skip
        lines.append({
            "link": place, "LS ms": f"{1e3 * middle['step_p50_s']:.2f} ({ratio['step_p50_s']:.3f})",
            "p99 ms": f"{1e3 * middle['step_p99_s']:.2f}",
            "BE tokens/s": f"{middle['be_tokens_per_s']:.1f} ({ratio['be_tokens_per_s']:.2f})",
            "on the host": f"{middle['host_tokens_per_s']:.1f} ({ratio['host_tokens_per_s']:.2f})",
            "steps a layer": f"{middle['steps_per_layer']:.2f}", "rows a step": f"{middle['rows_per_step']:.1f}",
        })  # fmt: skip
    return lines


@torch.inference_mode()
def main() -> None:
    parser = argument_parser(
        __doc__, "network_hosts", shapes=["32/8/128", "64/8/128"], rows=(400, "requests with a task at once"),
        context=(16, "tokens of each"), row_samples=200, models=list(MODELS), ls=(4, "LS requests that decode"),
        be=(48, "BE requests"), be_prompt=200, device_tokens=(1800, "tokens of KV on the device"), window_s=3.0,
        repeats=9,
    )  # fmt: skip
    args = parser.parse_args()
    torch.manual_seed(0)
    results: dict[str, Any] = {"rows": {}, "steps": {}}
    load = OtherLoad()
    with ExitStack() as stack:
        places = Places(stack, threads=1, kv_gib=1.0)
        lines = [["heads, ms of all rows", *places.configs]]
        for shape in args.shapes:
            results["rows"][shape] = measured = measure_rows(places, shape, args)
            cells = []
            for times in measured.values():
                times.sort()
                cells.append(f"{1e3 * statistics.median(times):.2f} (p99 {1e3 * times[int(0.99 * len(times))]:.2f})")
            lines.append([shape, *cells])
        print(table(lines, numbers=True), flush=True)
        for name in args.models:
            results["steps"][name] = windows = measure_steps(places, name, args)
            print(f"\n{name}\n{table_of(step_rows(windows))}", flush=True)
    results["others_busy_cores"] = load.cores()
    config = vars(args) | {"isa": instruction_set_in_use(), "cores": available_cores(), "links": LINKS}
    write_record(args.record, name="network_hosts", config=config, seed=0, results=results)


if __name__ == "__main__":
    main()

"""Devices and hosts by name: figures of data sheets, and the links between them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

GB = 1e9
Spec = TypeVar("Spec", "DeviceSpec", "HostSpec")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """A GPU, or a CPU that takes the place of one. Units are bytes and seconds."""

    name: str
    flops: float
    """Peak dense 16-bit multiply-adds, as two each, a second."""
    bytes_per_s: float
    """Peak bandwidth of its memory."""
    memory_bytes: float
    pcie_bytes_per_s: float
    """Rate to and from its host that a large copy reaches, in bytes/s."""
    link_bytes_per_s: Mapping[int, float]
    """Number of devices -> bus bandwidth of their all-reduce."""
    link_alpha_s: Mapping[int, float]
    """Number of devices -> seconds of the smallest all-reduce."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSpec:
    """A host's CPU, all sockets together. Units are bytes and seconds."""

    name: str
    cores: int
    bytes_per_s: float
    """Peak bandwidth of its memory."""
    memory_bytes: float
    network_bytes_per_s: float = 12.5 * GB
    """Rate to the host of the device in bytes/s: 100 Gb/s."""


def _device(
    name: str, tflops: float, gb_per_s: float, gb: float, pcie: float, links: Mapping[int, tuple[float, float]]
) -> DeviceSpec:
    """Make a DeviceSpec; ``links`` holds (GB/s of bus bandwidth, microseconds) by number of devices."""
    return DeviceSpec(
        name=name,
        flops=tflops * 1e12,
        bytes_per_s=gb_per_s * GB,
        memory_bytes=gb * GB,
        pcie_bytes_per_s=pcie * GB,
        link_bytes_per_s={count: speed * GB for count, (speed, _) in links.items()},
        link_alpha_s={count: alpha * 1e-6 for count, (_, alpha) in links.items()},
    )


# All-reduces of the A100s and of the H100 are fitted to Vidur's timings (see analytic.Efficiency): NVSwitch (DGX), and
# PCIe cards of which two share a bridge. The others are estimates: half of PCIe's bandwidth, or NVLink's share on A100.
DEVICES = {
    spec.name.lower(): spec
    for spec in (
        _device("A100-80GB", 312, 2039, 80, 24, {2: (171, 45), 4: (161, 39), 8: (152, 44)}),
        _device("A100-80GB-PCIe", 312, 1935, 80, 24, {2: (202, 44), 4: (23.6, 58)}),
        _device("A10", 125, 600, 24, 24, {2: (12, 50), 4: (12, 60)}),
        _device("T4", 65, 320, 16, 12, {2: (6, 50), 4: (6, 60)}),
        _device("V100-32GB", 125, 900, 32, 12, {2: (85, 45), 4: (80, 45), 8: (75, 45)}),
        _device("H100-80GB", 989, 3352, 80, 50, {2: (332, 27), 4: (389, 33), 8: (342, 30)}),
        _device("H200-141GB", 989, 4800, 141, 50, {2: (332, 27), 4: (389, 33), 8: (342, 30)}),
        # CPUs as devices that compute whole requests: AVX-512 in fp32, 24 cores at 2.6 GHz; AMX in bf16, 56 at 2.0 GHz.
        _device("CPU-Xeon-6342", 4.0, 204.8, 400, 100, {}),
        _device("CPU-Xeon-8480", 229, 307.2, 512, 100, {}),
    )
}
"""Devices by their names in lower case."""

HOSTS = {
    spec.name.lower(): spec
    for spec in (
        HostSpec(name="Xeon-6342", cores=24, bytes_per_s=204.8 * GB, memory_bytes=400 * GB),
        HostSpec(name="Xeon-6342-dual", cores=48, bytes_per_s=409.6 * GB, memory_bytes=500 * GB),
        HostSpec(name="Xeon-6130-dual", cores=32, bytes_per_s=256 * GB, memory_bytes=180 * GB),
        HostSpec(name="Xeon-8480", cores=56, bytes_per_s=307.2 * GB, memory_bytes=512 * GB),
        HostSpec(name="Xeon-4215", cores=8, bytes_per_s=115.2 * GB, memory_bytes=128 * GB),
        HostSpec(name="EPYC-9654", cores=96, bytes_per_s=460.8 * GB, memory_bytes=768 * GB),
    )
}
"""Hosts by name, lower case. The 6342 of one socket (omniserve 5.1.1) and the 6130 (apex, table 1) have the papers'
memory; the 6342 of two sockets has twice the 250 GB of apex's table 1, of which its loads need a part."""

_SHORT = {"a100": "a100-80gb", "h100": "h100-80gb", "h200": "h200-141gb", "v100": "v100-32gb"}


def find_devices(text: str) -> tuple[int, DeviceSpec]:
    """Return (count, device) of ``4xA100-80GB``.

    Raises:
        ValueError: Unknown, or more devices than a measured link joins.
    """
    count, spec = _find("device", DEVICES, text)
    if count != 1 and count not in spec.link_bytes_per_s:
        raise ValueError(
            f"{text!r}: {spec.name} devices are known alone or by {', '.join(map(str, spec.link_bytes_per_s))}"
        )
    return count, spec


def find_hosts(text: str) -> tuple[int, HostSpec]:
    """Return (count, host) of ``5xXeon-6342``.

    Raises:
        ValueError: Unknown.
    """
    return _find("host", HOSTS, text)


def _find(kind: str, known: Mapping[str, Spec], text: str) -> tuple[int, Spec]:
    match = re.fullmatch(r"(?:(\d+)x)?(.+)", text.strip(), re.IGNORECASE)
    if match is None or match[1] == "0":
        raise ValueError(f"{text!r} is no count and name, such as 4xA100-80GB")
    name = match[2].lower()
    if (spec := known.get(_SHORT.get(name, name))) is None:
        raise ValueError(f"unknown {kind} {match[2]!r}; known: {', '.join(spec.name for spec in known.values())}")
    return int(match[1] or 1), spec

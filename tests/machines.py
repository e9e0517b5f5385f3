"""Folders that look like /sys/devices/system of other machines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

GIB_KIB = 1 << 20


def write_machine(
    folder: Path, nodes: Mapping[int, str], *, gib: Mapping[int, int] = {}, siblings: Mapping[int, str] = {}
) -> Path:
    """Write a machine's nodes with their cores; return the folder.

    Args:
        folder: Where.
        nodes: The online cores of each node, as the kernel writes them.
        gib: Memory of the nodes that have not 64 GiB.
        siblings: For each core that is online the threads of its physical core; other cores have no folder.
    """
    for number, cores in nodes.items():
        node = folder / "node" / f"node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(cores + "\n")
        size = gib.get(number, 64) * GIB_KIB
        (node / "meminfo").write_text(
            f"Node {number} MemTotal:       {size} kB\nNode {number} MemFree:        {size // 2} kB\n"
            f"Node {number} HugePages_Total:     0\n"
        )
    for name in ("has_cpu", "online", "power"):  # beside the nodes' folders
        (folder / "node" / name).write_text("0\n")
    for core, threads in siblings.items():
        topology = folder / "cpu" / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(threads + "\n")
    return folder

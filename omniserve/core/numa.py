"""NUMA: which cores and how much memory each node of this machine has, and how a process is kept to one of them.

A core reads memory of its own node faster than that of another one. Several processes that share a machine, such as the
ranks of a model, are each kept to a node: their threads by the affinity mask, their memory by the kernel's memory
policy. Both are inherited by threads that start later, so a process is placed before its libraries start theirs, and
before it reads weights.

The policy is ``MPOL_PREFERRED``: memory comes from the node as long as that has some, then from others. With
``MPOL_BIND`` the kernel would end a process whose node is full, although other nodes have memory. The policy adds two
things to the kernel's default, which takes memory of the node of the core that touches a page first: a thread that runs
elsewhere changes nothing, and the kernel does not look for pages to move between nodes. A process with the cores of
several nodes takes memory of these in turn (``MPOL_INTERLEAVE``).
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

SYSTEM, STATUS = Path("/sys/devices/system"), Path("/proc/self/status")
_DEFAULT, _PREFERRED, _INTERLEAVE = 0, 1, 3
# Numbers of set_mempolicy and get_mempolicy, which the C library has no functions for.
_CALLS = {
    "x86_64": (238, 239),
    "aarch64": (237, 236),
    "riscv64": (237, 236),
    "ppc64le": (261, 260),
    "s390x": (270, 269),
}
_MOST_NODES = 1024  # the kernel's own limit, which get_mempolicy's mask must reach
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_Mask = ctypes.c_ulong * (_MOST_NODES // _WORD_BITS)

# A rank with fewer cores than this share of an equal part would lose more than it gains by memory of its own node.
_LEAST_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node, as far as this process may use it."""

    number: int
    cores: tuple[int, ...]
    """Threads of one physical core are neighbours."""
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Share:
    """The cores of one of several processes, and the nodes that its memory comes from; none: wherever it is touched."""

    cores: tuple[int, ...]
    nodes: tuple[Node, ...] = ()


def read_nodes(cores: Collection[int]) -> list[Node]:
    """Return the nodes that have some of these cores, and memory that this process may use.

    None where the kernel knows no nodes.
    """
    allowed = _memory_allowed()
    nodes = []
    for folder in (SYSTEM / "node").glob("node[0-9]*"):
        number = int(folder.name.removeprefix("node"))
        own = _in_order(parse_list((folder / "cpulist").read_text()) & set(cores))
        total, free = _memory_of(folder)
        if own and total and (allowed is None or number in allowed):
            nodes.append(Node(number, own, total, free))
    return sorted(nodes, key=lambda node: node.number)


def node_numbered(number: int, cores: Collection[int]) -> Node:
    """Return a node.

    Raises:
        ValueError: This process may use none of this number.
    """
    nodes = read_nodes(cores)
    for node in nodes:
        if node.number == number:
            return node
    there = " and ".join(f"{node.number} (cores {as_ranges(node.cores)})" for node in nodes)
    raise ValueError(
        f"there is no NUMA node {number} with cores and memory that this process may use; "
        + (f"there is {there}" if there else "the kernel of this machine knows no nodes")
    )


def shares_of(num_processes: int, cores: Collection[int], nodes: Sequence[Node]) -> list[Share] | None:
    """Spread processes evenly over nodes, neighbours side by side; None if they are better off without that.

    Processes of one node have equal parts of its cores. With more nodes than processes each has several. ``cores`` are
    all that the processes may use. They are better off without if there are fewer than two nodes or processes, or
    if a process would have much less than an equal share of these cores.
    """
    if num_processes < 2 or len(nodes) < 2:
        return None
    shares = []
    for rank in range(num_processes):
        first = rank * len(nodes) // num_processes
        own = nodes[first : max(first + 1, (rank + 1) * len(nodes) // num_processes)]
        sharing = [each for each in range(num_processes) if each * len(nodes) // num_processes == first]
        parts = _equal_parts([core for node in own for core in node.cores], len(sharing))
        shares.append(Share(parts[rank - sharing[0]], tuple(own)))
    least = min(len(share.cores) for share in shares)
    return shares if least and least >= _LEAST_SHARE * (len(cores) // num_processes) else None


def equal_shares(num_processes: int, cores: Collection[int]) -> list[Share]:
    """Return an equal share of the cores for each process; with fewer cores than processes several share one."""
    ordered = _in_order(cores)
    if len(ordered) < num_processes:
        return [Share((ordered[rank % len(ordered)],)) for rank in range(num_processes)]
    return [Share(part) for part in _equal_parts(ordered, num_processes)]


# -- keeping this process to a share -----------------------------------------------------------------------------------

_kept: tuple[Share, set[int], bool] | None = None
"""What this process is kept to, the cores that it had before, and whether it has a memory policy of ``keep_to``."""


def keep_to(share: Share) -> None:
    """Keep this thread, and those that it starts, to some cores; and their memory to the nodes of the share, if any.

    A memory policy that this process was started with, such as that of ``numactl``, stays.
    """
    global _kept
    release()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, share.cores)
    _kept = (share, cores, bool(share.nodes) and _prefer([node.number for node in share.nodes]))


def settle() -> None:
    """Let this process have for good what ``keep_to`` has left it: ``release`` gives it no other cores."""
    global _kept
    _kept = None


def is_kept_to_nodes() -> bool:
    """Tell whether ``keep_to`` has given this process a share that is of some nodes."""
    return _kept is not None and bool(_kept[0].nodes)


def release() -> None:
    """Undo ``keep_to`` for this thread: a program that takes this one's place begins with all cores again."""
    global _kept
    if _kept is not None:
        _, cores, has_policy = _kept
        os.sched_setaffinity(0, cores)
        if has_policy:
            _set_policy(_DEFAULT, [])
        _kept = None


def describe(share: Share) -> str:
    """Return what a log says of a share."""
    text = f"cores {as_ranges(share.cores)}"
    if share.nodes:
        numbers = " and ".join(str(node.number) for node in share.nodes)
        free, total = (sum(getattr(node, name) for node in share.nodes) for name in ("free_bytes", "memory_bytes"))
        text = f"NUMA node {numbers}: {text}, memory of the node ({free / 2**30:.1f} of {total / 2**30:.1f} GiB free)"
    return text


def _prefer(nodes: list[int]) -> bool:
    """Set the memory policy of this thread and of those that it starts; return whether that is done."""
    try:
        mode, own = memory_policy()
        if mode != _DEFAULT:
            logger.info("the memory policy that this process was started with stays (mode %d, nodes %s)", mode, own)
            return False
        _set_policy(_PREFERRED if len(nodes) == 1 else _INTERLEAVE, nodes)
    except OSError as error:
        logger.warning(
            "the kernel sets no memory policy for NUMA node %s (%s): a page comes from the node of the core that "
            "touches it first; in a container, --cap-add SYS_NICE may allow it",
            " and ".join(map(str, nodes)),
            error.strerror,
        )
        return False
    return True


def memory_policy() -> tuple[int, list[int]]:
    """Return the mode of this thread's memory policy, as in ``linux/mempolicy.h``, and its nodes.

    Raises:
        OSError: The kernel does not tell.
    """
    mode, mask = ctypes.c_int(), _Mask()
    _call(1, ctypes.byref(mode), mask, ctypes.c_ulong(_MOST_NODES + 1), None, ctypes.c_ulong(0))
    return mode.value, [node for node in range(_MOST_NODES) if mask[node // _WORD_BITS] >> node % _WORD_BITS & 1]


def _set_policy(mode: int, nodes: Iterable[int]) -> None:
    mask = _Mask()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    _call(0, ctypes.c_int(mode), mask, ctypes.c_ulong(_MOST_NODES + 1))


def _call(which: int, *arguments: object) -> None:
    calls = _CALLS.get(platform.machine())
    if calls is None:
        raise OSError(0, f"the number of the system call is not known on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(calls[which]), *arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


# -- files of the kernel -----------------------------------------------------------------------------------------------


def parse_list(text: str) -> set[int]:
    """Read numbers and ranges of them as the kernel writes them: ``0-3,8``."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def as_ranges(numbers: Iterable[int]) -> str:
    """Write numbers as ``parse_list`` reads them."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


def _memory_allowed() -> set[int] | None:
    """Return the nodes whose memory the control group of this process has; None: all."""
    for line in STATUS.read_text().splitlines() if STATUS.exists() else ():
        if line.startswith("Mems_allowed_list:"):
            return parse_list(line.partition(":")[2])
    return None


def _memory_of(folder: Path) -> tuple[int, int]:
    """Return all memory and the free memory of a node, in bytes."""
    lines = [line.split() for line in (folder / "meminfo").read_text().splitlines()]
    kib = {fields[2]: int(fields[3]) for fields in lines if len(fields) > 3}  # Node 0 MemTotal: 1234 kB
    return 1024 * kib.get("MemTotal:", 0), 1024 * kib.get("MemFree:", 0)


def _in_order(cores: Collection[int]) -> tuple[int, ...]:
    """Sort cores so that threads of one physical core are neighbours."""
    return tuple(sorted(cores, key=lambda core: (_first_sibling(core), core)))


def _first_sibling(core: int) -> int:
    path = SYSTEM / "cpu" / f"cpu{core}" / "topology" / "thread_siblings_list"
    return min(parse_list(path.read_text()), default=core) if path.exists() else core


def _equal_parts(cores: Sequence[int], count: int) -> list[tuple[int, ...]]:
    each = len(cores) // count
    return [tuple(cores[part * each : (part + 1) * each]) for part in range(count)]

"""A rank on a made-up machine: ``python -m tests.parallel.placed_rank MACHINE TOLD``, then a rank's own arguments.

Its pid is in ``TOLD.pid`` from the start on, and at the end ``TOLD`` has what its main thread has.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from omniserve.core import numa


def place() -> dict[str, object]:
    """Return the cores, the number of threads and the memory policy of this thread."""
    import torch

    return {
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "policy": list(numa.memory_policy()),
    }


def main() -> int:
    """Be a rank; return the exit status."""
    machine, told, *arguments = sys.argv[1:]
    Path(told + ".pid").write_text(str(os.getpid()))
    numa.SYSTEM, numa.STATUS = Path(machine), Path(machine) / "status"
    from omniserve.parallel.cli import main as be_rank

    status = be_rank(arguments)
    Path(told).write_text(json.dumps(place()))
    return status


if __name__ == "__main__":
    sys.exit(main())

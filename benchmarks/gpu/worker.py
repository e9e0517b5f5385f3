"""The process that measures: runs parts one after the other and writes what comes of them, line by line.

Its parent (``supervise``) reads the lines, and ends it if a part takes too long; what was written is kept.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.clock import reclaim_memory
from benchmarks.gpu.limits import Limits
from benchmarks.gpu.models import ModelShelf
from benchmarks.gpu.parts import PARTS, limit_of
from benchmarks.gpu.table import Row

Send = Callable[[dict[str, Any]], None]
BROKEN = 3
"""Exit status: a part left the device unusable; the others need another process."""


class PartRunner:
    """Runs parts in this process.

    Args:
        device: The device tier's.
        dry: Tiny sizes.
        send: Gets events: ``begin``, ``row`` and ``end``, each with its part's name.
    """

    def __init__(self, device: torch.device, *, dry: bool, send: Send) -> None:
        self._device, self._dry, self._send = device, dry, send
        self._limits = Limits(device, dry=dry)
        self._shelf = ModelShelf(device, dry=dry)

    def run(self, name: str, limit_s: float) -> bool:
        """Run a part.

        Args:
            name: In PARTS.
            limit_s: Its time; a part looks at it between two cases.

        Returns:
            False if the device does not work any more.
        """
        began_s = time.monotonic()
        self._send({"event": "begin", "part": name, "limit_s": limit_s})

        def emit(row: Row) -> None:
            self._send({"event": "row", "part": name, "row": row.as_record()})

        bench = Bench(
            device=self._device, dry=self._dry, limits=self._limits, shelf=self._shelf, limit_s=limit_s, emit=emit
        )
        status = "measured"
        try:
            PARTS[name].load()(bench)
        except Exception:  # the other parts are still worth their time; the record and the exit status tell
            status = f"failed: {traceback.format_exc(limit=-3).strip()}"
            logging.exception("part %s failed", name)
        works = self._device_works()
        seconds = time.monotonic() - began_s
        self._send({"event": "end", "part": name, "status": status, "seconds": seconds})
        return works

    def _device_works(self) -> bool:
        if self._device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize(self._device)
            reclaim_memory(self._device)
        except RuntimeError:  # an illegal access, for example: nothing works in this process from then on
            logging.exception("the device is unusable")
            return False
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", required=True, help="comma-separated, in their order")
    parser.add_argument("--ends-at", type=float, required=True, help="seconds since the epoch")
    parser.add_argument("--events", type=Path, required=True, help="file that gets a JSON line an event")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level="WARNING", format="%(levelname)s %(name)s %(message)s")
    names = args.parts.split(",")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with args.events.open("a", buffering=1) as events:
        runner = PartRunner(device, dry=args.dry, send=lambda event: print(json.dumps(event), file=events))
        for name in names:
            left_s = args.ends_at - time.time()
            if left_s <= 0:
                break
            if not runner.run(name, limit_of(name, names, left_s)):
                return BROKEN
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""One part in this process, without a time limit: python -m benchmarks.gpu.part benchmarks.gpu.speed_moves moves --dry

The exit status is 1 if a case failed, and NO_GPU if there is no GPU and this is no dry run.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.arguments import argument_parser
from benchmarks.gpu.script import Script, folder_of

NO_GPU = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__, dry=(False, "tiny sizes, on the CPU where there is no GPU"))
    parser.add_argument("module")
    parser.add_argument("part", help="the module's function, which takes a Script")
    parser.add_argument("--out", type=Path, help="folder of the record (default: $OUT, or benchmarks/results/gpu)")
    args = parser.parse_args(arguments)
    script = Script(args.part, dry=args.dry, out=folder_of(args.out, dry=args.dry))
    lacks_gpu = not script.on_gpu and not script.dry
    if lacks_gpu and args.part != "machine":
        print("there is no GPU that torch can use; --dry runs tiny sizes on the CPU", file=sys.stderr)
        return NO_GPU
    getattr(importlib.import_module(args.module), args.part)(script)
    return NO_GPU if lacks_gpu else int(any(case.outcome == "FAIL" for case in script.cases))


if __name__ == "__main__":
    sys.exit(main())

"""Run ``omniserve engine`` with the fake engine."""

from __future__ import annotations

import os
import sys

if __name__ in ("__main__", "__mp_main__"):
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"

if __name__ == "__main__":
    import asyncio

    from fake_engine import FakeLoader

    from omniserve.core.config import EngineConfig
    from omniserve.core.logs import set_up_logs
    from omniserve.server.engines import cli, supervisor
    from omniserve.server.engines.curve import ENGINE, read_keys

    parser = cli.build_parser()
    parser.add_argument("--no-faults", action="store_true")
    args = parser.parse_args()
    set_up_logs("info", "text")
    supervisor._LONGEST_PAUSE_S = 0.5
    loader = FakeLoader(config=EngineConfig(device_kv_bytes=4 << 20, block_size=16), with_faults=not args.no_faults)
    keys = None if args.keys is None else read_keys(args.keys, ENGINE)
    sys.exit(asyncio.run(cli.serve(args, loader, keys)))

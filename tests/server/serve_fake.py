"""Run the server with the fake engine; --class is the real server's."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from fake_engine import FakeLoader

from omniserve.server.cli import ServerOptions
from omniserve.server.engine_flags import add_engine_flags, config_from
from omniserve.server.serve import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer")
    parser.add_argument("--shutdown-timeout", type=float)
    parser.add_argument("--fail", help="the engine does not start, with this message")
    parser.add_argument("--fail-while", type=Path, help="the engine does not start while there is this file")
    parser.add_argument("--engine-restarts", type=int, default=0)
    add_engine_flags(parser)
    args = parser.parse_args()
    options = ServerOptions(
        tokenizer=args.tokenizer,
        model_name="fake",
        port=0,
        shutdown_timeout_s=args.shutdown_timeout,
        engine_restarts=args.engine_restarts,
        log_level="info",
    )
    config = dataclasses.replace(config_from(args), device_kv_bytes=4 << 20, block_size=16)
    sys.exit(run(options, FakeLoader(config=config, fail=args.fail, fail_while=args.fail_while)))

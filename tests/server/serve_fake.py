"""Run the server with the fake engine; --class is the real server's."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from fake_engine import FakeLoader

from omniserve.server.batches.settings import add_batch_flags, batch_settings
from omniserve.server.cli import ServerOptions
from omniserve.server.engine_flags import add_engine_flags, config_from
from omniserve.server.serve import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer")
    parser.add_argument("--shutdown-timeout", type=float)
    parser.add_argument("--fail", help="the engine does not start, with this message")
    parser.add_argument("--name", default="fake", help="of the model")
    parser.add_argument("--work-log", help="file that gets a line for each prompt that the engine gets")
    parser.add_argument("--fail-while", type=Path, help="the engine does not start while there is this file")
    parser.add_argument("--engine-restarts", type=int, default=0)
    add_engine_flags(parser)
    add_batch_flags(parser)
    args = parser.parse_args()
    options = ServerOptions(
        tokenizer=args.tokenizer,
        model_name=args.name,
        port=0,
        shutdown_timeout_s=args.shutdown_timeout,
        engine_restarts=args.engine_restarts,
        log_level="info",
        batches=batch_settings(args),
    )
    config = dataclasses.replace(config_from(args), device_kv_bytes=4 << 20, block_size=16)
    loader = FakeLoader(config=config, fail=args.fail, fail_while=args.fail_while, work_log=args.work_log)
    sys.exit(run(options, loader))

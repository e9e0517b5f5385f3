"""Run a batch without a server, with the fake engine."""

from __future__ import annotations

import os
import sys

sys.modules["torch"] = None  # type: ignore[assignment]  # as in serve_fake.py
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"


def main() -> int:
    """Run the batch to its end."""
    import argparse
    import asyncio
    import logging
    from pathlib import Path

    from fake_engine import FakeLoader

    from omniserve.core.config import EngineConfig
    from omniserve.server.batches.offline import OfflineJob, run_offline
    from omniserve.server.cli import ServerOptions
    from omniserve.server.limits import Limits

    parser = argparse.ArgumentParser()
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tokenizer")
    parser.add_argument("--work-log")
    args = parser.parse_args()
    logging.basicConfig(level="INFO")
    options = ServerOptions(tokenizer=args.tokenizer, model_name="fake", limits=Limits(batch_concurrency=4))
    errors = args.output.with_suffix(".errors.jsonl")
    job = OfflineJob(input=args.input, output=args.output, errors=errors, endpoint="/v1/completions")
    config = EngineConfig(device_kv_bytes=4 << 20, block_size=16)
    return asyncio.run(run_offline(job, options, FakeLoader(config=config, work_log=args.work_log)))


if __name__ == "__main__":  # the engine process imports this module too, under another name
    sys.exit(main())

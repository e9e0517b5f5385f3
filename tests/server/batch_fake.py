"""Run a batch without a server, with the fake engine."""

from __future__ import annotations

import os
import sys

if __name__ in ("__main__", "__mp_main__"):
    sys.modules["torch"] = None  # type: ignore[assignment]  # as in serve_fake.py
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"


def run(tokenizer: str) -> int:
    """Run ``in.jsonl`` to its end; what the engine gets is in ``work``."""
    import asyncio
    from pathlib import Path

    from fake_engine import FakeLoader

    from omniserve.core.config import EngineConfig
    from omniserve.server.access.limits import Limits
    from omniserve.server.batches.offline import OfflineJob, run_offline
    from omniserve.server.options import ServerOptions

    options = ServerOptions(tokenizer=tokenizer, model_names=("fake",), limits=Limits(batch_concurrency=4))
    job = OfflineJob(
        input=Path("in.jsonl"), output=Path("out.jsonl"), errors=Path("out.errors.jsonl"), endpoint="/v1/completions"
    )
    config = EngineConfig(device_kv_bytes=4 << 20, block_size=16)
    return asyncio.run(run_offline(job, options, FakeLoader(config=config, work_log="work")))


if __name__ == "__main__":
    import logging

    logging.basicConfig(level="INFO")
    sys.exit(run(sys.argv[1]))

"""Run the server with the fake engine: serve_fake.py TOKENIZER_FOLDER SHUTDOWN_TIMEOUT_S [FAIL_MESSAGE]."""

from __future__ import annotations

import sys

from fake_engine import FakeLoader

from omniserve.server.cli import ServerOptions
from omniserve.server.serve import run

if __name__ == "__main__":
    folder, timeout_s, *fail = sys.argv[1:]
    options = ServerOptions(
        tokenizer=folder, model_name="fake", port=0, shutdown_timeout_s=float(timeout_s), log_level="info"
    )
    sys.exit(run(options, FakeLoader(fail=fail[0] if fail else None)))

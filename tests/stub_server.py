"""A server of the completions API that streams tokens slowly, for tests of clients: the fixture ``stub``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

TOKEN_GAP_S = 0.02


class StubHandler(BaseHTTPRequestHandler):
    """Streams ``max_tokens`` tokens; refuses the prompt ``bad``; never ends for the prompt ``endless``."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"] == "bad":
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "no"}}')
            return
        self.send_response(200)
        self.end_headers()
        try:
            sent = 0
            while body["prompt"] == "endless" or sent < body["max_tokens"]:
                time.sleep(TOKEN_GAP_S)
                self.event({"choices": [{"text": "x"}]})
                sent += 1
            self.event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": sent}})
            self.wfile.write(b"data: [DONE]\n\n")
        except (BrokenPipeError, ConnectionResetError):
            self.server.disconnects += 1  # type: ignore[attr-defined]

    def event(self, content: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def stub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), StubHandler)
    server.disconnects = 0  # type: ignore[attr-defined]
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()

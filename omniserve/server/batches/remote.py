"""A batch at a server: send it, ask for it, fetch what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from omniserve.server.batches.files import FileFolder

_POLL_S = 2.0
_TIMEOUT_S = 60.0
# So long a server that was there may give no answer, or say that it cannot, before waiting for a batch ends.
_PATIENCE_S = 600.0
_LONGEST_PAUSE_S = 60.0
_FINAL = ("completed", "failed", "expired", "cancelled")


class RemoteError(Exception):
    """The server did not do what it was asked to; the message is its own."""


class RemoteNotReady(RemoteError):
    """The server is not there, or says that it cannot answer now.

    Args:
        message: Why.
        retry_after_s: When it asks to be asked again.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RemoteBatches:
    """The batches of one server.

    Args:
        url: Of the server, without ``/v1``.
        api_key: Sent along.
    """

    def __init__(self, url: str, api_key: str) -> None:
        headers = {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.Client(base_url=f"{url.rstrip('/')}/v1", headers=headers, timeout=_TIMEOUT_S)

    def submit(self, path: Path, *, endpoint: str, completion_window: str) -> dict[str, Any]:
        """Upload an input file and make a batch of it; return the batch.

        Raises:
            OSError: The file cannot be read.
            RemoteError: The server refuses it or is not there.
        """
        with path.open("rb") as file:
            upload = self._ask("POST", "/files", data={"purpose": "batch"}, files={"file": (path.name, file)}).json()
        wanted = {"input_file_id": upload["id"], "endpoint": endpoint, "completion_window": completion_window}
        return self._ask("POST", "/batches", json=wanted).json()

    def status(self, batch_id: str) -> dict[str, Any]:
        """Return a batch.

        Raises:
            RemoteError: There is none, or no server.
        """
        return self._ask("GET", f"/batches/{batch_id}").json()

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """Cancel a batch and return it.

        Raises:
            RemoteError: There is none, or no server, or it has ended.
        """
        return self._ask("POST", f"/batches/{batch_id}/cancel").json()

    def wait(self, batch_id: str, on_progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Return a batch once it has ended; ``on_progress`` sees it now and then.

        A server that has answered once may be away for some minutes, to be started again for instance.

        Raises:
            RemoteError: There is none, or no server.
        """
        answered_s: float | None = None
        while True:
            pause_s = _POLL_S
            try:
                batch = self.status(batch_id)
            except RemoteNotReady as error:
                if answered_s is None or time.monotonic() - answered_s > _PATIENCE_S:
                    raise
                if error.retry_after_s is not None:
                    pause_s = min(max(error.retry_after_s, _POLL_S), _LONGEST_PAUSE_S)
            else:
                answered_s = time.monotonic()
                on_progress(batch)
                if batch["status"] in _FINAL:
                    return batch
            time.sleep(pause_s)

    def fetch(self, batch: dict[str, Any], output: Path, errors: Path) -> None:
        """Write the files that a batch ended with; each is complete or not there.

        Raises:
            StorageError: They cannot be written.
            RemoteError: The server does not give them.
        """
        for file_id, target in ((batch["output_file_id"], output), (batch["error_file_id"], errors)):
            if file_id is not None:
                try:
                    with self._http.stream("GET", f"/files/{file_id}/content") as response:
                        if response.status_code != httpx.codes.OK:
                            response.read()
                            raise RemoteError(_message(response))
                        FileFolder(target.parent.absolute()).write(target.name, response.iter_bytes())
                except httpx.HTTPError as error:
                    raise RemoteError(f"{self._http.base_url}: {error}") from None

    def _ask(self, method: str, path: str, **content: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **content)
        except httpx.HTTPError as error:
            message = f"{self._http.base_url}: {error}; is the server there? see --url"
            raise (RemoteNotReady if isinstance(error, httpx.TransportError) else RemoteError)(message) from None
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise RemoteNotReady(_message(response), _retry_after_s(response))
        if not response.is_success:
            raise RemoteError(_message(response))
        return response


def _retry_after_s(response: httpx.Response) -> float | None:
    value = response.headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdigit() else None  # a date is not understood


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.request.url}: HTTP {response.status_code}"

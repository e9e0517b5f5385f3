"""Where the engines of a server are from, and which may join while it runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from omniserve.server.engines.curve import SERVER, CurveKeys, checked_address, read_keys
from omniserve.server.engines.peer import Connect, Peer
from omniserve.server.engines.remote import RemoteSource
from omniserve.server.errors import ApiError


class EngineSource(Protocol):
    """A place that an engine is started in, or found at, again and again."""

    name: str
    """Unlike that of all others: ``local:`` and the number of a share of this machine, or an address."""
    is_local: bool
    """The engine is a process that this server starts on its machine."""

    async def connect(self) -> Peer:
        """Start the engine's process, or find it; see ``Connect``."""

    async def end(self) -> None:
        """Free the place, whose engine has ended or was let go."""


class LocalSource:
    """A share of this machine.

    Args:
        name: As in ``EngineSource``.
        start: Starts an engine in it.
    """

    is_local = True

    def __init__(self, name: str, start: Connect) -> None:
        self.name, self._start = name, start

    async def connect(self) -> Peer:
        return await self._start()

    async def end(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteEngines:
    """Engines on other machines that a server may use."""

    addresses: tuple[str, ...] = ()
    """Addresses of engines that are used from the start on."""
    allowed: tuple[str, ...] = ()
    """Addresses of others that may be added later; ``*`` stands for any port."""
    keys: CurveKeys | None = None
    """The server's keys; None: nothing is encrypted, which is for this machine alone."""


class _File(BaseModel):
    """The file of ``--engines``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    keys: str | None = None
    engines: list[str] = []
    allowed: list[str] = []


def read_engines_file(path: Path) -> RemoteEngines:
    """Read the file that ``--engines`` names, YAML or JSON.

    Raises:
        ValueError: It cannot be read, or something in it is wrong.
    """
    try:
        fields: Any = yaml.safe_load(path.read_text())
        found = _File.model_validate(fields)
    except OSError as error:
        raise ValueError(f"--engines {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ValueError(f"--engines {path}: neither YAML nor JSON") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(
            f"--engines {path}: {'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}; it may have engines and "
            "allowed, lists of addresses, and keys, a folder"
        ) from None
    keys = None if found.keys is None else read_keys(path.parent / found.keys, SERVER)
    for name, addresses in (("engines", found.engines), ("allowed", found.allowed)):
        for address in addresses:
            checked_address(address, keys, what=f"--engines {path}: {name}")
            if name == "engines" and address.endswith(":*"):
                raise ValueError(f"--engines {path}: engines: {address} names no port")
    if len(set(found.engines)) < len(found.engines):
        raise ValueError(f"--engines {path}: engines names an address twice")
    return RemoteEngines(addresses=tuple(found.engines), allowed=tuple(found.allowed), keys=keys)


class Places:
    """The places that engines may join from while the server runs.

    Args:
        local: The shares of this machine.
        remote: Engines on other machines.
    """

    def __init__(self, local: Sequence[EngineSource] = (), remote: RemoteEngines | None = None) -> None:
        self._local, self._remote = local, remote or RemoteEngines()

    def local(self, used: Collection[str]) -> EngineSource:
        """Return a share of this machine that no engine has; ``used`` are the names of places in use.

        Raises:
            ApiError: There is none.
        """
        free = [source for source in self._local if source.name not in used]
        if not free:
            raise ApiError(
                f"this machine is divided into {len(self._local)} shares (--replicas), and each has its engine; remove "
                "one first, start the server with more, or give the address of an engine on another machine",
                status=409,
                code="no_place",
            )
        return free[0]

    def at(self, address: str, used: Collection[str]) -> EngineSource:
        """Return an engine of another machine; ``used`` are the names of places in use.

        Raises:
            ApiError: It may not be used, or is used already.
        """
        if address in used:
            raise ApiError(f"the engine at {address} is used already", status=409, param="address", code="no_place")
        remote = self._remote
        any_port = f"{address.rpartition(':')[0]}:*"
        is_allowed = address in (*remote.addresses, *remote.allowed) or any_port in remote.allowed
        if not is_allowed or address == any_port:
            raise ApiError(
                f"the engine at {address!r} may not be added: the file of --engines, which the server was started "
                "with, does not allow this address",
                status=403,
                param="address",
            )
        try:
            return RemoteSource(checked_address(address, remote.keys, what="address"), remote.keys)
        except ValueError as error:
            raise ApiError(str(error), param="address") from None

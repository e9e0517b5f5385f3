"""Keys and addresses of connections to engines on other machines: encrypted by ZeroMQ's CURVE, both ends known.

A folder of keys has two pairs: that of engines, and that of servers that use them. An engine takes servers with the
second pair alone; a server talks to engines with the first alone. An engine's machine needs ``engine.key_secret`` and
``server.key`` of it, a server's ``server.key_secret`` and ``engine.key``.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth

from omniserve.server.access.origins import is_loopback

ENGINE, SERVER = "engine", "server"
_ADDRESS = re.compile(r"tcp://(?:\[([0-9a-fA-F:.]+)\]|([^\s:/\[\]*]+)):([0-9]{1,5}|\*)")


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One end's pair of keys, and the other end's public key, each 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    other: bytes

    def put_on(self, socket: zmq.Socket, *, listens: bool) -> None:
        """Have a socket that is not bound or connected yet encrypt; ``listens``: it is the engine's."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        if listens:
            socket.curve_server = True
        else:
            socket.curve_serverkey = self.other


def new_pair() -> tuple[bytes, bytes]:
    """Return a new public key and its secret one."""
    public, secret = zmq.curve_keypair()
    return public, secret


def make_keys(folder: Path) -> list[Path]:
    """Make a folder of new keys, which only this user can read; return its files.

    Raises:
        OSError: It cannot be written.
        ValueError: There are keys already.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = [folder / f"{name}.{end}" for name in (ENGINE, SERVER) for end in ("key", "key_secret")]
    if found := [file for file in files if file.exists()]:
        raise ValueError(f"{found[0]} is there already; give another folder, or remove the old keys")
    before = os.umask(0o077)
    try:
        for name in (ENGINE, SERVER):
            zmq.auth.create_certificates(folder, name)
    finally:
        os.umask(before)
    return files


def read_keys(folder: Path, own: str) -> CurveKeys:
    """Read the keys of one end, ``ENGINE`` or ``SERVER``, from a folder that ``make_keys`` has made, or a part of it.

    Raises:
        ValueError: A file is missing, or is no key.
    """
    other = SERVER if own == ENGINE else ENGINE
    read = {}
    for file in (folder / f"{own}.key_secret", folder / f"{other}.key"):
        try:
            read[file.suffix] = zmq.auth.load_certificate(file)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ValueError(f"{file}: {reason}; make keys with 'omniserve engines keys FOLDER'") from None
    public, secret = read[".key_secret"]
    if secret is None:
        raise ValueError(f"{folder / own}.key_secret has no secret key; copy what 'omniserve engines keys' made")
    return CurveKeys(public, secret, read[".key"][0])


def checked_address(address: str, keys: CurveKeys | None, *, what: str) -> str:
    """Return the address of an engine, ``tcp://HOST:PORT``, ``what`` names the setting.

    Raises:
        ValueError: It is none, or leads to another machine and there are no keys.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None or (found[3] != "*" and int(found[3]) > 65535):
        raise ValueError(f"{what} must be an address such as tcp://10.0.0.2:7201, got {address!r}")
    if keys is None and not is_loopback(found[1] or found[2]):
        raise ValueError(
            f"{what}: {address} can be reached from other machines, and nothing would be encrypted; make keys with "
            "'omniserve engines keys FOLDER' and give the folder at both ends (--keys of the engine, keys: in the file "
            "of the server's --engines)"
        )
    return address

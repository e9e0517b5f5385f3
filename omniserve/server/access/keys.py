"""API keys: their highest class and their rates per minute."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omniserve.core.request import ClassSpec
from omniserve.server.access.tiers import class_of_tier
from omniserve.server.errors import ApiError

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiKey:
    """An API key's entry. The key itself is not kept, so that no log and no traceback can show it."""

    name: str
    """The name of its holder in messages and logs."""
    sha256: bytes = field(repr=False)
    """The digest of the key, 32 bytes."""
    tier: str | None = None
    """The highest ``service_tier`` that its holder gets; None: any."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    """Tokens of prompts and outputs together."""
    weight: float = 1.0
    """The share of its holder beside other keys' in each class, from 0.001 to 1000."""
    admin: bool = False
    """Its holder may load and unload LoRA adapters, clear the prefix cache, and see and change the engines."""
    private_prefixes: bool = False
    """Requests with this key share cached prefixes with each other only. Otherwise a short time to first token shows
    that a request of another key had the same first tokens."""

    def limited_tier(self, asked: str, classes: Sequence[ClassSpec]) -> str:
        """Return the tier to use: the one asked for, or the key's own where that is of lower priority.

        Raises:
            ApiError: There is no such tier.
        """
        spec = class_of_tier(asked, classes)
        if self.tier is None or classes.index(spec) >= classes.index(class_of_tier(self.tier, classes)):
            return asked
        return self.tier


class KeyRing:
    """The API keys of a server.

    Raises:
        ValueError: Two entries have the same name or the same key.
    """

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self.keys = tuple(keys)
        for what, values in (("name", [key.name for key in self.keys]), ("key", [key.sha256 for key in self.keys])):
            if len(set(values)) < len(values):
                names = ", ".join(repr(key.name) for key in self.keys)
                raise ValueError(f"two API keys have the same {what}, among {names}; each needs its own")

    def find(self, authorization: bytes, x_api_key: bytes = b"") -> ApiKey:
        """Return the key of an Authorization header, in a time that says nothing about the keys there are.

        Without one it is that of an x-api-key header, which Anthropic's clients send. The headers are as they came: a
        key of other letters than ASCII's is in UTF-8 there, as in files and settings.

        Raises:
            ApiError: 401: there is none, or another one.
        """
        scheme, _, given = authorization.partition(b" ")
        if not authorization:
            scheme, given = b"bearer", x_api_key
        if scheme.lower() != b"bearer" or not given.strip():
            raise _refused(
                "no API key was given; send it as the header 'Authorization: Bearer KEY', or as 'x-api-key: KEY'"
            )
        digest = hashlib.sha256(given.strip()).digest()
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        if found is None:
            raise _refused("this API key is not known here; check it, or ask who runs the server for one")
        return found


def _refused(message: str) -> ApiError:
    return ApiError(message, status=401, code="invalid_api_key")


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key, in UTF-8."""
    return hashlib.sha256(key.encode()).digest()


class _Entry(BaseModel):
    """An entry of a key file."""

    model_config = ConfigDict(
        extra="forbid", strict=True, str_strip_whitespace=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    name: str = Field(min_length=1)
    key: str | None = Field(None, min_length=1)
    sha256: str | None = None
    tier: str | None = None
    requests_per_minute: float | None = Field(None, gt=0)
    tokens_per_minute: float | None = Field(None, gt=0)
    weight: float = Field(1.0, ge=0.001, le=1000)
    admin: bool = False
    private_prefixes: bool = False

    def as_key(self) -> ApiKey:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give either key or sha256")
        if self.sha256 is not None and not _SHA256.fullmatch(self.sha256.lower()):
            raise ValueError("sha256 must be 64 hexadecimal digits, as sha256sum prints them")
        digest = digest_of(self.key) if self.key is not None else bytes.fromhex(self.sha256 or "")
        return ApiKey(sha256=digest, **self.model_dump(exclude={"key", "sha256"}))


def read_key_file(path: Path) -> list[ApiKey]:
    """Read a list of entries, YAML or JSON.

    Raises:
        ValueError: It cannot be read, or an entry is wrong; the message names it and never a key.
    """
    try:
        entries: Any = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        # Their messages quote the text, keys included.
        raise ValueError(f"{path}: neither YAML nor JSON") from None
    if not isinstance(entries, list):
        raise ValueError(f"{path}: must hold a list of keys, each with name, and key or sha256")
    keys = []
    for number, entry in enumerate(entries, 1):
        try:
            keys.append(_Entry.model_validate(entry).as_key())
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise ValueError(f"{path}: key {number}: {where}: {first['msg']}") from None
        except ValueError as error:
            raise ValueError(f"{path}: key {number}: {error}") from None
    return keys

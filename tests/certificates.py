"""One set of certificates for all clients of httpx in a process.

Each client reads all the certificates of the world when it is made, which takes longer than ten calls.
"""

from __future__ import annotations

import functools

import httpx


def share_certificates() -> None:
    """Have the clients that are made from now on share the certificates that the first one reads."""
    transports = httpx._transports.default
    if not hasattr(transports.create_ssl_context, "cache_info"):
        transports.create_ssl_context = functools.cache(transports.create_ssl_context)

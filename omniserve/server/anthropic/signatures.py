"""Signatures of thinking: any is taken back, and ours have the thinking where an answer left it out."""

from __future__ import annotations

import base64
import binascii

from omniserve.server.anthropic.blocks import ThinkingBlock

# The begin of a signature, before the thinking if that is nowhere else.
_SIGNED = "omniserve:"


def signature_of(thinking: str, *, is_omitted: bool) -> str:
    """Return a signature; if the thinking is omitted, it is in the signature, from which ``thought_of`` reads it."""
    return base64.b64encode(f"{_SIGNED}{thinking if is_omitted else ''}".encode()).decode()


def thought_of(block: ThinkingBlock) -> str:
    """Return the thinking of a block, which may be in its signature; empty if only another server can read that."""
    if block.thinking:
        return block.thinking
    try:
        text = base64.b64decode(block.signature, validate=True).decode()
    except (binascii.Error, ValueError):  # another server's
        return ""
    return text.removeprefix(_SIGNED) if text.startswith(_SIGNED) else ""

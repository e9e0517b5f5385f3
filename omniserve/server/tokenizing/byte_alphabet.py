"""The characters by which tokenizers write bytes in the pieces of their vocabularies."""

from __future__ import annotations

import re

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token of one byte, as SentencePiece's models have it."""


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's map of printable characters to bytes, which byte-level tokenizers write their pieces in."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
"""The byte that a character of a byte-level piece stands for."""

"""Bit masks of tokens, as grammars give them."""

from __future__ import annotations

import numpy as np


def ids_of(mask: bytes, vocab_size: int) -> list[int]:
    """Return the tokens of a mask, lowest bit first, in their order."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return np.flatnonzero(bits[:vocab_size]).tolist()

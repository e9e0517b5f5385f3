"""A lower bound on the tokens of a text, found without encoding it: what is certainly too long need not be encoded.

A token stands for so many bytes. Let a byte's weight be 1 over the length of the longest token that has this byte: then
the weights of a token's bytes come to 1 at most, so that a text has at least as many tokens as the sum of its weights.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from omniserve.server.tokenizing.byte_alphabet import BYTE_OF, BYTE_TOKEN

# Characters that are looked at at a time; the sum is often large enough after the first ones.
_PIECE = 1 << 16
_ASCII = 128
_UTF8 = [b for b in range(256) if b not in (0xC0, 0xC1) and b < 0xF5]
# What SentencePiece's models write for a space.
_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"


class TokenBound:
    """Counts what a text has at least; of most kinds of tokenizers it knows how.

    Args:
        backend: A ``tokenizers.Tokenizer``; None: a tokenizer of which nothing is known.
    """

    def __init__(self, backend: Any) -> None:
        self._weights = None if backend is None else _weights(json.loads(backend.to_str()))

    def exceeds(self, text: str, most: int) -> bool:
        """Return whether the text certainly has more than ``most`` tokens. False says nothing."""
        if self._weights is None or len(text) * 4 <= most:  # no character is more bytes than that
            return False
        total = 0.0
        for first in range(0, len(text), _PIECE):
            data = np.frombuffer(text[first : first + _PIECE].encode(), dtype=np.uint8)
            # The sum of a piece may be below 0 where other characters may swallow ASCII; the text's never falls by it.
            total += max(0.0, float(np.bincount(data, minlength=256) @ self._weights))
            # 1 for what is rounded off, and 1 for each border of pieces that a character may swallow another one over.
            if total > most + 1 + first // _PIECE:
                return True
        return False


def _weights(description: dict[str, Any]) -> np.ndarray[Any, Any] | None:
    """Return each byte's weight for a tokenizer in the form of ``tokenizer.json``; None if there is no bound."""
    model, added = description["model"], description["added_tokens"]
    normalizers = _flat(description["normalizer"], "normalizers")
    steps = _flat(description["pre_tokenizer"], "pretokenizers")
    if model["type"] not in ("BPE", "Unigram") or not all(map(_keeps_text, steps)):
        return None
    is_byte_level = any(step["type"] == "ByteLevel" for step in [*normalizers, *steps])
    has_bytes = is_byte_level or model.get("byte_fallback")
    if not has_bytes or model.get("dropout") or any(_kind(step) is None for step in normalizers):
        return None  # an unknown token may stand for any length
    vocab = model["vocab"]
    pieces = vocab if isinstance(vocab, dict) else [piece for piece, _ in vocab]
    longest = np.zeros(256)
    texts = [token["content"].encode() for token in added]
    for data in (*texts, *map(_byte_level if is_byte_level else _sentencepiece, pieces)):
        where = np.frombuffer(data, dtype=np.uint8)
        longest[where] = np.maximum(longest[where], len(data))
    alone = set(map(_byte_level if is_byte_level else _fallback, pieces))
    if not is_byte_level and any(bytes([b]) not in alone for b in _UTF8):
        return None  # a character may be unknown
    # A byte without a token of its own may be dropped, or be part of an unknown token of any length.
    weights = np.array([1 / longest[b] if longest[b] and bytes([b]) in alone else 0.0 for b in range(256)])
    if not is_byte_level:
        weights[list(_SPACE_MARK.encode())] = 0.0  # a text may have the mark itself, which counts as one byte above
    kinds = {_kind(step) for step in normalizers}
    if "case" in kinds:
        lower = np.array([ord(chr(b).lower()) if b < _ASCII else b for b in range(256)])
        weights = np.minimum(weights, weights[lower])
    if kinds & {"case", "compose"}:
        weights[_ASCII:] = 0.0
    if "compose" in kinds:
        # A mark may become one with the character before it.
        weights[_ASCII:] = -weights.max()
    if any(token["lstrip"] or token["rstrip"] for token in added):
        # Such a token swallows white space of any length.
        weights[[b for b in range(_ASCII) if chr(b).isspace()]] = 0.0
        weights[_ASCII:] = np.minimum(weights[_ASCII:], 0.0)
    return weights


def _flat(step: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """Return the steps of a sequence of steps, or of none."""
    if step is None:
        return []
    return [s for part in step[inner] for s in _flat(part, inner)] if step["type"] == "Sequence" else [step]


def _keeps_text(step: dict[str, Any]) -> bool:
    """Return whether a step that splits texts drops nothing of them."""
    return step["type"] in ("ByteLevel", "Metaspace", "Digits") or (
        step["type"] in ("Split", "Punctuation") and step["behavior"] != "Removed"
    )


def _kind(step: dict[str, Any]) -> str | None:
    """Return what a normalizer does to a text; None: something else."""
    if step["type"] == "Replace":
        return "space" if step["pattern"] == {"String": " "} and step["content"] == _SPACE_MARK else None
    kinds = {"Prepend": "space", "ByteLevel": "space", "Lowercase": "case"}
    return (kinds | dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD"), "compose")).get(step["type"])


def _byte_level(piece: str) -> bytes:
    return bytes(BYTE_OF[c] for c in piece) if all(c in BYTE_OF for c in piece) else piece.encode()


def _sentencepiece(piece: str) -> bytes:
    return _fallback(piece) or piece.replace(_SPACE_MARK, " ").encode()


def _fallback(piece: str) -> bytes:
    """Return the byte of a token of one byte; of other tokens, nothing."""
    match = BYTE_TOKEN.fullmatch(piece)
    return b"" if match is None else bytes([int(match[1], 16)])

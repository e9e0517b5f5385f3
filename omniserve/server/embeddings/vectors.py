"""Embeddings as they are answered: cut, normalised, compared and encoded.

Legend: N texts, D numbers of an embedding.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from omniserve.server.errors import ApiError

Vectors = NDArray[np.float32]


def matrix_of(
    embeddings: Sequence[Sequence[float]], *, dimensions: int | None = None, normalize: bool = True
) -> Vectors:
    """Return embeddings as an array ``[N, D]``.

    Args:
        embeddings: As the model gives them.
        dimensions: Numbers of each that are kept, the first ones; None: all.
        normalize: They have the length 1 then; one that is all 0 stays so.

    Raises:
        ApiError: There are fewer than ``dimensions``.
    """
    vectors_ND = np.array(embeddings, dtype=np.float32)
    width = vectors_ND.shape[1]
    if dimensions is not None and dimensions > width:
        raise ApiError(f"this model's embeddings have {width} dimensions, got {dimensions}", param="dimensions")
    vectors_ND = vectors_ND[:, :dimensions]
    if not normalize:
        return vectors_ND
    lengths_N1 = np.sqrt(np.square(vectors_ND, dtype=np.float64).sum(axis=1, keepdims=True))
    return np.asarray(vectors_ND / np.maximum(lengths_N1, np.finfo(np.float32).tiny), dtype=np.float32)


def in_base64(vector_D: Vectors) -> str:
    """Return the numbers as OpenAI's clients read them: float32, the lowest byte first."""
    return base64.b64encode(vector_D.astype("<f4").tobytes()).decode()

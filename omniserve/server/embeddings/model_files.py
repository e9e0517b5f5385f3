"""The way from a model's hidden states to embeddings, as its files tell it.

sentence-transformers writes it: ``modules.json`` names the parts of a model, and a folder such as ``1_Pooling`` has the
config of one. Models without these files are pooled by their last token.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omniserve.core.request import Pooling
from omniserve.server.errors import ApiError

logger = logging.getLogger(__name__)

_MODULES = "modules.json"
_POOLINGS = {
    "lasttoken": Pooling.LAST,
    "last_token": Pooling.LAST,
    "last": Pooling.LAST,
    "mean": Pooling.MEAN,
    "mean_tokens": Pooling.MEAN,
}
# Kinds of sentence-transformers' modules that change nothing here: embeddings are normalised in any case.
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingOfModel:
    """The way to an embedding."""

    pooling: Pooling = Pooling.LAST
    why_not: str | None = None
    """The reason why the model has no embeddings here; None: it has."""
    width: int | None = None
    """Numbers of an embedding, as far as the config tells."""
    is_matryoshka: bool = False
    """The first numbers of an embedding are an embedding, too."""
    dimensions: tuple[int, ...] = ()
    """How many may be kept; empty: any number."""

    def check_dimensions(self, wanted: int | None) -> None:
        """Refuse a number of dimensions that the model's embeddings cannot be cut to.

        Raises:
            ApiError: The message says which numbers can be had.
        """
        if wanted is None or wanted == self.width:
            return
        if not self.is_matryoshka:
            raise ApiError(
                "this model's config does not say that its embeddings may be cut (is_matryoshka, "
                "matryoshka_dimensions); remove dimensions",
                param="dimensions",
                code="unsupported_parameter",
            )
        if self.dimensions and wanted not in self.dimensions:
            known = ", ".join(map(str, self.dimensions))
            raise ApiError(f"this model's embeddings can have {known} dimensions, got {wanted}", param="dimensions")
        if self.width is not None and wanted > self.width:
            raise ApiError(f"this model's embeddings have {self.width} dimensions, got {wanted}", param="dimensions")


def find_pooling(model: str) -> PoolingOfModel:
    """Return how a model's embeddings are made; ``model`` is its folder or hub id.

    What cannot be read, or is not known here, is the reason why there are none.
    """
    try:
        config = _json(model, "config.json") or {}
        modules = _json(model, _MODULES) or []
        about_pooling = next((module for module in modules if _kind(module) == "Pooling"), None)
        if about_pooling is None:
            how: dict[str, Any] = {}
        else:
            how = _json(model, f"{about_pooling['path']}/config.json") or {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return PoolingOfModel(why_not=f"its files of sentence-transformers cannot be read ({error})")
    unknown = sorted({_kind(module) for module in modules} - {*_KNOWN_MODULES})
    pooling, why_not = Pooling.LAST, None
    if unknown:
        why_not = f"its {_MODULES} names {', '.join(unknown)}, and only {', '.join(_KNOWN_MODULES)} are known here"
    elif about_pooling is not None:
        named = _named_pooling(how)
        if named not in _POOLINGS:
            file = f"{about_pooling['path']}/config.json"
            why_not = f"its {file} asks for {named!r}, and only the last token and the mean are known here"
        pooling = _POOLINGS.get(named, pooling)
    text_config = config.get("text_config")
    sizes = [text_config, config] if isinstance(text_config, dict) else [config]
    width = next((each[name] for each in sizes for name in _WIDTHS if isinstance(each.get(name), int)), None)
    allowed = config.get("matryoshka_dimensions")
    dimensions = tuple(n for n in allowed if isinstance(n, int)) if isinstance(allowed, list) else ()
    found = PoolingOfModel(
        pooling=pooling,
        why_not=why_not,
        width=width,
        is_matryoshka=bool(dimensions) or config.get("is_matryoshka") is True,
        dimensions=dimensions,
    )
    if about_pooling is not None:
        logger.info("embeddings: %s", found.why_not or f"pooled by {found.pooling}, as {_MODULES} says")
    return found


def _named_pooling(how: Mapping[str, Any]) -> str:
    """Return the pooling that a ``1_Pooling/config.json`` names, older files with a truth value for each."""
    if isinstance(mode := how.get("pooling_mode"), str):
        return mode
    names = [name.removeprefix("pooling_mode_") for name, value in how.items() if value is True]
    modes = [name for name in names if f"pooling_mode_{name}" in how]
    return "+".join(modes) or "nothing"


def _kind(module: Mapping[str, Any]) -> str:
    """Return the class of a module, of whatever package."""
    return str(module["type"]).rpartition(".")[2]


def _json(model: str, name: str) -> Any:
    """Return what one of a model's files holds; None: it has no such file."""
    from transformers.utils import cached_file  # here: the command line is read without transformers

    found = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else json.loads(Path(found).read_text(encoding="utf-8-sig"))

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
from typing import Any, Literal

from omniserve.server.errors import ApiError

logger = logging.getLogger(__name__)

_MODULES = "modules.json"
_POOLINGS: dict[str, Literal["last", "mean", "cls"]] = {
    "lasttoken": "last",
    "last_token": "last",
    "last": "last",
    "mean": "mean",
    "mean_tokens": "mean",
    "cls": "cls",
    "cls_token": "cls",
}
# Kinds of sentence-transformers' modules that change nothing here: embeddings are normalised in any case.
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingOfModel:
    """The way to an embedding, or to the score of a pair."""

    how: Literal["last", "mean", "cls"] = "last"
    """The token that stands for the text, the last or the first one, or the mean of all; the first one of encoders
    alone."""
    why_not: str | None = None
    """The reason why the model has no embeddings here; None: it has."""
    width: int | None = None
    """Numbers of an embedding, as far as the config tells."""
    is_matryoshka: bool = False
    """The first numbers of an embedding are an embedding, too."""
    dimensions: tuple[int, ...] = ()
    """How many may be kept; empty: any number."""
    max_tokens: int | None = None
    """Most tokens of a text by the files of sentence-transformers."""
    scores_pairs: bool = False
    """The model is a cross-encoder: it reads two texts at once, and says how well they fit."""
    has_sigmoid: bool = True
    """A cross-encoder's score is brought between 0 and 1."""
    separator: int = -1
    """The token id behind each text of a pair; -1: there is none."""

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


def find_pooling(model: str, *, is_encoder: bool = False) -> PoolingOfModel:
    """Return how a model's embeddings are made.

    What cannot be read, or is not known here, is the reason why there are none.

    Args:
        model: Its folder or hub id.
        is_encoder: It is the second model. Without files of sentence-transformers it is pooled by the mean, as
            sentence-transformers does, and if it classifies, it scores pairs.
    """
    about_pooling: Mapping[str, Any] | None
    try:
        config = _json(model, "config.json") or {}
        modules = _json(model, _MODULES) or []
        about_pooling = next((module for module in modules if _kind(module) == "Pooling"), None)
        how: dict[str, Any] = {}
        if about_pooling is not None:
            how = _json(model, f"{about_pooling['path']}/config.json") or {}
        unknown = sorted({_kind(module) for module in modules} - {*_KNOWN_MODULES})
        max_tokens = (_json(model, "sentence_bert_config.json") or {}).get("max_seq_length") if is_encoder else None
        architecture = str((config.get("architectures") or [""])[0])
        scores_pairs = is_encoder and architecture.endswith("ForSequenceClassification")
        pairs = _of_pairs(model, config) if scores_pairs else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return PoolingOfModel(why_not=f"its files cannot be read ({type(error).__name__}: {error})")
    named = _named_pooling(how) if about_pooling is not None else "mean" if is_encoder else "last"
    why_not = None
    if unknown:
        why_not = f"its {_MODULES} names {', '.join(unknown)}, and only {', '.join(_KNOWN_MODULES)} are known here"
    elif named not in _POOLINGS or (named.startswith("cls") and not is_encoder):
        assert about_pooling is not None
        file = f"{about_pooling['path']}/config.json"
        known = "the mean, the first and the last token" if is_encoder else "the last token and the mean"
        why_not = f"its {file} asks for {named!r}, and only {known} are known here"
    text_config = config.get("text_config")
    sizes = [text_config, config] if isinstance(text_config, dict) else [config]
    width = next((each[name] for each in sizes for name in _WIDTHS if isinstance(each.get(name), int)), None)
    allowed = config.get("matryoshka_dimensions")
    dimensions = tuple(n for n in allowed if isinstance(n, int)) if isinstance(allowed, list) else ()
    found = PoolingOfModel(
        how=_POOLINGS.get(named, "last"),
        why_not=why_not,
        width=width,
        is_matryoshka=bool(dimensions) or config.get("is_matryoshka") is True,
        dimensions=dimensions,
        max_tokens=max_tokens if isinstance(max_tokens, int) else None,
        scores_pairs=scores_pairs,
        **pairs,
    )
    if about_pooling is not None:
        logger.info("embeddings: %s", found.why_not or f"pooled by {found.how}, as {_MODULES} says")
    return found


def _of_pairs(model: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the files of a cross-encoder say of its scores and its separator."""
    tokenizer = _json(model, "tokenizer_config.json") or {}
    separator = tokenizer.get("sep_token")
    text = separator["content"] if isinstance(separator, dict) else separator
    added = tokenizer.get("added_tokens_decoder") or {}
    ids = [int(token_id) for token_id, token in added.items() if token.get("content") == text]
    ids += [entry["id"] for entry in (_json(model, "tokenizer.json") or {}).get("added_tokens", ())
            if entry["content"] == text]  # fmt: skip
    about = config.get("sentence_transformers") or {}
    activation = about.get("activation_fn") or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    kind = str(activation).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise ValueError(f"its config asks for the activation {activation}; Sigmoid and Identity are known here")
    return {"separator": ids[0] if ids else -1, "has_sigmoid": kind == "Sigmoid"}


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

"""Defaults from a model's generation_config.json, for requests that do not set these fields themselves."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omniserve.server.completions.protocol import CompletionRequest
from omniserve.server.errors import ApiError
from omniserve.server.fields import UnknownFields, validate

logger = logging.getLogger("omniserve.server")

FILE_NAME = "generation_config.json"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that have the same names in the file and in requests."""
_NOT_HONOURED = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "num_beams",
    "sequence_bias",
    "suppress_tokens",
    "top_h",
    "typical_p",
)
"""Fields that would change answers, too, but that no request can ask for here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """Defaults of requests; a request's own value always wins."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters, by the names of a request's fields."""
    max_tokens: int | None = None
    """Most output tokens of a request that does not say; None: as many as fit."""
    stop: tuple[str, ...] = ()
    """Strings that end an output, beside the request's own, unless it ignores the end of sequence."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that do the same."""

    def __str__(self) -> str:
        told = [f"{name} {value:g}" for name, value in self.fields.items()]
        told += [] if self.max_tokens is None else [f"max_tokens {self.max_tokens}"]
        told += [f"the end {text!r}" for text in self.stop]
        told += [f"the end {token_id}" for token_id in self.stop_token_ids]
        return ", ".join(told)


def find_generation_defaults(source: str, model: str) -> GenerationDefaults:
    """Return the defaults that ``--generation-config`` asks for.

    ``auto`` reads the model's own file, if it has one; ``none`` sets none; a path is that of another such file, or of
    the folder that has it, whose end-of-sequence ids count beside the model's.

    Args:
        source: The flag's value.
        model: Folder or hub id of the model.

    Raises:
        OSError: There is no such file, or it cannot be read.
        ValueError: It is no JSON object, or one of its values cannot be a request's.
    """
    if source == "none":
        return GenerationDefaults()
    if source == "auto":
        from transformers.utils import cached_file  # here: the command line is read without transformers

        found = cached_file(model, FILE_NAME, _raise_exceptions_for_missing_entries=False)
        if found is None:
            return GenerationDefaults()
        path = Path(found)
    else:
        path = Path(source)
        path = path / FILE_NAME if path.is_dir() else path
    try:
        defaults = _read(path, with_ends=source != "auto")
    except ValueError as error:
        raise ValueError(f"{path}: {error}; correct it, or give --generation-config none") from None
    if told := str(defaults):
        logger.info("requests that do not say have, by %s: %s (--generation-config none: not)", path, told)
    return defaults


def _read(path: Path, *, with_ends: bool) -> GenerationDefaults:
    values = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(values, dict):
        raise ValueError(f"must hold a JSON object, found a {type(values).__name__}")
    values = {name: value for name, value in values.items() if value is not None}
    if ignored := [name for name in _NOT_HONOURED if values.get(name, 0) not in (0, 1, [], {})]:
        logger.warning("%s also has %s, which is without effect here", path, ", ".join(ignored))
    fields = {name: values[name] for name in _SAMPLING if name in values}
    max_tokens, stop = values.get("max_new_tokens"), values.get("stop_strings", [])
    eos = values.get("eos_token_id", []) if with_ends else []
    ends = {"max_tokens": max_tokens, "stop": stop, "stop_token_ids": [eos] if isinstance(eos, int) else eos}
    try:
        request = validate(
            CompletionRequest,
            fields | {name: value for name, value in ends.items() if value} | {"prompt": "a"},
            UnknownFields(),
        )
    except ApiError as error:
        raise ValueError(error.message) from None
    return GenerationDefaults(
        fields={name: getattr(request, name) for name in fields},
        max_tokens=request.max_tokens,
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
    )

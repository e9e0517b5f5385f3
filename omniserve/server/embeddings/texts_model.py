"""A model as calls for embeddings and scores see it: the served one, or the second one (``--embedding-model``)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omniserve.core.errors import EngineStopped
from omniserve.core.request import ClassSpec, Pooling
from omniserve.launch.models import load_tokenizer
from omniserve.server.embeddings.encoder import EncoderMaker
from omniserve.server.embeddings.model_files import PoolingOfModel, find_pooling
from omniserve.server.engines.fleet import Fleet
from omniserve.server.engines.messages import EngineInfo
from omniserve.server.errors import ApiError
from omniserve.server.tokenizing.text import TextCodec


@dataclass(frozen=True, kw_only=True, slots=True)
class TextsModel:
    """What reads texts."""

    name: str
    engine: Fleet
    info: EngineInfo
    codec: TextCodec
    pooling: PoolingOfModel
    lora: str | None = None
    """The adapter of the served model that reads them; None: the model alone."""
    num_separators: int = 0
    """Separators in a pair of texts, of a cross-encoder."""

    @property
    def pooling_here(self) -> Pooling:
        """The pooling that its process is asked for; the second model has its own, whatever it is asked for."""
        return Pooling.MEAN if self.pooling.how == "cls" else Pooling(self.pooling.how)

    def score_of(self, found: Sequence[float]) -> float:
        """Return the score of a pair from what a cross-encoder says of it."""
        (logit,) = found
        if not self.pooling.has_sigmoid:
            return logit
        return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))


async def start_second(
    model: str, *, classes: Sequence[ClassSpec], make_fleet: Callable[[EncoderMaker], Fleet]
) -> TextsModel:
    """Start the second model, and return it; ``model`` is its folder or hub id.

    Raises:
        EngineStopped: It cannot be loaded; the message says why.
    """
    engine = make_fleet(EncoderMaker(model, tuple(classes)))
    try:
        return await _started(engine, model)
    except BaseException:
        await engine.close()
        raise


async def _started(engine: Fleet, model: str) -> TextsModel:
    info = await engine.start()
    try:
        tokenizer = await asyncio.to_thread(load_tokenizer, model, False)
    except (OSError, ValueError, ImportError) as error:
        raise EngineStopped(f"--embedding-model {model}: no tokenizer: {error}") from None
    pooling = await asyncio.to_thread(find_pooling, model, is_encoder=True)
    name = Path(model).name if Path(model).is_dir() else model
    codec = TextCodec(tokenizer)
    num_separators = 0
    if pooling.scores_pairs:
        (pair,) = await codec.encode_all([("a", "a")], add_special_tokens=True)
        num_separators = pair.count(pooling.separator)
    return TextsModel(name=name, engine=engine, info=info, codec=codec, pooling=pooling, num_separators=num_separators)


def no_such_use(name: str, use: str) -> ApiError:
    """Return the refusal of a call for what a model does not do."""
    return ApiError(f"the model {name!r} {use}", param="model", code="unsupported_parameter")

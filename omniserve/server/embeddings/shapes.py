"""The calls for embeddings, scores and ranks: which texts the engine reads, and the answers that are made of them.

A text is a request of the engine without output, whose hidden states are pooled there (``sampling.pooler``). The score
of two texts is the cosine of their embeddings; a text that is in several pairs is read once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from omniserve.core.request import SamplingParams, ServiceClass
from omniserve.server.access.tiers import class_of_tier
from omniserve.server.answer_shape import CallShape
from omniserve.server.choice import Delta, TextForm
from omniserve.server.embeddings.protocol import EmbeddingRequest, RerankRequest, ScoreRequest, TextsRequest
from omniserve.server.embeddings.texts_model import TextsModel
from omniserve.server.embeddings.vectors import Vectors, in_base64, matrix_of
from omniserve.server.errors import ApiError
from omniserve.server.jobs import Job, Usage
from omniserve.server.output_stream import OutputStream
from omniserve.server.service import Service
from omniserve.server.tokenizing.text import TooManyTokens

_encode = msgspec.json.encode
# Answers with more numbers are written beside the event loop: a million take tens of milliseconds.
_MAX_INLINE = 1 << 14
# A text that is to be cut may have so many times the tokens that the model takes, or so many if that is more.
_MOST_CONTEXTS = 4
_MOST_TOKENS = 1 << 17


class TextsShape(CallShape):
    """A call about texts: an engine request for each, one embedding from each."""

    text_field: ClassVar[str]
    """The field that has the texts, for errors."""

    reads_pairs: ClassVar[bool] = False
    """The call is about pairs of texts, which a cross-encoder reads as one."""

    def __init__(self, service: Service, request: TextsRequest, call_id: str) -> None:
        super().__init__(service, request, call_id)
        self.reader = service.texts_model(request.model, pairs=self.reads_pairs)
        self._common = {
            "id": call_id,
            "created": int(time.time()),
            "model": request.model or self.reader.name,
            "service_tier": request.answered_tier,
        }

    def use_tier(self, tier: str) -> None:
        self._common["service_tier"] = tier

    @classmethod
    def check_open(cls, service: Service) -> None:
        service.check_taking()  # which model reads the texts is not known yet

    @classmethod
    def check_model(cls, service: Service, name: str | None) -> None:
        service.texts_model(name, pairs=cls.reads_pairs)

    @classmethod
    async def outputs(
        cls, service: Service, request: Any, call_id: str, arrival_s: float, caller: str | None
    ) -> OutputStream:
        reader = service.texts_model(request.model, pairs=cls.reads_pairs)
        cls.check(reader, request)
        if reader is service.second and request.wishes.deadline_s is not None:
            message = f"the model {reader.name!r} has no deadlines, as nothing predicts its times; use slo.max_queue_s"
            raise ApiError(message, param="slo.deadline_s", code="unsupported_parameter")
        spec = class_of_tier(request.service_tier, service.info.classes)
        prompts = await cls._prompts(reader, request, is_urgent=spec.kind is ServiceClass.LS)
        return service.open(
            Job(
                call_id=call_id,
                arrival_s=arrival_s,
                prompts=prompts,
                samplings=[SamplingParams(max_tokens=0, pooling=reader.pooling_here)],
                form=TextForm(at_once=True),
                **service.terms_of(request, spec, caller, lora=reader.lora),
            ),
            reader,
        )

    @classmethod
    def check(cls, reader: TextsModel, request: Any) -> None:
        """Refuse what the model cannot do.

        Raises:
            ApiError: It cannot.
        """

    @classmethod
    def texts(cls, request: Any) -> Sequence[str] | Sequence[list[int]]:
        """Return the texts that are read, or their token ids, in the order of the embeddings."""
        raise NotImplementedError

    @classmethod
    async def _prompts(cls, reader: TextsModel, request: Any, *, is_urgent: bool) -> list[list[int]]:
        """Return the token ids of each text.

        Raises:
            ApiError: One is empty or too long, or has ids that the model does not know.
        """
        most = reader.info.limits.max_tokens
        texts: Sequence[Any] = request.pairs if reader.pooling.scores_pairs else cls.texts(request)
        if not all(all(text) if isinstance(text, tuple) else text for text in texts):
            raise ApiError("a text is empty; give it at least one token", param=cls.text_field)
        wanted = request.truncate_prompt_tokens
        if wanted is not None and wanted > most:
            raise ApiError(
                f"truncate_prompt_tokens is {wanted}, but this model takes {most} tokens; lower it",
                param="truncate_prompt_tokens",
            )
        cut_to = most if wanted == -1 else wanted
        if isinstance(texts[0], (str, tuple)):
            bound = most if cut_to is None else max(_MOST_CONTEXTS * most, _MOST_TOKENS)
            try:
                prompts = await reader.codec.encode_all(
                    texts,
                    add_special_tokens=getattr(request, "add_special_tokens", True),
                    is_urgent=is_urgent,
                    most=bound,
                    cut_to=cut_to,
                )
            except TooManyTokens as error:
                number = f"{'' if error.is_exact else 'at least '}{error.num_tokens}"
                raise cls._too_long(most, number, may_be_cut=cut_to is None) from None
        else:
            prompts = [ids if cut_to is None else ids[:cut_to] for ids in texts]
        for i, prompt in enumerate(prompts):
            if i % 64 == 63:
                await asyncio.sleep(0)  # millions of ids must not hold up others
            if not prompt:
                raise ApiError("a text is empty; give it at least one token", param=cls.text_field)
            if len(prompt) > most:
                raise cls._too_long(most, str(len(prompt)), may_be_cut=True)
            if (unknown := reader.info.limits.unknown_token(prompt)) is not None:
                known = f"this model's ids are 0 to {reader.info.limits.vocab_size - 1}"
                raise ApiError(f"the token id {unknown} is unknown: {known}", param=cls.text_field)
            if reader.pooling.scores_pairs and prompt.count(reader.pooling.separator) != reader.num_separators:
                raise ApiError("a text has the token that separates texts; remove it", param=cls.text_field)
        return prompts

    @classmethod
    def _too_long(cls, most: int, number: str, *, may_be_cut: bool) -> ApiError:
        advice = "shorten it, or set truncate_prompt_tokens to -1" if may_be_cut else "shorten it"
        # OpenAI's words come first: some clients know the error by them, and not by its code.
        message = f"this model's maximum context length is {most} tokens; a text has {number} tokens; {advice}"
        return ApiError(message, param=cls.text_field, code="context_length_exceeded")

    async def written(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        if sum(len(delta.embedding) for delta in deltas) <= _MAX_INLINE:
            return self.answer(deltas, usage)
        return await asyncio.to_thread(self.answer, deltas, usage)


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the usage of a call without output has."""
    return {name: value for name, value in usage.items() if not name.startswith("completion")}


class EmbeddingShape(TextsShape):
    """Lists of embeddings."""

    request_kind = EmbeddingRequest
    id_prefix = "embd"
    text_field = "input"

    def __init__(self, service: Service, request: EmbeddingRequest, call_id: str) -> None:
        super().__init__(service, request, call_id)
        self._dimensions, self._normalize = request.dimensions, request.normalize
        self._in_base64 = request.encoding_format == "base64"

    @classmethod
    def check(cls, reader: TextsModel, request: EmbeddingRequest) -> None:
        reader.pooling.check_dimensions(request.dimensions)

    @classmethod
    def texts(cls, request: EmbeddingRequest) -> list[Any]:
        return request.input

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        vectors_ND = matrix_of(
            [delta.embedding for delta in deltas], dimensions=self._dimensions, normalize=self._normalize
        )
        # One by one: each call keeps other threads from running.
        data = [
            _encode({
                "object": "embedding",
                "index": index,
                "embedding": in_base64(vector_D) if self._in_base64 else vector_D.tolist(),
            })
            for index, vector_D in enumerate(vectors_ND)
        ]  # fmt: skip
        head = _encode({"object": "list", **self._common, "usage": _usage(usage.as_dict())})
        return head[:-1] + b',"data":[' + b",".join(data) + b"]}"


class PairsShape(TextsShape):
    """A call about pairs of texts."""

    reads_pairs = True

    def __init__(self, service: Service, request: Any, call_id: str) -> None:
        super().__init__(service, request, call_id)
        place = {text: index for index, text in enumerate(self.texts(request))}
        self._pairs = [(place[first], place[second]) for first, second in request.pairs]

    @classmethod
    def texts(cls, request: Any) -> list[str]:
        return list(dict.fromkeys(text for pair in request.pairs for text in pair))

    def scores(self, deltas: Sequence[Delta]) -> list[float]:
        """Return the score of each pair: the cosine of the two embeddings, or what a cross-encoder says of it."""
        if self.reader.pooling.scores_pairs:
            return [self.reader.score_of(delta.embedding) for delta in deltas]
        vectors_ND: Vectors = matrix_of([delta.embedding for delta in deltas])
        return [float(vectors_ND[first] @ vectors_ND[second]) for first, second in self._pairs]


class ScoreShape(PairsShape):
    """Lists of scores, as vLLM answers."""

    request_kind = ScoreRequest
    id_prefix = "score"
    text_field = "text_1"

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(self.scores(deltas))]
        return _encode({"object": "list", **self._common, "data": data, "usage": _usage(usage.as_dict())})


class RerankShape(PairsShape):
    """Documents by their scores, best first, as Jina, Cohere and vLLM answer."""

    request_kind = RerankRequest
    id_prefix = "rerank"
    text_field = "documents"

    def __init__(self, service: Service, request: RerankRequest, call_id: str) -> None:
        super().__init__(service, request, call_id)
        self._top_n = request.top_n or len(request.documents)
        self._documents = request.documents if request.return_documents else None

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        scores = self.scores(deltas)
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in ranked]
        for result in results if self._documents is not None else ():
            assert self._documents is not None
            result["document"] = {"text": self._documents[result["index"]]}
        return _encode({**self._common, "results": results, "usage": _usage(usage.as_dict())})

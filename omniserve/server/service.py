"""Makes the stream of outputs of a checked request, and holds what all calls share."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

from omniserve.core.request import SLO, ClassSpec, ServiceClass
from omniserve.routing.books import Call
from omniserve.server.access.limits import MIB, Backlog, BodyReader, Limits
from omniserve.server.access.tiers import class_of_tier, tier_of_class
from omniserve.server.completions.protocol import (
    MAX_PROMPTS,
    CallRequest,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)
from omniserve.server.dialects.tagged import TaggedDialect
from omniserve.server.embeddings.model_files import PoolingOfModel
from omniserve.server.embeddings.texts_model import TextsModel, no_such_use
from omniserve.server.engines.fleet import Fleet
from omniserve.server.engines.messages import EngineInfo
from omniserve.server.engines.placement import Placement
from omniserve.server.errors import ApiError, shutting_down
from omniserve.server.fields import UnknownFields
from omniserve.server.generation_defaults import GenerationDefaults
from omniserve.server.jobs import Fallback, Job
from omniserve.server.loras import LoRAModels
from omniserve.server.output_stream import OutputStream
from omniserve.server.prompts import PromptWriter, samplings_of, with_budget
from omniserve.server.responses.store import ResponseStore
from omniserve.server.sessions import session_name
from omniserve.server.telemetry.metrics import ServerMetrics
from omniserve.server.telemetry.vllm_metrics import Served
from omniserve.server.tokenizing.text import TextCodec

# As many tokens as /v1/completions of OpenAI gives when the request does not say.
_DEFAULT_COMPLETION_TOKENS = 16
_MAX_CHOICES_PER_CALL = MAX_PROMPTS
# Prompts that are looked at before others have their turn.
_PROMPTS_AT_ONCE = 64
# Texts that are only counted may have so many times the tokens of the longest prompt, or so many if that is more.
_COUNTABLE_CONTEXTS = 4
_COUNTABLE_TOKENS = 1 << 17
# What clients get to take the news that their request was ended.
_GOODBYE_S = 2.0
# Of completions, which are text and no more.
_NO_DIALECT = TaggedDialect(None, None)


class Service:
    """A model behind the API; its engine has been started."""

    def __init__(
        self,
        *,
        engine: Fleet,
        info: EngineInfo,
        codec: TextCodec,
        model_names: tuple[str, ...],
        limits: Limits,
        private_callers: frozenset[str] = frozenset(),
        weights: Mapping[str, float] = MappingProxyType({}),
        unknown_fields: UnknownFields | None = None,
        defaults: GenerationDefaults | None = None,
        loras: LoRAModels | None = None,
        drops_billing_header: bool = False,
        pooling: PoolingOfModel | None = None,
        second: TextsModel | None = None,
    ) -> None:
        self.engine = engine
        self.info = info
        self.codec = codec
        self.model_names = model_names
        self.loras = loras or LoRAModels(model_names)
        self.defaults = defaults or GenerationDefaults()
        self.pooling = pooling or PoolingOfModel()
        self.second = second
        """The second model, which reads texts; None: there is none."""
        sensitive = [spec.name for spec in info.classes if spec.kind == ServiceClass.LS]
        self.metrics = ServerMetrics(
            [spec.name for spec in info.classes],
            [spec.slo for spec in info.classes],
            Served(model_name=model_names[0], latency_sensitive=sensitive),
            info.classes,
        )
        self.limits = limits
        self.responses: ResponseStore | None = None
        """Stored responses; None: the server keeps none."""
        self.drops_billing_header = drops_billing_header
        self._private_callers = private_callers
        self.weights = weights
        """Weight of each API key, by its name; a key that is not here has 1."""
        self.unknown_fields = unknown_fields or UnknownFields()
        self.prompts = PromptWriter(codec, info.limits, self.defaults)
        """Writes the prompts of requests."""
        self.bodies = BodyReader(int(limits.max_body_mib * MIB), limits.stall_timeout_s)
        self.backlog = Backlog([spec.name for spec in info.classes], limits.max_queued_requests)
        """The requests that wait for their first token."""
        self.metrics.show_backlog(self.backlog.num_waiting)
        self.gather_counts: Callable[[], Awaitable[None]] = _nothing
        self.workers_have_calls: Callable[[], bool] = lambda: False
        """Adds to the metrics what other processes of the server have counted."""
        self._kinds = {spec.name: ServiceClass(spec.kind) for spec in info.classes}
        self._running: set[OutputStream] = set()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def model_name(self) -> str:
        """The first of the names that the model is served under."""
        return self.model_names[0]

    @property
    def is_idle(self) -> bool:
        """True while no call runs, here or in an API worker."""
        return not self._running and not self.workers_have_calls()

    def check_open(self) -> None:
        """Raise ApiError unless new calls are taken by the served model."""
        self.check_taking()
        self.engine.check_room()

    def check_taking(self) -> None:
        """Raise ApiError if the server is about to stop."""
        if self._draining:
            raise shutting_down()

    def _salt(self, asked: str, caller: str) -> str:
        """Return a salt that a request of another key cannot have, if the caller's prefixes are private."""
        if not self._private_callers:
            return asked
        owner = caller if caller in self._private_callers else ""
        return f"{len(owner)} {owner} {asked}"

    @property
    def most_countable_tokens(self) -> int:
        """Most tokens of a text that is only counted: clients may learn by how much one is too long."""
        return max(_COUNTABLE_CONTEXTS * self.info.limits.max_tokens, _COUNTABLE_TOKENS)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if another model is asked for than the one that there is, and its adapters."""
        self.lora_of(name)

    def lora_of(self, name: str | None) -> str | None:
        """Return the LoRA adapter that a model's name stands for; None: the model alone.

        Raises:
            ApiError: There is no such model.
        """
        if name is None or name in self.model_names:
            return None
        if (lora := self.loras.named_by(name)) is not None:
            return lora
        if self.second is not None and name == self.second.name:
            raise no_such_use(name, "is for embeddings, scores and ranks; it writes no text")
        known = ", ".join(repr(each) for each in (*self.model_names, *(card["id"] for card in self.loras.cards())))
        raise ApiError(
            f"the model {name!r} is not served here; this server has {known}",
            status=404,
            param="model",
            code="model_not_found",
        )

    def texts_model(self, name: str | None, *, pairs: bool) -> TextsModel:
        """Return what reads texts for a call that names a model: without a name the second model, if it can.

        Args:
            name: The model's name.
            pairs: The call is about pairs of texts.

        Raises:
            ApiError: There is no such model, or it does not do that.
        """
        second = self.second
        if second is not None and name in (None, second.name):
            if pairs or not second.pooling.scores_pairs:
                return second
            if name is not None:
                raise no_such_use(name, "scores pairs of texts (/v1/score, /v1/rerank); it has no embeddings")
        lora = self.lora_of(name)
        if self.pooling.why_not is not None:
            raise no_such_use(name or self.model_name, f"has no embeddings here: {self.pooling.why_not}")
        return TextsModel(
            name=self.model_name, engine=self.engine, info=self.info, codec=self.codec, pooling=self.pooling, lora=lora
        )

    async def begin(
        self, request: GenerationRequest, call_id: str, arrival_s: float, *, caller: str | None = None
    ) -> OutputStream:
        """Return a call's outputs, not started; hand them to ``end`` at last. ``caller``: the name of its API key.

        Raises:
            ApiError: The request does not fit the model, or too many of its class wait already.
        """
        spec = class_of_tier(request.service_tier, self.info.classes)
        request, prompts = with_budget(request, spec), self.prompts
        biased = [token_id for token_id, _ in request.logit_bias]
        for field, token_ids in (("logit_bias", biased), ("stop_token_ids", request.stop_token_ids)):
            prompts.check_token_ids(token_ids, f"{field} has the token id {{}}, but", param=field)
        # Before the prompts are encoded: that takes long if there are many.
        num_prompts = len(request.prompt) if isinstance(request, CompletionRequest) else 1
        if num_prompts * request.num_samples > _MAX_CHOICES_PER_CALL:
            field = "best_of" if request.num_samples > request.n else "n"
            raise ApiError(
                f"prompts times {field} is more than {_MAX_CHOICES_PER_CALL}; send several requests", param=field
            )
        is_sensitive = spec.kind is ServiceClass.LS
        chat = await prompts.chat(request, is_sensitive) if isinstance(request, ChatRequest) else None
        grammar = await prompts.grammar(request, chat)
        token_ids_of_each = await prompts.token_ids(request, chat, is_urgent=is_sensitive)
        max_tokens = min(prompts.max_tokens(request, len(prompt)) for prompt in token_ids_of_each)
        if request.min_tokens > max_tokens:
            raise ApiError(
                f"min_tokens is {request.min_tokens}, but the output has at most {max_tokens} tokens (max_tokens, and "
                "what the context has room for); lower it",
                param="min_tokens",
            )
        echoes = await prompts.echoes(request, token_ids_of_each, is_sensitive) if request.echoes else None
        predicted = request.prediction.text if request.prediction is not None else ""
        prediction = await prompts.prediction(predicted, is_sensitive) if predicted else ()
        more_stops, more_stop_token_ids = self.defaults.stop, self.defaults.stop_token_ids
        if request.ignore_eos:
            more_stops, more_stop_token_ids = (), ()
        return self.open(
            Job(
                call_id=call_id,
                arrival_s=arrival_s,
                prompts=token_ids_of_each,
                samplings=samplings_of(request, max_tokens, grammar, more_stop_token_ids),
                form=prompts.form(request, chat, more_stops),
                echoes=echoes,
                prediction=prediction,
                speculation=request.speculation,
                num_kept=request.n,
                max_unread_tokens=self.limits.max_unread_tokens if request.stream else None,
                **self.terms_of(request, spec, caller, lora=self.lora_of(request.model), is_streamed=request.stream),
            )
        )

    def open(self, job: Job, reader: TextsModel | None = None) -> OutputStream:
        """Return a job's outputs, not started; hand them to ``end`` at last.

        Args:
            job: The work.
            reader: The model that does it; None: the served one.

        Raises:
            ApiError: Too many of its class wait already, or no new calls are taken.
        """
        self.check_taking()
        (self.engine if reader is None else reader.engine).check_room()
        outputs = OutputStream(
            job,
            place=self._place if reader is None else functools.partial(self._place, engine=reader.engine),
            codec=self.codec if reader is None else reader.codec,
            metrics=self.metrics,
            backlog=self.backlog,
        )
        self._running.add(outputs)
        self._idle.clear()
        return outputs

    def _place(self, job: Job, engine: Fleet | None = None) -> Placement:
        """Return which engine a job's requests go to."""
        sampling = job.samplings[0]
        return (engine or self.engine).place(
            Call(
                kind=self._kinds[job.service_class],
                service_class=job.service_class,
                prompts=job.prompts,
                num_samples=len(job.samplings),
                max_tokens=sampling.max_tokens,
                ttft_s=job.slo.ttft_s,
                salt=f"{job.lora} {job.cache_salt}",
            ),
            lora=job.lora,
        )

    def terms_of(
        self,
        request: CallRequest,
        spec: ClassSpec,
        caller: str | None,
        *,
        lora: str | None = None,
        is_streamed: bool = False,
    ) -> dict[str, Any]:
        """Return the fields of a ``Job`` that follow from a request's class, its wishes for latency, and its caller."""
        wishes = request.wishes
        return {
            "service_class": spec.name,
            "slo": wishes.objectives or spec.slo,
            "brings_slo": wishes.objectives is not None,
            "deadline_s": wishes.deadline_s,
            "max_queue_s": wishes.max_queue_s,
            "fallback": self._fallback(spec, is_streamed=is_streamed) if wishes.otherwise == "flex" else None,
            "lora": lora,
            "cache_salt": self._salt(request.cache_salt or "", caller or ""),
            "session": session_name(request.session_key, caller),
            "session_ttl_s": request.session_ttl_s,
            "tenant": caller or "",
            "weight": self.weights.get(caller or "", 1.0),
            "interval_s": self._interval_s(spec, wishes.objectives or spec.slo, is_streamed=is_streamed),
        }

    def _interval_s(self, spec: ClassSpec, slo: SLO, *, is_streamed: bool) -> float:
        is_urgent = spec.kind is ServiceClass.LS or slo.tpot_s is not None or not is_streamed
        return 0.0 if is_urgent else self.limits.best_effort_stream_interval_s

    def _fallback(self, spec: ClassSpec, *, is_streamed: bool) -> Fallback:
        """Return what a request is served as that admission refuses in its class."""
        if spec.kind is not ServiceClass.BE:
            spec = class_of_tier("flex", self.info.classes)
        return Fallback(
            service_class=spec.name,
            tier=tier_of_class(spec, self.info.classes),
            slo=spec.slo,
            interval_s=self._interval_s(spec, spec.slo, is_streamed=is_streamed),
        )

    def end(self, outputs: OutputStream) -> None:
        """Free what a call still holds."""
        outputs.close()
        self._running.discard(outputs)
        if not self._running:
            self._idle.set()

    async def drain(self, timeout_s: float) -> None:
        """Take no new calls; wait for the running ones, and end those that take too long with an error."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            for outputs in self._running:
                outputs.fail(shutting_down())
            # A client that reads nothing cannot hold the server: the connection is cut after this.
            await asyncio.wait([asyncio.ensure_future(self._idle.wait())], timeout=_GOODBYE_S)


async def _nothing() -> None:
    """Do nothing: there are no other processes that count."""


def new_call_id(prefix: str) -> str:
    """Return a fresh id for an API call."""
    return f"{prefix}{'' if prefix.endswith('_') else '-'}{uuid.uuid4().hex}"

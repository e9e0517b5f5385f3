"""An engine without a model: deterministic tokens, and faults on demand. Imports no torch, so it starts at once."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
import types
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omniserve.core.config import EngineConfig
from omniserve.core.errors import RequestRejected
from omniserve.core.load import PROMPT_SIZES, EngineLoad
from omniserve.core.lora import LoRA, LoRAError
from omniserve.core.request import (
    SLO,
    FinishReason,
    Request,
    RequestLimits,
    RequestOutput,
    RequestTimes,
    ServiceClass,
    TokenLogprob,
)
from omniserve.core.spec import AttentionSpec, ModelSpec
from omniserve.core.stats import EngineStats, FreedKV, HostTierStats, KVUsage, LatencyStats, SchedulerStats, TenantStats

logger = logging.getLogger(__name__)

# A prompt that begins with one of these causes the fault.
REJECT, REJECT_WITHOUT_HINT, REFUSE, RAISE_IN_STEP, DIE, BAD_OUTPUT = 390, 391, 392, 393, 394, 395
# Refused while the engine has another request.
REJECT_IF_BUSY = 384
# While a prompt that begins with this one runs, steps take SLOW_STEP_S.
SLOW = 396
# Its TTFT is predicted as the age that it has when it reaches the engine.
AGE = 397
# Its TTFT is predicted as 7 s if it was announced in the middle of a step, else as 9 s.
ANNOUNCED = 398
# It never has a token.
SILENT = 389
# Admission refuses it in latency-sensitive classes.
REJECT_LS = 385
# Its class's TTFT is scaled to this many seconds.
SCALE, SCALED_TTFT_S = 386, 12.5
# The step never ends; or waits for a device that hangs.
HANG, STALL = 388, 387
SLOW_STEP_S = 0.05
# Tokens that a request with drafts gets in a step; those behind its end count as drafts that failed.
TOKENS_OF_A_STEP = 4
# What a prompt token is predicted to take, if the request has a TTFT objective.
SECONDS_PER_TOKEN = 0.25


die = os._exit


def embedding_of(prompt: Sequence[int], pooling: str) -> tuple[float, ...]:
    """Return a made-up embedding: how many tokens have each remainder; of the last tokens, or their mean."""
    counts = [float(sum(token % 8 == i for token in prompt)) for i in range(8)]
    return tuple(count / len(prompt) for count in counts) if pooling == "mean" else (*counts[:7], float(prompt[-1]))


@dataclass
class _Running:
    request: Request
    arrival_s: float
    predicted_ttft_s: float | None
    scaled_slo: SLO | None = None
    shift: int = 0
    output: list[int] = field(default_factory=list)
    first_scheduled_s: float | None = None
    first_token_s: float | None = None


class _Never:
    """An event that the device does not get to."""

    def query(self) -> bool:
        return False


class FakeLoRAs:
    """Adapters: folders with a file ``adapter_config.json``."""

    def __init__(self) -> None:
        self.known: dict[str, LoRA] = {}

    def read(self, name: str, folder: str) -> LoRA:
        if not (Path(folder) / "adapter_config.json").exists():
            raise LoRAError(f"the fake engine finds no adapter in {folder}")
        return LoRA(name=name, folder=folder, digest=folder)

    def add(self, lora: LoRA) -> None:
        self.known[lora.name] = lora

    def clear(self) -> None:
        self.known.clear()

    def remove(self, name: str) -> None:
        del self.known[name]


class FakeEngine:
    """Says the prompt's tokens again and again: output i is prompt[i % len(prompt)], shifted by the seed if any.

    A token with a bias of 100 is all that is said. Log-probabilities differ between seeds. With an adapter, output i is
    shifted by the length of the adapter's folder's name.

    Args:
        vocab_size, eos_token_id: Of the tokenizer beside it.
        config: Only its classes and the size of its KV pool have an effect.
        with_faults: Whether the prompts above cause what they cause.
        work_log: File that gets a line for each request that is added: its class and its prompt.
    """

    last_plan_was_empty = False
    upkeep: Any = None

    def __init__(
        self,
        vocab_size: int,
        eos_token_id: int,
        config: EngineConfig,
        max_model_len: int = 512,
        *,
        work_log: str | None = None,
        with_faults: bool = True,
    ) -> None:
        self.config = config
        self._with_faults = with_faults
        self.spec = ModelSpec(
            num_layers=1,
            hidden_size=8,
            num_heads=1,
            num_kv_heads=1,
            head_size=8,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=(eos_token_id,),
            dtype_bytes=4,
            attention=(AttentionSpec(scale=1.0),),
        )
        self.limits = RequestLimits(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            pool_tokens=config.device_kv_bytes // self.spec.kv_block_bytes(config.block_size) * config.block_size,
            has_tokenizer=False,
        )
        self._running: dict[str, _Running] = {}
        self._num_steps = 0
        self._num_added = 0
        self._announced: set[str | None] = set()
        self.preemption = types.SimpleNamespace(arrivals=tuple)
        self.loras = FakeLoRAs()
        self._sessions: dict[str, Request] = {}
        self._tenants: dict[str, dict[str, TenantStats]] = {}
        """The newest prompt and weight of each tenant."""
        self._work_log = None if work_log is None else os.open(work_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._running)

    def compile_grammar(self, grammar: str) -> Future[Any]:
        compiled: Future[Any] = Future()
        compiled.set_result(None)
        return compiled

    def add(self, request: Request, *, arrival_s: float | None = None, grammar: Any = None) -> str:
        first = self._cause(request)
        is_ls = self.config.class_named(request.service_class).kind == "LS"
        if first == REJECT or (first == REJECT_LS and is_ls) or (first == REJECT_IF_BUSY and self._running):
            raise RequestRejected(
                "too many requests for their objectives", retry_after_s=2.5, predicted_ttft_s=3.25, required_ttft_s=0.5
            )
        if first == REJECT_WITHOUT_HINT:
            raise RequestRejected("too many requests")
        if first == REFUSE:
            raise ValueError("the fake engine does not like this prompt")
        if request.sampling.grammar is not None and "unsupported" in request.sampling.grammar:
            raise ValueError("the fake engine does not like this grammar")
        self._num_added += 1
        if request.session:
            self._sessions[request.session] = request
        request_id = request.request_id or f"warm-up-{self._num_added}"
        now_s = time.monotonic()
        arrival_s = now_s if arrival_s is None else arrival_s
        predicted_s = None
        slo = request.slo or self.config.class_named(request.service_class).slo
        if slo.ttft_s is not None:
            predicted_s = now_s - arrival_s if first == AGE else len(request.prompt_token_ids) * SECONDS_PER_TOKEN
            if first == ANNOUNCED:
                predicted_s = 7.0 if request_id in self._announced else 9.0
        scaled = dataclasses.replace(slo, ttft_s=SCALED_TTFT_S) if first == SCALE and request.slo is None else None
        shift = 0 if request.lora is None else len(Path(self.loras.known[request.lora].folder).name)
        self._running[request_id] = _Running(request, arrival_s, predicted_s, scaled, shift)
        if request.tenant:
            stats = TenantStats(prompt_tokens=len(request.prompt_token_ids), virtual_time=request.weight)
            self._tenants.setdefault(request.service_class, {})[request.tenant] = stats
        if self._work_log is not None and not request_id.startswith("warm-up"):
            os.write(
                self._work_log, f"{request.service_class} {' '.join(map(str, request.prompt_token_ids))}\n".encode()
            )
        return request_id

    def predicted_ttft_s(self, request_id: str) -> float | None:
        return self._running[request_id].predicted_ttft_s

    def scaled_slo(self, request_id: str) -> SLO | None:
        return self._running[request_id].scaled_slo

    def abort(self, request_id: str) -> bool:
        return self._running.pop(request_id, None) is not None

    def step(self) -> list[RequestOutput]:
        slow = any(self._cause(entry.request) == SLOW for entry in self._running.values())
        for entry in self._running.values():
            entry.first_scheduled_s = entry.first_scheduled_s or time.monotonic()
        time.sleep(SLOW_STEP_S if slow else 0.001)
        self._announced |= {arrival.request.request_id for arrival in self.preemption.arrivals()}
        self._num_steps += 1
        late = [
            (request_id, entry)
            for request_id, entry in self._running.items()
            if entry.request.max_queue_s is not None
            and self._cause(entry.request) == SILENT
            and time.monotonic() >= entry.arrival_s + entry.request.max_queue_s
        ]
        for request_id, _ in late:
            del self._running[request_id]
        ended = [self._output(request_id, entry, finish_reason=FinishReason.TIMEOUT) for request_id, entry in late]
        speaking = [item for item in self._running.items() if self._cause(item[1].request) != SILENT]
        return ended + [self._run(request_id, entry) for request_id, entry in speaking]

    def _run(self, request_id: str, entry: _Running) -> RequestOutput:
        """Return a step's output, of several tokens if the request has drafts."""
        outputs = [self._advance(request_id, entry)]
        if not (entry.request.speculation or entry.request.predicted_token_ids):
            return outputs[0]
        while len(outputs) < TOKENS_OF_A_STEP and not outputs[-1].finished:
            outputs.append(self._advance(request_id, entry))
        return dataclasses.replace(
            outputs[-1],
            new_token_ids=tuple(token for output in outputs for token in output.new_token_ids),
            new_logprobs=tuple(entry for output in outputs for entry in output.new_logprobs),
            prompt_logprobs=outputs[0].prompt_logprobs,
            num_accepted_drafts=len(outputs) - 1,
            num_rejected_drafts=TOKENS_OF_A_STEP - len(outputs),
        )

    def _advance(self, request_id: str, entry: _Running) -> RequestOutput:
        prompt, sampling = entry.request.prompt_token_ids, entry.request.sampling
        cause = self._cause(entry.request)
        if cause == RAISE_IN_STEP:
            raise RuntimeError("the fake engine's step failed")
        if cause == DIE:
            die(7)
        if cause == HANG:
            time.sleep(3600)
        if cause == STALL:
            from omniserve.ops.streams import wait_for  # imports torch

            wait_for(_Never(), "a step's tokens", timeout_s=0.1)
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if sampling.prompt_logprobs is not None and not entry.output:
            prompt_logprobs = tuple(self._logprob(token, sampling.prompt_logprobs, -0.25) for token in prompt[1:])
        if sampling.max_tokens == 0:
            del self._running[request_id]
            embedding = embedding_of(prompt, sampling.pooling) if sampling.pooling is not None else ()
            return self._output(
                request_id, entry, prompt_logprobs=prompt_logprobs, embedding=embedding,
                finish_reason=FinishReason.LENGTH,
            )  # fmt: skip
        shift = (sampling.seed or 0) + entry.shift
        token = (prompt[len(entry.output) % len(prompt)] + shift) % self.spec.vocab_size
        token = next((biased for biased, bias in sampling.logit_bias if bias == 100), token)
        entry.output.append(token)
        reason = FinishReason.LENGTH if len(entry.output) >= sampling.max_tokens else None
        stop_reason: int | str | None = None
        if token in sampling.stop_token_ids:
            reason, stop_reason = FinishReason.STOP, token
        elif token in self.spec.eos_token_ids and not sampling.ignore_eos:
            reason = FinishReason.STOP
        elif cause == BAD_OUTPUT:
            reason, stop_reason = FinishReason.ERROR, "the fake logits are not finite"
            logger.error("request %s failed", request_id, extra={"engine_request_id": request_id})
        if reason is not None:
            del self._running[request_id]
        logprobs: tuple[TokenLogprob, ...] = ()
        if sampling.logprobs is not None:
            value = -0.5 if sampling.seed is None else -0.5 - sampling.seed % 3
            logprobs = (self._logprob(token, sampling.logprobs, value),)
        return self._output(
            request_id, entry, (token,), new_logprobs=logprobs, prompt_logprobs=prompt_logprobs, finish_reason=reason,
            stop_reason=stop_reason,
        )  # fmt: skip

    def _cause(self, request: Request) -> int | None:
        return request.prompt_token_ids[0] if self._with_faults else None

    def _logprob(self, token: int, num_top: int, value: float) -> TokenLogprob:
        top = tuple(((token + i) % self.spec.vocab_size, value * (i + 1)) for i in range(num_top))
        return TokenLogprob(token_id=token, logprob=value, top=top)

    def _output(
        self, request_id: str, entry: _Running, token_ids: tuple[int, ...] = (), **fields: Any
    ) -> RequestOutput:
        now_s = time.monotonic()
        entry.first_token_s = entry.first_token_s or now_s
        return RequestOutput(
            request_id=request_id,
            service_class=entry.request.service_class,
            new_token_ids=token_ids,
            num_prompt_tokens=len(entry.request.prompt_token_ids),
            num_cached_tokens=len(entry.request.cache_salt),  # so that tests can ask for some
            num_output_tokens=len(entry.output),
            times=RequestTimes(
                arrival_s=entry.arrival_s,
                first_scheduled_s=entry.first_scheduled_s,
                first_token_s=entry.first_token_s,
                finished_s=now_s if fields.get("finish_reason") is not None else None,
                predicted_ttft_s=entry.predicted_ttft_s,
            ),
            **fields,
        )

    def wait(self, timeout_s: float) -> None:
        time.sleep(timeout_s)

    def load(self, num_taken: int = 0) -> EngineLoad:
        prompts = sum(len(entry.request.prompt_token_ids) for entry in self._running.values())
        seconds = [(prompts + size) * SECONDS_PER_TOKEN for size in PROMPT_SIZES]
        forecasts = {spec.name: seconds for spec in self.config.classes if spec.kind == ServiceClass.LS}
        return EngineLoad(num_taken=num_taken, ttft_s=forecasts, be_tokens=self._num_steps)

    def stats(self) -> EngineStats:
        names = [spec.name for spec in self.config.classes]
        running = {name: sum(e.request.service_class == name for e in self._running.values()) for name in names}
        scheduler = SchedulerStats(
            waiting=dict.fromkeys(names, 0),
            running=running,
            output_tokens=dict.fromkeys(names, 5),
            prompt_tokens=dict.fromkeys(names, 6),
            device_blocks_by_class=running,
            host_blocks_by_class=dict.fromkeys(names, 2),
            preemptions=12,
            preempted_tokens=18,
            layer_preemptions=17,
            swaps_out=13,
            swaps_in=14,
            checkpoints=16,
            resumed_tokens=17,
            tenants=self._tenants,
        )
        return EngineStats(
            scheduler=scheduler,
            kv=KVUsage(device_used=len(self._running), device_total=100, host_used=3, host_total=200),
            host=HostTierStats(failures=15, kv_bytes_read=19, busy_seconds=20.5),
            latency=LatencyStats(error=0.125, drift=1.25),
            block_size=self.config.block_size,
            max_loras=self.config.lora.max_loras,
            steps=self._num_steps,
            steps_by_threads={1: 21, 2: 22},
            piggyback_rows=11,
        )

    def clear_prefixes(self, sessions=None) -> FreedKV:
        """Tell of a block on the device for each session that there is, and of as many on disk as its TTL has hours."""
        names = [*self._sessions] if sessions is None else sessions
        found = [self._sessions.pop(name) for name in names if name in self._sessions]
        num_hours = sum((request.session_ttl_s or 0.0) / 3600 for request in found)
        return FreedKV(device=len(found), disk=round(num_hours), block_size=16)

    def prepare_grammars(self) -> None:
        pass

    def close(self) -> None:
        self._running.clear()


@dataclass(frozen=True)
class FakeLoader:
    """Makes a FakeEngine in the engine process."""

    vocab_size: int = 400
    eos_token_id: int = 0
    config: EngineConfig = field(default_factory=EngineConfig)
    fail: str | None = None
    work_log: str | None = None
    fail_while: Path | None = None
    with_faults: bool = True

    def for_replica(self, number: int, count: int) -> FakeLoader:
        return self

    def __call__(self, progress) -> FakeEngine:
        progress("faking")
        if self.fail is not None:
            raise ValueError(self.fail)
        if self.fail_while is not None and self.fail_while.exists():
            raise ValueError("the fake engine may not start yet")
        return FakeEngine(
            self.vocab_size, self.eos_token_id, self.config, work_log=self.work_log, with_faults=self.with_faults
        )

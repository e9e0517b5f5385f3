"""Engine: add, abort, step. Owns scheduler, KV, runner and host tier."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from omniserve.core.config import EngineConfig
from omniserve.core.errors import EngineStopped, PeerLost, Stalled
from omniserve.core.load import EngineLoad
from omniserve.core.lora import LoRA
from omniserve.core.plan import StepPlan
from omniserve.core.request import SLO, Completion, Request, RequestLimits, RequestOutput
from omniserve.core.stats import DiskStats, EngineStats, FreedKV, HostTierStats, LatencyStats
from omniserve.core.upkeep import Upkeep
from omniserve.engine.loras import LoRANames
from omniserve.engine.outputs import OutputCollector
from omniserve.engine.parts import EngineParts, latency_model_of
from omniserve.engine.stepping import FinishedStep, OpenRequest, Stepper
from omniserve.latency.profile import Profile
from omniserve.ops.streams import drain
from omniserve.sampling.grammar import Grammar, GrammarCompiler
from omniserve.sched.admission import scaled_slo

if TYPE_CHECKING:
    from omniserve.parallel.group import RankGroup

logger = logging.getLogger(__name__)

_COPY_POLL_S = 0.001
_PREFILL_WAIT_S = 0.005
"""Least seconds of a wait while nothing but prefill engines works for this one: to look more often for new requests
would take their cores."""
_LAST_WRITES_S = 10.0
_IDLE_STEPS = 3  # a block that has just been filled is copied two plans later at the soonest


class Engine:
    """Serves latency-sensitive and best-effort requests with one model. Not thread-safe: one thread calls it.

    Args:
        model: A Hugging Face causal language model, or a PEFT model of one; it is patched in place if it is not yet.
        config: Settings; None takes the defaults.
        profile: What a latency model is made of (see ``omniserve.profiling``). None: there is none, steps are bounded
            by ``max_num_batched_tokens`` only, and no objective is enforced.
        tokenizer: Needed for stop strings, for grammars and for the text of completions. Its end-of-sequence token
            ends an output as those of the model's configs do.
        clock: Monotonic seconds.
        group: The other ranks, with ``tensor_parallel_size``; the model is then rank 0's part, and the engine ends them
            as it is closed. ``omniserve.launch.loading.EngineLoader`` makes all that.

    Raises:
        UnsupportedModelError: No layer family fits the model.
        ValueError: The settings do not fit the model or this machine.
        ProfileMismatch: The profile was made for something else.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig | None = None,
        *,
        profile: Profile | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        clock: Callable[[], float] = time.monotonic,
        group: RankGroup | None = None,
    ) -> None:
        this: Callable[[], Any] = weakref.ref(self)  # or a closed engine would keep its KV until a garbage collection
        self._clock, self._ids, self._outputs = clock, itertools.count(), OutputCollector(tokenizer)
        config = config or EngineConfig()
        parts = EngineParts.of(config, model, profile=profile, tokenizer=tokenizer, clock=clock, group=group)
        setup, spec = parts.setup, parts.spec
        self.config, self.spec, self.max_model_len = setup.config, spec, setup.max_model_len
        self.model = parts.model
        """The patched model."""
        self.group = group
        """The other ranks, if there are any."""
        self.kv, self.scheduler, self.runner = parts.kv, parts.scheduler, parts.runner
        self.host_tier, self.disk = parts.host_tier, parts.disk
        self.loras, self._lora_loads = LoRANames(parts.model.lora), parts.loras
        """The adapters that requests can name."""
        self.hosts, self.prefill_engines, self.preemption = parts.hosts, parts.prefills, parts.preemption
        """CPU hosts, prefill engines, and what polls requests for which rows may have to leave the running step; None:
        there are none, or rows never leave."""
        self._sampler, self._log, self._latency, self._profile = parts.sampler, parts.log, parts.latency, profile
        self._grammars = GrammarCompiler(tokenizer, vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids)
        self.limits = RequestLimits(
            vocab_size=spec.vocab_size,
            max_model_len=setup.max_model_len,
            pool_tokens=setup.num_device_blocks * setup.config.block_size,
            has_tokenizer=tokenizer is not None,
        )
        self._stepper = Stepper(
            scheduler=self.scheduler,
            runner=self.runner,
            outputs=self._outputs,
            clock=clock,
            record=lambda step: this()._record(step),
            depth=setup.depth,
            side_by_side=setup.in_stages,
            keeps_names=setup.config.trace_steps is not None,
        )
        self._process_id, self._closed = os.getpid(), False
        self.on_step: Callable[[StepPlan, bool, float], None] | None = None
        """Called with each step that computed something, as it is collected: plan, whether the host tier worked,
        seconds. These run from the end of the step before it, or from its own planning after a pause; without a GPU and
        with ``async_steps`` they are those of the step launched meanwhile."""
        self.upkeep: Upkeep | None = None
        """Work that is still to be done on the engine beside requests; the process that steps the engine does it."""

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Request, *, arrival_s: float | None = None, grammar: Grammar | None = None) -> str:
        """Take a request, which came at ``arrival_s`` on the engine's clock (None: now), and return its id.

        A request with a grammar waits here until that is compiled, unless ``grammar`` is what ``compile_grammar`` made
        of it.

        Raises:
            ValueError: A token is outside the vocabulary, the prompt plus output is longer than the model or the KV
                pool allows, the id is in use or the KV of its last request still is, the grammar is not supported,
                there are stop strings or a grammar and no tokenizer, or no adapter of that name is loaded.
            RequestRejected: The request's objectives cannot be met at present load.
            EngineStopped: The engine was closed.
        """
        self._require_open()
        request_id = request.request_id if request.request_id is not None else f"req-{next(self._ids)}"
        if request_id in self._outputs:
            raise ValueError(f"request id {request_id!r} is in use by an unfinished request; choose another")
        self.limits.check(request)
        lora = None if request.lora is None else self.loras.named(request.lora)
        if grammar is None and request.sampling.grammar is not None:
            grammar = self._grammars.compile(request.sampling.grammar).result()
        grammar_state = None if grammar is None else grammar.start()
        spec = self.config.class_named(request.service_class)
        slo = request.slo if request.slo is not None else spec.slo
        now_s = self._clock()
        arrival_s = now_s if arrival_s is None else min(arrival_s, now_s)
        predicted_s = self.scheduler.add(request_id, request, slo, now_s, arrival_s=arrival_s, lora=lora)
        scaled = scaled_slo(self.scheduler.requests.states[request_id])
        self._stepper.requests[request_id] = OpenRequest(request.service_class, scaled or slo, predicted_s, scaled)
        self._sampler.add(request_id, request.sampling, request.prompt_token_ids, grammar_state)
        self._outputs.open(request_id, request)
        return request_id

    def load_lora(self, name: str, folder: str | Path) -> LoRA:
        """Let requests name a LoRA adapter, in ``Request.lora``.

        Args:
            name: The name; an adapter that has it is replaced for new requests.
            folder: The folder that PEFT's ``save_pretrained`` wrote, with safetensors.

        Raises:
            LoRAError: It does not fit the model or ``lora.max_lora_rank``, cannot be read, or is more than LoRA.
        """
        lora = self.loras.read(name, folder)
        self.loras.add(lora)
        return lora

    def compile_grammar(self, grammar: str) -> Future[Grammar]:
        """Begin to compile a grammar for ``add``, beside the steps; the future has a ValueError if it is refused."""
        return self._grammars.compile(grammar)

    def prepare_grammars(self) -> None:
        """Do now what the first request with a grammar would wait for, up to a second; log it if there can be none."""
        if self.limits.has_tokenizer:
            try:
                self._grammars.prepare()
            except ValueError as error:
                logger.warning("requests with a grammar will be refused: %s", error)

    def load(self, num_taken: int = 0) -> EngineLoad:
        """Return what the engine says of its load; ``num_taken`` is the caller's count of requests."""
        return self.scheduler.load(self._clock(), num_taken)

    def abort(self, request_id: str) -> bool:
        """End a request now and free what it holds; False if it is unknown or has finished."""
        return self._stepper.abort(request_id)

    def predicted_ttft_s(self, request_id: str) -> float | None:
        """Return what admission predicted for an unfinished request, seconds from its arrival; None: nothing.

        Raises:
            KeyError: There is no such request.
        """
        return self._stepper.requests[request_id].predicted_ttft_s

    def scaled_slo(self, request_id: str) -> SLO | None:
        """Return the objectives of an unfinished request if admission has scaled those of its class; else None.

        Raises:
            KeyError: There is no such request.
        """
        return self._stepper.requests[request_id].scaled_slo

    @property
    def has_unfinished(self) -> bool:
        """True while a step may have something to do, be it to collect what another one launched."""
        return self._stepper.has_unfinished

    # -- steps ---------------------------------------------------------------------------------------------------

    def start_moves(self) -> list[RequestOutput]:
        """Begin copies between the tiers without a step, and take note of those that have ended.

        Raises:
            EngineStopped: The engine was closed.
        """
        self._require_open()
        return self._stepper.start_moves()

    def step(self) -> list[RequestOutput]:
        """Run one step through all layers and return what it produced, if anything.

        With ``async_steps`` the step is launched, while the one before it runs, and then that one's outputs are
        returned; a step whose plan is not certain (see ``Scheduler.is_certain``) ends here all the same.

        Raises:
            EngineStopped: The engine was closed.
        """
        self._require_open()
        try:
            return self._stepper.step()
        except BaseException:
            # The plan's requests may have published blocks that this step was to write.
            self.scheduler.requests.loads.give_up()
            raise

    @property
    def last_plan_was_empty(self) -> bool:
        """The last step had nothing to compute or collect: all requests wait for the host tier (see ``wait``)."""
        return self._stepper.last_plan_was_empty

    def wait(self, timeout_s: float) -> None:
        """Sleep until the host tier reports something or the time is over; for use after an empty step.

        Raises:
            Stalled: The host tier is stalled, and requests, or moves and slots of ended ones, wait for nothing else.
        """
        loras = self.scheduler.requests.loras
        if loras is not None and loras.is_loading:
            timeout_s = min(timeout_s, _COPY_POLL_S)
        if self.host_tier is None:
            if loras is not None and loras.is_loading:
                time.sleep(timeout_s)
            return
        waits_for_disk = self.disk is not None and self.disk.busy
        waits_for_copies = waits_for_disk or (self.prefill_engines is not None and self.prefill_engines.busy)
        if self.host_tier.is_stalled and self.last_plan_was_empty and self.has_unfinished and not waits_for_copies:
            count = len(self._stepper.requests)
            what = f"{count} requests wait" if count else "what ended requests held waits"
            raise Stalled(f"{what} for the host tier, which is stalled (see the log): start the engine again")
        if self.prefill_engines is not None and not (self.host_tier.busy or waits_for_disk):
            self.prefill_engines.wait(max(timeout_s, _PREFILL_WAIT_S))
        else:
            self.host_tier.wait(min(timeout_s, _COPY_POLL_S) if waits_for_copies else timeout_s)

    def use_profile(self, profile: Profile) -> None:
        """Predict by another profile from now on; the engine must have one. What is learned from steps begins anew.

        Only how fast the host tier attends, which ``apex`` asks for, stays that of the first.

        Raises:
            ProfileMismatch: The profile was made for something else.
        """
        assert self._profile is not None and self._latency is not None, "the engine has no profile to replace"
        profile.require(self._profile.fingerprint)
        self._latency.replace(latency_model_of(self.config).from_profile(profile), is_coarse=profile.is_coarse)
        self._profile = profile

    def generate(self, requests: Iterable[Request], *, progress: bool = False) -> list[Completion]:
        """Run requests to their end, with a progress bar if asked, and return their completions in the same order.

        Raises:
            ValueError: A request does not fit; the message says which, and none of them runs on.
        """
        ids: list[str] = []
        try:
            for index, request in enumerate(requests):
                try:
                    ids.append(self.add(request))
                except ValueError as error:
                    raise ValueError(f"request {index}: {error}") from error
            wanted = set(ids)
            completions: dict[str, Completion] = {}
            for request_id in ids:
                self._outputs.keep(request_id)
            with tqdm(total=len(ids), disable=not progress, unit="request") as bar:
                while len(completions) < len(wanted):
                    for output in self.step():
                        if output.finished and output.request_id in wanted:
                            completions[output.request_id] = self._outputs.completion(output)
                            bar.update()
                    if self.last_plan_was_empty:
                        self.wait(0.05)
            while not self.scheduler.has_unfinished and self._stepper.is_in_flight:
                self.step()  # it was launched for requests that then ended
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
            raise
        return [completions[request_id] for request_id in ids]

    def _record(self, step: FinishedStep) -> None:
        self._log.record(step)
        if self.on_step is not None:
            self.on_step(step.plan, step.host_works, step.seconds)

    # -- state ---------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return gauges and counters."""
        disk = self.disk.stats() if self.disk is not None else DiskStats()
        prefixes = self.kv.prefixes
        on_disk = prefixes.disk if prefixes is not None else None
        disk_used, disk_total = on_disk.usage() if on_disk is not None else (0, 0)
        return EngineStats(
            scheduler=self.scheduler.stats(),
            kv=self.kv.usage(),
            host=self.host_tier.stats() if self.host_tier is not None else HostTierStats(),
            latency=self._latency.stats() if self._latency is not None else LatencyStats(),
            disk=dataclasses.replace(disk, blocks_used=disk_used, blocks_total=disk_total),
            cpu_hosts=self.hosts.stats() if self.hosts is not None else {},
            prefill_engines=self.prefill_engines.stats() if self.prefill_engines is not None else {},
            admittable_per_s=self.scheduler.admittable_per_s(self._clock()),
            block_size=self.config.block_size,
            max_loras=self.config.lora.max_loras,
            steps=self._log.num_steps,
            step_seconds=self._log.seconds,
            steps_by_threads=dict(self.runner.steps_by_threads),
            device_tokens=self._log.num_device_tokens,
            piggyback_rows=self._log.num_piggyback_rows,
        )

    def clear_prefixes(self, sessions: Iterable[str] | None = None) -> FreedKV:
        """Free what the prefix cache has on all tiers and nothing uses now; no later engine finds it on disk.

        Args:
            sessions: Names of sessions, to free what only their requests have used; None: all.

        Raises:
            OSError: The disk fails.
        """
        index = self.scheduler.requests.prefixes.index
        if index is None:
            return FreedKV(block_size=self.kv.block_size)
        freed = index.forget(sessions)
        for slot in freed.disk_slots:
            assert self.disk is not None
            self.disk.file.erase(slot)
        return FreedKV(device=freed.device, host=freed.host, disk=len(freed.disk_slots), block_size=self.kv.block_size)

    def close(self) -> None:
        """Wait for the device, then stop the host tier's threads; unfinished requests are dropped.

        With ``disk_kv.keep``, prefixes that are not on disk yet are written first, for up to ten seconds.

        A second call does nothing, nor does one in a forked child: the engine is its parent's.

        Raises:
            Stalled: The device or a thread of the host tier does not end.
            RuntimeError: The device has failed.
        """
        if not self._closed and os.getpid() == self._process_id:
            try:
                if self.config.disk_kv.keep and self.scheduler.requests.prefixes.is_on:
                    self._write_prefixes()
            finally:
                self._closed = True
                self._log.close()
                self._grammars.close()
                if self.disk is not None:
                    self.disk.close()
                if self.group is not None:
                    self._end_on_ranks(self.group)
                if self.hosts is not None:
                    self.hosts.close()
                if self.prefill_engines is not None:
                    self.prefill_engines.close()
                if self._lora_loads is not None:
                    self._lora_loads.close()
                if self.host_tier is not None:
                    self.host_tier.close()
                else:
                    drain(self.model.device)

    def _end_on_ranks(self, group: RankGroup) -> None:
        if not group.is_lost:
            try:
                self._stepper.finish()  # or the next engine of these ranks would get the rows of this one's steps
            except (PeerLost, Stalled) as error:
                logger.warning("steps in flight did not end: %s", error)
        group.end_engine()

    def _write_prefixes(self) -> None:
        """Abort all requests, and write the prefixes to disk that are still to be written."""
        for request_id in list(self._stepper.requests):
            self.abort(request_id)
        deadline_s, num_idle = time.monotonic() + _LAST_WRITES_S, 0
        try:
            while num_idle < _IDLE_STEPS and time.monotonic() < deadline_s:
                self.step()
                if self.scheduler.requests.loads.is_saving:
                    self.wait(_COPY_POLL_S)
                num_idle = 0 if self.scheduler.requests.loads.is_saving else num_idle + 1
        except (RuntimeError, Stalled) as error:
            logger.warning("some prefixes were not written to disk: %s", error)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise EngineStopped("the engine was closed")
        if os.getpid() != self._process_id:
            raise EngineStopped(
                f"the engine is that of process {self._process_id}, which was forked: make another one in the child"
            )

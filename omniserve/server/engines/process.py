"""The engine's process: it takes commands, steps, and reports what came out, once a step.

Nothing here imports torch: the engine's maker does, after the environment was set for it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import zmq

from omniserve.core.config import EngineConfig
from omniserve.core.errors import OmniServeError, RequestRejected
from omniserve.core.load import EngineLoad
from omniserve.core.logs import set_up_logs
from omniserve.core.lora import LoRA, LoRAError
from omniserve.core.request import SLO, Arrival, Request, RequestLimits, RequestOutput, SamplingParams
from omniserve.core.stats import EngineStats, FreedKV
from omniserve.core.upkeep import Upkeep
from omniserve.sampling.grammar import Grammar
from omniserve.server.engines.messages import (
    Abort,
    Add,
    Alive,
    AskStats,
    CacheCleared,
    ChangeLoRA,
    ClearCache,
    Close,
    Command,
    EngineInfo,
    Failed,
    Load,
    LoRAChanged,
    Progress,
    Refused,
    Report,
    Reset,
    Stats,
    Step,
    TellLoad,
    WasReset,
    decode_command,
    encode,
    is_bare,
)
from omniserve.server.process_settings import GarbageCollector

logger = logging.getLogger(__name__)

# How long to sleep when every request waits for the host tier. A command that arrives meanwhile waits as long.
_HOST_WAIT_S = 0.001
# Without requests: how long until it is quiet, and how often upkeep that waits for something is asked.
_QUIET_S, _UPKEEP_S = 0.05, 0.2
_WARM_UP_TOKENS = 16
# A client is told after so long that its grammar is too large. Most take some 10 ms.
_GRAMMAR_S = 10.0
# Commands are taken between two steps for as long as this share of the last step took, and for so long in any case.
_TAKING, _LEAST_TAKING_S = 0.5, 0.005
_IDLE_STEP_S = 1.0
_LINGER_MS = 2000
# An engine beside others tells its load so often.
_LOAD_EVERY_S = 0.02
# And every engine that it is alive.
_ALIVE_EVERY_S = 0.5


class TakesArrivals(Protocol):
    """Asks, in the middle of a step, which requests have come."""

    arrivals: Callable[[], Iterable[Arrival]]


class TakesLoRAs(Protocol):
    """The LoRA adapters of an engine; see ``LoRANames``."""

    def read(self, name: str, folder: str) -> LoRA: ...
    def add(self, lora: LoRA) -> None: ...
    def remove(self, name: str) -> None: ...
    def clear(self) -> None: ...


class EngineLike(Protocol):
    """The part of an engine's interface that this process calls."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def limits(self) -> RequestLimits: ...
    @property
    def has_unfinished(self) -> bool: ...
    @property
    def last_plan_was_empty(self) -> bool: ...

    @property
    def preemption(self) -> TakesArrivals | None: ...
    @property
    def loras(self) -> TakesLoRAs: ...

    upkeep: Upkeep | None

    def add(self, request: Request, *, arrival_s: float | None = None, grammar: Grammar | None = None) -> str: ...
    def compile_grammar(self, grammar: str) -> Future[Grammar]: ...
    def predicted_ttft_s(self, request_id: str) -> float | None: ...
    def scaled_slo(self, request_id: str) -> SLO | None: ...
    def abort(self, request_id: str) -> bool: ...
    def step(self) -> list[RequestOutput]: ...
    def wait(self, timeout_s: float) -> None: ...
    def stats(self) -> EngineStats: ...
    def clear_prefixes(self, sessions: Iterable[str] | None = None) -> FreedKV: ...
    def load(self, num_taken: int = 0) -> EngineLoad: ...
    def prepare_grammars(self) -> None: ...
    def close(self) -> None: ...


EngineMaker = Callable[[Callable[[str], None]], EngineLike]
"""Makes the engine in its process; has to be picklable. Tells its argument how it gets on, in short sentences."""


def run_engine_process(
    make_engine: EngineMaker, command_address: str, output_address: str, log_level: str, log_format: str
) -> None:
    """Run the engine process until it is told to close, or until the API process is gone."""
    # Ctrl-C reaches the whole process group; the API process decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    names: dict[str, str] = {}
    set_up_logs(log_level, log_format, names=names)
    threading.Thread(target=_exit_with_parent, name="parent-watch", daemon=True).start()
    status = 1
    try:
        status = _run(make_engine, command_address, output_address, names)
    except Exception:
        logger.exception("the engine process failed")
    finally:
        # Without taking the interpreter apart, which takes seconds once torch is in it. Everything is closed.
        logging.shutdown()
        os._exit(status)


def _run(make_engine: EngineMaker, command_address: str, output_address: str, names: dict[str, str]) -> int:
    """Start the engine and serve; return the exit status."""
    context = zmq.Context()
    commands, outputs = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    commands.connect(command_address)
    outputs.setsockopt(zmq.SNDHWM, 0)
    outputs.connect(output_address)
    link = _Link(commands, outputs)
    ended = threading.Event()
    heart = threading.Thread(target=_beat, args=(context, output_address, ended), name="alive", daemon=True)
    heart.start()
    try:
        started = _start(make_engine, link)
        if started is None:
            return 1
        engine, collector = started
        try:
            _serve(engine, link, names, collector)
            return 0
        except Exception as error:
            logger.exception("the engine's step failed")
            link.send(Failed(f"{type(error).__name__}: {error}"))
            return 1
        finally:
            if engine.upkeep is not None:
                engine.upkeep.close()
            engine.close()
    finally:
        ended.set()
        heart.join()
        context.destroy(linger=_LINGER_MS)


def _beat(context: zmq.Context, output_address: str, ended: threading.Event) -> None:
    """Tell that this process is alive, in long steps, too, until it ends."""
    outputs = context.socket(zmq.PUSH)
    outputs.setsockopt(zmq.SNDHWM, 1)  # what is not taken need not be repeated
    outputs.connect(output_address)
    alive = encode(Alive())
    while not ended.wait(_ALIVE_EVERY_S):
        with contextlib.suppress(zmq.Again):
            outputs.send(alive, zmq.NOBLOCK)
    outputs.close(linger=0)


class _Link:
    """Receives commands and sends reports."""

    def __init__(self, commands: zmq.Socket, outputs: zmq.Socket) -> None:
        self._commands = commands
        self._outputs = outputs
        self._early: deque[Command] = deque()
        self._bell, self._bell_rope = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(commands, zmq.POLLIN)
        self._poller.register(self._bell, zmq.POLLIN)

    def ring(self) -> None:
        """End a wait for commands, the next one if there is none now; any thread may call this."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full of rings that were not taken yet
            os.write(self._bell_rope, b".")

    def send(self, report: Report) -> None:
        self._outputs.send(encode(report))

    def receive(self) -> Command | None:
        """Return the next command; None when there is none now."""
        if self._early:
            return self._early.popleft()
        try:
            return decode_command(self._commands.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for a command or a ring, at most ``timeout_s`` (None: without end); return whether there was one."""
        if self._early:
            return True
        ready = dict(self._poller.poll(None if timeout_s is None else int(timeout_s * 1000)))
        if self._bell in ready:
            os.read(self._bell, 1 << 16)
        return bool(ready)

    def arrivals(self) -> list[Arrival]:
        """Return the requests that came since the last call; ``receive`` returns their commands, too."""
        new: list[Command] = []
        early, self._early = self._early, deque()
        while (command := self.receive()) is not None:
            new.append(command)
        self._early = early + deque(new)
        return [Arrival(command.request, command.arrival_s) for command in new if isinstance(command, Add)]


def _start(make_engine: EngineMaker, link: _Link) -> tuple[EngineLike, GarbageCollector] | None:
    try:
        engine = make_engine(lambda text: link.send(Progress(text)))
        link.send(Progress("warming up"))
        _warm_up(engine)
        collector = GarbageCollector()
    except Exception as error:
        logger.debug("the engine could not start", exc_info=True)
        expected = isinstance(error, (ValueError, OSError, OmniServeError, ImportError))
        link.send(Failed(str(error) if expected and str(error) else f"{type(error).__name__}: {error}"))
        return None
    link.send(EngineInfo(engine.limits, engine.config.classes))
    return engine, collector


def _warm_up(engine: EngineLike) -> None:
    """Run a request of each kind of class, so that compiling is over before the first user comes."""
    engine.prepare_grammars()
    limit = engine.limits.max_model_len
    num_prompt = max(1, min(_WARM_UP_TOKENS, limit // 2))
    for name in {spec.kind: spec.name for spec in engine.config.classes}.values():
        engine.add(
            Request(
                prompt_token_ids=[i % engine.limits.vocab_size for i in range(num_prompt)],
                sampling=SamplingParams(max_tokens=max(1, min(4, limit - num_prompt)), ignore_eos=True),
                service_class=name,
                slo=SLO(),  # so that it is not refused
            )
        )
    while engine.has_unfinished:
        engine.step()
        if engine.last_plan_was_empty:
            engine.wait(_HOST_WAIT_S)


class _Closed(Exception):
    """The process was told to end."""


class _Interrupted(BaseException):
    """Ends what an engine's upkeep does; the cause says why. The upkeep must not take it for an error of its own."""


@dataclass(frozen=True, slots=True)
class _Compiling:
    """A request whose grammar is compiled."""

    command: Add
    grammar: Future[Grammar]
    until_s: float
    """Time at which the request is refused at the latest, in monotonic seconds."""


class _Serving:
    """Takes commands and steps; to the engine's upkeep it is what has to be given way to."""

    def __init__(self, engine: EngineLike, link: _Link, names: dict[str, str], collector: GarbageCollector) -> None:
        self._engine, self._link, self._names, self._collector = engine, link, names, collector
        self._step_s = 0.0
        self._ids: set[str] = set()
        """Requests that the engine has."""
        self._tells_load = False
        self._told_s, self._told_idle = -math.inf, False
        self._num_taken = 0
        self._compiling: dict[str, _Compiling] = {}
        """Requests whose grammar is compiled beside the steps, by id, in the order of their arrival."""
        self._reader = ThreadPoolExecutor(1, "lora")
        self._reading: list[tuple[int, Future[LoRA]]] = []
        """Adapters that are read beside the steps, and the numbers of the commands that asked for them."""

    def turn(self, *, block: bool) -> None:
        """Take the commands that are there, and step; without requests wait for a command if ``block``.

        Raises:
            _Closed: There was a command to end.
        """
        engine, link, names = self._engine, self._link, self._names
        accepted: list[tuple[str, float | None, SLO | None]] = []
        self._collector.collect(is_idle=not engine.has_unfinished)
        has_helpers = engine.config.hosts.cpu_hosts or engine.config.prefill.prefill_engines
        if block and not engine.has_unfinished:
            while not link.wait(_IDLE_STEP_S if has_helpers or self._compiling else None):
                if has_helpers:
                    engine.step()  # without requests, it only takes note of those that were lost or have joined
                if self._compiling:
                    break
        command = link.receive()
        # However many come, those that were taken get on.
        until_s = time.monotonic() + max(_LEAST_TAKING_S, _TAKING * self._step_s)
        while command is not None:
            self._obey(command, accepted)
            command = link.receive() if time.monotonic() < until_s else None
        self._add_compiled(accepted)
        self._add_read()
        begun_s = time.monotonic()
        outputs = engine.step() if engine.has_unfinished else []
        self._step_s = time.monotonic() - begun_s
        if outputs or accepted:
            link.send(Step(accepted, [(o.request_id, o.new_token_ids[0]) if is_bare(o) else o for o in outputs]))
        for output in outputs:
            if output.finished:
                _log(f"ended: {output.finish_reason}, {output.num_output_tokens} tokens", output.request_id)
                names.pop(output.request_id, None)
                self._ids.discard(output.request_id)
        if self._tells_load:
            self._tell_load()
        if engine.has_unfinished and engine.last_plan_was_empty:
            engine.wait(_HOST_WAIT_S)

    def _tell_load(self) -> None:
        """Tell the load now and then, and at once when there is none any more."""
        is_idle = not self._engine.has_unfinished
        now_s = time.monotonic()
        if (is_idle and not self._told_idle) or now_s - self._told_s >= _LOAD_EVERY_S:
            self._told_s, self._told_idle = now_s, is_idle
            self._link.send(Load(self._engine.load(self._num_taken)))

    def _obey(self, command: Command, accepted: list[tuple[str, float | None, SLO | None]]) -> None:
        match command:
            case Add(request, _, http_request_id):
                request_id = request.request_id
                assert request_id is not None
                self._num_taken += 1
                if http_request_id is not None:
                    self._names[request_id] = http_request_id
                if request.sampling.grammar is None:
                    self._add(command, None, accepted)
                else:
                    grammar = self._engine.compile_grammar(request.sampling.grammar)
                    self._compiling[request_id] = _Compiling(command, grammar, time.monotonic() + _GRAMMAR_S)
                    grammar.add_done_callback(lambda _: self._link.ring())
            case Abort(request_id):
                if self._compiling.pop(request_id, None) is not None or self._engine.abort(request_id):
                    _log("aborted", request_id)
                self._names.pop(request_id, None)
                self._ids.discard(request_id)
            case ChangeLoRA(number, name, None):
                try:
                    self._engine.loras.remove(name)
                    self._link.send(LoRAChanged(number, None))
                except LoRAError as error:
                    self._link.send(LoRAChanged(number, str(error)))
            case ChangeLoRA(number, name, str(folder)):
                read = self._reader.submit(self._engine.loras.read, name, folder)
                self._reading.append((number, read))
                read.add_done_callback(lambda _: self._link.ring())
            case ClearCache(sessions):
                self._link.send(CacheCleared(self._engine.clear_prefixes(sessions)))
            case AskStats():
                self._link.send(Stats(self._engine.stats()))
            case TellLoad():
                self._tells_load = True
            case Reset():
                self._reset(accepted)
            case Close():
                raise _Closed

    def _reset(self, accepted: list[tuple[str, float | None, SLO | None]]) -> None:
        """End all requests, tell nothing more of them, and let go of the adapters: another server names its own."""
        for request_id in self._ids:
            self._engine.abort(request_id)
        self._ids.clear()
        self._names.clear()
        self._compiling.clear()
        self._reading.clear()
        self._engine.loras.clear()
        accepted.clear()
        self._num_taken, self._tells_load = 0, False
        self._link.send(WasReset())

    def _add_compiled(self, accepted: list[tuple[str, float | None, SLO | None]]) -> None:
        """Add the requests whose grammars have been compiled, and refuse those that waited too long for it."""
        for request_id, waiting in list(self._compiling.items()):
            if waiting.grammar.done():
                del self._compiling[request_id]
                # Not raised, so that an error that many requests get does not collect their tracebacks.
                if (error := waiting.grammar.exception()) is None:
                    self._add(waiting.command, waiting.grammar.result(), accepted)
                elif isinstance(error, ValueError):
                    self._refuse(request_id, error)
                else:
                    raise error
            elif time.monotonic() > waiting.until_s:
                del self._compiling[request_id]
                self._refuse(
                    request_id,
                    ValueError(
                        f"the grammar or JSON schema takes more than {_GRAMMAR_S:g} s to compile; make it smaller: "
                        "fewer properties and alternatives, smaller numbers in multipleOf and in patterns"
                    ),
                )

    def _add_read(self) -> None:
        """Let requests name the adapters that have been read, and tell of those that were refused."""
        while self._reading and self._reading[0][1].done():
            number, read = self._reading.pop(0)
            error = read.exception()
            if error is None:
                self._engine.loras.add(read.result())
            elif not isinstance(error, LoRAError):
                raise error
            self._link.send(LoRAChanged(number, None if error is None else str(error)))

    def _add(self, command: Add, grammar: Grammar | None, accepted: list[tuple[str, float | None, SLO | None]]) -> None:
        request_id = command.request.request_id
        assert request_id is not None
        try:
            self._engine.add(command.request, arrival_s=command.arrival_s, grammar=grammar)
        except (ValueError, RequestRejected) as error:
            self._refuse(request_id, error)
        else:
            engine = self._engine
            self._ids.add(request_id)
            accepted.append((request_id, engine.predicted_ttft_s(request_id), engine.scaled_slo(request_id)))
            _log("accepted", request_id)

    def _refuse(self, request_id: str, error: ValueError | RequestRejected) -> None:
        load = dict(vars(error)) if isinstance(error, RequestRejected) else None
        self._link.send(Refused(request_id, str(error), load))
        _log(f"refused: {error}", request_id)
        self._names.pop(request_id, None)

    def are_waiting(self, within_s: float = 0.0) -> bool:
        """Tell whether there are requests or commands, or come within a time."""
        return self._engine.has_unfinished or self._link.wait(within_s)

    def run(self) -> None:
        """Serve until no command has come for a moment: one client's requests often follow each other at once."""
        try:
            while self.are_waiting(_QUIET_S):
                self.turn(block=False)
        except Exception as error:
            raise _Interrupted from error


def _serve(engine: EngineLike, link: _Link, names: dict[str, str], collector: GarbageCollector) -> None:
    if engine.preemption is not None:
        engine.preemption.arrivals = link.arrivals
    serving = _Serving(engine, link, names, collector)
    try:
        while True:
            if (upkeep := engine.upkeep) is None:
                serving.turn(block=True)
                continue
            upkeep.poll()
            if not serving.are_waiting(_QUIET_S if upkeep.is_due else _UPKEEP_S):
                if upkeep.is_due:
                    upkeep.run(serving)
            else:
                serving.turn(block=False)
            if upkeep.is_done:
                engine.upkeep = None
    except _Closed:
        return
    except _Interrupted as interrupted:
        if not isinstance(interrupted.__cause__, _Closed):
            assert interrupted.__cause__ is not None
            raise interrupted.__cause__ from None


def _log(event: str, request_id: str) -> None:
    logger.debug("request %s %s", request_id, event, extra={"engine_request_id": request_id})


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

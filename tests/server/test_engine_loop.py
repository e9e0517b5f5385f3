"""The engine's loop: however many commands come, those that were taken get on, and none is passed over."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import zmq
from fake_engine import FakeEngine

from omniserve.core.config import EngineConfig
from omniserve.core.request import Request, RequestOutput, SamplingParams
from omniserve.server.engines import messages as engine_messages
from omniserve.server.engines import process as engine_process


class Idle:
    """A collector that says when it was asked."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def collect(self, *, is_idle: bool) -> bool:
        self.asked.append(is_idle)
        return False


class Link:
    """Commands that come as fast as they are taken; ends when ``done`` says so."""

    def __init__(self, commands, done: Callable[[], bool]) -> None:
        self._commands = iter(commands)
        self._done = done
        self.num_taken = self.num_waits = self.num_rings = 0
        self.sent: list[engine_messages.Report] = []

    def receive(self):
        if self._done():
            return engine_messages.Close()
        assert self.num_taken < 2_000_000, "commands are taken and nothing else is done"
        command = next(self._commands, None)
        self.num_taken += command is not None
        return command

    def wait(self, timeout_s: float | None) -> bool:
        self.num_waits += 1
        assert self.num_waits < 100_000, "it would wait for ever"
        return True

    def ring(self) -> None:
        self.num_rings += 1

    def arrivals(self) -> list:
        return []

    def send(self, report: engine_messages.Report) -> None:
        self.sent.append(report)


class Counting(FakeEngine):
    """Counts its steps."""

    num_steps = 0

    def step(self) -> list[RequestOutput]:
        self.num_steps += 1
        return super().step()


def add(number: int, max_tokens: int = 3, grammar: str | None = None) -> engine_messages.Add:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=grammar is None, grammar=grammar)
    request = Request(request_id=f"r{number}", prompt_token_ids=[5, 6], sampling=sampling, service_class="LS")
    return engine_messages.Add(request, 0.0, None)


def serve(engine: FakeEngine, link: Link) -> Idle:
    collector = Idle()
    engine_process._serve(engine, link, {}, collector)  # type: ignore[arg-type]
    return collector


def test_a_flood_of_commands_stops_no_step() -> None:
    """Regression: every command that was there was taken before the next step, and in a flood there is always one."""
    engine = Counting(64, 2, EngineConfig(device_kv_bytes=1 << 20))
    link = Link(
        itertools.chain([add(0, 8)], itertools.repeat(engine_messages.Abort("nobody"))), lambda: engine.num_steps >= 8
    )
    serve(engine, link)
    outputs = [output for report in link.sent if isinstance(report, engine_messages.Step) for output in report.outputs]
    assert len(outputs) == 8


def test_every_command_is_obeyed_in_its_order() -> None:
    engine = Counting(64, 2, EngineConfig(device_kv_bytes=1 << 20))
    commands = [add(i) for i in range(3000)]
    link = Link(commands, lambda: link.num_taken == len(commands) and not engine.has_unfinished)
    collector = serve(engine, link)
    accepted = [
        name for report in link.sent if isinstance(report, engine_messages.Step) for name, *_ in report.accepted
    ]
    assert accepted == [f"r{i}" for i in range(3000)]
    assert len(collector.asked) == engine.num_steps + 1
    assert collector.asked[0] and collector.asked[-1] and not any(collector.asked[1:-1])


def test_nothing_is_told_of_requests_after_a_reset() -> None:
    engine = Counting(64, 2, EngineConfig(device_kv_bytes=1 << 20))
    commands = [add(0, 50), add(1, 50), engine_messages.Reset(), add(2, 3)]
    link = Link(commands, lambda: link.num_taken == len(commands) and not engine.has_unfinished)
    serve(engine, link)
    (at,) = [i for i, report in enumerate(link.sent) if isinstance(report, engine_messages.WasReset)]
    steps = [report for report in link.sent[at:] if isinstance(report, engine_messages.Step)]
    assert {name for report in steps for name, *_ in report.accepted} == {"r2"}
    told = [output for report in steps for output in report.outputs]
    assert {output[0] if isinstance(output, tuple) else output.request_id for output in told} == {"r2"}


class Script(Link):
    """Commands that are put in as the test goes on, and an end."""

    def __init__(self) -> None:
        self.waiting: list[engine_messages.Command] = []
        self.sent: list[engine_messages.Report] = []

    def receive(self):
        return self.waiting.pop(0) if self.waiting else None

    def wait(self, timeout_s: float | None) -> bool:
        assert self.waiting or timeout_s is not None, "it would wait for ever"
        return bool(self.waiting)


class Samples:
    """Upkeep that takes samples, and puts a request in as the third one is taken."""

    def __init__(self, engine: FakeEngine, link: Script, *, num_samples: int = 6) -> None:
        self._engine, self._link, self._num_samples = engine, link, num_samples
        self.taken: list[int] = []
        """Outputs that requests had by then."""
        self.is_done = False
        self.is_due = True
        self.num_polls = 0
        self.closed = False
        self.interrupting: engine_messages.Command = add(0, 4)

    def poll(self) -> None:
        self.num_polls += 1

    def run(self, others) -> None:
        for number in range(self._num_samples):
            if others.are_waiting():
                others.run()
            assert not self._engine.has_unfinished, "a sample was taken while a request waited"
            self.taken.append(sum(isinstance(report, engine_messages.Step) for report in self._link.sent))
            if number == 2:
                self._link.waiting.append(self.interrupting)
        self.is_done = True
        self._link.waiting.append(engine_messages.Close())

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def at_rest(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeEngine, Script, Samples]:
    engine, link = FakeEngine(64, 2, EngineConfig(device_kv_bytes=1 << 20)), Script()
    engine.upkeep = upkeep = Samples(engine, link)
    return engine, link, upkeep


def test_upkeep_gives_way_to_a_request_until_it_has_ended(at_rest: tuple[FakeEngine, Script, Samples]) -> None:
    engine, link, upkeep = at_rest
    serve(engine, link)
    before, after = upkeep.taken[:3], upkeep.taken[3:]
    assert before == [0, 0, 0] and len(set(after)) == 1 and after[0] >= 4
    assert engine.upkeep is None, "it is done"


def test_upkeep_waits_for_the_requests_that_are_there(at_rest: tuple[FakeEngine, Script, Samples]) -> None:
    engine, link, upkeep = at_rest
    link.waiting.append(add(7, 5))
    serve(engine, link)
    assert upkeep.taken[0] >= 5
    assert upkeep.num_polls >= 5, "it is polled between steps"


def test_upkeep_without_anything_to_do_yet_is_polled_and_not_run(at_rest: tuple[FakeEngine, Script, Samples]) -> None:
    engine, link, upkeep = at_rest
    upkeep.is_due = False
    original = upkeep.poll

    def poll() -> None:
        original()
        if upkeep.num_polls == 5:
            link.waiting.append(engine_messages.Close())

    upkeep.poll = poll  # type: ignore[method-assign]
    serve(engine, link)
    assert not upkeep.taken and upkeep.num_polls == 5


def test_the_end_comes_in_the_middle_of_upkeep(at_rest: tuple[FakeEngine, Script, Samples]) -> None:
    engine, link, upkeep = at_rest
    upkeep.interrupting = engine_messages.Close()
    serve(engine, link)
    assert len(upkeep.taken) == 3 and not upkeep.is_done


def test_an_engine_that_fails_in_the_middle_of_upkeep_fails_as_ever(
    at_rest: tuple[FakeEngine, Script, Samples], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upkeep takes RuntimeErrors for its own, and goes on."""
    engine, link, upkeep = at_rest

    def broken() -> list[RequestOutput]:
        raise RuntimeError("the step failed")

    monkeypatch.setattr(engine, "step", broken)
    original = upkeep.run

    def tolerant(others) -> None:
        with contextlib.suppress(RuntimeError):
            original(others)

    upkeep.run = tolerant  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the step failed"):
        serve(engine, link)


class Compiling(Counting):
    """Compiles grammars when it is told to."""

    def __init__(self) -> None:
        super().__init__(64, 2, EngineConfig(device_kv_bytes=1 << 20))
        self.compiling: dict[str, Future[Any]] = {}

    def compile_grammar(self, grammar: str) -> Future[Any]:
        return self.compiling.setdefault(grammar, Future())


def test_steps_go_on_while_grammars_are_compiled() -> None:
    """Requests that share a grammar wait for one compilation, an aborted one not at all, and a refused one is told."""
    engine = Compiling()
    commands = [
        add(0, 8), add(1, grammar="good"), add(2, grammar="good"), add(3, grammar="bad"), add(4, grammar="good"),
        engine_messages.Abort("r4"),
    ]  # fmt: skip

    def done() -> bool:
        if engine.num_steps == 8 and not engine.compiling["good"].done():
            assert set(engine.compiling) == {"good", "bad"}
            engine.compiling["bad"].set_exception(ValueError("it is bad"))
            engine.compiling["good"].set_result("compiled")
        return len(accepted()) >= 3 and not engine.has_unfinished

    def accepted() -> list[str]:
        steps = [report for report in link.sent if isinstance(report, engine_messages.Step)]
        return [name for step in steps for name, *_ in step.accepted]

    link = Link(commands, done)
    serve(engine, link)
    assert accepted() == ["r0", "r1", "r2"]
    [refused] = [report for report in link.sent if isinstance(report, engine_messages.Refused)]
    assert (refused.request_id, refused.message) == ("r3", "it is bad")
    assert link.num_rings == 4


def test_request_whose_grammar_takes_too_long_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(engine_process, "_GRAMMAR_S", -1.0)
    engine = Compiling()
    link = Link([add(0, grammar="endless")], lambda: bool(link.sent))
    serve(engine, link)
    [refused] = link.sent
    assert isinstance(refused, engine_messages.Refused)
    assert refused.load is None and "make it smaller" in refused.message
    engine.compiling["endless"].set_result("too late")
    assert not engine.has_unfinished


def test_bell_ends_a_wait_and_is_no_command() -> None:
    context = zmq.Context()
    commands, outputs = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    commands.bind("inproc://commands")
    sender = context.socket(zmq.PUSH)
    sender.connect("inproc://commands")
    link = engine_process._Link(commands, outputs)
    assert not link.wait(0.0)
    thread = threading.Thread(target=link.ring)
    thread.start()
    assert link.wait(None)
    thread.join()
    assert link.receive() is None and not link.wait(0.0)
    sender.send(engine_messages.encode(engine_messages.Close()))
    assert link.wait(None)
    assert isinstance(link.receive(), engine_messages.Close)
    context.destroy(linger=0)


def test_arrivals_are_told_once_and_their_commands_keep_their_order() -> None:
    context = zmq.Context()
    commands, outputs = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    commands.bind("inproc://arrivals")
    sender = context.socket(zmq.PUSH)
    sender.connect("inproc://arrivals")
    link = engine_process._Link(commands, outputs)
    sent = [add(0), engine_messages.Abort("r0"), add(1), engine_messages.AskStats(), add(2)]

    def send(*some: engine_messages.Command) -> None:
        for command in some:
            sender.send(engine_messages.encode(command))

    def arrived() -> list[str | None]:
        return [arrival.request.request_id for arrival in link.arrivals()]

    send(sent[0])
    assert link.receive() == sent[0], "it is added before the step, which need not hear of it"
    assert arrived() == []
    send(*sent[1:4])
    assert arrived() == ["r1"] and arrived() == []
    send(sent[4])
    assert arrived() == ["r2"] and link.wait(None)
    assert [link.receive() for _ in range(5)] == [*sent[1:], None]
    context.destroy(linger=0)

"""The engine's loop: however many commands come, those that were taken get on, and none is passed over."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from fake_engine import FakeEngine

from omniserve.core.config import EngineConfig
from omniserve.core.request import Request, RequestOutput, SamplingParams
from omniserve.server import engine_process


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
        self.num_taken = 0
        self.sent: list[engine_process.Report] = []

    def receive(self, *, block: bool):
        if self._done():
            return engine_process.Close()
        assert self.num_taken < 2_000_000, "commands are taken and nothing else is done"
        command = next(self._commands, None)
        assert command is not None or not block, "it would wait for ever"
        self.num_taken += command is not None
        return command

    def look_ahead(self) -> list:
        return []

    def send(self, report: engine_process.Report) -> None:
        self.sent.append(report)


class Counting(FakeEngine):
    """Counts its steps."""

    num_steps = 0

    def step(self) -> list[RequestOutput]:
        self.num_steps += 1
        return super().step()


def add(number: int, max_tokens: int = 3) -> engine_process.Add:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    request = Request(request_id=f"r{number}", prompt_token_ids=[5, 6], sampling=sampling, service_class="LS")
    return engine_process.Add(request, 0.0, None)


def serve(engine: FakeEngine, link: Link) -> Idle:
    collector = Idle()
    engine_process._serve(engine, link, {}, collector)  # type: ignore[arg-type]
    return collector


def test_a_flood_of_commands_stops_no_step() -> None:
    """Regression: every command that was there was taken before the next step, and in a flood there is always one."""
    engine = Counting(64, 2, EngineConfig(device_kv_bytes=1 << 20))
    link = Link(
        itertools.chain([add(0, 8)], itertools.repeat(engine_process.Abort("nobody"))), lambda: engine.num_steps >= 8
    )
    serve(engine, link)
    outputs = [output for report in link.sent if isinstance(report, engine_process.Step) for output in report.outputs]
    assert len(outputs) == 8


def test_every_command_is_obeyed_in_its_order() -> None:
    engine = Counting(64, 2, EngineConfig(device_kv_bytes=1 << 20))
    commands = [add(i) for i in range(3000)]
    link = Link(commands, lambda: link.num_taken == len(commands) and not engine.has_unfinished)
    collector = serve(engine, link)
    accepted = [name for report in link.sent if isinstance(report, engine_process.Step) for name, _ in report.accepted]
    assert accepted == [f"r{i}" for i in range(3000)]
    assert len(collector.asked) == engine.num_steps + 1
    assert collector.asked[0] and collector.asked[-1] and not any(collector.asked[1:-1])

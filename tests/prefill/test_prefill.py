"""Prompts that a prefill engine computes: exact tokens over any history, whatever becomes of the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from omniserve import SLO, ClassSpec, Engine, EngineConfig, PrefillConfig, Request, SamplingParams, patch
from omniserve.core.errors import RequestRejected
from omniserve.prefill.server import PrefillServer
from omniserve.sched import SCHEDULERS
from tests.parity.engine_histories import Tally, made_up_profile, run_histories, run_history
from tests.parity.models import MODELS, tiny_model
from tests.parity.test_engine import model_and_reference
from tests.parity.test_network import cuts
from tests.parity.test_states import STRUCTURES
from tests.parity.test_states import model_and_reference as states_and_reference
from tests.parity.zoo import tiny
from tests.prefill.servers import SECRET, Server, config_of, make_quick, prefill_server
from tests.quick import slow_except
from tests.remote.proxy import Proxy


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    make_quick(monkeypatch)


def _small(model: Any) -> dict[str, Any]:
    spec = model.omniserve.spec
    block_bytes = spec.kv_block_bytes(8)
    settings = {
        "block_size": 8, "host_kv_bytes": 30 * block_bytes, "host_kv_dtype": "auto", "max_num_batched_tokens": 64,
        "prefix_cache": True,
    }  # fmt: skip
    if not spec.state_bytes:  # otherwise the history sees to it that the states have room, too
        settings |= {"device_kv_bytes": 14 * block_bytes, "max_host_requests": 16}
    return settings


def _config(servers: list[tuple[str, int]], secret_file: str, placement: str = "always") -> PrefillConfig:
    return PrefillConfig(
        prefill_engines=tuple("{}:{}".format(*address) for address in servers), prefill_secret_file=secret_file,
        prefill_placement=placement, prefill_timeout_s=5.0,
    )  # fmt: skip


@contextlib.contextmanager
def behind_proxies(servers: list[Server]) -> Iterator[list[Proxy]]:
    proxies = [Proxy(server.address) for server in servers]
    try:
        yield proxies
    finally:
        for proxy in proxies:
            proxy.close()


@pytest.mark.parametrize("family", slow_except(("llama", "gemma2"), MODELS))
def test_tokens_of_any_family_equal_hugging_face(family: str, secret_file: str) -> None:
    model, reference = model_and_reference(family, "cpu")
    with prefill_server(family) as server:
        run_histories(
            model, reference, range(1100, 1102), reach=("prefilled_tokens", "restored_tokens"), kv="tiered",
            prefill=_config([server.address], secret_file), has_profile=False, faults=lambda seed: seed % 2 == 0,
            **_small(model),
        )  # fmt: skip


@pytest.mark.parametrize("model_type", slow_except(("nemotron_h",), STRUCTURES))
def test_recurrent_states_come_with_the_kv(model_type: str, secret_file: str) -> None:
    """A prompt goes on where the other engine ended, through preemptions and with an engine that is cut off."""
    model, reference = states_and_reference(model_type, "cpu")
    with prefill_server(model_type) as server, behind_proxies([server]) as proxies:
        run_histories(
            model, reference, range(2034, 2037), reach=("prefilled_tokens", "restored_tokens"), kv="tiered",
            prefill=_config([proxies[0].address], secret_file), has_profile=False, faults=lambda seed: seed % 2 == 0,
            async_steps=lambda seed: seed % 3 == 0, disturb=lambda seed: cuts(proxies),
            **_small(model),
        )  # fmt: skip


@pytest.mark.parametrize("scheduler", slow_except(("omniserve", "sarathi"), SCHEDULERS.names()))
def test_every_scheduler_with_engines_that_are_cut_off(scheduler: str, secret_file: str) -> None:
    model, reference = model_and_reference("llama", "cpu")
    with (
        prefill_server("llama") as one,
        prefill_server("llama", host_kv_bytes=20 * model.omniserve.spec.kv_block_bytes(8)) as other,
        behind_proxies([one, other]) as proxies,
    ):
        run_histories(
            model, reference, range(1120, 1123), reach=("prefilled_tokens",), scheduler=scheduler,
            kv=lambda seed: ("tiered", "incremental")[seed % 2], disturb=lambda seed: cuts(proxies),
            prefill=lambda seed: _config(
                [proxy.address for proxy in proxies], secret_file, ("always", "sooner", "in-time")[seed % 3]
            ),
            async_steps=lambda seed: seed % 3 == 0, **_small(model),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other"),
    slow_except({(signal.SIGKILL, signal.SIGSTOP)}, itertools.permutations((signal.SIGKILL, signal.SIGSTOP))),
)
def test_no_request_is_lost_with_an_engine_that_is_killed_and_one_that_hangs(
    one: int, other: int, secret_file: str
) -> None:
    """Engines are lost in every phase of a prompt: while they are asked, while they compute, while they send."""
    model, reference = model_and_reference("llama", "cpu")
    for number, after in zip((one, other) * 2, (1, 5, 20, 60), strict=True):
        with prefill_server("llama") as server:
            tally = Tally()
            run_history(
                model, reference, 1140 + after, tally=tally, kv="tiered", disturb=_kill(server, number, after),
                prefill=dataclasses.replace(_config([server.address], secret_file), prefill_timeout_s=0.5),
                has_profile=False, **_small(model),
            )  # fmt: skip
            assert tally.finished > 0
            server.process.kill()


def _kill(server: Server, number: int, after: int) -> Callable[[random.Random], None]:
    """Return what sends a signal to a prefill engine before a step."""
    steps = itertools.count()

    def disturb(rng: random.Random) -> None:
        if next(steps) == after:
            os.kill(server.process.pid, number)

    return disturb


def _engine(model: Any, config: PrefillConfig, **settings: Any) -> Engine:
    return Engine(model, config_of(model, prefill=config, **settings))


def _generate(engine: Engine, prompts: Sequence[Sequence[int]], service_class: str = "LS") -> list[Sequence[int]]:
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    requests = [Request(prompt_token_ids=each, sampling=sampling, service_class=service_class) for each in prompts]
    return [completion.token_ids for completion in engine.generate(requests)]


_PROMPTS = [[(17 * index + 3 * at) % 150 + 1 for at in range(60)] for index in range(6)]


def test_prompts_go_there_and_their_kv_is_found_again(secret_file: str) -> None:
    model, _ = model_and_reference("llama", "cpu")
    with prefill_server("llama") as server:
        with _engine(model, PrefillConfig()) as alone:
            expected = _generate(alone, _PROMPTS)
        with _engine(model, _config([server.address], secret_file)) as engine:
            assert _generate(engine, _PROMPTS) == expected
            assert sum(engine.stats().scheduler.loaded_from("prefilled").values()) == 6 * 56
            assert server.stats() == {"asked": 6, "done": 6, "failed": 0, "blocks_sent": 42}
            assert _generate(engine, _PROMPTS, "BE") == expected  # what is here is not asked for again
            assert server.stats()["asked"] == 6


def test_it_is_no_warning_that_an_engine_without_work_there_ends(
    secret_file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model, _ = model_and_reference("llama", "cpu")
    with prefill_server("llama") as server:
        with _engine(model, _config([server.address], secret_file)) as engine:
            _generate(engine, _PROMPTS)
        with _engine(model, _config([server.address], secret_file)) as engine:  # it is there for the next one
            _generate(engine, _PROMPTS)
            assert server.stats()["asked"] == 12
    assert "is lost" not in capfd.readouterr().err


def test_a_request_that_is_late_here_but_not_there_is_admitted_and_goes_there(secret_file: str) -> None:
    model, _ = model_and_reference("llama", "cpu")
    with prefill_server("llama") as server:
        config = config_of(model, prefill=_config([server.address], secret_file, "sooner"))
        with Engine(model, config, profile=made_up_profile(model, config)) as engine:
            sampling = SamplingParams(max_tokens=1)
            late = Request(prompt_token_ids=_PROMPTS[1], sampling=sampling, slo=SLO(ttft_s=1e-5))
            with pytest.raises(RequestRejected):
                engine.add(late)
            engine.generate([Request(prompt_token_ids=_PROMPTS[0], sampling=sampling, slo=SLO())])
            prefills = engine.scheduler.requests.loads.sources[0]
            assert prefills.num_tokens.total() == 56 and prefills._token_s[1] > 0
            prefills._token_s[1] = 1e-9  # it is fast, as far as it is known
            engine.generate([late])
            assert prefills.num_tokens.total() == 2 * 56


def test_blocks_of_bfloat16(secret_file: str) -> None:
    """Values of such blocks come as they are: in the layout of the pool, of which numpy knows no dtype."""
    model = patch(tiny_model("llama", torch.bfloat16), compile=False)
    with prefill_server("llama", dtype="bfloat16") as server, _engine(model, PrefillConfig()) as alone:
        expected = _generate(alone, _PROMPTS)
        with _engine(model, _config([server.address], secret_file)) as engine:
            assert _generate(engine, _PROMPTS) == expected
            assert server.stats()["done"] == 6


def test_an_engine_without_memory_leaves_the_prompt_to_this_one(secret_file: str) -> None:
    model, _ = model_and_reference("llama", "cpu")
    block_bytes = model.omniserve.spec.kv_block_bytes(8)
    with prefill_server("llama", host_kv_bytes=2 * block_bytes) as server:
        with _engine(model, PrefillConfig()) as alone:
            expected = _generate(alone, _PROMPTS)
        with _engine(model, _config([server.address], secret_file)) as engine:
            assert _generate(engine, _PROMPTS) == expected
        assert server.stats()["failed"] > 0


def test_an_aborted_request_gives_its_blocks_back(secret_file: str) -> None:
    model, _ = model_and_reference("llama", "cpu")
    with prefill_server("llama") as server, _engine(model, _config([server.address], secret_file)) as engine:
        for prompt in _PROMPTS:
            engine.add(Request(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=4), request_id=str(prompt)))
        engine.step()
        for prompt in _PROMPTS:
            engine.abort(str(prompt))
        for _ in range(500):
            engine.step()
            engine.wait(0.01)
            if not engine.prefill_engines.busy:
                break
        engine.step()
        engine.scheduler.check_integrity()
        assert not engine.scheduler.requests.loads.sources[0]._orders and not engine.has_unfinished


def test_an_engine_that_is_not_there_is_left_out_and_joins_later(secret_file: str) -> None:
    model, _ = model_and_reference("llama", "cpu")
    with prefill_server("llama") as server:
        address = server.address
    with _engine(model, _config([address], secret_file)) as engine:
        before = _generate(engine, _PROMPTS[:3])
        assert sum(engine.stats().scheduler.loaded_from("prefilled").values()) == 0
        with prefill_server("llama", port=address[1]):
            for _ in range(300):
                engine.step()
                if engine.scheduler.requests.loads.sources[0].can_ask:
                    break
                time.sleep(0.02)
            after = _generate(engine, _PROMPTS[3:])
            assert sum(engine.stats().scheduler.loaded_from("prefilled").values()) == 3 * 56
    with _engine(model, PrefillConfig()) as alone:
        assert _generate(alone, _PROMPTS) == before + after


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"block_size": 16}, "block_size"),
        ({"classes": (ClassSpec(name="gold", kind="LS"), ClassSpec(name="BE", kind="BE"))}, "classes .* gold"),
    ],
)
def test_engines_that_differ_are_refused(settings: dict[str, Any], why: str, secret_file: str) -> None:
    model, _ = model_and_reference("llama", "cpu")
    with prefill_server("llama") as server, pytest.raises(ValueError, match=f"refuses this engine: .*{why}"):
        _engine(model, _config([server.address], secret_file), **settings)


def test_another_model_and_a_wrong_secret_are_refused(secret_file: str, tmp_path: Path) -> None:
    model, _ = model_and_reference("qwen2", "cpu")
    wrong = tmp_path / "wrong"
    wrong.write_text("some other secret, as long")
    with prefill_server("llama") as server:
        with pytest.raises(ValueError, match="refuses this engine: it has another model"):
            _engine(model, _config([server.address], secret_file))
        with pytest.raises(ValueError, match="does not know the secret"):
            _engine(model, _config([server.address], str(wrong)))


def test_settings_without_a_prefix_cache_in_host_memory_are_refused(secret_file: str) -> None:
    model, _ = model_and_reference("llama", "cpu")
    config = _config([("127.0.0.1", 1)], secret_file)
    with pytest.raises(ValueError, match="host_kv_bytes"):
        EngineConfig(prefill=config, host_kv_bytes=0)
    with pytest.raises(ValueError, match="prefill_secret_file"):
        PrefillConfig(prefill_engines=("a:1",))
    with pytest.raises(ValueError, match="prefix cache"):
        _engine(model, config, prefix_cache=False)
    with pytest.raises(ValueError, match="recurrent states"):
        Engine(patch(tiny("nemotron_h"), compile=False), config_of(model, prefix_cache=True))


@pytest.mark.parametrize("async_steps", [True, None])
def test_a_prefill_engine_that_may_launch_steps_ahead_is_refused_with_recurrent_states(
    async_steps: bool | None,
) -> None:
    """The next step could overwrite the states before they are sent. None: on a GPU it does."""
    model, _ = states_and_reference("nemotron_h", "cpu")
    config = config_of(model, prefill=PrefillConfig(is_prefill_engine=True), async_steps=async_steps)
    with Engine(model, config) as engine, pytest.raises(ValueError, match="async_steps"):
        PrefillServer(engine, fingerprint="", secret=SECRET.encode())


def test_states_that_came_are_dropped_if_the_prompt_is_computed_here_all_the_same() -> None:
    """The host has forgotten a block. Later the request moves to the host and back, and must go on with its own."""
    model, _ = states_and_reference("nemotron_h", "cpu")
    config = config_of(model, prefill=PrefillConfig(is_prefill_engine=True))
    with Engine(model, config) as engine:
        engine.add(Request(prompt_token_ids=_PROMPTS[0], sampling=SamplingParams(max_tokens=4), request_id="a"))
        state = engine.scheduler.requests.states["a"]
        state.prefix.states = b"states"
        engine.step()
        assert state.num_computed_tokens > 0 and state.prefix.states is None


def test_states_of_another_size_are_refused() -> None:
    model, _ = states_and_reference("nemotron_h", "cpu")
    with Engine(model, config_of(model, prefix_cache=False)) as engine:
        pool = engine.runner.states.pool
        saved = pool.save(0)
        assert len(saved) == engine.spec.state_bytes
        with pytest.raises(ValueError, match="recurrent states of"):
            pool.load(0, saved[:-1])

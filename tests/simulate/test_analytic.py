"""Devices of data sheets: monotone, in the right order of size, and near to what was measured."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from omniserve.core.config import EngineConfig
from omniserve.latency import BatchFeatures
from omniserve.simulate.analytic import AnalyticDevice, analytic_machine, engine_config_for
from omniserve.simulate.hardware import DEVICES, HOSTS, find_devices, find_hosts
from omniserve.simulate.models import MODELS, find_model

A100 = DEVICES["a100-80gb"]
HOST = HOSTS["xeon-6342"]


def decodes(count: int, context: int) -> BatchFeatures:
    return BatchFeatures(
        decode_requests=count, decode_context=count * context, decode_load=float(count * context),
        sampled_rows=count, dense_layers=60,
    )  # fmt: skip


def prefill(tokens: int) -> BatchFeatures:
    return BatchFeatures(
        prefill_requests=1, prefill_tokens=tokens, prefill_load=tokens * (tokens + 1) / 2, sampled_rows=1,
        dense_layers=60,
    )  # fmt: skip


@pytest.mark.parametrize("name", DEVICES)
def test_more_load_never_takes_less(name: str) -> None:
    device = AnalyticDevice(find_model("yi-34b"), DEVICES[name], 2 if DEVICES[name].link_alpha_s else 1)
    for grow in (
        lambda n: decodes(n, 500), lambda n: decodes(8, 64 * n), prefill,
        lambda n: BatchFeatures(seats=8, piggyback_rows=n, piggyback_layers=min(n, 60), dense_layers=60),
    ):  # fmt: skip
        times = [device.step_s(grow(n)) for n in (1, 2, 3, 16, 17, 64, 128, 500, 513, 2048)]
        assert times == sorted(times) and times[0] > 0
        for n in (1, 64, 2048):
            assert all(term >= 0 for term in device.terms(grow(n)))


def test_more_and_faster_devices_take_less() -> None:
    model = find_model("llama-2-70b")
    for features in (decodes(32, 1000), prefill(2048)):
        times = [AnalyticDevice(model, A100, count).step_s(features) for count in (2, 4, 8)]
        assert times == sorted(times, reverse=True)
        slow_to_fast = ["t4", "a10", "a100-80gb", "h100-80gb", "h200-141gb"]
        times = [AnalyticDevice(model, DEVICES[name]).step_s(features) for name in slow_to_fast]
        assert all(later <= earlier for earlier, later in itertools.pairwise(times))


def test_a_step_of_decodes_reads_all_weights_once() -> None:
    model = find_model("llama-2-13b")
    seconds = AnalyticDevice(model, A100).step_s(decodes(1, 1))
    assert 1.0 < seconds / (model.weight_bytes / A100.bytes_per_s) < 2.2


# Milliseconds of a layer's projections and elementwise kernels, Llama-2-70B, and seconds of whole prefills of Yi-34B on
# two A100 PCIe cards, as measured by Vidur and Sarathi-Serve (MIT; Apache-2.0).
@pytest.mark.parametrize(("rows", "measured_ms"), [(16, 0.328), (128, 0.418), (512, 1.116), (2048, 4.156)])
def test_dense_layers_are_near_measured_ones(rows: int, measured_ms: float) -> None:
    device = AnalyticDevice(find_model("llama-2-70b"), A100, 4)
    assert 1e3 * device.dense_layer_s(rows) == pytest.approx(measured_ms, rel=0.12)


@pytest.mark.parametrize(("tokens", "measured_s"), [(512, 0.1056), (2048, 0.366), (4096, 0.7576)])
def test_whole_prefills_are_near_measured_ones(tokens: int, measured_s: float) -> None:
    device = AnalyticDevice(find_model("yi-34b-200k"), DEVICES["a100-80gb-pcie"], 2)
    assert device.step_s(prefill(tokens)) == pytest.approx(measured_s, rel=0.12)


def test_a_machine_has_the_memory_that_weights_leave() -> None:
    model = find_model("llama-2-70b")
    machine = analytic_machine(model, A100, 4, hosts=(HOST,) * 3)
    assert machine.device_kv_bytes is not None and machine.host_kv_bytes is not None
    assert 0 < machine.device_kv_bytes < 4 * A100.memory_bytes - model.weight_bytes
    assert len(machine.hosts) == 3 and machine.host_kv_bytes == pytest.approx(0.8 * 3 * HOST.memory_bytes)
    local, remote, _ = machine.hosts
    assert local.num_threads < remote.num_threads and local.latency_s < remote.latency_s
    assert local.key_s == remote.key_s and remote.move_byte_s > 0
    config = engine_config_for(machine, max_num_batched_tokens=128)
    assert (config.device_kv_bytes, config.max_num_batched_tokens) == (machine.device_kv_bytes, 128)


def test_host_memory_alone_limits_the_requests_on_the_host_unless_their_number_is_given() -> None:
    machine = analytic_machine(find_model("yi-34b-200k"), A100, 2, hosts=(HOST,) * 5)
    config = engine_config_for(machine, block_size=32)
    assert machine.host_kv_bytes is not None
    assert config.max_host_requests == machine.host_kv_bytes // machine.spec.kv_block_bytes(32) > 3_000
    assert engine_config_for(machine, max_host_requests=7).max_host_requests == 7
    assert engine_config_for(machine, host_kv_bytes=0).max_host_requests == 1
    with_states = dataclasses.replace(machine, spec=dataclasses.replace(machine.spec, state_bytes=1))
    assert engine_config_for(with_states).max_host_requests == EngineConfig.max_host_requests


def test_the_gap_between_host_and_device_attention_is_the_papers() -> None:
    # omniserve, Table 1: ten decodes of 1,000 tokens, Llama-2-70B, one A100 and one Xeon 6342: 7.58 times.
    model = find_model("llama-2-70b")
    node = analytic_machine(model, A100, 4, hosts=(HOST,)).hosts[0]
    terms = AnalyticDevice(model, A100).terms(decodes(10, 1000))
    assert 10_000 * node.key_s / (terms[2] / model.num_layers) == pytest.approx(7.58, rel=0.1)


@pytest.mark.parametrize(
    ("text", "said"),
    [("9xA100", "alone or by 2, 4, 8"), ("B200", "unknown device 'B200'; known: A100"), ("0xA100", "count and name")],
)
def test_unknown_devices_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        find_devices(text)


def test_names_are_found_in_any_case() -> None:
    assert find_devices("4xa100-80gb-pcie")[0] == 4
    assert find_devices("H100") == (1, DEVICES["h100-80gb"])
    assert find_hosts("5xXeon-6342") == (5, HOST)
    with pytest.raises(ValueError, match="unknown host"):
        find_hosts("2xPentium")
    assert find_model("Llama-2-70B") is MODELS["llama-2-70b"]


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 138 GB"):
        analytic_machine(find_model("llama-2-70b"), A100)
    with pytest.raises(ValueError, match="9 heads, which 2 devices"):
        AnalyticDevice(find_model("smollm-135m"), A100, 2)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-2-7b", 6.74), ("llama-2-70b", 69.0), ("llama-3-8b", 8.03), ("yi-34b", 34.4), ("opt-13b", 12.9),
     ("qwen-2.5-14b", 14.8), ("smollm-135m", 0.1345)],
)  # fmt: skip
def test_known_models_have_their_weights(name: str, billions: float) -> None:
    assert find_model(name).weight_bytes / 2e9 == pytest.approx(billions, rel=0.015)


def test_a_local_config_is_read(tmp_path: Path) -> None:
    config = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 256, "tie_word_embeddings": True,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    model = find_model(str(tmp_path))
    assert (model.num_layers, model.head_size, model.spec.max_model_len, model.ties_embeddings) == (2, 16, 256, True)
    for broken, said in (
        ({"hidden_size": None}, "does not say hidden_size"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number"),
        ({"num_key_value_heads": 3}, "no multiple of its 3 KV heads"),
        ({"num_local_experts": 8}, "mixture of experts"),
    ):
        path.write_text(json.dumps(config | broken))
        with pytest.raises(ValueError, match=said):
            find_model(str(path))
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        find_model(str(path))
    with pytest.raises(ValueError, match="unknown model"):
        find_model("nobody/knows")

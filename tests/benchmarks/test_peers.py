"""The comparison with other engines: what it needs no other engine for."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common.client import RequestRecord, Wire
from benchmarks.common.machine_speed import MachineSpeed, SpeedMeter
from benchmarks.common.models import random_llama
from benchmarks.common.record import ROOT, portable, read_rows, write_record
from benchmarks.peers import __main__ as peers
from benchmarks.peers import comparison, processes
from benchmarks.peers import engines as peers_engines
from benchmarks.peers.comparison import Comparison, interleaved
from benchmarks.peers.engines import Settings, contenders, engines, parse_peer
from benchmarks.peers.gguf import write_gguf
from benchmarks.peers.loads import PHASES, QUICK, Sizes, decode_rate
from benchmarks.peers.model import SHAPES, ModelCost, SavedModel
from benchmarks.peers.processes import Engine, Pool, cpu_seconds
from benchmarks.peers.report import gain, markdown, plot
from benchmarks.peers.weights import (
    DENSE,
    FORMS,
    LLAMA_CPP,
    OMNISERVE,
    VLLM,
    W4A16,
    Weights,
    weights_in,
    weights_of,
    write_w4a16,
)
from omniserve.layers.weights.quantized import dense_of
from omniserve.layers.weights.quantized_checkpoints import QuantizedCheckpoint

TINY = SHAPES["tiny"]
SHORT = dataclasses.replace(QUICK, prefill_samples=1, ls_rate=20.0, ls_seconds=0.2, be_requests=2, be_output=2)

# -- the command line -----------------------------------------------------------------------------------------------


def test_a_peer_is_a_name_and_a_folder_with_its_server(tmp_path: Path) -> None:
    for program in ("vllm/bin/python", "build/bin/llama-server", "unpacked/llama-server"):
        (tmp_path / program).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / program).touch()
    assert parse_peer(f"vllm={tmp_path}/vllm") == (VLLM, tmp_path / "vllm")
    assert parse_peer(f"vLLM={tmp_path}/vllm") == (VLLM, tmp_path / "vllm")
    for folder in ("build", "unpacked"):
        assert parse_peer(f"llama.cpp={tmp_path}/{folder}") == (LLAMA_CPP, tmp_path / folder)
    for text in ("vllm", "vllm=", f"sglang={tmp_path}", "=x"):
        with pytest.raises(ValueError, match=r"a peer is vllm=DIR or llama\.cpp=DIR"):
            parse_peer(text)
    with pytest.raises(ValueError, match="has no bin/llama-server or llama-server"):
        parse_peer(f"llama.cpp={tmp_path}/vllm")


def test_a_bad_command_line_ends_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--peer", "vllm=/no/such/folder"], "has no bin/python"),
        (["--phases", "training"], "invalid choice"),
        (["--rounds", "0"], "must be 1 or more"),
        (["--threads", "100000"], "--threads must be from 1 to"),
        (["--weights", "Q2_K"], "invalid choice"),
        (["--gguf", "/no/such/file.gguf"], "there is no such file"),
        (["--decode-output", "1"], "--decode-output must be 2 or more"),
    ):
        with pytest.raises(SystemExit):
            peers.parse_arguments(arguments)
        assert message in capsys.readouterr().err


# -- who takes part, and when ---------------------------------------------------------------------------------------


def engine(name: str, **fields: Any) -> Engine:
    plain: dict[str, Any] = {"program": (), "arguments": (), "environment": {}, "wire": Wire(), "version": "1"}
    plain["weights"] = "bf16"
    return Engine(name=name, **plain | fields)


def test_each_round_begins_with_another_contender() -> None:
    assert interleaved(["a", "b", "c"], 4) == [
        (0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a"), (2, "c"), (2, "a"), (2, "b"),
        (3, "a"), (3, "b"), (3, "c"),
    ]  # fmt: skip


def test_co_serving_has_a_line_for_each_pair_of_objectives_and_each_use_of_priorities() -> None:
    wires = {OMNISERVE: Wire(), VLLM: Wire(omniserve_fields=False, priority_field=True)}
    wires[LLAMA_CPP] = Wire(omniserve_fields=False)
    engines = {name: engine(name, wire=wire) for name, wire in wires.items()}
    lines = {line.label: line for line in contenders(engines, "coserve")}
    assert list(lines) == [
        "OmniServe, 1 s and 0.25 s",
        "OmniServe, 0.3 s and 0.06 s",
        "vLLM, priority",
        "vLLM, FCFS",
        "llama.cpp",
    ]
    assert [line.slo for line in lines.values()] == [(1.0, 0.25), (0.3, 0.06), None, None, None]
    assert [line.wire.priority_field for line in lines.values()] == [False, False, True, False, False]
    assert [line.label for line in contenders(engines, "decode")] == [OMNISERVE, VLLM, LLAMA_CPP]


# -- figures --------------------------------------------------------------------------------------------------------


def test_the_floor_counts_the_arithmetic_of_the_model() -> None:
    model, tokens = random_llama(dtype=torch.float32, attn_implementation="eager", **TINY), 24
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.ones(1, tokens, dtype=torch.long))
    cost = ModelCost.of(TINY)
    # The counter sees logits of all tokens, and attention of each token to all, of which half is masked.
    attention = 4 * cost.attention_width * tokens**2
    linear = 2 * tokens * (cost.layer_weights + cost.head_weights)
    assert counter.get_total_flops() == linear + attention
    assert cost.prefill_flop(tokens) == 2 * tokens * cost.layer_weights + 2 * cost.head_weights + attention / 2
    assert cost.decode_flop(10) == 2 * (cost.layer_weights + cost.head_weights) + 40 * cost.attention_width


def test_the_floor_counts_the_weights_and_the_kv_of_the_model() -> None:
    cost = ModelCost.of(TINY)
    read_once = sum(value.numel() for value in random_llama(**TINY).parameters() if value.dim() == 2)
    assert cost.layer_weights + cost.head_weights == read_once  # the tied embedding is the head
    untied = ModelCost.of(TINY | {"tie_word_embeddings": False})
    assert untied == cost  # of another embedding a step reads a row a token
    assert cost.kv_values == 2 * 2 * 1 * 32  # K and V of two layers with one head of 32


def test_a_step_takes_as_long_as_the_slower_of_memory_and_arithmetic() -> None:
    cost = ModelCost(layer_weights=900, head_weights=100, kv_values=10, attention_width=5)
    slow_memory = MachineSpeed(bytes_per_s=100.0, flop_per_s=1e9)
    slow_products = MachineSpeed(bytes_per_s=1e9, flop_per_s=100.0)
    assert cost.decode_step_s(slow_memory, 4, 20) == 2 * (1000 + 4 * 20 * 10) / 100
    assert cost.decode_step_s(slow_products, 4, 20) == 4 * (2 * 1000 + 4 * 5 * 20) / 100
    assert cost.prefill_s(slow_memory, 8) == 2 * 1000 / 100
    assert cost.prefill_s(slow_products, 8) == (2 * 900 * 8 + 2 * 100 + 2 * 5 * 64) / 100
    decodes = 3 * (2 * 1000 + 4 * 5 * (8 + 2))
    assert cost.batch_s(slow_products, count=7, prompt=8, output=4) == 7 * (cost.prefill_flop(8) + decodes) / 100


@pytest.fixture
def cores_and_threads() -> Iterator[None]:
    """Give this process its cores and torch its threads back, which measuring takes away."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("cores_and_threads")
def test_the_machine_has_a_speed() -> None:
    meter = SpeedMeter([min(os.sched_getaffinity(0))], arena_bytes=4 << 20, repeats=1)
    speed = meter.sample()
    assert speed.bytes_per_s > 0 and speed.flop_per_s > 0
    assert "fp32" in meter.flop_per_s_by_product and min(meter.flop_per_s_by_product.values()) > 0


def test_a_decode_rate_is_of_the_tokens_after_the_first_ones() -> None:
    def record(first_s: float, last_s: float, tokens: int) -> RequestRecord:
        return RequestRecord(
            service_tier="priority", send_at_s=0, first_token_s=first_s, last_token_s=last_s, num_output_tokens=tokens
        )

    assert decode_rate([record(1.0, 3.0, 21)]) == 10.0
    assert decode_rate([record(1.0, 3.0, 21), record(2.0, 5.0, 11)]) == 30 / 4
    for none in ([record(1.0, 1.0, 1)], [RequestRecord(service_tier="priority", send_at_s=0)]):
        with pytest.raises(ValueError, match="two tokens"):
            decode_rate(none)


def test_a_gain_is_the_median_over_pairs_of_one_round() -> None:
    ours, theirs = {0: 10.0, 1: 30.0, 2: 40.0, 5: 1.0}, {0: 5.0, 1: 10.0, 2: 40.0, 4: 1.0}
    assert gain(ours, theirs, more_is_better=True) == 2.0  # of 2, 3, 1
    assert gain(ours, theirs, more_is_better=False) == 0.5  # of 1/2, 1/3, 1
    assert gain(ours, {7: 1.0}, more_is_better=True) is None


# -- the model for llama.cpp ----------------------------------------------------------------------------------------


class GGUF:
    """Reads a file by the format's description."""

    def __init__(self, path: Path) -> None:
        self._data, self._at = path.read_bytes(), 0
        assert self._data[:4] == b"GGUF"
        self._at = 4
        version, num_tensors, num_fields = self._take("<IQQ")
        assert version == 3
        self.fields = {self._string(): self._value(*self._take("<I")) for _ in range(num_fields)}
        about = []
        for _ in range(num_tensors):
            name, (dims,) = self._string(), self._take("<I")
            sizes = self._take(f"<{dims}Q")
            about.append((name, sizes[::-1], *self._take("<IQ")))
        begin = -(-self._at // 32) * 32
        self.tensors = {}
        for name, shape, kind, offset in about:
            assert offset % 32 == 0
            dtype = {0: torch.float32, 30: torch.bfloat16}[kind]
            count = torch.Size(shape).numel()
            values = torch.frombuffer(bytearray(self._data), dtype=dtype, count=count, offset=begin + offset)
            self.tensors[name] = values.view(shape)

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return values

    def _string(self) -> str:
        (length,) = self._take("<Q")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == 8:
            return self._string()
        if kind == 9:
            kind, count = self._take("<IQ")
            return [self._value(kind) for _ in range(count)]
        return self._take({4: "<I", 5: "<i", 6: "<f", 7: "<?"}[kind])[0]


def rotated(rows: torch.Tensor, angles: torch.Tensor, *, neighbours: bool) -> torch.Tensor:
    """Return rows ``[heads, size]`` whose pairs of values are rotated by ``angles`` ``[size / 2]``."""
    pairs = rows.unflatten(1, (-1, 2)) if neighbours else rows.unflatten(1, (2, -1)).transpose(1, 2)
    first, second = pairs.unbind(-1)
    return torch.stack([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1)


def test_gguf_holds_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    shape = TINY | {"tie_word_embeddings": False}
    model = random_llama(dtype=torch.bfloat16, **shape)
    model.save_pretrained(tmp_path)
    write_gguf(tmp_path, model.config.to_dict(), tmp_path / "weights.gguf", "bfloat16")
    read = GGUF(tmp_path / "weights.gguf")
    assert read.fields["general.architecture"] == "llama" and read.fields["llama.block_count"] == 2
    assert read.fields["llama.rope.dimension_count"] == 32 and read.fields["llama.rope.freq_base"] == 10000.0
    assert len(read.fields["tokenizer.ggml.tokens"]) == 1024 and read.fields["tokenizer.ggml.tokens"][7] == "▁w7"
    layer, tensors = model.model.layers[1], read.tensors
    assert len(tensors) == 3 + 2 * 9
    assert torch.equal(tensors["token_embd.weight"], model.model.embed_tokens.weight)
    assert torch.equal(tensors["output.weight"], model.lm_head.weight)
    assert torch.equal(tensors["blk.1.ffn_down.weight"], layer.mlp.down_proj.weight)
    assert torch.equal(tensors["blk.1.attn_v.weight"], layer.self_attn.v_proj.weight)
    assert tensors["blk.1.ffn_norm.weight"].dtype is torch.float32

    hidden, angles = torch.randn(64), torch.linspace(0.1, 3.0, 16)
    for name, linear, heads in (("q", layer.self_attn.q_proj, 2), ("k", layer.self_attn.k_proj, 1)):
        theirs = (tensors[f"blk.1.attn_{name}.weight"].float() @ hidden).view(heads, 32)
        ours = (linear.weight.float() @ hidden).view(heads, 32)
        # Rounding: the same products, summed in an order that may differ by row.
        torch.testing.assert_close(rotated(theirs, angles, neighbours=True), rotated(ours, angles, neighbours=False))


def test_gguf_in_fp32_has_the_values_of_the_bf16_checkpoint(tmp_path: Path) -> None:
    model = random_llama(dtype=torch.bfloat16, **TINY)
    model.save_pretrained(tmp_path)
    write_gguf(tmp_path, model.config.to_dict(), tmp_path / "weights.gguf", "float32")
    tensors = GGUF(tmp_path / "weights.gguf").tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert "output.weight" not in tensors  # tied: llama.cpp takes the embedding
    assert torch.equal(tensors["token_embd.weight"], model.model.embed_tokens.weight.float())


def test_gguf_of_another_model_is_refused(tmp_path: Path) -> None:
    save_file({"model.layers.0.self_attn.q_proj.bias": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"q_proj\.bias, which is none of a Llama without biases"):
        write_gguf(tmp_path, TINY | {"rms_norm_eps": 1e-6}, tmp_path / "x.gguf", "bfloat16")
    with pytest.raises(ValueError, match="got float16"):
        write_gguf(tmp_path, TINY, tmp_path / "x.gguf", "float16")


# -- forms of weights -----------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> SavedModel:
    """Give a small untied model whose inputs fill groups of 128."""
    shape = TINY | {"hidden_size": 128, "tie_word_embeddings": False}
    model = random_llama(dtype=torch.bfloat16, **shape)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return SavedModel(name="small", folder=folder, config=model.config.to_dict())


@pytest.mark.parametrize(("form", "num_bits"), [("Q4_0", 4), ("Q8_0", 8)])
def test_gguf_holds_codes_of_all_matrices(saved: SavedModel, form: str, num_bits: int) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf extra is not installed")
    found = weights_of(saved, form, "bfloat16", {OMNISERVE, LLAMA_CPP})
    assert found.label == form and found.files.keys() == {OMNISERVE, LLAMA_CPP} and found.cost is not None
    own = load_file(saved.folder / "model.safetensors")
    reader = gguf.GGUFReader(found.files[OMNISERVE])
    assert reader.fields["general.file_type"].contents() == {"Q4_0": 2, "Q8_0": 7}[form]
    read = {tensor.name: tensor for tensor in reader.tensors}
    assert len(read) == 3 + 2 * 9
    matrices = [tensor for tensor in reader.tensors if len(tensor.shape) > 1]
    assert len(matrices) == 2 + 2 * 7 and {tensor.tensor_type.name for tensor in matrices} == {form}
    bytes_a_weight = sum(tensor.n_bytes for tensor in matrices) / sum(tensor.n_elements for tensor in matrices)
    assert found.cost.layer_weight_bytes == found.cost.head_weight_bytes == bytes_a_weight
    for name, weight in (("output", own["lm_head.weight"]), ("blk.1.ffn_up", own["model.layers.1.mlp.up_proj.weight"])):
        tensor = read[f"{name}.weight"]
        widened = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        # A code is at most half a step off, and in Q4_0 a whole one at the end that the codes reach less far.
        step = 2 * weight.float().unflatten(1, (-1, 32)).abs().amax(2) / (2**num_bits - 1)
        off = (widened - weight.float()).abs().unflatten(1, (-1, 32)).amax(2)
        assert bool((off <= 1.15 * step).all()) and off.max() > 0
    weights, vocab_size = weights_in(found.files[OMNISERVE])
    assert vocab_size == TINY["vocab_size"] and weights.label == form and weights.cost is None
    assert weights.memory_bytes == found.memory_bytes == found.files[OMNISERVE].stat().st_size


def test_w4a16_is_read_back_as_weights_that_are_rounded_once(saved: SavedModel) -> None:
    found = weights_of(saved, W4A16, "bfloat16", {OMNISERVE, VLLM})
    assert found.files.keys() == {OMNISERVE, VLLM}
    folder = found.files[OMNISERVE]
    own = load_file(saved.folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    checkpoint = QuantizedCheckpoint(folder, config["quantization_config"])
    assert checkpoint.weights == {name for name in own if "_proj." in name} and len(checkpoint.weights) == 14
    for name in checkpoint.weights:
        codes = checkpoint.weight(name)
        assert codes.form.bits == 4 and codes.form.group == 128
        groups = own[name].float().unflatten(1, (-1, 128))
        off = (dense_of(codes).unflatten(1, (-1, 128)) - groups).abs()
        # Half a step, and what the scale loses in bf16; the largest positive weight of a group is half a step beyond.
        assert bool((off <= 0.6 * groups.abs().amax(2, keepdim=True) / 7.5).all()) and off.max() > 0
    dense = checkpoint.state_dict(torch.bfloat16)
    assert dense.keys() == own.keys()
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(dense[name], own[name])
    assert (folder / "tokenizer.json").is_file()


def test_w4a16_of_inputs_that_fill_no_groups_is_refused(tmp_path: Path) -> None:
    random_llama(dtype=torch.bfloat16, **TINY).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="groups of 128 inputs; a weight has 64"):
        write_w4a16(tmp_path, tmp_path / "w4a16")


def test_each_engine_serves_the_weights_that_it_can(saved: SavedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf", reason="the gguf extra is not installed")
    monkeypatch.setattr(peers_engines, "_said", lambda command: "1.0")
    (saved.folder / "llama-server").touch()
    peers = [(VLLM, saved.folder), (LLAMA_CPP, saved.folder)]
    forms = [weights_of(saved, form, "bfloat16", {OMNISERVE, VLLM, LLAMA_CPP}) for form in FORMS]
    settings = Settings(weights=tuple(forms), vocab_size=1024, dtype="bfloat16", cpus=(0,), kv_gib=1, slots=4)
    found = engines(peers, settings)
    assert list(found) == [
        "OmniServe, bf16", "vLLM, bf16", "llama.cpp, bf16", "OmniServe, Q4_0", "llama.cpp, Q4_0", "OmniServe, Q8_0",
        "llama.cpp, Q8_0", "OmniServe, W4A16", "vLLM, W4A16",
    ]  # fmt: skip
    for name, each in found.items():
        assert name == f"{each.name}, {each.weights}"
        (weights,) = [weights for weights in forms if weights.label == each.weights]
        assert each.arguments[each.arguments.index("--model") + 1] == str(weights.files[each.name])
    (ours,) = engines(peers, dataclasses.replace(settings, weights=(weights_of(saved, DENSE, "float32", [OMNISERVE]),)))
    assert ours == OMNISERVE and not (saved.folder / "float32.gguf").exists()
    (alone,) = engines([], dataclasses.replace(settings, weights=tuple(forms[1:2])))
    assert alone == OMNISERVE


@pytest.mark.parametrize(
    ("flags", "case", "served"),
    [
        ([], "bf16", {"bf16": [LLAMA_CPP, OMNISERVE]}),
        (["--dtype", "float32"], "fp32", {"fp32": [LLAMA_CPP, OMNISERVE]}),
        (["--weights", "Q8_0", "dense"], "quantized", {"Q8_0": [LLAMA_CPP, OMNISERVE], "bf16": [OMNISERVE]}),
        (["--weights", "W4A16"], "W4A16", {"W4A16": [OMNISERVE, VLLM]}),
    ],
)
def test_the_command_line_says_what_is_served_and_compared(
    saved: SavedModel, monkeypatch: pytest.MonkeyPatch, flags: list[str], case: str, served: dict[str, list[str]]
) -> None:
    pytest.importorskip("gguf", reason="the gguf extra is not installed")
    monkeypatch.setattr(SavedModel, "made", lambda name: saved)
    (saved.folder / "llama-server").touch()
    args = peers.parse_arguments(["--peer", f"llama.cpp={saved.folder}", "--model", "tiny", *flags])
    settings, about = peers.settings_of(args)
    assert peers.case_of(args) == case
    assert {weights.label: sorted(weights.files, key=str.lower) for weights in settings.weights} == served
    assert about["weights"] == list(served) and settings.vocab_size == TINY["vocab_size"]


def test_a_gguf_file_is_served_as_it_is(saved: SavedModel) -> None:
    pytest.importorskip("gguf", reason="the gguf extra is not installed")
    path = weights_of(saved, "Q4_0", "bfloat16", [OMNISERVE]).files[OMNISERVE]
    args = peers.parse_arguments(["--gguf", str(path), "--decode-output", "9", "--quick"])
    settings, about = peers.settings_of(args)
    assert peers.case_of(args) == "gguf" and about == {"model": "Q4_0.gguf", "weights": ["Q4_0"]}
    assert settings.weights[0].files == {OMNISERVE: path, LLAMA_CPP: path}
    assert peers.sizes_of(args) == dataclasses.replace(QUICK, decode_output=9)


def test_the_floor_reads_codes_in_the_bytes_that_hold_them() -> None:
    dense, codes = ModelCost.of(TINY), ModelCost.of(TINY, 0.5, 1.0)
    memory = MachineSpeed(bytes_per_s=1.0, flop_per_s=1e30)
    assert codes.weight_bytes == dense.layer_weights / 2 + dense.head_weights
    assert dense.decode_step_s(memory, 1, 0) == 2 * (dense.layer_weights + dense.head_weights)
    kv = 2 * 3 * 10 * dense.kv_values
    assert codes.decode_step_s(memory, 3, 10) == codes.weight_bytes + kv
    products = MachineSpeed(bytes_per_s=1e30, flop_per_s=1.0)
    assert codes.prefill_s(products, 9) == dense.prefill_s(products, 9)


# -- servers that take turns ----------------------------------------------------------------------------------------

STUB = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def event(self, content):
        self.wfile.write(f"data: {json.dumps(content)}\\n\\n".encode())

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        if not body.get("stream"):
            self.wfile.write(json.dumps({"choices": [{"text": sys.argv[-1]}]}).encode())
            return
        for _ in range(body["max_tokens"]):
            self.event({"choices": [{"text": " x"}]})
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\\n\\n")

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REST_S", "IDLE_S", "SETTLE_S"):
        monkeypatch.setattr(processes, name, 0.02)


def stub_engine(name: str, token: str = "x") -> Engine:
    return engine(name, program=(sys.executable, "-c", STUB), arguments=(token,))


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def rests(server: Any) -> bool:
    """Tell whether a server is stopped, which its process may learn a moment after it was sent the signal."""
    until_s = time.monotonic() + 10.0
    while state_of(server.group) != "T" and time.monotonic() < until_s:
        time.sleep(0.01)
    return state_of(server.group) == "T"


@pytest.mark.usefixtures("hurry")
def test_servers_rest_while_another_is_measured_and_end_with_the_pool(tmp_path: Path) -> None:
    engines = {name: stub_engine(name) for name in "ab"}
    with Pool(engines, cpus=[0], folder=tmp_path, warm_up=[], in_turns=False) as pool:
        with pool.active("a") as first:
            assert state_of(first.group) != "T"
        assert rests(first)
        with pool.active("b") as second:
            assert rests(first) and state_of(second.group) != "T"
        with pool.active("a") as again:
            assert again is first and state_of(first.group) != "T" and rests(second)
    assert not first.is_running and not second.is_running
    assert pool.idle_cores.keys() == {"a", "b"} and pool.first_tokens == {"a": ["x"] * 8, "b": ["x"] * 8}


@pytest.mark.usefixtures("hurry")
def test_servers_that_do_not_fit_together_are_started_in_turns(tmp_path: Path) -> None:
    with Pool({"a": stub_engine("a")}, cpus=[0], folder=tmp_path, warm_up=[], in_turns=True) as pool:
        with pool.active("a") as first:
            assert first.is_running
        assert not first.is_running


def test_cpu_time_is_that_of_a_process_group(tmp_path: Path) -> None:
    def process(number: int, group: int, user: int, system: int) -> None:
        (tmp_path / str(number)).mkdir()
        rest = f"S 1 {group} 1 0 -1 0 0 0 0 0 {user} {system} 900 900 20 0"
        (tmp_path / str(number) / "stat").write_text(f"{number} (a ) b) {rest}")

    process(10, 10, 100, 20)
    process(11, 10, 3, 4)
    process(12, 12, 5000, 5000)
    (tmp_path / "self").mkdir()
    (tmp_path / "13").mkdir()  # has ended
    assert cpu_seconds(10, tmp_path) == pytest.approx(127 / 100)  # 100 ticks a second


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a made-up speed of the machine in place of a measured one."""

    class Meter:
        flop_per_s_by_product: dict[str, float] = {}  # noqa: RUF012

        def __init__(self, cpus: object, seed: int) -> None:
            pass

        def sample(self) -> MachineSpeed:
            return MachineSpeed(bytes_per_s=1e9, flop_per_s=1e12)

    monkeypatch.setattr(comparison, "SpeedMeter", Meter)


def form(label: str, layer_weight_bytes: float = 2.0, memory_bytes: int = 100) -> Weights:
    cost = ModelCost.of(TINY, layer_weight_bytes, layer_weight_bytes)
    return Weights(label=label, files={}, memory_bytes=memory_bytes, cost=cost)


def compared(
    tmp_path: Path, tokens: dict[str, str], phases: list[str], rounds: int, sizes: Sizes = SHORT,
    forms: tuple[Weights, ...] = (form("bf16"),), earlier: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the results of engines by name, which is "NAME, WEIGHTS" with several forms, and their first tokens."""
    settings = Settings(weights=forms, vocab_size=1024, dtype="bfloat16", cpus=(0,), kv_gib=1, slots=4)
    kept: list[str] = []
    stubs = {
        key: dataclasses.replace(
            stub_engine(key, token), name=key.split(",")[0], weights=key.partition(", ")[2] or forms[0].label
        )
        for key, token in tokens.items()
    }
    made = Comparison(
        stubs, settings, sizes=sizes, rounds=rounds, seed=3, in_turns=False, folder=tmp_path, earlier=earlier,
        save=lambda results: kept.append(json.dumps(results)),
    )  # fmt: skip
    made.run(phases)
    assert json.loads(kept[-1]) == made.results
    return made.results


@pytest.mark.usefixtures("hurry", "meter")
def test_contenders_take_turns_on_each_load(tmp_path: Path) -> None:
    results = compared(tmp_path, {OMNISERVE: "x", VLLM: "x"}, ["start", "prefill", "coserve"], rounds=2)
    assert results["failed"] == []
    order = [(s["case"], s["round"], s["contender"]) for s in results["samples"] if s["phase"] == "prefill"]
    turns = [(0, OMNISERVE), (0, VLLM), (1, VLLM), (1, OMNISERVE)]
    assert order == [(f"{tokens} tokens", *turn) for tokens in (32, 128) for turn in turns]
    speeds = [(s["phase"], s["case"], s["round"]) for s in results["speeds"]]
    assert len(speeds) == len(set(speeds)) == 6
    assert {s["contender"] for s in results["samples"] if s["phase"] == "coserve"} == {
        "OmniServe, 1 s and 0.25 s", "OmniServe, 0.3 s and 0.06 s", "vLLM, priority", "vLLM, FCFS",
    }  # fmt: skip
    for text in ("prefill, 128 tokens: TTFT, ms", "start, to the first token: cold, s", "vLLM, FCFS"):
        assert text in markdown(results)


@pytest.mark.usefixtures("hurry", "meter")
def test_forms_of_weights_take_turns_as_contenders_do(tmp_path: Path) -> None:
    tokens = {"OmniServe, bf16": "x", "OmniServe, Q4_0": "y", "llama.cpp, Q4_0": "y"}  # codes have tokens of their own
    sizes, forms = dataclasses.replace(SHORT, prefill_prompts=(32,)), (form("bf16"), form("Q4_0", 0.5))
    results = compared(tmp_path, tokens, ["decode", "prefill"], rounds=3, sizes=sizes, forms=forms)
    assert results["failed"] == [] and results["idle_cores"].keys() == tokens.keys()
    order = [(s["case"], s["round"], s["contender"]) for s in results["samples"] if s["phase"] == "prefill"]
    turns = [("bf16", OMNISERVE), ("Q4_0", OMNISERVE), ("Q4_0", LLAMA_CPP)]
    assert order == [
        (f"32 tokens, {label}", number, name) for number in range(3) for label, name in turns[number:] + turns[:number]
    ]
    floors = {s["case"]: s["floor"]["tokens_per_s"] for s in results["speeds"] if s["phase"] == "decode"}
    assert floors["1 at once, Q4_0"] > floors["1 at once, bf16"]  # the read rate bounds both
    text = markdown(results)
    head, *lines = text.splitlines()
    assert f"{OMNISERVE} / dense" in head and "decode, 1 at once, Q4_0: tokens/s" in text
    column = [cell.strip() for cell in head.split("|")].index(f"{OMNISERVE} / dense")
    shown = {line.split("|")[1].strip(): line.split("|")[column].strip() for line in lines if line.count("|") > column}
    assert shown["prefill, 32 tokens, bf16: TTFT, ms"] == "" and float(shown["prefill, 32 tokens, Q4_0: TTFT, ms"]) > 0
    assert "idle, Q4_0: cores in use" in shown
    plot(results, tmp_path / "plot.svg")
    assert "Q4_0" in (tmp_path / "plot.svg").read_text()


@pytest.mark.usefixtures("hurry", "meter")
def test_a_run_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    tokens, sizes = {OMNISERVE: "x", VLLM: "x"}, dataclasses.replace(SHORT, prefill_prompts=(32,))
    whole = compared(tmp_path, tokens, ["prefill"], rounds=2, sizes=sizes)
    part = whole | {"samples": whole["samples"][:-1], "failed": [{"error": "of before"}]}
    results = compared(tmp_path, tokens, ["prefill"], rounds=2, sizes=sizes, earlier=json.loads(json.dumps(part)))
    assert results["samples"][:-1] == whole["samples"][:-1] and results["speeds"] == whole["speeds"]
    assert results["samples"][-1] != whole["samples"][-1] and results["failed"] == []
    assert results["first_tokens"].keys() == {OMNISERVE, VLLM}


def test_a_run_of_other_settings_does_not_go_on(tmp_path: Path) -> None:
    record, config = tmp_path / "record.json", {"rounds": 3, "sizes": SHORT}
    with pytest.raises(OSError):
        peers.earlier_results(record, "quantized", config, 0)
    write_record(record, name="peers", case="quantized", config=config, seed=0, results={"samples": [1]})
    assert peers.earlier_results(record, "quantized", config, 0) == {"samples": [1]}
    for other, seed in ((config | {"rounds": 2}, 0), (config, 1)):
        with pytest.raises(ValueError, match="with other settings, or of another commit"):
            peers.earlier_results(record, "quantized", other, seed)


def test_servers_are_started_in_turns_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = form("fp32", memory_bytes=2000), form("Q4_0", memory_bytes=300)
    settings = Settings(weights=forms, vocab_size=1024, dtype="float32", cpus=(0,), kv_gib=3, slots=4)
    found = {
        "OmniServe, fp32": engine(OMNISERVE, weights="fp32"), "OmniServe, Q4_0": engine(OMNISERVE, weights="Q4_0"),
        "llama.cpp, Q4_0": engine(LLAMA_CPP, weights="Q4_0"),
    }  # fmt: skip
    needed = comparison.needed_bytes(found.values(), settings)
    beside = 2 * comparison.ENGINE_BYTES[OMNISERVE] + comparison.ENGINE_BYTES[LLAMA_CPP]
    assert needed == 2000 + 300 + 300 + 3 * (3 << 30) + beside
    for available, expected, asked in ((needed, False, False), (needed - 1, True, False), (needed, True, True)):
        monkeypatch.setattr(comparison, "available_bytes", lambda available=available: available)
        made = Comparison(
            found, settings, sizes=SHORT, rounds=1, seed=0, in_turns=asked, folder=tmp_path, save=lambda results: None
        )
        assert made.in_turns is expected


@pytest.mark.usefixtures("hurry", "meter")
def test_a_peer_with_another_model_is_noted(tmp_path: Path) -> None:
    sizes = dataclasses.replace(SHORT, prefill_prompts=(32,))
    results = compared(tmp_path, {OMNISERVE: "x", VLLM: "y"}, ["prefill"], rounds=1, sizes=sizes)
    (failed,) = results["failed"]
    assert failed["contender"] == VLLM and "0 of 8 first tokens" in failed["error"]


@pytest.mark.slow
def test_omniserve_alone_goes_through_all_phases(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the server extra is not installed")
    record = tmp_path / "record.json"
    arguments = ["--model", "tiny", "--quick", "--dtype", "float32", "--record", str(record)]
    command = [sys.executable, "-m", "benchmarks.peers", *arguments, "--", "--profile", "none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = read_rows(record)
    assert written["config"] == portable(written["config"]) and written["config"]["instruction_set"]
    results = written["results"]
    assert {sample["phase"] for sample in results["samples"]} == set(PHASES)
    assert len(results["first_tokens"][OMNISERVE]) == 8
    assert "decode, 4 at once: tokens/s" in markdown(results)
    pytest.importorskip("matplotlib", reason="the bench extra is not installed")
    plot(results, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").stat().st_size > 0

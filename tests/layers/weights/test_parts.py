"""Weights that a rank reads from a checkpoint are those of the whole model, cut: the same bits in the same places."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, TorchAoConfig

from omniserve.core.config import EngineConfig
from omniserve.launch.loading import EngineLoader
from omniserve.layers.patched_model import PatchedModel
from omniserve.layers.patching import patched_model
from omniserve.layers.weights.checkpoint_files import CheckpointFiles, NotInParts
from omniserve.layers.weights.parts import read_weights, unread_weights
from omniserve.layers.weights.sharding import shard
from omniserve.layers.weights.unread import UnreadTensor
from omniserve.ops.collectives import alone
from omniserve.parallel.place import Place
from tests.parallel.ranks import checkpoint_of
from tests.parallel.test_pipeline_parallel import FAMILIES as FAMILIES_IN_STAGES
from tests.parallel.test_pipeline_parallel import FAMILIES_OF_BOTH
from tests.parallel.test_tensor_parallel import FAMILIES
from tests.parity.models import tiny_model
from tests.quick import slow_except

_CPU = torch.device("cpu")


def _loaded(folder: str | Path, dtype: Any = "auto") -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map="cpu")
    return model


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _check_same(read: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
    assert read.keys() == whole.keys()
    for name, tensor in whole.items():
        other = read[name]
        assert type(other) is type(tensor) and not isinstance(other, UnreadTensor), name
        assert (other.dtype, other.stride()) == (tensor.dtype, tensor.stride()), name
        assert torch.equal(other, tensor), name
        assert other.requires_grad == tensor.requires_grad, name
    assert _sharing(read) == _sharing(whole), "the same weights are tied"


def _sharing(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return of each name the first one with the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}


def _file_bytes(folder: str | Path) -> int:
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


def _check_shards(folder: str | Path, num_ranks: int, dtype: Any = "auto", *, most: float = 0.7) -> None:
    for rank in range(num_ranks):
        whole = shard(_loaded(folder, dtype), rank, num_ranks)
        with unread_weights() as files:
            part = _loaded(folder, dtype)
        assert all(isinstance(weight, UnreadTensor) for weight in part.parameters())
        assert files.read_bytes == 0
        read_weights(shard(part, rank, num_ranks), _CPU)
        _check_same(_tensors(part), _tensors(whole))
        assert not part.training
        assert files.read_bytes < _file_bytes(folder) * most


@pytest.mark.parametrize("family", slow_except(("llama_tied", "mixtral", "deepseek_v3"), FAMILIES))
def test_a_shard_is_that_of_the_whole_model(family: str) -> None:
    _check_shards(checkpoint_of(family), 2)


@pytest.mark.parametrize(("family", "num_ranks"), [("llama", 6), ("gpt_neox", 3), ("llama_tied", 2), ("qwen3", 3)])
def test_heads_that_do_not_go_into_the_ranks_evenly(family: str, num_ranks: int) -> None:
    """With more ranks than KV heads several ranks read the same heads; where heads do not fit, both ways refuse."""
    if family != "qwen3":
        _check_shards(checkpoint_of(family), num_ranks)
        return
    with unread_weights():
        part = _loaded(checkpoint_of(family))
    with pytest.raises(ValueError, match=r"2 KV heads .* cannot be split over 3 ranks"):
        shard(part, 0, num_ranks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", ["llama_tied", "mixtral"])
def test_a_shard_in_another_dtype(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tiny_model(family, torch.bfloat16 if dtype is torch.float32 else torch.float32).save_pretrained(tmp_path)
    _check_shards(tmp_path, 2, dtype)


def test_modules_that_stay_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.LlamaForCausalLM._keep_in_fp32_modules_strict", {"input_layernorm", "q_proj"})
    with unread_weights():
        part = _loaded(checkpoint_of("llama"), torch.bfloat16)
    kinds = {name.split(".")[-2]: weight.dtype for name, weight in part.named_parameters()}
    assert (kinds["q_proj"], kinds["input_layernorm"], kinds["k_proj"]) == (
        torch.float32, torch.float32, torch.bfloat16,
    )  # fmt: skip
    _check_shards(checkpoint_of("llama"), 2, torch.bfloat16)


def test_a_checkpoint_of_several_files(tmp_path: Path) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(set(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].values())) > 3
    _check_shards(tmp_path, 2)


@pytest.mark.parametrize(("least_run", "block"), [(1, 64), (64, 100), (1 << 16, 1 << 23)])
def test_short_runs_are_read_with_what_lies_between_them(
    least_run: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omniserve.layers.weights.checkpoint_files._LEAST_RUN_BYTES", least_run)
    monkeypatch.setattr("omniserve.layers.weights.checkpoint_files._BLOCK_BYTES", block)
    _check_shards(checkpoint_of("llama_tied"), 2, most=1.0)


def test_weights_that_the_checkpoint_lacks_are_made_as_always(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    weights = {name: weight for name, weight in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    with unread_weights():
        part = _loaded(tmp_path)
    assert not isinstance(part.model.layers[1].mlp.up_proj.weight, UnreadTensor)
    read_weights(shard(part, 1, 2), _CPU)
    assert part.model.layers[1].mlp.up_proj.weight.shape == (40, 48)


# -- stages ----------------------------------------------------------------------------------------------------------


def _patched(model: PreTrainedModel, place: Place) -> PatchedModel:
    return patched_model(model, compile=False, prepack=False, keep=place.layers)


def _check_stages(family: str, num_shards: int, num_stages: int) -> None:
    folder = checkpoint_of(family)
    for rank in range(num_shards * num_stages):
        place = Place(rank, num_shards, num_stages)
        whole = shard(_loaded(folder), place.shard, num_shards)
        with unread_weights() as files:
            part = shard(_loaded(folder), place.shard, num_shards)
        read_weights(part, _CPU, traces_first=True)
        traced_bytes = files.read_bytes
        one, other = _patched(part, place), _patched(whole, place)
        assert traced_bytes <= files.read_bytes < _file_bytes(folder)  # without most of the other stage's layers
        _check_same(_tensors(part), _tensors(whole))
        assert (one.spec, one.layers, one.has_between) == (other.spec, other.layers, other.has_between)
        freed = [{name for name, module in model.named_modules() if id(module) in patched.freed}
                 for model, patched in ((part, one), (whole, other))]  # fmt: skip
        assert freed[0] == freed[1]
        assert "_omniserve_later" not in part.__dict__
        ids, positions = torch.tensor([3, 5, 7]), torch.tensor([0, 4, 30])
        with torch.inference_mode(), alone():
            tables = [patched.rotary(positions) for patched in (one, other)]
            rows = [patched.embed(ids, positions) for patched in (one, other)]
            assert torch.equal(*rows)
            assert (tables[0] is None) == (tables[1] is None)
            cos_sin = tables[0] or (None, None)
            for layer in one.layers:
                heads = [patched.pre_attention(layer, rows[0].clone(), *cos_sin) for patched in (one, other)]
                assert all(map(torch.equal, *heads))
            assert torch.equal(one.logits(rows[0]), other.logits(rows[0]))
        if tables[0] is not None:
            assert all(map(torch.equal, tables[0], tables[1]))


@pytest.mark.parametrize("family", slow_except(("llama_tied", "jamba"), FAMILIES_IN_STAGES))
def test_a_stage_is_that_of_the_whole_model(family: str) -> None:
    _check_stages(family, 1, 2)


@pytest.mark.parametrize("family", slow_except(("mixtral",), FAMILIES_OF_BOTH))
def test_a_shard_of_a_stage_is_that_of_the_whole_model(family: str) -> None:
    _check_stages(family, 2, 2)


# -- what is not read in parts ---------------------------------------------------------------------------------------


def _load_rank(folder: Path, **config: Any) -> PreTrainedModel:
    loader = EngineLoader(model=str(folder), dtype="auto", device="cpu", config=EngineConfig(**config))
    return loader.load_rank(Place(1, 2, 1))


def test_a_rank_loads_its_part(caplog: pytest.LogCaptureFixture) -> None:
    part = _load_rank(Path(checkpoint_of("llama")))
    _check_same(_tensors(part), _tensors(shard(_loaded(checkpoint_of("llama")), 1, 2)))
    assert "whole" not in caplog.text


def test_weights_that_are_not_safetensors_are_loaded_whole_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    part = _load_rank(tmp_path)
    assert "rank 1 loads the whole of" in caplog.text and "pytorch_model.bin" in caplog.text
    _check_same(_tensors(part), _tensors(shard(_loaded(tmp_path), 1, 2)))


def test_an_adapter_is_loaded_whole_and_the_log_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    peft = pytest.importorskip("peft")
    tiny_model("llama").save_pretrained(tmp_path / "model")
    wrapped = peft.get_peft_model(_loaded(tmp_path / "model"), peft.LoraConfig(target_modules=["q_proj"], r=2))
    wrapped.save_pretrained(tmp_path / "adapter")
    loader = EngineLoader(model=str(tmp_path / "adapter"), dtype="auto", device="cpu", config=EngineConfig())
    part = loader.load_rank(Place(0, 1, 2))
    assert "beside those of the model" in caplog.text
    assert hasattr(part.model.layers[0].self_attn.q_proj, "base_layer")
    assert not any(isinstance(weight, UnreadTensor) for weight in part.parameters())


def test_quantised_weights_are_loaded_whole_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    plain = checkpoint_of("llama")
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, device_map="cpu").save_pretrained(tmp_path)
    loader = EngineLoader(model=str(tmp_path), dtype="auto", device="cpu", config=EngineConfig())
    stage = loader.load_rank(Place(0, 1, 2))
    assert "its weights are quantised (torchao)" in caplog.text
    quantised = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu").model.layers[0].mlp.up_proj.weight
    assert type(quantised).__name__ == "Int8Tensor"
    assert torch.equal(stage.model.layers[0].mlp.up_proj.weight, quantised.dequantize())  # its codes are noted beside


def test_another_way_of_loading_weights_is_not_taken_for_the_known_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PreTrainedModel._load_pretrained_model

    def load(model: Any, weights: Any, files: Any, load_config: Any, expected_keys: Any = None) -> Any:
        return original(model, weights, files, load_config, expected_keys)

    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", staticmethod(load))
    part = _load_rank(Path(checkpoint_of("llama")))
    assert "loads weights in a way that is not known" in caplog.text
    _check_same(_tensors(part), _tensors(shard(_loaded(checkpoint_of("llama")), 1, 2)))


# -- UnreadTensor ----------------------------------------------------------------------------------------------------


def _saved(tmp_path: Path, tensors: Mapping[str, Tensor]) -> dict[str, UnreadTensor]:
    save_file(dict(tensors), tmp_path / "some.safetensors")
    return _unread(CheckpointFiles(), tmp_path)


def _unread(files: CheckpointFiles, tmp_path: Path) -> dict[str, UnreadTensor]:
    return {name: UnreadTensor(stored) for name, stored in files.open([tmp_path / "some.safetensors"]).items()}


def _moved(rng: random.Random, tensors: list[Tensor]) -> Tensor:
    """Return what a random operator makes of tensors, of which all have the same shape."""
    tensor, dim = tensors[0], rng.randrange(max(1, tensors[0].ndim))
    kinds = ["cast", "clone", "stack", "reshape", "unsqueeze"]
    if tensor.ndim:
        kinds += ["narrow", "cat", "transpose", "select", "chunk", "unbind", "split", "permute", "squeeze", "t"]
    match rng.choice(kinds):
        case "cast":
            return tensor.to(rng.choice([torch.bfloat16, torch.float16, torch.float32]))
        case "clone":
            return tensor.clone(memory_format=rng.choice([torch.contiguous_format, torch.preserve_format]))
        case "stack":
            return torch.stack(tensors, dim=rng.randrange(-tensor.ndim - 1, tensor.ndim + 1))
        case "reshape":
            return tensor.reshape(-1, 1)
        case "unsqueeze":
            return tensor.unsqueeze(dim)
        case "narrow":
            start = rng.randrange(tensor.shape[dim])
            return tensor.narrow(dim, start, rng.randrange(1, tensor.shape[dim] - start + 1))
        case "cat":
            return torch.cat(tensors, dim=rng.choice([dim, dim - tensor.ndim]))
        case "transpose":
            return tensor.transpose(dim, -1)
        case "select":
            return tensor.select(dim, rng.randrange(-tensor.shape[dim], tensor.shape[dim]))
        case "chunk":
            return rng.choice(torch.chunk(tensor, 2, dim=dim))
        case "unbind":
            return rng.choice(torch.unbind(tensor, dim=dim))
        case "split":
            size = rng.randrange(1, tensor.shape[dim] + 1)
            return rng.choice(torch.split(tensor, [size, tensor.shape[dim] - size], dim=dim))
        case "permute":
            return tensor.permute(rng.sample(range(tensor.ndim), tensor.ndim))
        case "squeeze":
            return tensor.squeeze(dim)
        case _:
            return tensor.t() if tensor.ndim < 3 else tensor.mT


@pytest.mark.parametrize("seed", range(100))
def test_what_is_read_is_what_the_operators_make_of_the_values(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omniserve.layers.weights.checkpoint_files._LEAST_RUN_BYTES", (1, 8, 1000)[seed % 3])
    monkeypatch.setattr("omniserve.layers.weights.checkpoint_files._BLOCK_BYTES", (10, 1000)[seed % 2])
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shape = [rng.randrange(1, 6) for _ in range(rng.randrange(1, 4))]
    dtypes = [rng.choice([torch.float32, torch.bfloat16]) for _ in "ab"]
    if rng.random() < 0.7:
        dtypes[1] = dtypes[0]
    real = {name: torch.randn(shape, generator=generator).to(dtype) for name, dtype in zip("ab", dtypes, strict=True)}
    unread = _saved(tmp_path, real)
    if rng.random() < 0.2:
        unread["b"] = real["b"]  # a tensor in memory among them
    pair: list[list[Tensor]] = [list(real.values()), [unread["a"], unread["b"]]]
    for step in range(6):
        state = rng.getstate()
        made = []
        for tensors in pair:
            rng.setstate(state)
            made.append(_moved(rng, tensors))
        wanted, got = made
        assert (got.shape, got.dtype, got.stride()) == (wanted.shape, wanted.dtype, wanted.stride()), step
        assert isinstance(got, UnreadTensor)
        if not wanted.numel():
            break
        pair = [[wanted, wanted], [got, got]]
    assert isinstance(got, UnreadTensor)
    values = got.read()
    assert torch.equal(values, wanted) and values.dtype is wanted.dtype
    assert values.untyped_storage().nbytes() == wanted.numel() * wanted.dtype.itemsize


def test_any_other_operator_gets_the_values(tmp_path: Path) -> None:
    real = torch.randn(3, 4)
    unread = _saved(tmp_path, {"a": real})["a"]
    assert torch.equal(unread + 1, real + 1) and torch.equal(real @ unread.t(), real @ real.t())
    assert torch.equal(unread[::2], real[::2]) and torch.equal(torch.zeros(3, 4).copy_(unread), real)
    assert "UnreadTensor([3, 4]" in repr(unread)


def test_an_unread_tensor_is_not_changed_in_place(tmp_path: Path) -> None:
    unread = _saved(tmp_path, {"a": torch.randn(3, 4)})["a"]
    for change in (lambda: unread.add_(1), lambda: unread.copy_(torch.zeros(3, 4)), lambda: unread[0].zero_()):
        with pytest.raises(NotInParts, match="in place"):
            change()


def test_a_part_of_a_tensor_takes_no_other_elements(tmp_path: Path) -> None:
    save_file({"a": torch.randn(8, 6), "b": torch.randn(8, 6)}, tmp_path / "some.safetensors")
    files = CheckpointFiles()
    tensors = _unread(files, tmp_path)
    joined = torch.stack([tensors["a"], tensors["b"]]).transpose(1, 2).to(torch.float16)
    part = joined.narrow(2, 0, 4).narrow(1, 3, 3)
    assert files.read_bytes == 0
    part.detach().read()  # type: ignore[attr-defined]
    assert files.read_bytes == 2 * 4 * 3 * 4


@pytest.fixture(autouse=True)
def _exact(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs of any length be read one by one: those of tiny models are short."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr("omniserve.layers.weights.checkpoint_files._LEAST_RUN_BYTES", 1)

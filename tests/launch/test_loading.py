"""Tests of loading a model, and of the latency profile that the engine is made with."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

import omniserve.engine.engine
import omniserve.launch.loading
import omniserve.profiling
from omniserve.core.config import EngineConfig, ExecutionConfig
from omniserve.launch.loading import EngineLoader
from omniserve.launch.models import builtin_model_path, load_tokenizer
from tests.parity.own_code import write


@pytest.fixture
def load(monkeypatch):
    """Make an engine of stand-ins; return its profile, the arguments that it was found with, and what was told."""

    def load(scheduler="omniserve", **options):
        seen, told = {}, []

        def find(model, config, *, path, time_limit_s, progress, is_coarse, group, shared_since_s):
            seen.update(
                model=model, config=config, path=path, time_limit_s=time_limit_s, is_coarse=is_coarse,
                shared_since_s=shared_since_s,
            )  # fmt: skip
            for what, spent in (("dense", 0.0), ("dense", 0.09), ("head", 0.5), ("head", 1.2), ("head", 1.4)):
                progress(what, spent)
            return "the profile"

        monkeypatch.setattr(EngineLoader, "load_model", lambda self, progress: "the model")
        monkeypatch.setattr(omniserve.profiling, "find_or_make_profile", find)
        monkeypatch.setattr(EngineLoader, "load_tokenizer", lambda self: "the tokenizer")
        monkeypatch.setattr(omniserve.engine.engine, "Engine", lambda model, config, *, profile, tokenizer: profile)
        config = EngineConfig(scheduler=scheduler)
        profile = EngineLoader(model="m", dtype="auto", device="cpu", config=config, **options)(told.append)
        assert seen.get("model", "the model") == "the model" and seen.get("config", config) is config
        return profile, seen, told

    return load


def test_profile_is_found_or_made_and_each_tenth_of_it_told(load):
    profile, seen, told = load(profile_time_limit_s=7)
    assert (profile, seen["path"], seen["time_limit_s"]) == ("the profile", None, 7)
    assert told == [
        "measuring latencies, 0% of the time limit: dense",
        "measuring latencies, 50% of the time limit: head",
        "measuring latencies, 100% of the time limit: head",
    ]


def test_what_is_prepared_is_told_although_it_does_not_count(load, monkeypatch):
    monkeypatch.setattr(omniserve.launch.loading, "_TELL_EACH_S", 0.0)
    _, _, told = load()
    assert len(told) == 5


def test_named_profile_is_used_whatever_the_scheduler(load):
    for scheduler in ("omniserve", "fcfs"):
        profile, seen, _ = load(scheduler, profile=Path("some.json"))
        assert (profile, seen["path"]) == ("the profile", Path("some.json"))


def test_engines_of_one_server_share_what_they_measure(load):
    _, seen, _ = load()
    assert seen["shared_since_s"] is None
    loader = EngineLoader(model="m", dtype="auto", device="cpu", config=EngineConfig())
    before_s = time.time()
    first, second = (loader.for_replica(number, 2) for number in range(2))
    assert before_s <= first.replicas_since_s <= second.replicas_since_s <= time.time()


def test_engines_of_one_server_do_not_write_into_one_trace(tmp_path):
    config = EngineConfig(trace_steps=str(tmp_path / "steps.jsonl"))
    loader = EngineLoader(model="m", dtype="auto", device="cpu", config=config)
    traces = [loader.for_replica(number, 2).config.trace_steps for number in range(2)]
    assert traces == [str(tmp_path / f"steps-{number}.jsonl") for number in range(2)]


@pytest.mark.parametrize(("scheduler", "options"), [("fcfs", {}), ("omniserve", {"with_profile": False})])
def test_nothing_is_measured_for_who_needs_no_profile(load, scheduler, options):
    assert load(scheduler, **options) == (None, {}, [])


@pytest.mark.parametrize(
    ("device", "start_s", "early"), [("cpu", 4.0, True), ("cpu", 0.0, False), ("cuda", 4.0, False)]
)
def test_a_server_on_a_cpu_begins_before_it_has_compiled_and_measured(monkeypatch, device, start_s, early):
    """A server with a GPU, or one that is asked to, has compiled and measured before it begins, as has one without
    upkeep."""
    model = SimpleNamespace(device=torch.device(device))
    child, asked = SimpleNamespace(stop=lambda: None), []

    def find(model, config, *, path, time_limit_s, progress, is_coarse, group, shared_since_s):
        asked.append((time_limit_s, is_coarse))
        return SimpleNamespace(is_coarse=is_coarse)

    def engine(model, config, *, profile, tokenizer):
        return SimpleNamespace(profile=profile, upkeep=None, model="patched")

    monkeypatch.setattr(EngineLoader, "load_model", lambda self, progress: model)
    monkeypatch.setattr(EngineLoader, "load_tokenizer", lambda self: "the tokenizer")
    monkeypatch.setattr(omniserve.profiling, "find_or_make_profile", find)
    monkeypatch.setattr(omniserve.engine.engine, "Engine", engine)
    monkeypatch.setattr("omniserve.engine.compiling.compile_beside", lambda model, config: child)
    options = {"profile_time_limit_s": 7.0, "profile_start_s": start_s, "serves": True}
    made = EngineLoader(model="m", dtype="auto", device=device, config=EngineConfig(), **options)(lambda what: None)
    assert asked == [(4.0, True) if early else (7.0, False)]
    assert (made.upkeep is not None) == early
    if early:
        assert made.upkeep._compiling is child and not made.upkeep.is_done
        monkeypatch.setattr("omniserve.engine.compiling.compile_beside", lambda model, config: None)
        monkeypatch.setattr(
            omniserve.profiling, "find_or_make_profile", lambda *_, **__: SimpleNamespace(is_coarse=False)
        )
        again = EngineLoader(model="m", dtype="auto", device=device, config=EngineConfig(), **options)(
            lambda what: None
        )
        assert again.upkeep is None, "all is there"


@pytest.fixture
def gpus(monkeypatch):
    """Let torch find two GPUs; return which one was made the current one, and where a model was loaded to."""
    seen = {}

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: seen.update(current=str(device)))

    def from_pretrained(model, *, dtype, device_map, trust_remote_code):
        seen["loaded"] = device_map
        model = SimpleNamespace(num_parameters=lambda: 1, dtype=torch.float32, eval=lambda: None)
        model.config = SimpleNamespace()
        return model

    monkeypatch.setattr("transformers.AutoModelForCausalLM", SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setattr("omniserve.launch.models.quantization_of", lambda model: None)
    return seen


@pytest.mark.parametrize(
    ("device", "seen"),
    [
        ("auto", {"loaded": "cuda"}),
        ("cuda", {"loaded": "cuda"}),
        ("cuda:1", {"loaded": "cuda:1", "current": "cuda:1"}),
        ("cpu", {"loaded": "cpu"}),
    ],
)
def test_model_is_loaded_to_the_device_that_was_asked_for(gpus, device, seen):
    EngineLoader(model="m", dtype="float32", device=device, config=EngineConfig()).load_model(lambda what: None)
    assert gpus == seen


def test_device_that_is_not_there_is_refused_with_those_that_are(gpus, monkeypatch):
    def load(device):
        EngineLoader(model="m", dtype="auto", device=device, config=EngineConfig()).load_model(lambda what: None)

    with pytest.raises(ValueError, match="--device cuda:2: torch finds 2 CUDA devices here; use cuda:0 to cuda:1"):
        load("cuda:2")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda:1: torch finds no CUDA device here; use --device cpu"):
        load("cuda:1")
    assert not gpus


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """Return a folder with a model whose code is beside it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setattr("builtins.input", lambda text: pytest.fail(f"asked at the terminal: {text}"))
    write(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_code_of_a_model_is_not_run_unless_it_is_trusted(own_code, dtype):
    loader = EngineLoader(model=own_code, dtype=dtype, device="cpu", config=EngineConfig())
    with pytest.raises(ValueError, match=r"comes with Python code of its own.*--execution trust_remote_code=true"):
        loader.load_model(lambda what: None)
    assert not [*Path(own_code).parent.glob("modules/**/modeling_tern.py")]  # from where it would be run
    trusting = EngineConfig(execution=ExecutionConfig(trust_remote_code=True))
    model = EngineLoader(model=own_code, dtype=dtype, device="cpu", config=trusting).load_model(lambda what: None)
    assert type(model).__name__ == "TernForCausalLM" and type(model).__module__.startswith("transformers_modules.")


def test_code_of_a_tokenizer_is_not_run_unless_it_is_trusted(own_code):
    folder = Path(own_code)
    (folder / "tokenization_tern.py").write_text(
        "from transformers import PreTrainedTokenizerFast\nclass TernTokenizer(PreTrainedTokenizerFast): pass\n"
    )
    tokenizer = AutoTokenizer.from_pretrained(builtin_model_path())
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {
        "tokenizer_class": "TernTokenizer",
        "auto_map": {"AutoTokenizer": [None, "tokenization_tern.TernTokenizer"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="comes with Python code of its own"):
        load_tokenizer(own_code, False)
    assert type(load_tokenizer(own_code, True)).__name__ == "TernTokenizer"


def test_an_error_that_is_not_about_code_stays_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(ValueError, match="backend tokenizer"):
        load_tokenizer(str(tmp_path), False)

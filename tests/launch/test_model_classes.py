"""A start imports what it uses: libraries for some models only are not in an engine's process that has another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.parity.models import tiny_model

OPTIONAL = ("torchao", "peft", "sklearn", "pandas", "matplotlib", "ray", "xformers", "torchvision", "openai", "pytest")

STARTS = """
import sys
import omniserve.launch.preload  # as the process from which engine processes are forked
from omniserve import EngineConfig, ExecutionConfig, Request, SamplingParams
from omniserve.core.logs import set_up_logs
from omniserve.launch.loading import EngineLoader
from omniserve.launch.models import builtin_model_path

set_up_logs("info", "text")
config = EngineConfig(device_kv_bytes=1 << 20, host_kv_bytes=1 << 20, execution=ExecutionConfig(compile=False))
told = []


def loader(model):
    return EngineLoader(model=model, dtype="auto", device="cpu", config=config, with_profile=False)


with loader(builtin_model_path())(told.append) as engine:
    engine.generate([Request(prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=2))])
print(*sorted(name for name in sys.modules if "." not in name))
for folder in sys.argv[1:]:
    model = loader(folder).load_model(told.append)
    print(type(model.model.layers[0].self_attn.q_proj.weight).__module__.partition(".")[0], "torchao" in sys.modules)
"""


def starts(*folders: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", STARTS, *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)


def test_torchao_is_imported_for_its_checkpoints_alone(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    peft = pytest.importorskip("peft")
    from transformers import TorchAoConfig

    plain, quantised, adapters = (tmp_path / name for name in ("plain", "quantised", "adapters"))
    tiny_model("llama").save_pretrained(plain)
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, device_map="cpu")
    model.save_pretrained(quantised)
    adapted = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(plain), peft.LoraConfig(target_modules=["v_proj"])
    )
    adapted.peft_config["default"].base_model_name_or_path = str(quantised)
    adapted.save_pretrained(adapters)

    done = starts(plain, adapters, quantised)
    imported, *loaded = done.stdout.splitlines()
    assert {"torch", "transformers", "omniserve"} <= set(imported.split())
    assert not set(imported.split()) & set(OPTIONAL)
    assert loaded == ["torch False", "torch True", "torch True"], "codes have taken the place of torchao's tensors"
    said = [line for line in done.stderr.splitlines() if not line.startswith("INFO omniserve.")]
    assert len(said) == 1 and said[0].startswith("WARNING omniserve."), done.stderr
    assert "torchao's own kernels compute" in said[0], "with what an adapter wraps"

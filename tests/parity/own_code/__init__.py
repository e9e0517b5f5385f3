"""A model whose code is a file beside its config, as ``trust_remote_code`` loads it; no library knows its type."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.parity.own_code.modeling_tern import TernConfig, TernForCausalLM

MODELING = Path(__file__).parent / "modeling_tern.py"


def tern(*, uses_interface: bool = True) -> TernForCausalLM:
    """Build a small random model whose greedy outputs are varied."""
    torch.manual_seed(0)
    model = TernForCausalLM(TernConfig(uses_interface=uses_interface))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_().mul_(1.6 * parameter.shape[-1] ** -0.5)
        model.embed.weight.normal_()
    model.generation_config.pad_token_id = 0
    return model.eval()


def write(folder: Path, *, uses_interface: bool = True) -> None:
    """Write such a model and its code into a folder."""
    tern(uses_interface=uses_interface).save_pretrained(folder)
    shutil.copy(MODELING, folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "modeling_tern.TernConfig",
        AutoModelForCausalLM.__name__: "modeling_tern.TernForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
